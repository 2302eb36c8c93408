"""Open MPI built from its real sources on one host and handed to the other; and what goes wrong on the way. Tests run in order.

The tarball is 4.1.4's, as the distribution keeps it: open-mpi.org cannot be reached from everywhere that tests run. A finished build
stays in the tests' cache, so that a second run on the same machine takes it from there; from nothing it takes minutes on two cores.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from hosts import RUN_S, Running, good, marked_processes, report, root, tasks

from provision.base import paths
from provision.catalog import OURS
from provision.sandbox import Sandbox
from provision.sandbox.containers import controller_settings

pytestmark = pytest.mark.slow

VERSION = "4.1.4"
TARBALL_SHA256 = "ddaee7dbdb01eb4fab1fda5b5e03e8bbff026711806c095c1f39bb410f99f263"  # openmpi_4.1.4-3.dsc of Debian 12
# Faster to compile, and without what no test here calls: files, one-sided communication, the larger collectives.
TEST_OPTIONS = ["CFLAGS=-O0", "--disable-io-ompio"]
LEAN = (
    "--torch",
    "none",
)
BUILD_S = 2 * RUN_S  # five minutes of compiling on two free cores; other tests share them

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def cluster(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(2, "debian:12", name="source", slots=1)
    return made


@pytest.fixture(scope="module")
def tarball(own_state, tmp_path_factory) -> Path:
    """The sources, by apt from this machine's own mirror; kept in the tests' cache."""
    path = paths.cache() / f"openmpi-{VERSION}.tar.xz"
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != TARBALL_SHA256:
        work = tmp_path_factory.mktemp("apt")
        mirror = controller_settings.read(os.environ, prefix=Path(sys.prefix)).mirror
        assert mirror is not None, "this machine's apt has no mirror of Debian to take the sources of Open MPI from"
        key = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (work / "sources.list").write_text(f"deb-src [signed-by={key}] {mirror.archive} bookworm main\n")
        (work / "lists/partial").mkdir(parents=True)
        places = {
            "Dir::Etc::SourceList": "sources.list",
            "Dir::Etc::SourceParts": "none",
            "Dir::State::Lists": "lists",
            "Dir::Cache": "cache",
        }
        apt = ["apt-get", "-q", *(word for name, value in places.items() for word in ("-o", f"{name}={work / value}"))]
        for words in (["update"], ["source", "--download-only", f"openmpi={VERSION}-3"]):
            done = subprocess.run([*apt, *words], cwd=work, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(work.glob("openmpi_*.orig.tar.xz")), path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == TARBALL_SHA256
    return path


def command(folder: Path, *words: str, **tarball: object) -> list[str]:
    """The command line with some of the catalogue's facts on Open MPI's tarball replaced."""
    options = [*OURS.openmpi().tarball.options, *TEST_OPTIONS]
    changes = folder / "catalogue.json"
    changes.write_text(json.dumps({"openmpi": {"tarball": {"options": options, **tarball}}}))
    return [sys.executable, str(Path(__file__).with_name("other_catalogue.py")), str(changes), *words]


@pytest.fixture
def provision(tmp_path) -> Command:
    def call(*words: str, **tarball: object) -> subprocess.CompletedProcess[str]:
        line = command(tmp_path, *words, **tarball)
        return subprocess.run(line, input="", capture_output=True, text=True, timeout=BUILD_S, check=False)

    return call


def untouched(cluster: Sandbox) -> list[str]:
    return [root(host, "ls -A /opt; dpkg -l | md5sum; ls /etc/ld.so.conf.d") for host in cluster.hosts]


# --- before the first host is touched -----------------------------------------------------------------------------------------------


class Site(BaseHTTPRequestHandler):
    """Answers 503 below /503, another file below /other, what it was given, and 404 to everything else."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        if self.path in self.files or self.path.startswith("/other/"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.files.get(self.path, b"this is not Open MPI"))
        else:
            self.send_error(503 if self.path.startswith("/503/") else 404)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("place", "reason"), [("404", "HTTP 404"), ("503", "HTTP 503"), ("other", "SHA-256")])
