#!/usr/bin/env bash
# The main job on an embedded default: two throw-away hosts where a container engine answers, else this machine.
set -euo pipefail
provision=$1

if why=$("$provision" sandbox check 2>&1); then
    inventory=$("$provision" sandbox up -n 2)
    echo "two hosts for the demo; their inventory: $inventory"
    "$provision" up "$inventory"
    echo "the hosts stay for you to look at; take them away with: $provision sandbox down"
else
    echo "$why"
    echo "so the demo runs on this machine alone; for two throw-away hosts run scripts/prepare-machine.sh first, as root"
    "$provision" up localhost
fi
