"""A mirror for our own calls of apt: the module's real code with the real apt, against a mirror that the test serves."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from loading import load_ansible_module
from rendered import variables_in

from provision import inventory
from provision.base import aptsources
from provision.base.errors import UsageError
from provision.catalog import OURS
from provision.cli.options import url as address
from provision.commands import planning
from provision.install import installer
from provision.plan.options import Options
from provision.plan.request import Request
from provision.survey.document import load_file

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt is on Debian and Ubuntu")

LOGIN = "reader:p%40ss"
ARCHIVE = "# ours\ndeb [trusted=yes] http://archive.invalid/debian bookworm main\n"
SECURITY = "Types: deb\nURIs: http://archive.invalid/debian-security\nSuites: bookworm-security\nComponents: main\nTrusted: yes\n"
THIRD_PARTY = "deb [trusted=yes] http://127.0.0.2:9/vendor anything main\n"  # nobody answers there


class Failed(Exception):
    """What a module ends with where it cannot go on."""


class Module:
    """Stands in for Ansible around the module's code; commands are run for real."""

    params: Mapping[str, Any] = {}

    def __init__(self, argument_spec: Mapping[str, Any]) -> None:
        assert argument_spec["login"]["no_log"]
        self.commands: list[list[str]] = []

    def run_command(self, argv: list[str], environ_update: Mapping[str, str]) -> tuple[int, str, str]:
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environ_update}, check=False)
        return done.returncode, done.stdout, done.stderr

    def exit_json(self, **result: Any) -> None:
        raise SystemExit(json.dumps(result))

    def fail_json(self, msg: str, **_result: Any) -> None:
        raise Failed(msg)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    import ansible.module_utils

    monkeypatch.setitem(sys.modules, "ansible.module_utils.aptsources", aptsources)
    monkeypatch.setattr(ansible.module_utils, "aptsources", aptsources, raising=False)
    found = load_ansible_module("apt_mirror")
    monkeypatch.setattr(found, "AnsibleModule", Module)
    monkeypatch.setattr(
        found, "SHORT_TIMEOUTS", [*found.SHORT_TIMEOUTS, "-o", "Acquire::http::Proxy::127.0.0.1=DIRECT", "-o", "APT::Sandbox::User=root"]
    )
    return found


class Mirror:
    """A mirror of Debian on loopback with one package, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        for place, suite in (("debian", "bookworm"), ("debian-security", "bookworm-security")):
            self.add(place, suite)

    def add(self, place: str, suite: str) -> None:
        packages = b"Package: from-the-mirror\nVersion: 1.0\nArchitecture: all\nFilename: pool/a.deb\nSize: 1\nSHA256: %s\n\n" % (b"0" * 64)
        arch = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
        listed = f"main/binary-{arch}/Packages"
        path = self.folder / place / "dists" / suite / listed
        path.parent.mkdir(parents=True)
        path.write_bytes(packages)
        sums = f" {hashlib.sha256(packages).hexdigest()} {len(packages)} {listed}"
        release = f"Codename: {suite}\nArchitectures: {arch}\nComponents: main\nDate: Sat, 01 Nov 2025 00:00:00 UTC\nSHA256:\n{sums}\n"
        (self.folder / place / "dists" / suite / "Release").write_text(release)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Callable[..., tuple[Mirror, str]]]:
    """Serves one, which asks for a password where a login is named: (the mirror, its address)."""
    servers = []

    def serve(login: str = "") -> tuple[Mirror, str]:
        made = Mirror(tmp_path / "mirror")

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                made.asked.append(self.path)
                wanted = "Basic " + base64.b64encode(login.replace("%40", "@").encode()).decode()
                if login and self.headers["Authorization"] != wanted:
                    self.send_error(401)
                else:
                    super().do_GET()

            def log_message(self, *_words: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=made.folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return made, f"http://127.0.0.1:{server.server_port}/debian"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def host(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's folder with its lists."""
    (tmp_path / "etc/sources.list.d").mkdir(parents=True)
    (tmp_path / "etc/sources.list").write_text(ARCHIVE)
    (tmp_path / "etc/sources.list.d/security.sources").write_text(SECURITY)
    (tmp_path / "etc/sources.list.d/vendor.list").write_text(THIRD_PARTY)
    (tmp_path / "os-release").write_text('PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n')
    monkeypatch.setattr(module, "LISTS", str(tmp_path / "etc"))
    monkeypatch.setattr(module, "OS_RELEASE", str(tmp_path / "os-release"))
    return tmp_path


