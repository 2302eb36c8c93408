"""A simulated GPU host that gets a driver: with what its container lacks of a machine, which is a kernel of its own and a reboot.

What is fake besides the simulated GPUs is the kernel's release, the boot id, and /sbin/shutdown: a machine that it restarts has another
boot id, and shows its GPUs with the driver that was installed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hosts import as_machine, root

from provision.sandbox import Sandbox, SandboxHost
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate

REBOOTS = "/var/log/reboots"
BOOT_ID, _GOING_DOWN = "/srv/fake/boot_id", "/run/going-down"
_SHUTDOWN = f"""#!/bin/sh
rm -rf /run/provision.lock*
echo "$*" >> {REBOOTS}
touch {_GOING_DOWN}
"""
#: Of the system's Python alone, which the survey runs with; one line, as files of that kind demand.
_KERNEL = "import os; os.uname = lambda made=os.uname_result((*os.uname()[:2], {release!r}, *os.uname()[3:])): made\n"


def disguise(host: SandboxHost, release: str) -> None:
    """Make the host look like a machine with a kernel of that release, apart from this one."""
    root(
        host,
        f"""set -e; mkdir -p /srv/fake
        cat /proc/sys/kernel/random/uuid > {BOOT_ID}
        cat > /usr/lib/python3/dist-packages/fake_kernel.pth <<'END'\n{_KERNEL.format(release=release)}END
        cat > /usr/sbin/shutdown <<'END'\n{_SHUTDOWN}END
        chmod 755 /usr/sbin/shutdown""",
    )
    as_machine(host, "mount", f"mount --bind {BOOT_ID} /proc/sys/kernel/random/boot_id")


@contextmanager
def boots(sandbox: Sandbox, then: Simulation) -> Iterator[None]:
    """Meanwhile the sandbox's only host comes back from a reboot with these GPUs."""
    (host,) = sandbox.hosts
    over = threading.Event()

    def boot() -> None:
        while not over.wait(0.5):
            if root(host, f"ls {_GOING_DOWN} 2>/dev/null || true"):
                simulate(sandbox.name, then, say=lambda _line: None)
                root(host, f"rm {_GOING_DOWN}; cat /proc/sys/kernel/random/uuid > {BOOT_ID}")

    thread = threading.Thread(target=boot)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
