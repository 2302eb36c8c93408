"""The sandbox without an engine: base images, names, mirrors, the controller's settings, and the files of a host."""

from __future__ import annotations

import configparser
import contextlib
import io
import ssl
import tarfile
from collections.abc import Callable
from pathlib import Path

import docker.errors
import pytest
import requests.exceptions

from provision import sandbox as sandboxes
from provision.base import aptsources
from provision.base.errors import ProvisionError, UsageError
from provision.cli import main
from provision.sandbox import Sandbox, SandboxHost, SudoMode, debootstrap, host_files, lifecycle, names, namespaces
from provision.sandbox.containers import container_engine, controller_settings, image_names, ssh_keys
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
    return Sandbox(name, hosts, folder)


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
    assert "if it is no longer needed: provision sandbox down --name mine\n" in said
    assert "if it is no longer needed: provision sandbox down\n" in said
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
    monkeypatch.setattr(lifecycle, "_engine_of", lambda _name: "docker")
    monkeypatch.setattr(lifecycle, "_engine", lambda _step, _kind: contextlib.nullcontext(Recorded(["node1"])))
    with pytest.raises(ProvisionError) as refused:
        lifecycle.status("mine")
    assert (refused.value.hint or "").endswith("remove it: `provision sandbox down --name mine`.")


# The engine: a container engine, or namespaces


class Recorded:
    """An engine whose hosts exist, and which notes what it is asked to do."""

    name = "namespaces"

    def __init__(self, hosts: list[str]) -> None:
        self.found = [SandboxHost(host, "198.18.0.2", f"provision-mine-{host}", "debian:12", "nopasswd") for host in hosts]
        self.asked: list[str] = []

    def hosts(self, _sandbox: str) -> list[SandboxHost]:
        return self.found

    def has(self, _sandbox: str) -> bool:
        return bool(self.found)

    def create_network(self, _sandbox: str, hosts: list[str]) -> None:
        self.asked.append(f"network of {len(hosts)}")
        raise ProvisionError("no network")

    def remove(self, sandbox: str, note: Callable[[str], None]) -> None:
        self.asked.append(f"remove {sandbox}")
        note("host node1")


