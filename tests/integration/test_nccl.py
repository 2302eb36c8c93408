"""NCCL installed for real on a host, by apt from a signed repository that the test serves, from a local repository package, as a wheel, and
built from sources.

The host has a simulated A100, with a driver for CUDA 12.4. Packages and sources are stand-ins, too (see nccl_packages.py); apt, its holds,
the signature, the dynamic linker, make, the compiler and the wheel are real. NCCL's own sources take too long for a test:
benchmarks/nccl_from_source.py builds them. Tests run in order on one host.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import hosts
import nccl_packages
import pytest
from hosts import RUN_S, good, remove_default_route, report, root, tasks

from provision.base import paths
from provision.sandbox import Sandbox, names
from provision.sandbox.gpus.model import Gpus
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate

pytestmark = pytest.mark.slow

CHOSEN = "2.21.5-1+cuda12.4"
OLDER = "2.20.5-1+cuda12.4"
HIGHER_CUDA = "2.21.5-1+cuda13.1"
OF_THE_DISTRIBUTION = "2.22.3-1-1"
REQUIREMENTS = ("--nccl", "2.21.5", "--nccl", "repository")

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def host(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(1, "debian:12", name="nccl", slots=1)
    simulate(made.name, Simulation(Gpus.requested("a100:1", driver="550.54.15")), say=lambda _line: None)
    return made


@pytest.fixture(scope="module")
def before(host) -> set[str]:
    """What the host was before anything ran."""
    return set(hosts.state(host.hosts[0]))


class Nvidia:
    """What stands in for NVIDIA's site: the repository's folder, its key, and its address."""

    def __init__(self, folder: Path, address: str) -> None:
        self.work = folder
        self.repository = folder / "site/debian12/x86_64"
        self.repository.mkdir(parents=True)
        self.key = nccl_packages.Key(folder / "gpg")
        for version in (CHOSEN, OLDER, HIGHER_CUDA):
            nccl_packages.nccl(self.repository, folder / "trees", version)
        nccl_packages.index(self.repository, self.key)
        self.keyring = nccl_packages.keyring_package(self.repository, folder, self.key)
        self.address = address

    def catalogue(self, **changes: str) -> Path:
        """The catalogue's facts that differ here; ``sha256`` and ``base`` may be given other values."""
        digest = hashlib.sha256(self.keyring.read_bytes()).hexdigest()
        place = {
            "base": changes.get("base", self.address + "/{system}/{arch}"),
            "apt": {"sha256": {"debian12": {"x86_64": changes.get("sha256", digest)}}},
        }
        path = self.work / "catalogue.json"
        path.write_text(json.dumps({"cuda_repositories": place}))
        return path


@pytest.fixture(scope="module")
def nvidia(host, tmp_path_factory) -> Iterator[Nvidia]:
    work = tmp_path_factory.mktemp("nvidia")
    network = docker.from_env().networks.get(names.network(host.name))
    gateway = network.attrs["IPAM"]["Config"][0]["Gateway"]
    (work / "site").mkdir()
    with nccl_packages.served(work / "site", gateway) as address:
        made = Nvidia(work, address)
        yield made
        made.key.close()


@pytest.fixture(scope="module")
def distribution(host, nvidia) -> None:
    """The host's distribution has an NCCL of its own, without a CUDA in its name, that sorts above NVIDIA's."""
    folder = nvidia.work / "site/distribution"
    folder.mkdir()
    nccl_packages.nccl(folder, nvidia.work / "trees", OF_THE_DISTRIBUTION)
    nccl_packages.index(folder, nvidia.key)
    line = f"deb [trusted=yes] {nvidia.address}/distribution/ /"
    root(host.hosts[0], f"echo '{line}' > /etc/apt/sources.list.d/distribution.list && apt-get -q update")


