#!/usr/bin/env bash
# The main job: on the hosts that HOSTS names, else on two throw-away ones. This machine is changed only for who says HOSTS=localhost.
set -euo pipefail
provision=$1

if [ -n "${HOSTS:-}" ]; then
    exec "$provision" up "$HOSTS"
fi
if ! why=$("$provision" sandbox check 2>&1); then
    cat >&2 <<END
$why
The demo makes two throw-away hosts, and for that a container engine must answer. Either
  → start one: on Debian or Ubuntu scripts/prepare-machine.sh, as root, installs what is needed, and then again: make demo
  → or install on this machine itself: make demo HOSTS=localhost   (provision remove localhost takes it off again)
END
    exit 1
fi
inventory=$("$provision" sandbox up -n 2)
echo "two hosts for the demo; their inventory: $inventory"
"$provision" up "$inventory"
echo "the hosts stay for you to look at; take them away with: $provision sandbox down"
