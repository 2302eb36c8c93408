#!/bin/sh
# The first process of a sandbox host. Its first start installs what a minimal base lacks, applies the controller's settings and makes the
# host's own keys; every start serves SSH.
set -eu
here=/etc/provision-sandbox
user=$(cat $here/user)

install_packages() {
    if ! command -v apt-get >/dev/null; then
        echo "this base has no apt-get: hosts are made from Debian and its relatives" >&2
        exit 3
    fi
    install -m 644 $here/apt.conf /etc/apt/apt.conf.d/90provision-sandbox
    if [ -e $here/sources.list ]; then
        rm -f /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources
        install -m 644 $here/sources.list /etc/apt/sources.list
    fi
    packages=$(cat $here/packages)
    # shellcheck disable=SC2086  # one word per package is meant
    if dpkg -s $packages >/dev/null 2>&1; then return; fi

    policy=/usr/sbin/policy-rc.d # the package must not start sshd: that is done below
    made_policy=
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
        made_policy=yes
    fi
    export DEBIAN_FRONTEND=noninteractive
    trust= # a minimal base trusts no certificate yet, and the mirror may speak https
    [ ! -e $here/bundle.crt ] || trust="-o Acquire::https::CaInfo=$here/bundle.crt"
    # shellcheck disable=SC2086
    apt-get $trust -q update
    # shellcheck disable=SC2086
    apt-get $trust -q install -y --no-install-recommends $packages
    apt-get clean
    rm -rf /var/lib/apt/lists/*
    [ -z "$made_policy" ] || rm -f $policy
}

allow_logins() {
    id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
    for who in root "$user"; do
        home=$(getent passwd "$who" | cut -d: -f6)
        install -d -m 700 -o "$who" -g "$(id -gn "$who")" "$home/.ssh"
        install -m 600 -o "$who" -g "$(id -gn "$who")" $here/authorized_keys "$home/.ssh/authorized_keys"
    done
    [ ! -e $here/sudoers ] || install -m 440 $here/sudoers "/etc/sudoers.d/$user"
    if [ -e $here/password ]; then
        chpasswd <$here/password
        rm -f $here/password
    fi
    install -d /etc/ssh/sshd_config.d
    install -m 644 $here/sshd.conf /etc/ssh/sshd_config.d/provision-sandbox.conf
    # Recording a login's audit id needs a right that a container lacks; the login itself must not fail for it.
    sed -i 's/^session\( *\)required\( *\)pam_loginuid/session\1optional\2pam_loginuid/' /etc/pam.d/sshd
    rm -f /etc/ssh/ssh_host_* # of the base image, common to all hosts
    for kind in ecdsa ed25519; do # an RSA key takes seconds to make, and no client of today asks for one
        ssh-keygen -q -t $kind -N '' -C "root@$(hostname)" -f /etc/ssh/ssh_host_${kind}_key
    done
}

apply_settings() {
    cat $here/environment >>/etc/environment
    install -m 644 $here/pip.conf /etc/pip.conf
    if [ -d $here/certificates ]; then
        install -d /usr/local/share/ca-certificates
        install -m 644 $here/certificates/*.crt /usr/local/share/ca-certificates/
        update-ca-certificates >/dev/null
    fi
    tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
}

if [ ! -e $here/settled ]; then
    install_packages
    apply_settings
    allow_logins
    touch $here/settled
fi
install -d -m 755 /run/sshd
exec /usr/sbin/sshd -D -e
