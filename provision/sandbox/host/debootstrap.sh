#!/bin/sh
# On the controller, in namespaces of its own: makes a minimal Debian and packs it.
# Arguments: suite, working folder, keyring, packages (with commas; may be empty), mirror (empty: debootstrap's own default).
set -eu
suite=$1 work=$2 keyring=$3 packages=$4 mirror=$5

debootstrap --variant=minbase --force-check-gpg --keyring="$keyring" ${packages:+--include="$packages"} \
    "$suite" "$work/tree" ${mirror:+"$mirror"}

# The image holds no trace of the controller's mirror, whose address may carry a password; hosts get it when they start.
rm -rf "$work"/tree/var/cache/apt/archives/*.deb "$work"/tree/var/cache/apt/*.bin "$work"/tree/var/lib/apt/lists/* "$work"/tree/var/log/*
[ -z "$mirror" ] || : >"$work/tree/etc/apt/sources.list"
# What debootstrap copies from the controller for its own use, and keys that every host must make for itself.
rm -f "$work/tree/etc/hostname" "$work/tree/etc/resolv.conf" "$work"/tree/etc/ssh/ssh_host_*

tar --create --file "$work/base.tar" --directory "$work/tree" --numeric-owner --one-file-system .