@pytest.fixture
def provision(nvidia, distribution) -> Command:
    """The command line with NVIDIA's site replaced."""

    def call(*words: str, catalogue: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(Path(__file__).with_name("other_catalogue.py")), str(catalogue or nvidia.catalogue()), *words]
        return subprocess.run(command, input="", capture_output=True, text=True, timeout=RUN_S, check=False)

    return call


@pytest.fixture
def book(host, provision, tmp_path) -> Command:
    """The playbook of a plan, to be run by hand: ``book(*requirements)`` returns what runs NCCL's part of it."""

    def render(*requirements: str) -> Command:
        good(provision("plan", str(host.inventory), "--torch", "none", *requirements, "--out", str(tmp_path / "book")))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(host.inventory), "site.yml", "-e", "@vars.json"]
        command += ["--tags", "nccl,linker"]
        return lambda: subprocess.run(command, cwd=tmp_path / "book", capture_output=True, text=True, timeout=RUN_S, check=False)

    return render


@pytest.fixture
def play(book) -> Command:
    """Plan and run in one."""
    return lambda *requirements: book(*requirements)()


def state(host: Sandbox) -> dict[str, tuple[str, str]]:
    """Package → (version, wanted state) as dpkg has it."""
    said = root(host.hosts[0], "dpkg-query -W -f '${Package} ${Version} ${db:Status-Want}\\n' libnccl2 libnccl-dev")
    return {name: (version, want) for name, version, want in (line.split() for line in said.splitlines())}


def clean(host: Sandbox) -> None:
    """Take every NCCL package and every repository of it off the host."""
    listed = "dpkg-query -W -f '${db:Status-Status} ${Package}\\n' 'libnccl*' 'nccl-local-repo-*' 2>/dev/null | sed -n 's/^installed //p'"
    root(host.hosts[0], f"for name in $({listed}); do dpkg --purge --force-depends --force-hold $name; done")
    root(host.hosts[0], "rm -f /etc/apt/sources.list.d/cuda-* && apt-get -q update")


HELD = {"libnccl2": (CHOSEN, "hold"), "libnccl-dev": (CHOSEN, "hold")}


def put(host: Sandbox, version: str) -> None:
    """Install and hold another version, as somebody does by hand."""
    both = f"libnccl2={version} libnccl-dev={version}"
    options = "-q -y --allow-downgrades --allow-change-held-packages --no-install-recommends"
    root(host.hosts[0], f"apt-get -q update && apt-get {options} install {both} && apt-mark hold libnccl2 libnccl-dev")
    assert state(host) == {"libnccl2": (version, "hold"), "libnccl-dev": (version, "hold")}


# --- what must not happen to a bare host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "reason"), [({"base": "{address}/no/{{system}}/{{arch}}"}, "404"), ({"sha256": "0" * 64}, "SHA-256")])
def test_a_key_that_cannot_be_had_or_is_another_one_stops_the_run_before_the_host_is_touched(
    wrong, reason, host, before, nvidia, provision, tmp_path, monkeypatch
):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    changes = {name: value.format(address=nvidia.address) for name, value in wrong.items()}
    bare = root(host.hosts[0], "ls -R /opt /etc/apt /usr/share/keyrings; dpkg -l")
    result = provision("up", str(host.inventory), "--torch", "none", *REQUIREMENTS, catalogue=nvidia.catalogue(**changes))
    assert result.returncode == 1
    assert reason in result.stderr
    assert "the key of the repository" in result.stderr
    assert "Traceback" not in result.stderr
    assert root(host.hosts[0], "ls -R /opt /etc/apt /usr/share/keyrings; dpkg -l") == bare


# --- NVIDIA's repository ------------------------------------------------------------------------------------------------------------


