"""Helpers for tests on sandbox hosts: run the command line as a user does, and inspect the hosts without it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container

from provision.base import paths
from provision.remote import progress
from provision.sandbox import Sandbox, SandboxHost

# Seconds. A whole installation takes minutes on two cores that several tests share; a run that takes longer hangs.
RUN_S = 900
#: The container engine is silent for as long as it commits a host.
ENGINE_S = 600

# Packages with their marks and holds, every path with owner and mode, every file's checksum, and the linker's cache.
STATE = r"""
dpkg-query -W -f '${db:Status-Status} ${binary:Package} ${Version}\n' | sort
apt-mark showauto | sed 's/^/auto /'; apt-mark showhold | sed 's/^/held /'
find /etc /opt /usr/local /root /home -xdev -printf '%p %y %m %u %g\n' | sort; find / -xdev -name '*.dpkg-new'
find /etc /opt /usr/local /root /home -xdev -type f ! -path /etc/ld.so.cache -exec sha256sum {} + | sort
ldconfig -p
"""


def provision(*words: str, stdin: str | None = None, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """``provision WORDS…`` as a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "provision", *words], input=stdin or "", capture_output=True, text=True, timeout=timeout, check=False
    )


def good(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The result of a command that must succeed; otherwise its output is the error."""
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stderr[-6000:]}\n{result.stdout[-6000:]}"
    return result


def verdict(result: subprocess.CompletedProcess[str]) -> str:
    """The last thing that was said on standard error, without the lines, indented, that belong to it."""
    return next((line for line in reversed(result.stderr.splitlines()) if line and not line.startswith(" ")), "")


def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON document of a ``--json`` run, which must be all of standard output."""
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def images_of_image_tests(engine: docker.DockerClient) -> set[str]:
    """Images that the tests of `provision image` build in another process: everything based on one of their tags."""
    listed = engine.api.images(all=True)
    found = {entry["Id"] for entry in listed if any(re.match(r"it\d+-image/", tag) for tag in entry["RepoTags"] or ())}
    while more := {entry["Id"] for entry in listed if entry["ParentId"] in found} - found:
        found |= more
    return found


def container(host: SandboxHost) -> Container:
    """The container behind a host."""
    return docker.from_env(timeout=ENGINE_S).containers.get(host.container)


def root(host: SandboxHost, command: str) -> str:
    """Run a shell command as root on a host, not over ssh; it must succeed."""
    if is_namespace(host):
        enter = ["nsenter", "--target", str(init(host)), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        done = subprocess.run([*enter, "sh", "-c", command], capture_output=True, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    else:
        code, output = container(host).exec_run(["sh", "-c", command])
    text = output.decode(errors="replace")
    assert code == 0, f"{host.name}: {command}\n{text}"
    return text.strip()


def is_namespace(host: SandboxHost) -> bool:
    return Path("/run/netns", host.container).exists()


def init(host: SandboxHost) -> int:
    """The first process of a host, as this machine numbers it."""
    if not is_namespace(host):
        return int(container(host).attrs["State"]["Pid"])
    listed = subprocess.run(["ip", "netns", "pids", host.container], capture_output=True, text=True, check=True).stdout.split()
    for pid in listed:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if re.search(r"^NSpid:.*\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                return int(pid)
    raise AssertionError(f"{host.name} does not run")


def state(host: SandboxHost) -> list[str]:
    """Everything on a host that an installation could change, in lines."""
    return root(host, STATE).splitlines()


def as_machine(host: SandboxHost, namespace: str, command: str) -> None:
    """Run a command in one namespace of a host with this machine's privileges, which containers do not have."""
    pid = str(init(host))
    elevated = [] if os.geteuid() == 0 else ["sudo", "-n"]
    done = subprocess.run(
        [*elevated, "nsenter", "-t", pid, f"--{namespace}", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def remove_default_route(host: SandboxHost) -> None:
    """Close the host's network. It may not do that itself, so a privileged container joins its network for a moment."""
    box = container(host)
    docker.from_env(timeout=ENGINE_S).containers.run(
        box.image, ["route", "del", "default"], entrypoint="ip", network_mode=f"container:{box.id}", cap_add=["NET_ADMIN"], remove=True
    )


def marked_processes(sandbox: Sandbox) -> list[str]:
    """Processes on the hosts and on this machine that a run has started and left behind.

    /proc lists the containers' processes, too. Runs of other tests are excluded by their hosts' process namespaces, and on this machine
    by the state folder.
    """
    ours = set()
    for host in sandbox.hosts:
        if is_namespace(host) or container(host).status == "running":
            ours.add(os.readlink(f"/proc/{init(host)}/ns/pid"))
    here = f"PROVISION_HOME={os.environ['PROVISION_HOME']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if not any(entry.startswith(b"PROVISION_RUN_ID=") for entry in environment):
                continue
            if os.readlink(folder / "ns/pid") in ours or here in environment:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


@contextlib.contextmanager
def running(*words: str) -> Iterator[Running]:
    """A ``provision`` run in the background, for tests that disturb it or its hosts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "provision", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()


class Running:
    """A run in the background and its output so far: standard error, or both streams if they are one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._earlier = set(paths.runs().glob("2*"))
        self.stream = process.stderr or process.stdout
        self.said: list[str] = []

    def wait_for(self, *texts: str, timeout: float = RUN_S) -> str:
        """Read its output up to the line that contains all of ``texts``; returns that line."""
        assert self.stream is not None
        deadline = time.monotonic() + timeout
        for line in self.stream:
            self.said.append(line)
            if all(text in line for text in texts):
                return line
            assert time.monotonic() < deadline, "".join(self.said[-40:])
        raise AssertionError(f"it ended without {texts} in its output:\n{''.join(self.said[-40:])}")

    def wait_for_task(self, text: str, timeout: float = RUN_S) -> None:
        """Wait until the log of its tasks has ``text``."""
        deadline = time.monotonic() + timeout
        while not any(text in read_if_there(folder / progress.NAME) for folder in set(paths.runs().glob("2*")) - self._earlier):
            assert self.process.poll() is None, f"it ended without {text}"
            assert time.monotonic() < deadline, text
            time.sleep(0.1)

    def finish(self, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout)
        said = "".join(self.said) + (out if err is None else err)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, said if err is None else out, said)


def read_if_there(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def tasks() -> str:
    """What happened to every task of the last run."""
    return (paths.runs() / "latest" / progress.NAME).read_text()


def wait_until(condition: Callable[[], object], timeout: float = 120) -> None:
    """Poll until ``condition`` is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
