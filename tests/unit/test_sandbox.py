"""The sandbox without an engine: base images, names, mirrors, the controller's settings, and the files of a host."""

from __future__ import annotations

import configparser
import contextlib
import io
import ssl
import tarfile
from pathlib import Path

import docker.errors
import pytest
import requests.exceptions

from provision import sandbox as sandboxes
from provision.base import aptsources
from provision.base.errors import ProvisionError, UsageError
from provision.cli import main
from provision.containers import container_engine, controller_settings, image_names, ssh_keys
from provision.sandbox import Sandbox, SandboxHost, SudoMode, debootstrap, host_files, lifecycle, names
from provision.sandbox.host_files import Login

# Bases and names


def test_hosts_take_bases_in_turn():
    assert names.base_images(3, ["debian:12", "debian:13"]) == ["debian:12", "debian:13", "debian:12"]
    assert names.base_images(2, None) == ["debian:12", "debian:12"]
    assert names.base_images(2, "ubuntu") == ["ubuntu:latest", "ubuntu:latest"]


@pytest.mark.parametrize("base", ["debian:12", "ghcr.example:5000/a/b_c:1.2", "a/b", "debian@sha256:" + "0" * 64])
def test_names_of_images(base):
    assert image_names.checked(base).startswith(base)


@pytest.mark.parametrize(
    ("base", "hint"), [("debian12", "debian:12"), ("Debian 13", "debian:13"), ("a b", "such as"), ("", "such as"), ("x:", "such as")]
)
def test_invalid_image_names_are_refused_with_a_hint(base, hint):
    with pytest.raises(UsageError) as refused:
        image_names.checked(base)
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(("count", "base"), [(0, None), (-1, None), (1, ["debian:12", "debian:13"])])
def test_invalid_counts(count, base):
    with pytest.raises(UsageError):
        names.base_images(count, base)


@pytest.mark.parametrize(
    ("base", "suite"),
    [
        ("debian:12", "bookworm"),
        ("library/debian:trixie-slim", "trixie"),
        ("debian:11", None),
        ("ubuntu:24.04", None),
        ("me/debian:12", None),
    ],
)
def test_bases_that_debootstrap_can_make(base, suite):
    assert debootstrap.suite_of(base) == suite


@pytest.mark.parametrize("name", ["", "A", "../x", "a/b", "x.", "a" * 41, "a b"])
def test_names_that_would_leave_the_folder_are_refused(name):
    with pytest.raises(UsageError):
        names.check(name)


def test_two_bases_never_share_a_tag():
    tags = {names.image_tag("s", base) for base in ("a/b:1", "a:b-1", "a-b:1", "x" * 80 + ":1", "x" * 80 + ":2")}
    assert len(tags) == 5
    assert all(len(tag) <= 128 for tag in tags)


# What the command line says about sandboxes of other names


def named(name: str, folder: Path) -> Sandbox:
    hosts = [SandboxHost("node1", "172.30.0.2", f"provision-{name}-node1", "debian:12")]
    return Sandbox(name, hosts, folder / "hosts.ini", "trainer", folder / "key", folder / "known_hosts")


def listed(capsys, words, found, code):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "200")
        patched.setattr(sandboxes, "every", lambda: found)
        patched.setattr(sandboxes, "status", lambda _name: None)
        assert main.guarded(lambda: main.app(args=["sandbox", *words], prog_name="provision"), debug=False) == code
    return capsys.readouterr().out


def test_a_sandbox_without_files_here_may_be_somebody_elses(tmp_path, capsys):
    said = listed(capsys, ["ls"], [named("mine", tmp_path / "mine"), named("default", tmp_path / "default")], 0)
    assert f"not in {tmp_path}/mine" in said
    assert "mine: it was made with another PROVISION_HOME, or its files were removed" in said
    assert "if nobody needs it any more: provision sandbox down --name mine\n" in said
    assert "if nobody needs it any more: provision sandbox down\n" in said
    (tmp_path / "mine").mkdir()
    assert "mine: it is still being made, or its making was interrupted" in listed(capsys, ["ls"], [named("mine", tmp_path / "mine")], 0)


def test_the_status_of_no_sandbox_names_the_others(tmp_path, capsys):
    said = listed(capsys, ["status", "--name", "other"], [named("mine", tmp_path)], 1)
    assert said == "no sandbox 'other' is up (others: mine); start it: provision sandbox up --name other\n"
    assert listed(capsys, ["status"], [], 1) == "no sandbox 'default' is up; start it: provision sandbox up\n"


def test_an_inventory_names_the_command_that_removes_its_sandbox(tmp_path):
    assert "`provision sandbox down --name mine` removes them." in named("mine", tmp_path).inventory_text(2)
    assert "`provision sandbox down` removes them." in named("default", tmp_path).inventory_text(2)


