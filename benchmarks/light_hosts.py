"""What `provision up` costs by the number of hosts, from 1 to 1,000: time, the controller's processor time and memory, what it writes.

    python benchmarks/light_hosts.py                       # 1, 10, 100, 300 and 1,000 hosts, of which 5 % are bad
    python benchmarks/light_hosts.py --hosts 1000 --bad 0 --keep FOLDER

The hosts are light: addresses 127.x.y.z of this machine behind one sshd, at 16 ports, as few logins can wait at one. Logins, connections,
transfers and all of the controller are real; what runs on a host is a STUB (`light_host.py`), so the hosts' own processor time is not in
the figures. That of sshd is counted apart, and comes first, as hosts have processors of their own.
Bad hosts, in turn: refuses the login; accepts a connection and says nothing; has no Python; falls silent; floods; fails in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from provision.base import engine_source, paths

HERE = Path(__file__).resolve().parent
PORTS = 16  # as many as sshd listens at
FAULTS = ("refuses", "deaf", "python", "hang", "flood", "fails")
_TICK = os.sysconf("SC_CLK_TCK")
_SSHD = """\
{ports}
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
MaxStartups 5000
PerSourceMaxStartups none
SetEnv SHLVL=1
ForceCommand exec {python} -IS {program} {folder}
"""


def free_ports() -> list[int]:
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("0.0.0.0", 0))).getsockname()[1] for _ in range(PORTS)]  # noqa: S104 - of many loopback addresses


def seconds_of(pid: int, *, children: bool = False) -> float:
    """Processor seconds of a process, or of its children that have ended and were waited for."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return sum(map(int, fields[13:15] if children else fields[11:13])) / _TICK
    return 0.0