def test_the_whole_job_installs_the_exact_build_although_others_sort_higher_and_holds_it(host, provision):
    root(host.hosts[0], f"apt-get -q -y install --no-install-recommends libnccl2={OF_THE_DISTRIBUTION}")  # its owner's
    refused = provision("up", str(host.inventory), "--torch", "none", *REQUIREMENTS)
    assert refused.returncode == 1
    assert f"libnccl2 {OF_THE_DISTRIBUTION} is installed there, which is newer; --allow-downgrade" in " ".join(refused.stdout.split())
    assert root(host.hosts[0], "dpkg-query -W -f '${Version} ${db:Status-Want}' libnccl2") == f"{OF_THE_DISTRIBUTION} install"
    document = report(good(provision("up", str(host.inventory), "--torch", "none", *REQUIREMENTS, "--allow-downgrade", "--json")))
    assert document["ok"]
    assert document["hosts"][0]["nccl"] == "2.21.5"
    assert state(host) == HELD
    offered = root(host.hosts[0], "apt-cache madison libnccl2")
    assert all(version in offered for version in (CHOSEN, HIGHER_CUDA, OF_THE_DISTRIBUTION))
    upgrade = root(host.hosts[0], "apt-get -q -s dist-upgrade")
    assert "Inst libnccl" not in upgrade
    record = json.loads(root(host.hosts[0], "cat /opt/provision/record.json"))
    assert {"libnccl2", "libnccl-dev"} & {name.partition(":")[0] for name in record["packages"]["added"]} == {"libnccl-dev"}
    assert record["replaced"] == {"libnccl2": OF_THE_DISTRIBUTION}
    assert record["held"]


def test_the_repository_is_believed_by_its_own_key_alone(host, nvidia):
    text = root(host.hosts[0], "cat /etc/apt/sources.list.d/cuda-debian12-x86_64.list")
    assert text == f"deb [signed-by={nccl_packages.KEYRING}] {nvidia.address}/debian12/x86_64/ /"
    assert root(host.hosts[0], "ls -A /etc/apt/trusted.gpg.d /etc/apt/trusted.gpg 2>/dev/null | grep -ci nccl || true") == "0"
    assert root(host.hosts[0], f"stat -c '%a %U' {nccl_packages.KEYRING}") == "644 root"


def test_a_second_run_changes_nothing_and_a_dry_run_says_so(host, provision):
    for words in ((), ("--check",)):
        document = report(good(provision("up", str(host.inventory), "--torch", "none", "--no-smoke", *REQUIREMENTS, "--json", *words)))
        assert [entry["changed"] for entry in document["hosts"]] == [0]
    assert state(host) == HELD


@pytest.mark.parametrize("version", [HIGHER_CUDA, OLDER, OF_THE_DISTRIBUTION])
def test_a_held_wrong_version_is_replaced_whether_it_is_older_or_newer(version, host, play):
    put(host, version)
    done = play(*REQUIREMENTS, "--allow-downgrade")
    assert done.returncode == 0, done.stdout[-3000:]
    assert state(host) == HELD


def test_with_a_mirror_of_the_distribution_nvidias_repository_is_still_where_it_was(host, play):
    put(host, OLDER)
    mirror = root(host.hosts[0], "awk '$1 == \"deb\" {print $2; exit}' /etc/apt/sources.list")
    root(host.hosts[0], "cp -p /etc/apt/sources.list /var/tmp && sed -i 's,//[^/]*,//archive.invalid,' /etc/apt/sources.list")
    done = play(*REQUIREMENTS, "--apt-mirror", mirror)
    root(host.hosts[0], "mv /var/tmp/sources.list /etc/apt")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Update the mirror's index" in done.stdout
    assert state(host) == HELD


def test_a_version_that_went_away_since_the_plan_is_one_clear_error_and_what_was_held_stays(host, nvidia, book, tmp_path):
    put(host, OLDER)
    run = book(*REQUIREMENTS)
    nccl_packages.withdraw(nvidia.repository, [CHOSEN], tmp_path / "away")
    nccl_packages.index(nvidia.repository, nvidia.key)
    try:
        root(host.hosts[0], "apt-get -q update")
        done = run()
    finally:
        for deb in (tmp_path / "away").iterdir():
            deb.rename(nvidia.repository / deb.name)
        nccl_packages.index(nvidia.repository, nvidia.key)
    assert done.returncode != 0
    assert f"no package index of this host offers libnccl2 {CHOSEN}; it has" in done.stdout
    assert state(host) == {"libnccl2": (OLDER, "hold"), "libnccl-dev": (OLDER, "hold")}