@pytest.mark.parametrize("interrupted", [False, True])
def test_errors_name_the_sandbox_that_they_are_about(tmp_path, monkeypatch, interrupted):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    if interrupted:
        names.folder("mine").mkdir(parents=True)
    monkeypatch.setattr(lifecycle, "_engine", lambda _step: contextlib.nullcontext())
    monkeypatch.setattr(lifecycle, "_containers", lambda _client, _name: ["a container"])
    monkeypatch.setattr(lifecycle, "_sandbox", lambda name, _containers: named(name, names.folder(name)))
    with pytest.raises(ProvisionError) as refused:
        lifecycle.status("mine")
    assert (refused.value.hint or "").endswith("remove it: `provision sandbox down --name mine`.")


# The controller's settings


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A pretended controller's file system."""
    files = {
        "etc/os-release": 'ID=debian\nVERSION_CODENAME="bookworm"\n',
        "etc/apt/sources.list.d/debian.sources": "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\n",
        "etc/pip.conf": "[global]\nfind-links = {wheels}\nextra-index-url = file://{index} https://more.example/simple\n"
        "[install]\nretries = 7\n",
        "index/simple/a/index.html": '<a href="../../files/a-1.whl#sha256=0">a</a>',
        "index/files/a-1.whl": "",
        "wheels/b-1.whl": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("{wheels}", str(tmp_path / "wheels")).replace("{index}", str(tmp_path / "index/simple")))
    return tmp_path


def test_pip_settings_in_pips_own_order(machine):
    found = controller_settings.read(
        {"PIP_DEFAULT_TIMEOUT": "99", "PIP_INDEX_URL": "https://index.example/simple", "PIP_NO_INPUT": "1"}, root=machine, apt_dump=""
    )
    assert found.pip == {
        "find-links": (str(machine / "wheels"),),
        "extra-index-url": (f"file://{machine}/index/simple", "https://more.example/simple"),
        "retries": ("7",),
        "timeout": ("99",),
        "index-url": ("https://index.example/simple",),
    }


def test_a_local_index_is_mounted_with_the_files_that_it_links_to(machine):
    assert controller_settings.read({}, root=machine, apt_dump="").mounts == (machine / "index", machine / "wheels")


