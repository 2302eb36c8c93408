"""Who the host is, and which system it runs."""

import hashlib
import os
import re
import socket

from .machine import glibc, section

CONTAINER_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/run/secrets/kubernetes.io": "kubernetes"}


@section(None)
def identity(machine):
    hostname = socket.gethostname() if machine.root == "/" else (machine.line("/etc/hostname") or "")
    short = hostname.split(".")[0]
    resolves_to = []
    # /etc/hosts only: asking DNS would be network access, and may hang.
    for line in (machine.read("/etc/hosts") or "").splitlines():
        fields = line.split("#")[0].split()
        if len(fields) > 1 and (hostname in fields[1:] or short in fields[1:]):
            resolves_to.append(fields[0])
    machine_id = machine.line("/etc/machine-id") or machine.line("/var/lib/dbus/machine-id")
    marked = next((name for mark, name in CONTAINER_MARKS.items() if machine.exists(mark)), None)
    return {
        "hostname": hostname,
        "hosts_file": resolves_to,
        "machine_id": hashlib.sha256(machine_id.encode()).hexdigest()[:16] if machine_id else None,
        "boot_id": machine.line("/proc/sys/kernel/random/boot_id"),
        "container": marked or machine.line("/run/systemd/container"),
        "arch": os.uname().machine,
    }


@section("os")
def operating_system(machine):
    text = machine.read("/etc/os-release") or machine.read("/usr/lib/os-release") or ""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and not key.startswith("#"):
            values[key] = value.strip().strip("\"'")
    in_brackets = re.search(r"\(([A-Za-z]+)\)", values.get("VERSION", ""))
    return {
        "id": values.get("ID", "linux").lower(),
        "version": values.get("VERSION_ID", ""),
        "codename": values.get("VERSION_CODENAME")
        or values.get("UBUNTU_CODENAME")
        or (in_brackets.group(1).lower() if in_brackets else None),
        "name": values.get("PRETTY_NAME"),
        "id_like": values.get("ID_LIKE", "").lower().split(),
        "kernel": os.uname().release,
        "libc": glibc(),
        "nix_ld": machine.exists("/run/current-system/sw/share/nix-ld/lib/ld.so"),
    }
