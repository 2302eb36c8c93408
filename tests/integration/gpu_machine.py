"""A sandbox host that looks like a machine with an H100, as far as the survey and a reboot look at it.

What is fake is what a kernel and hardware would show: the PCI bus, the kernel's release and boot id, and /sbin/shutdown, after which the
host has another boot id and nvidia-smi of the fake packages answers.
"""

from __future__ import annotations

from hosts import as_machine, root

from provision.sandbox import SandboxHost

REBOOTS = "/var/log/reboots"
RUNNING = "/run/nvidia-driver-runs"

_SHUTDOWN = f"""#!/bin/sh
rm -rf /run/provision.lock*
echo "$*" >> {REBOOTS}
touch {RUNNING}
cat /proc/sys/kernel/random/uuid > /srv/fake/boot_id
"""
#: Of the system's Python alone, which the survey runs with; one line, as files of that kind demand.
_KERNEL = "import os; os.uname = lambda made=os.uname_result((*os.uname()[:2], {release!r}, *os.uname()[3:])): made\n"

#: What `nvidia-smi` of the fake packages prints of one H100, once the host was rebooted.
SMI = f"""#!/bin/sh
[ -e {RUNNING} ] || {{ echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }}
case "$1" in
--query-gpu=driver_version) echo 'VERSION' ;;
--query-gpu=*compute_cap*) echo 'NVIDIA H100 80GB HBM3, GPU-0, 81559, VERSION, 00000000:41:00.0, 9.0' ;;
-q) ;;
*) echo '| NVIDIA-SMI VERSION    Driver Version: VERSION    CUDA Version: 13.0 |' ;;
esac
"""


def disguise(host: SandboxHost, release: str) -> None:
    """Make the host look like a machine with a GPU and without a driver, with a kernel of that release."""
    bus = "/srv/fake/pci/0000:41:00.0"
    root(
        host,
        f"""set -e; rm -f /.dockerenv; mkdir -p {bus}
        echo 0x030200 > {bus}/class; echo 0x10de > {bus}/vendor; echo 0x2330 > {bus}/device
        cat /proc/sys/kernel/random/uuid > /srv/fake/boot_id
        cat > /usr/lib/python3/dist-packages/fake_kernel.pth <<'END'\n{_KERNEL.format(release=release)}END
        cat > /usr/sbin/shutdown <<'END'\n{_SHUTDOWN}END
        chmod 755 /usr/sbin/shutdown""",
    )
    as_machine(host, "mount", "mount --bind /srv/fake/pci /sys/bus/pci/devices")
    as_machine(host, "mount", "mount --bind /srv/fake/boot_id /proc/sys/kernel/random/boot_id")