def test_a_repository_whose_signature_is_wrong_is_not_believed(host, nvidia, play):
    put(host, OLDER)
    root(host.hosts[0], "rm -rf /var/lib/apt/lists/*debian12*")
    stranger = nccl_packages.Key(nvidia.work / "stranger")
    nccl_packages.index(nvidia.repository, stranger)
    try:
        done = play(*REQUIREMENTS)
    finally:
        stranger.close()
        nccl_packages.index(nvidia.repository, nvidia.key)
    assert done.returncode != 0
    assert "NO_PUBKEY" in done.stdout or "not signed" in done.stdout
    assert state(host)["libnccl2"] == (OLDER, "hold")


# --- the wheel ----------------------------------------------------------------------------------------------------------------------


def test_the_wheel_lies_in_the_prefix_the_linker_finds_it_and_the_repository_goes(host, play):
    repository = f"/etc/apt/sources.list.d/cuda-debian12-x86_64.list {nccl_packages.KEYRING}"
    root(host.hosts[0], f"ls {repository}")
    root(host.hosts[0], f"cp -L /{nccl_packages.LIBRARY}/libnccl.so.2 /usr/local/lib && ldconfig")  # by hand, of another version
    done = play("--nccl", "2.21.5", "--nccl", "wheel")
    assert done.returncode == 0, done.stdout[-3000:]
    assert root(host.hosts[0], f"ls {repository} 2>/dev/null || true") == ""
    found = root(host.hosts[0], "ldconfig -p | grep libnccl.so.2")
    assert "=> /opt/provision/nccl/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2" in found.splitlines()[0]
    assert "=> /usr/local/lib/libnccl.so.2" in found
    asked = 'import ctypes; n = ctypes.c_int(); ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(n)); print(n.value)'
    assert root(host.hosts[0], f"python3 -c '{asked}'; rm /usr/local/lib/libnccl.so.2; ldconfig") == "22105"


def test_a_library_of_somebody_elses_that_comes_first_is_noticed(host, play):
    root(
        host.hosts[0],
        "mkdir -p /opt/other && cp -L /opt/provision/nccl/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2 /opt/other/",
    )
    root(host.hosts[0], "sed -i 's/NCCL version 2.21.5+cuda/NCCL version 9.99.9+cuda/' /opt/other/libnccl.so.2")
    root(host.hosts[0], "echo /opt/other > /etc/ld.so.conf.d/00-other.conf && ldconfig")
    done = play("--nccl", "2.21.5", "--nccl", "wheel")
    root(host.hosts[0], "rm -r /opt/other /etc/ld.so.conf.d/00-other.conf && ldconfig")
    assert done.returncode != 0
    assert "from /opt/other/libnccl.so.2" in done.stdout
    assert "see /etc/ld.so.conf.d" in done.stdout


