#!/bin/sh
# Inside a builder: makes a base into a host. Nothing of the controller's settings may stay: the result becomes an image.
set -eu
here=/provision-build
export DEBIAN_FRONTEND=noninteractive APT_CONFIG=$here/apt.conf

if ! command -v apt-get >/dev/null; then
    echo "this base has no apt-get: hosts are made from Debian and its relatives" >&2
    exit 3
fi

# A package's service must not start while an image is being made.
policy=/usr/sbin/policy-rc.d
made_policy=
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    made_policy=yes
fi

apt-get -q update
# shellcheck disable=SC2046  # one word per package is meant
apt-get -q install -y --no-install-recommends $(cat $here/packages)

[ -z "$made_policy" ] || rm -f $policy

user=$(cat $here/user)
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"

mkdir -p /etc/ssh/sshd_config.d
cp $here/sshd.conf /etc/ssh/sshd_config.d/provision-sandbox.conf
chmod 644 /etc/ssh/sshd_config.d/provision-sandbox.conf
# Recording a login's audit id needs a right that a container lacks; the login itself must not fail for it.
sed -i 's/^session\( *\)required\( *\)pam_loginuid/session\1optional\2pam_loginuid/' /etc/pam.d/sshd

# Host keys are each host's own. Package lists and logs hold the mirror's address, perhaps with a password.
rm -f /etc/ssh/ssh_host_*
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt/* $here
