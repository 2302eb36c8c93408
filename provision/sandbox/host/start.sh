#!/bin/sh
# Inside a host, its first process: puts the controller's settings in place once, makes the host's own keys, then serves SSH.
set -eu
here=/etc/provision-sandbox
user=$(cat $here/user)

settle() {
    for who in root "$user"; do
        home=$(getent passwd "$who" | cut -d: -f6)
        install -d -m 700 -o "$who" -g "$(id -gn "$who")" "$home/.ssh"
        install -m 600 -o "$who" -g "$(id -gn "$who")" $here/authorized_keys "$home/.ssh/authorized_keys"
    done

    cat $here/environment >>/etc/environment
    install -m 644 $here/pip.conf /etc/pip.conf
    install -m 644 $here/apt.conf /etc/apt/apt.conf.d/90provision-sandbox
    [ ! -e $here/sudoers ] || install -m 440 $here/sudoers "/etc/sudoers.d/$user"
    if [ -e $here/password ]; then
        chpasswd <$here/password
        rm -f $here/password
    fi
    if [ -e $here/sources.list ]; then
        rm -f /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources
        install -m 644 $here/sources.list /etc/apt/sources.list
    fi
    if [ -d $here/certificates ]; then
        install -d /usr/local/share/ca-certificates
        install -m 644 $here/certificates/*.crt /usr/local/share/ca-certificates/
        update-ca-certificates >/dev/null
    fi
    tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
    for kind in ecdsa ed25519; do # an RSA key takes seconds to make, and no client of today asks for one
        key=/etc/ssh/ssh_host_${kind}_key
        [ -e $key ] || ssh-keygen -q -t $kind -N '' -C "root@$(hostname)" -f $key
    done
    touch $here/settled
}

[ -e $here/settled ] || settle
install -d -m 755 /run/sshd
exec /usr/sbin/sshd -D -e
