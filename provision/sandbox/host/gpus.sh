#!/bin/sh
# On a running sandbox host, as root with the right to mount: shows the GPUs that this folder describes, again after each change. Programs find an overlay over /sys, folders over /proc/driver, and NVIDIA's own nvidia-smi with
# a stand-in for its library.
set -eu
here=/etc/provision-sandbox/gpus
kept=/etc/provision-sandbox/nvidia-smi
live=/run/provision-gpus # what can be mounted, in memory: an overlay over an overlay has limits
shown=/usr/lib/provision-sandbox
failed=/run/provision-no-nvidia-smi # why the archive did not give it

mounted() { grep -q "^[^ ]* $1 " /proc/mounts; }
setting() { cat "$here/set/$1" 2>/dev/null || echo "${2:-0}"; }

# nvidia-smi is not ours to give away: each host takes it from its distribution's archive, once. Fails where it cannot, and is not tried again for
# ten minutes: a mirror that does not answer would be waited for at each change.
fetch_nvidia_smi() {
    [ ! -e $kept ] || return 0
    [ -z "$(find $failed -mmin -10 2>/dev/null)" ] || return 1
    # shellcheck disable=SC1091
    . /etc/os-release
    archive=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
        grep -v security | head -n 1)
    work=$(mktemp -d)
    echo "deb $archive ${VERSION_CODENAME:-stable} non-free" >"$work/list"
    install -d -m 755 "$work/lists/partial"
    set -- -q -o Dir::Etc::SourceList="$work/list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists" -o APT::Sandbox::User=root
    set -- "$@" -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
    if (cd "$work" && timeout 100 apt-get "$@" update && timeout 100 apt-get "$@" download nvidia-smi && dpkg-deb --extract nvidia-smi_*.deb tree) >"$work/log" 2>&1; then
        find "$work/tree" -name nvidia-smi -type f -size +100k -exec cp {} $kept \;
    fi
    [ -e $kept ] || echo "no nvidia-smi in ${archive:-no archive}, part non-free: $(sed -n 's/^[EW]: *//p; /not found$/p' "$work/log" | tail -n 1)" >$failed
    rm -rf "$work"
    [ -e $kept ]
}

lay_over() {
    mounted $live || { install -d -m 755 $live && mount -t tmpfs -o mode=755 provision-gpus $live; }
    tree=$(mktemp -d $live/tree.XXXXXX)
    cp -R $here/tree/. "$tree"
    chmod -R u=rwX,go=rX "$tree"
    install -d "$tree/proc/driver" "$tree/sys/class/infiniband" "$tree/sys/bus/pci/devices" "$tree/sys/module"
    # Devices and modules of this machine do not shine through.
    python3 -c 'import os, sys; [os.setxattr(each, "trusted.overlay.opaque", b"y") for each in sys.argv[1:]]' \
        "$tree/sys/class/infiniband" "$tree/sys/bus/pci/devices" "$tree/sys/module"
    ! grep -q '^provision-gpus /sys ' /proc/mounts || umount -l /sys
    ! mounted /proc/driver || umount -l /proc/driver
    ! mounted /proc/modules || umount -l /proc/modules
    if mounted /sys/fs/cgroup && ! [ -d $live/cgroup ]; then
        mkdir $live/cgroup
        mount --rbind /sys/fs/cgroup $live/cgroup
    fi
    mount -t overlay -o "ro,nosuid,nodev,noexec,lowerdir=$tree/sys:/sys" provision-gpus /sys
    [ ! -d $live/cgroup ] || mount --rbind $live/cgroup /sys/fs/cgroup
    mount -o bind,ro "$tree/proc/driver" /proc/driver
    [ ! -e /proc/modules ] || mount -o bind,ro "$tree/proc/modules" /proc/modules
    for old in "$live"/tree.*; do
        [ "$old" = "$tree" ] || rm -rf "$old"
    done
    mount -o "remount,size=$(setting shm_mb 2048)m" /dev/shm
}

make_devices() {
    rm -rf /dev/nvidia* /dev/kfd /dev/dri
    while read -r node; do
        install -D -m 666 /dev/null "$node"
    done <$here/devices
}

# The archive's nvidia-smi is of a driver that does not show the NVLink domain of a rack: a script adds the line.
add_cluster() {
    mv /usr/bin/nvidia-smi $shown/nvidia-smi
    cat >/usr/bin/nvidia-smi <<END
#!/bin/sh
said=\$($shown/nvidia-smi "\$@")
code=\$?
echo "\$said" | sed '/^    Fabric/,/Status/s/^        Status.*/&\\n        ClusterUUID                       : $1/'
exit \$code
END
    chmod 755 /usr/bin/nvidia-smi
}

give_programs() {
    install -d -m 755 $shown
    install -m 644 $here/kernel.log $shown/kernel.log
    # The kernel's log is this machine's: no namespace has one of its own.
    printf '#!/bin/sh\n# The log of a simulated GPU host.\nexec cat %s/kernel.log\n' $shown >/usr/local/bin/dmesg
    chmod 755 /usr/local/bin/dmesg
    rm -f /usr/bin/nvidia-smi /usr/local/bin/amd-smi /usr/local/lib/libnvidia-ml.so.1 /usr/local/lib/libcuda.so.1
    if [ -e $here/state.txt ]; then
        install -m 644 $here/state.txt $shown/gpus.txt
        if [ "$(setting nvidia_smi)" = 1 ]; then
            if fetch_nvidia_smi; then
                install -m 755 $kept /usr/bin/nvidia-smi
            else
                install -m 755 $here/nvidia-smi /usr/bin/nvidia-smi
                echo "recorded: $(cat $failed)"
            fi
            [ ! -e $here/cluster ] || add_cluster "$(cat $here/cluster)"
            install -m 644 $here/libnvidia-ml.so.1 /usr/local/lib/libnvidia-ml.so.1
        fi
        [ "$(setting libcuda)" != 1 ] || install -m 644 $here/libcuda.so.1 /usr/local/lib/libcuda.so.1
    else
        install -m 755 $here/amd-smi /usr/local/bin/amd-smi
    fi
    ldconfig
    for program in nv-fabricmanager nvidia-imex; do
        pid=$(pgrep -x "$(echo $program | cut -c -15)" || true) # the kernel keeps 15 letters of a name
        if ! grep -qsx $program $here/programs; then
            [ -z "$pid" ] || kill "$pid"
        elif [ -z "$pid" ]; then
            cp /bin/sleep $live/$program
            setsid $live/$program infinity </dev/null >/dev/null 2>&1 &
        fi
    done
    # As on hosts with RDMA; logins take it from sshd. A machine that may not raise it keeps its own, which the doctor names.
    prlimit --pid "$(pgrep -o -x sshd)" --memlock=unlimited:unlimited 2>/dev/null || true
    rm -f /.dockerenv # it is to be surveyed as a machine
}

lay_over
make_devices
give_programs