def test_a_tarball_that_cannot_be_had_leaves_every_host_as_it_was(place, reason, cluster, site, provision, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    before = untouched(cluster)
    url = f"{site}/{place}/openmpi-{{version}}.tar.{{ending}}"
    result = provision("up", str(cluster.inventory), *LEAN, "--openmpi", "source", url=url)
    assert result.returncode == 1
    assert reason in result.stderr
    assert f"{site}/{place}/openmpi-4.1.8.tar.gz" in result.stderr
    assert "--openmpi FILE" in result.stderr
    assert "Traceback" not in result.stderr
    assert untouched(cluster) == before
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_version_that_is_known_to_be_bad_is_refused_with_its_reason(cluster, provision, tmp_path):
    before = untouched(cluster)
    (tmp_path / "openmpi-4.1.7.tar.gz").write_bytes(b"")
    result = provision("up", str(cluster.inventory), *LEAN, "--openmpi", str(tmp_path / "openmpi-4.1.7.tar.gz"))
    assert result.returncode == 1
    assert "OpenSHMEM .so version mistake" in result.stdout + result.stderr
    assert "--allow-bad" in result.stdout + result.stderr
    assert untouched(cluster) == before
    allowed = provision("plan", str(cluster.inventory), *LEAN, "--openmpi", str(tmp_path / "openmpi-4.1.7.tar.gz"), "--allow-bad", "--json")
    assert report(good(allowed))["hosts"]["node1"]["openmpi"]["version"] == "4.1.7"


# --- the build ----------------------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_build_leaves_no_process_and_no_half_built_tree(cluster, tarball, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # with an earlier build in it nothing would be built
    words = command(tmp_path, "up", str(cluster.inventory), *LEAN, "--openmpi", str(tarball))
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        run = Running(process)
        run.wait_for_task("node1: from_source: Compile: running")
        process.send_signal(signal.SIGINT)
        ended = run.finish(timeout=90)
    finally:
        process.kill()
    assert ended.returncode == 130
    assert "nothing of this run is left running" in ended.stderr
    assert marked_processes(cluster) == []
    for host in cluster.hosts:
        assert (
            root(host, "cd /opt/provision && ls -d openmpi-source/*.build openmpi-source/*.part openmpi*provision-new 2>/dev/null || true")
            == ""
        )


def test_one_host_builds_both_get_the_same_bits_and_mpi_runs_over_both(cluster, tarball, provision):
    kept = list((paths.cache() / "openmpi").glob(f"openmpi-{VERSION}-debian12-*.tar.gz"))
    # As on a host with an earlier installation: what is built there must find its libraries on a host without one.
    root(cluster.hosts[0], "echo /opt/provision/openmpi/lib > /etc/ld.so.conf.d/earlier.conf")
    result = good(provision("up", str(cluster.inventory), *LEAN, "--openmpi", str(tarball), "--json"))
    root(cluster.hosts[0], "rm /etc/ld.so.conf.d/earlier.conf")
    document = report(result)
    assert {host["state"] for host in document["hosts"]} == {"ready"}
    assert document["smoke"]["size"] == 2
    building = {line.split()[1].rstrip(":") for line in tasks().splitlines() if "from_source: Compile: " in line}
    assert building == (set() if kept else {"node1"})
    sums = {root(host, "cd /opt/provision/openmpi && find . -type f -name '*.so*' | sort | xargs sha256sum") for host in cluster.hosts}
    assert len(sums) == 1
    said = root(cluster.hosts[1], "/opt/provision/openmpi/bin/ompi_info --parsable")
    assert f"ompi:version:full:{VERSION}" in said
    for own in ("mca:hwloc:hwloc201:", "mca:pmix:pmix3x:", "mca:event:libevent2022:"):
        assert own in said
    assert root(cluster.hosts[1], "ls -A /opt/provision | grep -c openmpi-source || true") == "0"


def test_the_linker_and_mpi4py_find_it_and_nothing_of_the_distribution_is_in_it(cluster):
    for host in cluster.hosts:
        assert "=> /opt/provision/openmpi/lib/libmpi.so.40" in root(host, "ldconfig -p")
        asked = "import mpi4py.MPI as m; print(m.Get_library_version())"
        assert f"Open MPI v{VERSION}" in root(host, f"/opt/provision/venv/bin/python -c '{asked}'")
        needs = root(
            host, "ldd /opt/provision/openmpi/lib/libmpi.so.40 /opt/provision/openmpi/bin/mpirun /opt/provision/openmpi/lib/openmpi/*.so"
        )
        found = [line for line in needs.splitlines() if "=>" in line]
        assert found
        assert not [line for line in found if any(name in line for name in ("hwloc", "pmix", "event", "not found"))]


def test_a_second_run_changes_nothing(cluster, tarball, provision):
    again = report(good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke", "--openmpi", str(tarball), "--json")))
    assert [host["changed"] for host in again["hosts"]] == [0, 0]


def test_a_host_that_lost_a_file_gets_the_kept_build_and_nobody_builds(cluster, tarball, provision):
    root(cluster.hosts[1], "rm /opt/provision/openmpi/lib/libmpi.so.40")
    result = good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke", "--openmpi", str(tarball), "--json"))
    assert "from_source: Compile: " not in tasks()
    assert root(cluster.hosts[1], "ls /opt/provision/openmpi/lib/libmpi.so.40")
    changed = {host["host"]: host["changed"] for host in report(result)["hosts"]}
    assert changed["node1"] == 0
    assert changed["node2"] > 0


def test_a_bundle_brings_sources_and_build_to_a_controller_that_has_neither(cluster, tarball, provision, tmp_path, monkeypatch):
    bundle = tmp_path / "hosts.bundle"
    good(provision("bundle", str(cluster.inventory), *LEAN, "--openmpi", str(tarball), "--out", str(bundle)))
    root(cluster.hosts[1], "rm /opt/provision/openmpi/lib/libmpi.so.40")
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke", "--bundle", str(bundle), "--json"))
    assert "from_source: Compile: " not in tasks()
    assert root(cluster.hosts[1], "ls /opt/provision/openmpi/lib/libmpi.so.40")
    assert not list((tmp_path / "cache/openmpi").glob(f"openmpi-{VERSION}-*.tar.gz"))  # who made the bundle decides about its hosts alone


def packed(path: Path, configure: str) -> Path:
    """What passes for sources of Open MPI: a configure script alone."""
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/configure")
        member.size, member.mode = len(configure.encode()), 0o755
        tar.addfile(member, io.BytesIO(configure.encode()))
    return path


def test_sources_that_do_not_build_name_the_error_and_leave_what_was_there(cluster, provision, tmp_path):
    strange = "#!/bin/sh\necho 'checking for a compiler'\necho 'configure: error: this compiler is too strange' >&2\nexit 1\n"
    path = packed(tmp_path / "openmpi-4.1.6.tar.gz", strange)
    result = provision("up", str(cluster.inventory), *LEAN, "--openmpi", str(path), "--json")
    assert result.returncode == 1
    failures = {failure["host"]: failure for failure in report(result)["failures"]}
    for name in ("node1", "node2"):  # one after the other
        assert failures[name]["where"] == "from_source / Stop without a build"
        assert "configure: error: this compiler is too strange" in failures[name]["what"]
    assert "Traceback" not in result.stdout + result.stderr
    for host in cluster.hosts:
        assert VERSION in root(host, "/opt/provision/openmpi/bin/mpirun --version")
        assert root(host, "ls -d /opt/provision/openmpi-source/*.build 2>/dev/null || true") == ""


def test_sources_are_fetched_and_a_host_that_cannot_build_gets_what_another_one_has_built(cluster, provision, site, tmp_path, monkeypatch):
    install = r"mkdir -p $(DESTDIR)/opt/provision/openmpi\n\tuname -n > $(DESTDIR)/opt/provision/openmpi/builder"
    path = packed(tmp_path / "openmpi-4.1.6.tar.gz", f"#!/bin/sh\nprintf 'all:\\ninstall:\\n\\t{install}\\n' > Makefile\n")
    monkeypatch.setitem(Site.files, f"/there/{path.name}", path.read_bytes())
    official = {
        "url": f"{site}/there/openmpi-{{version}}.tar.{{ending}}",
        "sha256": {"4.1.6": {"ending": "gz", "value": hashlib.sha256(path.read_bytes()).hexdigest()}},
    }
    book = tmp_path / "book"
    requirements = ("--openmpi", "source", "--openmpi", "4.1.6")
    good(provision("plan", str(cluster.inventory), *LEAN, *requirements, "--out", str(book), **official))
    path.unlink()
    one, two = cluster.hosts
    words = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(cluster.inventory), "site.yml", "-e", "@vars.json"]
    root(one, "mv /usr/bin/make /usr/bin/make.away")
    try:
        done = subprocess.run([*words, "--tags", "from_source"], cwd=book, capture_output=True, text=True, timeout=RUN_S, check=False)
    finally:
        root(one, "mv /usr/bin/make.away /usr/bin/make")
    assert "make: not found" in done.stdout
    for host in (one, two):
        assert root(host, "cat /opt/provision/openmpi/builder") == root(two, "uname -n"), done.stdout[-3000:]


def test_the_wheel_takes_its_place_again(cluster, provision):
    good(provision("up", str(cluster.inventory), *LEAN, "--openmpi", "wheel"))
    for host in cluster.hosts:
        assert "=> /opt/provision/venv/lib/libmpi.so.40" in root(host, "ldconfig -p")
        assert root(host, "ls -d /opt/provision/openmpi 2>/dev/null || true") == ""
