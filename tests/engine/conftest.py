"""Launching worker scripts as real ranks: `mpirun` from the interpreter's own environment, many cases per launch."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefork import Server

WORKERS = Path(__file__).parent / "workers"
#: Seconds: a launch takes two to ten on a busy machine with two cores; a hang must not block the suite.
LAUNCH_LIMIT = 120

#: The longest modules, which run first so that no worker of xdist is left with one at the end.
LONGEST_FIRST = (
    "test_failures.py",
    "test_horovod_api.py",
    "test_collectives.py",
    "test_core_programs.py",
    "test_elastic.py",
    "test_torch.py",
    "test_torch_distributed.py",
    "test_runner.py",
    "test_embeddings.py",
    "test_observation.py",
    "test_launch_program.py",
    "test_launchers.py",
    "test_checkpoints.py",
)

pytest.importorskip("collective_core", reason="the engine is not installed: pip install ./collective_core")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str
    folder: Path  # of reports that are longer than a line, and of what ranks tell each other

    def reports(self) -> dict[int, dict[str, Any]]:
        """What each rank reported with common.report, by rank."""
        found = [json.loads(line.split("REPORT ", 1)[1]) for line in self.stdout.splitlines() if "REPORT " in line]
        found += [json.loads(file.read_text()) for file in self.folder.glob("*.json")]
        return {entry["rank"]: entry for entry in found}

    def must_succeed(self) -> Outcome:
        assert self.returncode == 0, f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


def find_mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.fixture(scope="session")
def prefork(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def launch(prefork, tmp_path_factory):
    """launch(worker, n, hosts=1, arguments=(), env={}, keep_going=False) -> Outcome.

    `hosts` > 1 divides the ranks over so many pretended hosts, which talk TCP over loopback. `keep_going`: mpirun does not end
    the other ranks when one dies. Ranks start with PyTorch imported (prefork.py), unless each has an `own_interpreter`.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.fail("there is no mpirun beside this Python or on PATH; `make engine` sets everything up", pytrace=False)

    def run(worker, n, hosts=1, arguments=(), env=None, keep_going=False, own_interpreter=False, limit=LAUNCH_LIMIT):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "COLLECTIVE_"))}
        folder = tmp_path_factory.mktemp("reports")
        environment.update({"TEST_HOSTS": str(hosts), "TEST_REPORTS": str(folder), "OMP_NUM_THREADS": "1", **(env or {})})
        environment["PYTHONPATH"] = os.pathsep.join([str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        if hosts > 1:
            environment.setdefault("COLLECTIVE_ADDRESS", "127.0.0.1")
        options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        if keep_going:
            options += ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
        command = [mpirun, *options, "-np", str(n), *([sys.executable] if own_interpreter else prefork.command())]
        command += ["-m", worker] if not worker.endswith(".py") else [str(WORKERS / worker)]
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=limit)
        return Outcome(done.returncode, done.stdout, done.stderr, folder)

    return run


@pytest.fixture(scope="session")
def ssh(tmp_path_factory):
    """The ssh command that reaches `other` and `third`: this machine, through a sshd of the test's own."""
    from collective_core.runtime import network

    folder = tmp_path_factory.mktemp("sshd")
    daemon = shutil.which("sshd", path=os.pathsep.join(["/usr/sbin", os.environ["PATH"]]))
    if daemon is None:
        pytest.fail("there is no sshd: apt install openssh-server", pytrace=False)
    for name in ("host", "mine"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = network.free_port()
    shutil.copy(folder / "mine.pub", folder / "authorized")
    (folder / "authorized").chmod(0o600)
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile none\nAuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    (folder / "config").write_text(
        f"Host other third\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/mine\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its rights
    with subprocess.Popen([daemon, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True) as server:
        for line in server.stderr:
            if "listening" in line:
                break
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield ("ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes")
        server.terminate()
