#!/usr/bin/env bash
# The main job: on the hosts that HOSTS names, else on two throw-away ones. This machine is changed only with HOSTS=localhost.
set -euo pipefail
provision=$1

if [ -n "${HOSTS:-}" ]; then
    exec "$provision" up "$HOSTS"
fi
if ! why=$("$provision" sandbox check 2>&1); then
    cat >&2 <<END
$why
The demo needs a container engine for its two throw-away hosts. Either
  → start one (on Debian or Ubuntu, scripts/prepare-machine.sh installs it, as root), then run it again: make demo
  → or install on this machine itself: make demo HOSTS=localhost   (provision remove localhost removes everything again)
END
    exit 1
fi
inventory=$("$provision" sandbox up -n 2)
echo "two hosts for the demo; their inventory: $inventory"
"$provision" up "$inventory"
echo "the hosts keep running; remove them with: $provision sandbox down"
