#!/bin/sh
# On the controller, the first process in the namespaces of a sandbox host: makes the host's root file system and becomes start.sh in it.
# Runs in the host's folder, which has `lower` (a link to the base's tree) and the empty `work` and `root`; `upper` is what the host changes.
# Arguments: host name, and the controller's files that it needs.
set -eu
echo "$1" >/proc/sys/kernel/hostname
shift

if ! mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root; then
    [ "$(readlink lower)" != / ] || exit 1
    cp -a --no-clobber lower/. upper/ # a file system that cannot be the upper one of an overlay, such as a container's
    mount --bind upper root
fi
mount -t proc -o nosuid,nodev,noexec proc root/proc
mount -o bind,ro root/proc/sys root/proc/sys # most of its settings are this machine's
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs root/sys
mount -t tmpfs -o nosuid,mode=755 tmpfs root/dev
mkdir root/dev/pts root/dev/shm
mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=666,mode=620,gid=5 devpts root/dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777,size=64m tmpfs root/dev/shm
for device in null zero full random urandom tty; do
    : >"root/dev/$device"
    mount --bind "/dev/$device" "root/dev/$device"
done
ln -s pts/ptmx root/dev/ptmx
ln -s /proc/self/fd root/dev/fd
for file in "$@"; do
    if [ -d "$file" ]; then
        mkdir -p "root$file"
    else
        mkdir -p "root$(dirname "$file")"
        : >"root$file"
    fi
    mount -o bind,ro "$file" "root$file"
done

cd root
mkdir -p .controller
pivot_root . .controller
umount -l /.controller
rmdir /.controller
# What Docker leaves to root in a container, without making devices.
kept=+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+audit_write,+setfcap
exec setpriv --inh-caps=-all --bounding-set="-all,$kept" sh /etc/provision-sandbox/start.sh