def test_a_repository_that_the_host_knows_already_is_used_and_no_key_is_fetched(host, nvidia, play, tmp_path):
    (nvidia.work / "site/mirror").symlink_to(nvidia.repository)
    line = f"deb [trusted=yes] {nvidia.address}/mirror/ /"
    root(host.hosts[0], f"echo '{line}' > /etc/apt/sources.list.d/cuda-mirror.list && apt-get -q update")
    done = play(*REQUIREMENTS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert state(host) == HELD
    assert json.loads((tmp_path / "book/vars.json").read_text())["provision_repository_keys"] == {}
    assert root(host.hosts[0], "ls /etc/apt/sources.list.d/cuda-*") == "/etc/apt/sources.list.d/cuda-mirror.list"


# --- a local repository package -----------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_local_repository_is_refused(host, nvidia, play, tmp_path):
    clean(host)
    file = tmp_path / "nccl-local-repo-debian12-2.21.5-cuda12.4_1.0-1_amd64.deb"
    file.write_bytes(b"an error page")
    done = play("--nccl", str(file))
    assert done.returncode != 0
    assert "could not install" in done.stdout
    assert root(host.hosts[0], "dpkg-query -W -f '${Package}\\n' 'nccl-local-repo-*' 2>/dev/null | wc -l") in ("0", "1")
    assert root(host.hosts[0], "dpkg --audit") == ""


@pytest.mark.parametrize("signed_by", [True, False], ids=["names its key", "expects apt-key"])
def test_a_local_repository_package_is_installed_its_key_put_in_place_and_nccl_taken_from_it(signed_by, host, nvidia, play, tmp_path):
    clean(host)
    file = nccl_packages.local_repository(tmp_path, tmp_path / "work", nvidia.key, "debian12", CHOSEN, signed_by=signed_by)
    requirements = ("--nccl", str(file))
    done = play(*requirements)
    assert done.returncode == 0, done.stdout[-3000:]
    assert state(host) == HELD
    assert "file:/var/nccl-local-repo-debian12-2.21.5-cuda12.4" in root(host.hosts[0], "apt-cache policy libnccl2")
    assert "trusted=yes" not in root(host.hosts[0], "cat /etc/apt/sources.list.d/nccl-local-*.list")
    assert root(host.hosts[0], "ls /opt/provision/repositories") in ("", "cuda-debian12-x86_64-keyring.deb")
    again = play(*requirements)
    assert "changed=0" in again.stdout, again.stdout[-3000:]


# --- from sources -------------------------------------------------------------------------------------------------------------------

NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'"


@pytest.fixture(scope="module")
def tarball(host, tmp_path_factory) -> Path:
    """Sources whose build is not kept, and a host that seems to have what compiles for CUDA 12.4."""
    for kept in (paths.cache() / "nccl").glob("nccl-2.22.3-debian12-*"):
        kept.unlink()
    folder = "/usr/local/cuda/bin"
    root(host.hosts[0], f"mkdir -p {folder} && cat > {folder}/nvcc <<'EOF'\n{NVCC}\nEOF\nchmod 755 {folder}/nvcc")
    return nccl_packages.sources(tmp_path_factory.mktemp("sources") / "mine.tar.gz", "2.22.3")


def linked(host: Sandbox) -> str:
    """The NCCL that a program gets: its file, and what it says of itself."""
    asked = (
        'import ctypes; n = ctypes.c_int(); ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(n)); '
        'print(n.value, *{line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line})'
    )
    return root(host.hosts[0], f"python3 -c '{asked}'")


def test_nccl_is_built_from_the_sources_that_were_given_and_takes_the_wheels_place(host, provision, tarball):
    words = ("--torch", "none", "--no-smoke", "--nccl", str(tarball), "--json")
    result = good(provision("up", str(host.inventory), *words))
    assert report(result)["hosts"][0]["nccl"] == "2.22.3"
    assert "node1: from_source: Compile: " in tasks()
    assert linked(host) == "22203 /opt/provision/nccl-built/lib/libnccl.so.2.22.3"
    built = root(host.hosts[0], "strings -a /opt/provision/nccl-built/lib/libnccl.so.2.22.3")
    assert "NCCL version 2.22.3+cuda12.4" in built
    assert "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_80,code=compute_80" in built
    assert root(host.hosts[0], "ls /opt/provision/nccl-built") == "include\nlib"
    assert root(host.hosts[0], "ls -d /opt/provision/nccl /opt/provision/nccl-source 2>/dev/null || true") == ""
    again = good(provision("up", str(host.inventory), *words))
    assert "up to date; nothing to do" in again.stderr


def test_a_file_of_the_build_that_is_gone_comes_back_and_nobody_builds(host, provision, tarball):
    root(host.hosts[0], "rm /opt/provision/nccl-built/lib/libnccl.so.2")
    result = good(provision("up", str(host.inventory), "--torch", "none", "--no-smoke", "--nccl", str(tarball), "--json"))
    assert "/opt/provision/nccl-built/lib/libnccl.so.2 is gone" in result.stderr
    assert "from_source: Compile: " not in tasks()
    assert linked(host) == "22203 /opt/provision/nccl-built/lib/libnccl.so.2.22.3"


def test_the_wheel_takes_the_place_of_what_was_built(host, play):
    done = play("--nccl", "2.21.5", "--nccl", "wheel")
    assert done.returncode == 0, done.stdout[-3000:]
    assert linked(host).startswith("22105 /opt/provision/nccl/lib/")
    assert root(host.hosts[0], "ls -d /opt/provision/nccl-built 2>/dev/null || true") == ""


# --- a closed network -----------------------------------------------------------------------------------------------------------------


def test_a_bundle_brings_the_packages_to_a_host_that_reaches_no_repository(host, provision, tmp_path):
    """The host's own repository in a folder, of the local repository package, is nothing to the controller."""
    root(host.hosts[0], "dpkg --purge --force-hold libnccl2 libnccl-dev && rm -rf /opt/provision/nccl")
    assert "file:///var/nccl-local-repo-" in root(host.hosts[0], "cat /etc/apt/sources.list.d/nccl-local-*.list")
    bundle = tmp_path / "hosts.bundle"
    words = ("--torch", "none", *REQUIREMENTS)
    good(provision("bundle", str(host.inventory), *words, "--out", str(bundle)))
    remove_default_route(host.hosts[0])
    root(host.hosts[0], "rm -f /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/90provision-sandbox")
    root(host.hosts[0], "rm -rf /var/lib/apt/lists && apt-get -q update")
    refused = provision("up", str(host.inventory), "--bundle", str(bundle), "--torch", "none", "--nccl", "wheel")
    assert refused.returncode == 2
    assert "the bundle does not hold nvidia-nccl-cu12==" in refused.stderr
    document = report(good(provision("up", str(host.inventory), "--bundle", str(bundle), *words, "--no-smoke", "--json")))
    assert document["hosts"][0]["state"] == "installed"
    assert state(host) == HELD
    assert root(host.hosts[0], "ls -A /etc/apt/sources.list.d") == ""
    again = report(good(provision("up", str(host.inventory), "--bundle", str(bundle), *words, "--no-smoke", "--full", "--json")))
    assert [entry["changed"] for entry in again["hosts"]] == [0]


# --- and off again --------------------------------------------------------------------------------------------------------------------

#: What tests before have changed on the host by hand.
TAKEN = ("/etc/apt/sources.list", "/etc/apt/apt.conf.d/90provision-sandbox")
PUT = ("/usr/local/cuda", "/usr/local/cuda/bin", "/usr/local/cuda/bin/nvcc")


def test_held_packages_the_repository_its_key_and_the_local_one_go_and_nothing_else(host, before, play, provision):
    done = play(*REQUIREMENTS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert state(host) == HELD
    there = {line.split()[0] for line in hosts.state(host.hosts[0])}
    assert {"/etc/apt/sources.list.d/cuda-debian12-x86_64.list", "/opt/provision"} <= there
    root(host.hosts[0], f"ls {nccl_packages.KEYRING} && dpkg-query -W 'nccl-local-repo-*'")
    removed = report(good(provision("remove", str(host.inventory), "--yes", "--json")))
    assert [(entry["state"], entry["left"]) for entry in removed["hosts"]] == [("removed", [])]
    changed = before ^ set(hosts.state(host.hosts[0]))
    assert sorted(line for line in changed if not {*TAKEN, *PUT} & set(line.split())) == []
    assert root(host.hosts[0], f"ls {nccl_packages.KEYRING} /usr/share/keyrings/nccl-local-* 2>/dev/null || true") == ""
