"""`provision push` over real ssh: on a cluster of which a host dies in the middle, and, slow, to 16 hosts behind slow links.

The 16 are network namespaces with sshd. Each has a home of its own here, the ssh configuration of `provision up`, and a record as if
that had run; nothing is installed there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import missing
from hosts import container, good, provision, report, root, running, wait_until

from provision.base import resources
from provision.sandbox import Sandbox

MEGABYTE = 1 << 20
#: On two cores, 16 hosts with their encryption and packets need more than there is from about 100 Mbit/s on.
LINK, MEGABYTES = os.environ.get("PUSH_LINK", "100mbit"), int(os.environ.get("PUSH_MEGABYTES", "512"))
NETWORK = "10.214.77.{}"


def data_in(folder: Path, megabytes: int) -> Path:
    """A data set: one large file and some small ones."""
    (folder / "data/train").mkdir(parents=True)
    with (folder / "data/large.bin").open("wb") as file:
        file.writelines(os.urandom(MEGABYTE) for _ in range(megabytes))
    for number in range(20):
        (folder / f"data/train/{number}.txt").write_text(f"{number}\n")
    return folder / "data"


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("push", 4)


@pytest.mark.slow
def test_the_others_have_it_although_a_host_dies(cluster: Sandbox, tmp_path: Path) -> None:
    data, hosts = data_in(tmp_path, 40), str(cluster.inventory)
    *_, third, fourth = cluster.hosts
    with running("push", hosts, str(data), "--rate", "4MB/s") as push:
        look = "find ~trainer/provision-data/.provision-push-* -name 0 -size +4M 2>/dev/null | grep -q . && echo there || true"
        wait_until(lambda: root(third, look) == "there")
        container(third).kill()
        done = push.finish()
    assert done.returncode == 1
    assert f"pushed 21 files, {40}" in done.stdout.replace(".0", ""), done.stdout
    wanted = digests(data)
    for host in (*cluster.hosts[:2], fourth):
        listed = root(host, "cd ~trainer/provision-data/data && find . -type f -exec sha256sum {} +").splitlines()
        assert {line[66:].removeprefix("./"): line[:64] for line in listed} == wanted
        assert root(host, "pgrep -f '[t]ake$|[g]ive ey' || true") == ""
    container(third).start()
    wait_until(lambda: provision("ssh", "--hosts", hosts, third.name, "--", "true").returncode == 0)
    again = report(good(provision("push", hosts, str(data), "--json")))
    came = {each["host"]: each["received"] for each in again["hosts"]}
    assert all(came[host.name] < MEGABYTE for host in (*cluster.hosts[:2], fourth))
    assert MEGABYTE < came[third.name] < 37 * MEGABYTE
    good(provision("remove", hosts, "--yes"))
    assert [root(host, "ls -A ~trainer | grep provision || true") for host in cluster.hosts] == [""] * 4


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class SlowNetwork:
    """Namespaces ``n1`` … with sshd, and one for this end of the push, each behind a link of that rate to a bridge."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.prefix = folder, f"push-{os.getpid()}"
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.servers: list[subprocess.Popen[bytes]] = []
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host"))
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        member = SimpleNamespace(port=22, login="root", host_keys=[public])
        members = {name: SimpleNamespace(**vars(member), address=NETWORK.format(at)) for at, name in enumerate(self.names, 1)}
        import jinja2

        for name in self.names:
            home = folder / name
            (home / ".ssh").mkdir(parents=True)
            for template in ("config", "known_hosts"):
                text = (resources.folder("playbooks") / f"roles/ssh_mesh/templates/{template}.j2").read_text()
                filled = jinja2.Environment(trim_blocks=True).from_string(text).render(provision_members=members)  # noqa: S701
                (home / f".ssh/provision_{template}").write_text(filled.replace("~/.ssh/", f"{home}/.ssh/"))
            shutil.copy(folder / "key", home / ".ssh/provision_ed25519")
            (home / ".provision-record.json").write_text("{}")
            (home / "sshd").write_text(
                f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
                "PermitRootLogin yes\n"
                f'MaxStartups 100\nForceCommand env HOME={home} sh -c "$SSH_ORIGINAL_COMMAND"\n'
            )
        (folder / "known").write_text("".join(f"{each.address} {public}\n" for each in members.values()))
        options = f"-F /dev/null -i {folder}/key -o UserKnownHostsFile={folder}/known"
        lines = [
            f"{name} ansible_host={each.address} ansible_user=root ansible_ssh_common_args='{options}'\n" for name, each in members.items()
        ]
        self.inventory = folder / "hosts.ini"
        self.inventory.write_text("".join(lines))

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        bridge = f"{self.prefix}-bridge"
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for at, name in enumerate([*self.names, "here"], 1):
            space = f"{self.prefix}-{name}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", f"port{at}", "netns", bridge)
            run("ip", "-n", bridge, "link", "set", f"port{at}", "master", "bridge", "up")
            run("ip", "-n", space, "address", "add", f"{NETWORK.format(at)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            for end, device in ((space, "eth0"), (bridge, f"port{at}")):
                run("tc", "-n", end, "qdisc", "add", "dev", device, "root", "tbf", "rate", LINK, "burst", "256kb", "latency", "50ms")
            if name != "here":
                serve = [
                    "ip",
                    "netns",
                    "exec",
                    space,
                    shutil.which("sshd", path="/usr/sbin:/sbin") or "sshd",
                    "-D",
                    "-f",
                    str(self.folder / name / "sshd"),
                ]
                self.servers.append(subprocess.Popen(serve, stderr=subprocess.DEVNULL))

    def stop(self) -> None:
        for name in [*self.names, "here", "bridge"]:
            space = f"{self.prefix}-{name}"
            for pid in subprocess.run(("ip", "netns", "pids", space), capture_output=True, text=True, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(("ip", "netns", "delete", space), check=False, capture_output=True)
        for server in self.servers:
            server.wait()

    def push(self, data: Path, hosts: int) -> float:
        """Seconds to the first hosts."""
        began = time.monotonic()
        words = [sys.executable, "-m", "provision", "push", str(self.inventory), str(data), "--limit", ",".join(self.names[:hosts])]
        done = subprocess.run(["ip", "netns", "exec", f"{self.prefix}-here", *words], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        assert "goes on with" not in done.stderr
        wanted = digests(data)
        for name in self.names[:hosts]:
            assert digests(self.folder / name / "provision-data/data") == wanted
            shutil.rmtree(self.folder / name / "provision-data")
        return seconds


@pytest.fixture
def slow_network(tmp_path: Path) -> Iterator[SlowNetwork]:
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc", "ssh-keygen")):
        missing("network namespaces need root, ip and tc")
    network = SlowNetwork(tmp_path, 16)
    try:
        network.start()
        yield network
    finally:
        network.stop()


@pytest.mark.slow
def test_sixteen_hosts_behind_slow_links_take_little_longer_than_one(slow_network: SlowNetwork, tmp_path: Path) -> None:
    data = data_in(tmp_path / "here", MEGABYTES)
    one, all_ = slow_network.push(data, 1), slow_network.push(data, 16)
    print(f"{MEGABYTES} MiB behind {LINK}: to one host {one:.1f} s, to 16 hosts {all_:.1f} s: {all_ / one:.3f}")
    assert one >= MEGABYTES * MEGABYTE * 8 / 1e6 / int(LINK.removesuffix("mbit"))
    assert all_ <= 1.15 * one
