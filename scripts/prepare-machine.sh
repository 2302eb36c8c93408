#!/usr/bin/env bash
# Prepares a Debian or Ubuntu machine for `provision sandbox`: installs a container engine and the tools that create base images, and
# starts the engine. Run it as root; what is already installed stays unchanged. Other scripts source it for its functions.
set -euo pipefail

ENGINE_LOG=${ENGINE_LOG:-/var/log/provision-dockerd.log}
ENGINE_SECONDS=60 # until the engine answers; on a slow disk it takes a while to read its storage

# command:package; the package is installed if the command is missing.
SANDBOX_NEEDS=(
    dockerd:docker.io debootstrap:debootstrap iptables:iptables ip:iproute2
    ssh:openssh-client ssh-keygen:openssh-client unshare:util-linux setpriv:util-linux tar:tar
)

say() { echo "prepare: $*" >&2; }

fail() {
    say "$1"
    exit 1
}

# Installs the packages of those commands that are missing. Arguments: command:package …
install_missing() {
    local need missing=()
    for need in "$@"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
    done
    install_packages "${missing[@]}"
}

# Installs packages that are not installed. Arguments: package …
install_packages() {
    local package missing=()
    for package in "$@"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q -o Acquire::Retries=3 update </dev/null >/dev/null
    apt-get -q -o Acquire::Retries=3 install -y --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

engine_answers() { docker info >/dev/null 2>&1 </dev/null; }

# Whether process $1 is a running $2: not ended, not a zombie, not another program with the same pid.
is_alive() {
    local name state
    read -r _ name state _ 2>/dev/null <"/proc/$1/stat" || return 1
    [ "$name" = "($2)" ] && [ "$state" != Z ]
}

is_running() {
    local process
    for process in /proc/[0-9]*; do
        is_alive "${process##*/}" "$1" && return 0
    done
    return 1
}

# A daemon that was killed leaves its pid file behind, and the next one would believe that it still runs.
forget_dead() {
    local file=$1 program=$2
    [ ! -s "$file" ] || is_alive "$(<"$file")" "$program" || rm -f "$file"
}

# Starts the engine unless one answers, and waits until it does. It keeps running after the script; its output goes to $ENGINE_LOG.
start_engine() {
    engine_answers && return 0
    if [ -d /run/systemd/system ]; then
        say "starting the container engine"
        systemctl start docker
    elif ! is_running dockerd; then
        say "starting the container engine; it writes to $ENGINE_LOG"
        forget_dead /var/run/docker.pid dockerd
        forget_dead /var/run/docker/containerd/containerd.pid containerd
        setsid dockerd </dev/null >"$ENGINE_LOG" 2>&1 &
    fi
    local left=$ENGINE_SECONDS
    until engine_answers; do
        [ $((left--)) -gt 0 ] || fail "the container engine does not answer: $(tail -n 3 "$ENGINE_LOG" 2>/dev/null)"
        sleep 1
    done
}

stop_engine() {
    local pid left=30
    pid=$(cat /var/run/docker.pid 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    while is_alive "$pid" dockerd && [ $((left--)) -gt 0 ]; do
        sleep 1
    done
}

prepare_machine() {
    [ "$(id -u)" -eq 0 ] || fail "run this as root: sudo $0"
    command -v apt-get >/dev/null || fail "this machine has no apt: install Docker by its own instructions, then start it"
    install_missing "${SANDBOX_NEEDS[@]}"
    start_engine
    say "ready: a container engine answers; try: provision sandbox up"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    prepare_machine
fi