def engines(monkeypatch, *, container: bool, namespace: bool, root: bool = True) -> None:
    monkeypatch.setattr(container_engine, "engine_available", lambda: (container, "No container engine is installed."))
    monkeypatch.setattr(namespaces, "missing", lambda: None if namespace else "hosts of namespaces need root")
    monkeypatch.setattr(lifecycle.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(namespaces, "_namespaces", lambda: [("made-of-namespaces", "node1")])


@pytest.mark.parametrize(
    ("container", "namespace", "chosen"), [(True, True, "docker"), (True, False, "docker"), (False, True, "namespaces")]
)
def test_a_container_engine_comes_first(monkeypatch, capsys, container, namespace, chosen):
    engines(monkeypatch, container=container, namespace=namespace)
    assert sandboxes.engine_for_hosts() == chosen
    assert main.guarded(lambda: main.app(args=["sandbox", "check"], prog_name="provision"), debug=False) == 0
    assert capsys.readouterr().out.startswith({"docker": "containers", "namespaces": "namespaces"}[chosen])


def test_where_nothing_can_run_hosts_both_reasons_are_given(monkeypatch, capsys):
    engines(monkeypatch, container=False, namespace=False, root=False)
    assert main.guarded(lambda: main.app(args=["sandbox", "check"], prog_name="provision"), debug=False) == 1
    said = capsys.readouterr().err
    assert "No container engine is installed." in said
    assert "namespaces need root" in said


def test_a_sandbox_stays_with_its_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    engines(monkeypatch, container=True, namespace=True)
    assert lifecycle._engine_of("made-of-namespaces") == "namespaces"
    assert lifecycle._engine_of("new") == "docker"
    engines(monkeypatch, container=False, namespace=True)
    assert lifecycle._engine_of("new") == "namespaces"
    names.folder("made-of-containers").mkdir(parents=True)
    assert lifecycle._engine_of("made-of-containers") == "docker"  # whose containers may exist, although it does not answer now
    (names.folder("left-by-a-reboot") / "namespaces").mkdir(parents=True)
    assert lifecycle._engine_of("left-by-a-reboot") == "namespaces"


@pytest.mark.parametrize(("found", "wanted"), [("namespaces", "docker"), ("docker", "namespaces")])
def test_another_engine_of_a_sandbox_is_named(monkeypatch, tmp_path, found, wanted):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    engines(monkeypatch, container=True, namespace=True)
    names.folder("mine").mkdir(parents=True)
    if found == "namespaces":
        (names.folder("mine") / "namespaces").mkdir()
    with pytest.raises(ProvisionError, match=f"another sandbox 'mine', made with --engine {found}") as refused:
        sandboxes.up(name="mine", say=lambda _line: None, engine=wanted)
    assert "`provision sandbox down --name mine`" in (refused.value.hint or "")
    assert lifecycle._engine_of("mine", found) == found
    assert lifecycle._engine_of("new", wanted) == wanted


def test_what_namespaces_lack_is_looked_for_once(monkeypatch):
    ran = []
    namespaces.missing.cache_clear()
    monkeypatch.setattr(container_engine, "engine_available", lambda: (False, "No container engine is installed."))
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_which", lambda tool: tool)
    monkeypatch.setattr(namespaces, "_namespaces", list)
    monkeypatch.setattr(namespaces, "_run", lambda *command: ran.append(command[0]))
    try:
        assert sandboxes.every() == []
        assert sorted(ran) == ["iptables", "unshare"]
    finally:
        namespaces.missing.cache_clear()


def test_what_was_begun_is_removed_through_the_same_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    engine = Recorded([])
    monkeypatch.setattr(lifecycle, "_engine", lambda _step, _kind: contextlib.nullcontext(engine))
    with pytest.raises(ProvisionError, match="no network"):
        sandboxes.up(count=3, base="debian:12", name="mine", say=lambda _line: None, engine="namespaces")
    assert engine.asked == ["network of 3", "remove mine"]
    assert not names.folder("mine").exists()


def test_files_without_hosts_that_an_earlier_run_left_are_removed_first(monkeypatch, tmp_path):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    engine = Recorded([])
    monkeypatch.setattr(lifecycle, "_engine", lambda _step, _kind: contextlib.nullcontext(engine))
    names.folder("mine").mkdir(parents=True)
    (names.folder("mine") / "id_ed25519").write_text("old")
    with pytest.raises(ProvisionError, match="no network"):
        sandboxes.up(count=3, base="debian:12", name="mine", say=engine.asked.append, engine="docker")
    assert engine.asked[:3] == ["removing what an earlier run left", "remove mine", "network of 3"]


def test_an_unknown_engine_is_refused(capsys):
    assert main.guarded(lambda: main.app(args=["sandbox", "up", "--engine", "podman"], prog_name="provision"), debug=False) == 2
    assert "docker, namespaces" in capsys.readouterr().err


def test_names_of_namespaces_and_interfaces():
    """The sandbox in a namespace's name is the one that made it, whatever it is called; an interface has at most 15 characters."""
    for sandbox, host in (("a", "node1"), ("a-node1", "node2"), ("x" * 40, "node250")):
        found = namespaces._NAMESPACE.fullmatch(names.container(sandbox, host))
        assert found is not None
        assert found.groups() == (sandbox, host)
        assert len(f"{namespaces._bridge(sandbox)}.{names.number(host)}") <= 15
    assert namespaces._bridge("a") != namespaces._bridge("b")


def test_a_network_of_which_the_machine_knows_a_part_is_not_taken(monkeypatch):
    said = ["default via 192.0.2.1 dev eth0"]
    monkeypatch.setattr(namespaces, "_run", lambda *_command: "\n".join(said))
    first = namespaces._free_network("mine")
    assert first == namespaces._free_network("mine")
    said.append(f"{first[0]}/25 dev vpn0 scope link")
    second = namespaces._free_network("mine")
    said.append(f"broadcast {second[77]} dev tun1 table local")
    assert len({first, second, namespaces._free_network("mine")}) == 3
    said.append("198.18.0.0/15 dev vpn1")
    with pytest.raises(ProvisionError, match="is free"):
        namespaces._free_network("mine")


def test_the_rules_of_a_bridge_are_removed_whole_and_alone(monkeypatch):
    rules = {
        "filter": [
            "-P FORWARD DROP",
            "-A FORWARD -i prov1234567 -j ACCEPT",
            "-A FORWARD -i prov7654321 -j ACCEPT",
            "-A FORWARD -o eth0 -j DROP",
        ],
        "nat": ['-A POSTROUTING -s 198.18.0.0/24 ! -o prov1234567 -m comment --comment "a b" -j MASQUERADE'],
    }
    removed: list[str] = []

    def run(*command: str) -> str:
        *_, table = command[: command.index("-t") + 2]
        if "-S" in command:
            return "\n".join(rules[table])
        removed.append(" ".join(command[command.index("-D") + 1 :]))
        return ""

    monkeypatch.setattr(namespaces, "_run", run)
    monkeypatch.setattr(namespaces, "_which", lambda tool: tool == "iptables")
    namespaces._shut("prov1234567")
    assert removed == [
        "POSTROUTING -s 198.18.0.0/24 ! -o prov1234567 -m comment --comment a b -j MASQUERADE",
        "FORWARD -i prov1234567 -j ACCEPT",
    ]


def test_more_hosts_than_a_network_holds(monkeypatch, tmp_path):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="at most 250"):
        namespaces.NamespaceEngine().create_network("mine", [f"node{number}" for number in range(1, 252)])


