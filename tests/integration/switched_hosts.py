"""Hosts that are network namespaces on a switch in one more, with shaped ports and faults in ports and interfaces: many, and in seconds.

They share this machine's files and cores. Their login is a command in their namespace, in place of ssh and sshd, which other tests have.
What cannot exist here, a core that is throttled and one that computes wrongly, is played by the host's Python: `_FAULTY_SUM`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from conftest import missing

RATE = "50mbit"
_FAULTY_SUM = """
import builtins, os
real, pin, calls = builtins.sum, os.sched_setaffinity, [0]
def throttled(numbers):
    numbers = list(numbers)
    real(numbers), real(numbers), real(numbers)
    return real(numbers)
def flipping(numbers):
    calls[0] += 1
    return real(numbers) ^ (1 << 9 if calls[0] % 30011 == 0 else 0)
def pinned(pid, cores):
    pin(pid, cores)
    if max(cores) == real([1 for _ in os.listdir("/sys/devices/system/cpu") if _[3:].isdigit()]) - 1:
        builtins.sum = FAULT
os.sched_setaffinity = pinned
"""


class Switch:
    """``count`` hosts, node1 and so on, at 10.77.0.2 and so on; as a context manager they are removed."""

    def __init__(self, folder: Path, count: int) -> None:
        self.name, self.folder, self.count = f"cert{os.getpid()}", folder, count
        self.inventory = folder / "hosts.ini"

    def __enter__(self) -> Switch:
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "iptables"))):
            missing("namespaces with shaped links need root, ip, tc and iptables")
        login = self.folder / "login"
        login.write_text(
            "#!/bin/sh\nfor word; do host=$last; last=$word; done\n"
            f'export PYTHONPATH={self.folder}/${{host##*.}}\nexec ip netns exec {self.name}-${{host##*.}} sh -c "$last"\n'
        )
        login.chmod(0o755)
        self.inventory.write_text(
            "".join(f"node{number} ansible_host=10.77.0.{number + 1} ansible_ssh_executable={login}\n" for number in self.numbers)
        )
        for name in ("switch", *(str(number + 1) for number in self.numbers)):
            run("ip", "netns", "add", f"{self.name}-{name}")
        ports = [
            f"link add name port{n} type veth peer name eth0 netns {self.name}-{n + 1}\nlink set dev port{n} master bridge0 up"
            for n in self.numbers
        ]
        self.inside("switch", "ip", "-batch", "-", text="\n".join(["link add name bridge0 type bridge", "link set dev bridge0 up", *ports]))
        for number in self.numbers:
            self.inside(
                number + 1, "ip", "-batch", "-", text=f"link set lo up\naddress add 10.77.0.{number + 1}/24 dev eth0\nlink set eth0 up\n"
            )
            self.shape(number, RATE)
        return self

    def __exit__(self, *_: object) -> None:
        for path in Path("/run/netns").glob(f"{self.name}-*"):
            run("ip", "netns", "delete", path.name)

    @property
    def numbers(self) -> range:
        return range(1, self.count + 1)

    def inside(self, name: object, *command: str, text: str = "") -> None:
        run("ip", "netns", "exec", f"{self.name}-{name}", *command, text=text)

    def shape(self, number: int, rate: str) -> None:
        """Both directions of a host's link."""
        shaper = ("root", "tbf", "rate", rate, "burst", "32k", "latency", "100ms")
        self.inside(number + 1, "tc", "qdisc", "replace", "dev", "eth0", *shaper)
        self.inside("switch", "tc", "qdisc", "replace", "dev", f"port{number}", *shaper)

    def plant(self, kind: str, number: int) -> None:
        """A fault of a host."""
        if kind == "slow":
            self.shape(number, "12mbit")
        elif kind == "loss":
            self.inside(
                number + 1, "iptables", "-w", "-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.01", "-j", "DROP"
            )
        elif kind == "mtu":
            self.inside(number + 1, "ip", "link", "set", "eth0", "mtu", "1400")
        elif kind == "port-mtu":
            self.inside("switch", "ip", "link", "set", f"port{number}", "mtu", "1400")
        else:
            (self.folder / str(number + 1)).mkdir()
            (self.folder / str(number + 1) / "sitecustomize.py").write_text(
                _FAULTY_SUM.replace("FAULT", {"core": "throttled", "flips": "flipping"}[kind])
            )


def run(*command: str, text: str = "") -> None:
    subprocess.run(command, input=text, text=True, check=True, timeout=60)
