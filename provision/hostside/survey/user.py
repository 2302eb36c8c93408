"""The login user and its privileges, limits, kernel settings, environment, security modules, clock."""

import os
import pwd
import re
import resource
import time

from .machine import SECRET_NAME, group_names, once, section, without_credentials

VARIABLES_OF_INTEREST = re.compile(r"^(NCCL|OMPI|PMIX|PRTE|UCX|HOROVOD|COLLECTIVE|HWLOC|OMP_NUM|(CUDA|HIP|ROCR)_VISIBLE|MASTER_(ADDR|PORT)$)")
SYSCTLS = (
    "kernel.yama.ptrace_scope",
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.core.somaxconn",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.ip_local_port_range",
    "vm.overcommit_memory",
)


@section("user")
def user(machine):
    who = pwd.getpwuid(os.getuid())
    facts = {"name": who.pw_name, "uid": who.pw_uid, "home": who.pw_dir, "shell": who.pw_shell, "groups": group_names()}
    return dict(facts, sudo_installed=machine.which("sudo") is not None, **machine.privileges())


@section("limits")
def limits(machine):
    def pair(which):
        soft, hard = resource.getrlimit(which)
        text = lambda value: "unlimited" if value == resource.RLIM_INFINITY else value  # noqa: E731
        return {"soft": text(soft), "hard": text(hard)}

    return {
        "memlock": pair(resource.RLIMIT_MEMLOCK),
        "nofile": pair(resource.RLIMIT_NOFILE),
        "nproc": pair(resource.RLIMIT_NPROC),
        "stack": pair(resource.RLIMIT_STACK),
    }


@section("sysctl")
def sysctl(machine):
    values = {name: machine.line("/proc/sys/" + name.replace(".", "/")) for name in SYSCTLS}
    return {name: " ".join(value.split()) for name, value in values.items() if value is not None}


@section("environment")
def environment(machine):
    interesting = {
        name: without_credentials(value)
        for name, value in machine.env.items()
        if VARIABLES_OF_INTEREST.match(name) and not SECRET_NAME.search(name)
    }
    return {
        "path": machine.env.get("PATH", ""),
        "ld_library_path": machine.env.get("LD_LIBRARY_PATH"),
        "locale": machine.env.get("LC_ALL") or machine.env.get("LANG"),
        "variables": interesting,
    }


@section("security")
def security(machine):
    enforcing = machine.line("/sys/fs/selinux/enforce")
    ufw = machine.read("/etc/ufw/ufw.conf") or ""
    # Four bytes of attributes, then 1 where Secure Boot is on.
    secure_boot = machine.content("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c")
    key = "/var/lib/dkms/mok.pub"  # DKMS signs the modules that it builds
    said = "".join(machine.run(["mokutil", "--test-key", key])[1:]) if secure_boot and machine.exists(key) else ""
    return {
        "selinux": {"1": "enforcing", "0": "permissive"}.get(enforcing, "disabled"),
        "firewalld": "firewalld" in running_programs(machine),
        "ufw": bool(re.search(r"^\s*ENABLED\s*=\s*yes", ufw, re.M | re.I)),
        "secure_boot": secure_boot[4:5] == b"\x01" if secure_boot else False,
        "dkms_key_enrolled": {"already": True, "not": False}.get((re.findall(r"\bis (already|not) enrolled", said) or [""])[0]),
    }


@once
def running_programs(machine):
    return set(filter(None, (machine.line(found) for found in machine.glob("/proc/[0-9]*/comm"))))


@section("time")
def clock(machine):
    synchronized = machine.exists("/run/systemd/timesync/synchronized") or None  # other time services are unknown
    return {"epoch": time.time(), "ntp_synced": synchronized, "timezone": time.strftime("%z")}
