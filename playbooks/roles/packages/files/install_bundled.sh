#!/bin/sh
# Install those of a bundle's packages that the host lacks or has in an older version, and print their files.
#
# The host may have been updated since they were gathered. apt says whether they fit before anything is changed: dpkg alone would go back to
# older versions, and would see what is lacking only when half of it is unpacked. The host's own indexes have no say.
# The package manager expands these, not the shell.
# shellcheck disable=SC2016
set -eu
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
for file; do
    shift
    package=$(dpkg-deb --show --showformat='${Package}:${Architecture}' "$file")
    version=$(dpkg-deb --field "$file" Version)
    there=$(dpkg-query --show --showformat='${db:Status-Status} ${Version}' "$package" 2>/dev/null) || there=
    if [ "${there%% *}" = installed ] && dpkg --compare-versions "$version" le "${there#* }"; then continue; fi
    set -- "$@" "$file"
done
[ $# -gt 0 ] || exit 0
if ! said=$(apt-get -q -y -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=/dev/null -o DPkg::Lock::Timeout=300 \
    --no-remove --no-install-recommends install "$@" 2>&1); then
    echo "the bundle's packages do not fit what is installed here by now; make it again:" >&2
    printf '%s\n' "$said" | awk '/^(E:|dpkg: error| [^ ]+ : )/ { print; found = 1 } END { exit !found }' >&2 || printf '%s\n' "$said" >&2
    exit 1
fi
printf '%s\n' "$@"