@contextmanager
def light_hosts(folder: Path, count: int, bad: float = 0.0, pace: float = 1.0, slow: int = 0) -> Iterator[int]:
    """Hosts whose inventory is ``hosts.ini`` in the folder; yields the process id of their sshd.

    Args:
        bad: what part of them is bad, from 0 to 1.
        pace: seconds for one that the recorded host took.
        slow: how many take five times as long.
    """
    for name in ("host_key", "key"):
        if not (folder / name).exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    faults = {str(1 + int(at / bad)): FAULTS[at % len(FAULTS)] for at in range(round(count * bad))} if bad else {}
    faults |= {str(count - at): "slow" for at in range(slow)}
    deaf = socket.create_server(("0.0.0.0", 0), backlog=1024)  # noqa: S104 - of many loopback addresses
    ports, known = free_ports(), (folder / "host_key.pub").read_text(encoding="ascii")
    address = {number: f"127.{number + 1 >> 16}.{number + 1 >> 8 & 255}.{number + 1 & 255}" for number in range(1, count + 1)}
    lines = []
    for number, here in address.items():
        fault = faults.get(str(number), "")
        port = deaf.getsockname()[1] if fault == "deaf" else ports[number % PORTS]
        lines.append(f"node{number} ansible_host={here} ansible_port={port} {'ansible_user=not-here' if fault == 'refuses' else ''}")
    options = f"-F /dev/null -o UserKnownHostsFile={folder}/known_hosts -o GlobalKnownHostsFile=/dev/null"
    common = [f"ansible_ssh_private_key_file={folder}/key", f"ansible_ssh_common_args='{options}'"]
    (folder / "hosts.ini").write_text("\n".join([*lines, "", "[all:vars]", *common, ""]), encoding="utf-8")
    (folder / "known_hosts").write_text(f"[127.*]:* {known}", encoding="ascii")
    (folder / "faults.json").write_text(json.dumps(faults), encoding="ascii")
    (folder / "pace").write_text(str(pace), encoding="ascii")
    shutil.copytree(HERE / "light_host", folder, dirs_exist_ok=True)
    listed = "\n".join(f"Port {port}" for port in ports)
    config = _SSHD.format(ports=listed, folder=folder, python=sys.executable, program=HERE / "light_host.py")
    (folder / "sshd_config").write_text(config, encoding="utf-8")
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its rights
    path = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or sys.exit("there is no sshd: apt install openssh-server")
    with (folder / "sshd.log").open("wb") as log, deaf:
        daemon = subprocess.Popen(["nice", "-n", "-10", path, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
        try:
            for _ in range(100):
                with suppress(OSError), socket.create_connection(("127.0.0.1", ports[0]), 5):
                    break
                time.sleep(0.1)
            yield daemon.pid
        finally:
            daemon.terminate()
            daemon.wait()


@dataclass
class Figures:
    """Of one run. Memory in MB: of the process at its peak, and of its ssh clients together, shared pages once."""

    code: int = 0
    seconds: float = 0.0
    survey: float = 0.0
    processor: float = 0.0
    own: float = 0.0
    sshd: float = 0.0
    peak: float = 0.0
    clients: float = 0.0
    files: int = 0
    threads: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    entries: int = 0
    lines: list[str] = field(default_factory=list)


def _watch(pid: int, figures: Figures, ended: threading.Event) -> None:
    turn = 0
    while not ended.wait(0.5):
        turn += 1
        with suppress(OSError, ValueError, IndexError):
            figures.own = max(figures.own, seconds_of(pid))
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            figures.threads = max(figures.threads, int(re.findall(r"Threads:\s+(\d+)", status)[0]))
            figures.files = max(figures.files, len(os.listdir(f"/proc/{pid}/fd")))
            if turn % 20 == 1:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
                for thread in os.listdir(f"/proc/{pid}/task"):
                    children += Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split()
                figures.clients = max(figures.clients, sum(map(_megabytes, set(children))))


def _megabytes(pid: str) -> float:
    with suppress(OSError, IndexError):
        return int(re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)[0]) / 1024
    return 0.0


def _stub_wheel(folder: Path) -> None:
    """A wheel of the engine of about its size, so that no host has to build it: no host unpacks it."""
    engine = engine_source.pack()
    folder.mkdir(exist_ok=True)
    name = f"{engine.package}-{engine.version}-{engine.build}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(folder / name, "w") as made:
        made.writestr("stub", random.Random(1).randbytes(1_500_000))  # noqa: S311 - no secret


def measure(folder: Path, sshd: int, *words: str) -> Figures:
    """Run ``provision up`` with these words on the folder's hosts."""
    home, cache, figures, ended = folder / "state", folder / "cache", Figures(), threading.Event()
    _stub_wheel(folder / "wheels")
    cache.mkdir(exist_ok=True)
    (paths.cache() / "downloads").mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (cache / "downloads").symlink_to(paths.cache() / "downloads")
    environment = {**os.environ, "PROVISION_HOME": str(home), "PROVISION_CACHE": str(cache)}
    command = [sys.executable, "-m", "provision", "up", str(folder / "hosts.ini"), "--no-smoke", "--torch", "none"]
    command += ["--wheels", str(folder / "wheels"), *words]
    before, began = seconds_of(sshd, children=True), time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        watcher = threading.Thread(target=_watch, args=(process.pid, figures, ended))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    process.returncode = figures.code = os.waitstatus_to_exitcode(status)
    figures.seconds = time.monotonic() - began
    figures.processor = usage.ru_utime + usage.ru_stime
    figures.peak = usage.ru_maxrss / 1024
    time.sleep(1)  # the last connections end
    figures.sshd = seconds_of(sshd, children=True) - before
    figures.lines = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
    latest = home / "runs/latest"
    files = [path for path in latest.resolve().rglob("*") if path.is_file()]
    figures.entries = len(files)
    figures.sizes = {path.name: path.stat().st_size for path in files if path.parent == latest.resolve()}
    figures.sizes["everything"] = sum(path.stat().st_size for path in files)
    with suppress(OSError, ValueError):
        steps = json.loads((latest / "timeline.json").read_text(encoding="utf-8"))["steps"]
        figures.survey = max(each["began"] + each["seconds"] for each in steps if each["stage"] == "survey")
    return figures


def main() -> int:
    """Measure and print a row for each number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 10, 100, 300, 1000])
    parser.add_argument("--bad", type=float, default=5.0, help="percent of the hosts")
    parser.add_argument("--slow", type=int, default=0, help="hosts that take five times as long")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds for one that the recorded host took")
    parser.add_argument("--files", type=int, help="limit of open files, as a login has it")
    parser.add_argument("--keep", type=Path, help="folder for what the last number of hosts leaves")
    wanted = parser.parse_args()
    if wanted.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print("hosts   time s  survey s  cpu s  per host s  own s  sshd s  MB  clients MB  files  threads  lines  page kB  JSON kB")
    for count in wanted.hosts:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (wanted.keep or Path(temporary)).resolve()
            folder.mkdir(exist_ok=True, parents=True)
            with light_hosts(folder, count, wanted.bad / 100, wanted.pace, wanted.slow) as sshd:
                found = measure(folder, sshd)
                page, report = (found.sizes.get(name, 0) / 1000 for name in ("report.html", "report.json"))
                print(
                    f"{count:5}  {found.seconds:7.1f} {found.survey:9.1f} {found.processor:7.1f}"
                    f" {found.processor / count:11.2f} "
                    f"{found.own:6.1f} {found.sshd:7.1f} {found.peak:4.0f} {found.clients:10.0f} {found.files:6} {found.threads:8}"
                    f" {len(found.lines):6} {page:8.0f} {report:8.0f}   exit {found.code}, {found.entries} files,"
                    f" {found.sizes['everything'] / 1e6:.0f} MB",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