def look(module: Any, host: Path, url: str, login: str = "") -> bool:
    """Whether the mirror was asked."""
    Module.params = {"folder": str(host / "apt-mirror"), "url": url, "login": login}
    with pytest.raises(SystemExit) as ended:
        module.main()
    changed: bool = json.loads(str(ended.value))["changed"]
    return changed


def lists(host: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (host / "etc").rglob("*") if path.is_file()}


def offered(host: Path, package: str) -> str:
    environment = {**os.environ, "APT_CONFIG": str(host / "apt-mirror/apt.conf"), "LC_ALL": "C"}
    return subprocess.run(["apt-cache", "madison", package], env=environment, capture_output=True, text=True, check=True).stdout


def test_apt_finds_what_the_mirror_has_and_the_hosts_lists_stay(module: Any, host: Path, mirror: Any) -> None:
    served, url = mirror()
    before = lists(host)
    assert look(module, host, url)
    assert f"{url} bookworm/main" in offered(host, "from-the-mirror")
    assert f"{url}-security bookworm-security/main" in offered(host, "from-the-mirror")
    assert (host / "apt-mirror/sources.list.d/vendor.list").read_text() == THIRD_PARTY  # which does not answer, and need not
    assert lists(host) == before
    assert served.asked


def test_the_mirror_is_asked_again_only_for_other_lists(module: Any, host: Path, mirror: Any) -> None:
    served, url = mirror()
    assert look(module, host, url)
    served.asked.clear()
    assert not look(module, host, url)
    assert served.asked == []
    (host / "etc/sources.list.d/vendor.list").unlink()
    assert look(module, host, url)
    assert served.asked
    assert not (host / "apt-mirror/sources.list.d/vendor.list").exists()


def test_a_password_is_in_no_file_that_others_can_read_and_in_no_message(module: Any, host: Path, mirror: Any) -> None:
    served, url = mirror(LOGIN)
    assert look(module, host, url, LOGIN)
    holding = [path for path in (host / "apt-mirror").rglob("*") if path.is_file() and LOGIN in path.read_text(errors="replace")]
    assert {path.name for path in holding} == {"sources.list", "security.sources"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holding)
    shutil.rmtree(served.folder)
    shutil.rmtree(host / "apt-mirror")
    with pytest.raises(Failed) as refused:
        look(module, host, url, LOGIN)
    assert "p%40ss" not in str(refused.value)
    assert f"the mirror {url} (--apt-mirror) cannot be used" in str(refused.value)


def test_a_mirror_that_does_not_answer_or_lacks_the_release_leaves_nothing_behind(module: Any, host: Path, mirror: Any) -> None:
    served, url = mirror()
    before = lists(host)
    with pytest.raises(Failed, match=r"cannot be used for debian bookworm:\n.*Connection refused"):
        look(module, host, "http://127.0.0.1:9/debian")
    shutil.rmtree(served.folder / "debian-security")
    with pytest.raises(Failed, match=r"/debian-security/dists/bookworm-security/.*404"):
        look(module, host, url)
    assert lists(host) == before
    assert not (host / "apt-mirror").exists()


def test_a_host_whose_lists_do_not_name_its_distribution_is_told_so(module: Any, host: Path, mirror: Any) -> None:
    _served, url = mirror()
    (host / "etc/sources.list").unlink()
    (host / "etc/sources.list.d/security.sources").unlink()
    with pytest.raises(Failed, match=r"no list in .*/etc names the archive of debian bookworm"):
        look(module, host, url)
    assert not (host / "apt-mirror").exists()


@pytest.mark.parametrize(
    "value", ["mirror.example/debian", "ftp://mirror.example", "http://", "http://[x/debian", "http://a b/debian", "http://u@/d"]
)
def test_what_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="expected a URL"):
        address("--apt-mirror", value)


def test_the_playbook_gets_the_login_apart_in_a_file_of_its_own(tmp_path: Path) -> None:
    known = load_file(ROOT / "tests/data/lint-facts.json", OURS)
    hosts = inventory.load(str(ROOT / "tests/data/lint.ini"))
    options = Options(apt_mirror="http://reader:se@cret@mirror.example/debian")
    playbook, *_ = installer.render(planning.make_plan(Request(hosts, options), known), tmp_path, fetch=False)
    given = variables_in(tmp_path / "vars.json")["provision_apt_mirror"]
    assert given == {"url": "http://mirror.example/debian", "login": "reader:se@cret"}
    assert (tmp_path / "vars.json").stat().st_mode & 0o077 == 0
    assert "cret" not in playbook.read_text()
    _install, release = yaml.safe_load(playbook.read_text())
    assert "apt-mirror" in json.dumps(release["tasks"])  # which runs on failed hosts, too
    assert (tmp_path / "module_utils/aptsources.py").exists()
