"""The login user and its privileges, limits, environment, firewalls and Secure Boot."""

import os
import pwd
import re
import resource

from .machine import SECRET_NAME, once, section, without_credentials

VARIABLES_OF_INTEREST = re.compile(r"^(NCCL|OMPI|PMIX|PRTE|UCX|HOROVOD|COLLECTIVE|HWLOC|OMP_NUM|(CUDA|HIP|ROCR)_VISIBLE|MASTER_(ADDR|PORT)$)")


@section("user")
def user(machine):
    who = pwd.getpwuid(os.getuid())
    return dict(machine.privileges(), name=who.pw_name, home=who.pw_dir, sudo_installed=machine.which("sudo") is not None)


@section("limits")
def limits(machine):
    def pair(which):
        soft, hard = resource.getrlimit(which)
        text = lambda value: "unlimited" if value == resource.RLIM_INFINITY else value  # noqa: E731
        return {"soft": text(soft), "hard": text(hard)}

    return {"memlock": pair(resource.RLIMIT_MEMLOCK), "nofile": pair(resource.RLIMIT_NOFILE)}


@section("environment")
def environment(machine):
    interesting = {
        name: without_credentials(value)
        for name, value in machine.env.items()
        if VARIABLES_OF_INTEREST.match(name) and not SECRET_NAME.search(name)
    }
    return {"variables": interesting}


@section("security")
def security(machine):
    ufw = machine.read("/etc/ufw/ufw.conf") or ""
    # Four bytes of attributes, then 1 where Secure Boot is on.
    secure_boot = machine.content("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c")
    key = "/var/lib/dkms/mok.pub"  # DKMS signs the modules that it builds
    said = "".join(machine.run(["mokutil", "--test-key", key])[1:]) if secure_boot and machine.exists(key) else ""
    return {
        "firewalld": "firewalld" in running_programs(machine),
        "ufw": bool(re.search(r"^\s*ENABLED\s*=\s*yes", ufw, re.M | re.I)),
        "secure_boot": secure_boot[4:5] == b"\x01" if secure_boot else False,
        "dkms_key_enrolled": {"already": True, "not": False}.get((re.findall(r"\bis (already|not) enrolled", said) or [""])[0]),
    }


@once
def running_programs(machine):
    return set(filter(None, (machine.line(found) for found in machine.glob("/proc/[0-9]*/comm"))))
