#!/usr/bin/env bash
# The main job: on the hosts that HOSTS names, else on two throw-away ones, in containers or in namespaces of this machine. Where neither is
# possible: on this machine, without root, in .work/demo. This machine is changed outside this folder only with HOSTS=localhost.
set -euo pipefail
provision=$1

if [ -n "${HOSTS:-}" ]; then
    exec "$provision" up "$HOSTS"
fi
# A release that pip has in a folder of wheels here is the one that its index may have alone for CPUs.
options=()
for wheel in "${PIP_FIND_LINKS:-/nonexistent}"/torch-*+cpu-*.whl; do
    release=${wheel##*/torch-}
    [ -e "$wheel" ] && options=(--torch "${release%%+*}") && echo "demo: PyTorch ${release%%+*}, of which $PIP_FIND_LINKS has a wheel"
done

if hosts=$("$provision" sandbox check 2>&1); then
    echo "demo: two throw-away hosts in $hosts"
    code=0
    inventory=$("$provision" sandbox up -n 2) || code=$?
    if [ $code = 0 ]; then
        echo "their inventory: $inventory"
        "$provision" up "$inventory" "${options[@]}"
        echo "train an example on them: $provision run $(printf %q "$inventory") examples/pytorch_mnist.py"
        exec echo "the hosts keep running; remove them with: $provision sandbox down"
    fi
    [ $code = 1 ] || exit $code # it was interrupted
else
    echo "$hosts"
fi
here=${DEMO:-$PWD/.work/demo}
echo "demo: on this machine without root, in $here (for two throw-away hosts: scripts/prepare-machine.sh, as root)"
mkdir -p "$here"
cat >"$here/hosts.ini" <<END
# Sandbox: this machine, without root, all in the folder of this file, made by \`make demo\`. To remove it, remove the folder.
localhost ansible_connection=local slots=2

[all:vars]
provision_sudo=no
provision_prefix=$here/prefix
END
export PROVISION_HOME=$here/state PROVISION_CACHE=$here/cache ANSIBLE_HOME=$here/ansible ANSIBLE_REMOTE_TMP=$here/ansible/tmp
"$provision" up "$here/hosts.ini" "${options[@]}"
echo "train an example here: PROVISION_HOME=$(printf %q "$PROVISION_HOME") $provision run $(printf %q "$here/hosts.ini") examples/pytorch_mnist.py"
echo "everything is in $here; remove it with: rm -r $here"