def test_variables_override_the_empty_configuration(machine):
    found = controller_settings.read({"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "/nowhere"}, root=machine, apt_dump="")
    assert found.pip == {"find-links": ("/nowhere",)}
    assert found.mounts == ()


def test_warning_about_a_loopback_proxy_without_its_password(machine):
    found = controller_settings.read({"HTTPS_PROXY": "http://me:secret@127.0.0.1:3128", "no_proxy": "localhost"}, root=machine, apt_dump="")
    assert found.proxies == {"https_proxy": "http://me:secret@127.0.0.1:3128", "no_proxy": "localhost"}
    assert "127.0.0.1:3128 is on this machine's loopback" in found.warnings[0]
    assert "secret" not in found.warnings[0]


def test_apt_options_that_reach_a_mirror():
    dump = """\
Acquire::http::Proxy "http://p:3128";
Acquire::http::Proxy::host.example "DIRECT";
Acquire::Retries "3";
APT::Architecture "amd64";
Acquire::http "";
"""
    assert controller_settings.parse_apt_dump(dump) == {
        "Acquire::http::Proxy": "http://p:3128",
        "Acquire::http::Proxy::host.example": "DIRECT",
        "Acquire::Retries": "3",
    }


def pem(data: bytes) -> str:
    return ssl.DER_cert_to_PEM_cert(data)


def test_only_certificates_beyond_the_distributions_are_copied(tmp_path):
    shipped, company, private = pem(b"0shipped"), pem(b"0company"), pem(b"0private")
    for name, text in {
        "usr/share/ca-certificates/mozilla/A.crt": shipped,
        "usr/local/share/ca-certificates/company.crt": company,
        "etc/ssl/certs/ca-certificates.crt": shipped + company,
        "bundle.pem": f"# remark\n{shipped}\n{private}{company}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = controller_settings.read(
        {"REQUESTS_CA_BUNDLE": str(tmp_path / "bundle.pem"), "SSL_CERT_FILE": "/gone"}, root=tmp_path, apt_dump=""
    )
    assert found.own_certificates == (company, private)
    assert controller_settings.split_certificates(found.bundle) == [shipped, company, private]


def test_a_damaged_certificate_is_skipped():
    assert controller_settings.split_certificates("-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n") == []


# The hosts' files

FULL = controller_settings.Settings(
    own_certificates=(pem(b"0company"),),
    bundle=pem(b"0company"),
    proxies={"http_proxy": "http://me:secret@proxy.example:3128", "no_proxy": "internal.example"},
    pip={"index-url": ("https://index.example/simple",), "find-links": ("/a", "/b")},
    apt={"Acquire::Retries": "3"},
    distribution="debian",
    mirror=aptsources.Mirror("http://mirror.example/debian", ("main",)),
)


def test_environment_has_proxies_in_both_cases_and_the_trust_store():
    lines = host_files.environment(FULL, ["node1"]).splitlines()
    assert 'HTTP_PROXY="http://me:secret@proxy.example:3128"' in lines
    assert 'no_proxy="internal.example,localhost,127.0.0.1,node1"' in lines
    assert 'REQUESTS_CA_BUNDLE="/etc/ssl/certs/ca-certificates.crt"' in lines
    assert host_files.environment(controller_settings.Settings()) == ""


def test_pip_conf():
    parser = configparser.RawConfigParser()
    parser.read_string(host_files.pip_conf(FULL))
    assert parser["global"]["cert"] == host_files.HOST_BUNDLE
    assert parser["global"]["find-links"].split() == ["/a", "/b"]


def test_sources_go_to_hosts_of_the_same_distribution_only():
    assert "trixie" in host_files.sources_for(FULL, {"ID": "debian", "VERSION_CODENAME": "trixie"})
    assert host_files.sources_for(FULL, {"ID": "ubuntu", "VERSION_CODENAME": "noble"}) == ""
    assert host_files.sources_for(FULL, {}) == ""


def test_sudo_modes():
    def files(sudo: SudoMode) -> dict[str, str]:
        return host_files.host_files(FULL, {}, Login("ssh-ed25519 AAAA", sudo, "pw" if sudo == "password" else None), ["node1"])

    assert "NOPASSWD" in files("nopasswd")["sudoers"]
    assert "NOPASSWD" not in files("password")["sudoers"]
    assert files("password").get("password") == "trainer:pw\n"
    assert {"sudoers", "password"}.isdisjoint(files("none"))


def test_archive_belongs_to_root():
    with tarfile.open(fileobj=io.BytesIO(host_files.archive({"a": "1", "sub/b": "2"}))) as tar:
        folder = host_files.FOLDER
        assert {member.name: member.mode for member in tar} == {folder: 0o700, f"{folder}/a": 0o600, f"{folder}/sub/b": 0o600}
        assert {member.uid for member in tar} == {0}


# Inventory and keys


def sandbox_at(folder: Path) -> Sandbox:
    hosts = [SandboxHost("node1", "192.0.2.1", "c1", "debian:12"), SandboxHost("node2", "192.0.2.2", "c2", "debian:13")]
    return Sandbox("default", hosts, folder / "hosts.ini", "trainer", folder / "key", folder / "known_hosts", folder / "become_password")


def test_inventory_text():
    text = sandbox_at(Path("/s")).inventory_text(slots=3)
    assert "node2  ansible_host=192.0.2.2  slots=3" in text
    assert "StrictHostKeyChecking=yes" in text
    assert "# trainer's sudo asks for the password in /s/become_password" in text


def test_known_hosts_name_both_name_and_address():
    text = ssh_keys.known_hosts({("node1", "192.0.2.1"): "ssh-ed25519 AAAA root@node1\nssh-rsa BBBB\n"})
    assert text == "node1,192.0.2.1 ssh-ed25519 AAAA\nnode1,192.0.2.1 ssh-rsa BBBB\n"


# The engine's failures, in words


def test_no_permission_for_the_socket():
    what, hint = container_engine.unavailable(
        docker.errors.DockerException(requests.exceptions.ConnectionError(PermissionError(13, "denied"))), {}
    )
    assert "may not use" in what
    assert "usermod -aG docker" in hint


def test_engine_not_installed_and_not_running_differ(monkeypatch):
    monkeypatch.setattr(container_engine.shutil, "which", lambda _name: "/usr/sbin/dockerd")
    what, hint = container_engine.unavailable(docker.errors.DockerException("refused"), {})
    assert "does not run" in what
    assert "Start it" in hint
    monkeypatch.setattr(container_engine.shutil, "which", lambda _name: None)
    monkeypatch.setattr(container_engine.Path, "exists", lambda _path: False)
    what, hint = container_engine.unavailable(docker.errors.DockerException("no such file"), {})
    assert "is installed" in what
    assert "apt-get install" in hint


def test_remote_engine():
    what, hint = container_engine.unavailable(docker.errors.DockerException("x"), {"DOCKER_HOST": "tcp://192.0.2.9:2375"})
    assert "tcp://192.0.2.9:2375" in what
    assert "DOCKER_HOST" in hint


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (OSError(28, "No space left on device"), "disk is full"),
        (docker.errors.APIError("x", explanation="write /var/lib: no space left on device"), "disk is full"),
        (
            docker.errors.APIError("x", explanation="could not find an available, non-overlapping IPv4 address pool among the defaults"),
            "addresses",
        ),
        (requests.exceptions.ConnectionError("gone"), "stopped answering"),
        (PermissionError(13, "Permission denied", "/s/key"), "/s/key"),
        (docker.errors.APIError("x", explanation="odd"), "odd"),
    ],
)
def test_failures_of_the_engine(failure, word):
    told = container_engine.explain(failure, "starting node1")
    assert word in told.what
    assert told.where == "starting node1"