@pytest.mark.parametrize(
    ("absent", "said"), [("unshare tar", "tar and unshare"), ("iptables nft", "neither iptables nor nft"), ("ip", "ip is not installed")]
)
def test_what_namespaces_lack_is_named(monkeypatch, absent, said):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_which", lambda tool: None if tool in absent.split() else tool)
    assert said in (namespaces.missing.__wrapped__() or "")


def test_a_machine_that_forbids_namespaces_is_recognised(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_which", lambda tool: tool)

    def refused(*_command: str) -> str:
        raise ProvisionError("unshare: Operation not permitted")

    monkeypatch.setattr(namespaces, "_run", refused)
    assert "Operation not permitted" in (namespaces.missing.__wrapped__() or "")


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
        {"HOME": "/none", "PIP_DEFAULT_TIMEOUT": "99", "PIP_INDEX_URL": "https://index.example/simple", "PIP_NO_INPUT": "1"},
        root=machine,
        apt_dump="",
    )
    assert found.pip == {
        "find-links": (str(machine / "wheels"),),
        "extra-index-url": (f"file://{machine}/index/simple", "https://more.example/simple"),
        "retries": ("7",),
        "timeout": ("99",),
        "index-url": ("https://index.example/simple",),
    }


def test_a_local_index_is_mounted_with_the_files_that_it_links_to(machine):
    assert controller_settings.read({"HOME": "/none"}, root=machine, apt_dump="").mounts == (machine / "index", machine / "wheels")


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


def test_inventory_text(tmp_path):
    hosts = [SandboxHost("node1", "192.0.2.1", "c1", "debian:12"), SandboxHost("node2", "192.0.2.2", "c2", "debian:13")]
    (tmp_path / "become_password").touch()
    text = Sandbox("default", hosts, tmp_path).inventory_text(slots=3)
    assert "node2  ansible_host=192.0.2.2  slots=3" in text
    assert "StrictHostKeyChecking=yes" in text
    assert f"# trainer's sudo asks for the password in {tmp_path}/become_password" in text


def test_known_hosts_name_both_name_and_address():
    text = ssh_keys.known_hosts({("node1", "192.0.2.1"): "ssh-ed25519 AAAA root@node1\nssh-rsa BBBB\n"})
    assert text == "node1,192.0.2.1 ssh-ed25519 AAAA\nnode1,192.0.2.1 ssh-rsa BBBB\n"


# The engine's failures, in words


def test_no_permission_for_the_socket(monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    failure = docker.errors.DockerException(requests.exceptions.ConnectionError(PermissionError(13, "denied")))
    what, hint = container_engine.unavailable(failure)
    assert "may not use" in what
    assert "usermod -aG docker" in hint


def test_engine_not_installed_and_not_running_differ(monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(container_engine.shutil, "which", lambda _name: "/usr/sbin/dockerd")
    what, hint = container_engine.unavailable(docker.errors.DockerException("refused"))
    assert "does not run" in what
    assert "Start it" in hint
    monkeypatch.setattr(container_engine.shutil, "which", lambda _name: None)
    monkeypatch.setattr(container_engine.Path, "exists", lambda _path: False)
    what, hint = container_engine.unavailable(docker.errors.DockerException("no such file"))
    assert "is installed" in what
    assert "apt-get install" in hint


def test_remote_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.9:2375")
    what, hint = container_engine.unavailable(docker.errors.DockerException("x"))
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
