"""The sandbox against a real engine: its hosts are hosts, the controller's settings reach them, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import ipaddress
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import images_of_image_tests, wait_until

from provision import sandbox as sandboxes
from provision.base import paths
from provision.base.errors import ProvisionError, UsageError
from provision.sandbox import Sandbox, debootstrap, names
from provision.sandbox.containers import controller_settings

BASES = ["debian:12", "debian:13"]
CODENAMES = {"debian:12": "bookworm", "debian:13": "trixie"}


@pytest.fixture(scope="module")
def mixed(sandbox_factory) -> Sandbox:
    """Two hosts, one of each Debian."""
    return sandbox_factory(2, BASES, name="mixed")


def ok(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.args[-1]}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


# The hosts are hosts


def test_every_host_has_its_own_name_address_keys_and_release(mixed, ssh):
    assert [host.name for host in mixed.hosts] == ["node1", "node2"]
    assert [ok(ssh(mixed, host, "hostname")) for host in mixed.hosts] == ["node1", "node2"]
    assert len({host.address for host in mixed.hosts}) == 2
    assert len({ok(ssh(mixed, host, "cat /etc/machine-id")) for host in mixed.hosts}) == 2
    assert len({ok(ssh(mixed, host, "cat /etc/ssh/ssh_host_ed25519_key.pub")) for host in mixed.hosts}) == 2
    for host in mixed.hosts:
        assert ok(ssh(mixed, host, ". /etc/os-release; echo $VERSION_CODENAME")) == CODENAMES[host.base]


def test_hosts_find_each_other_by_name(mixed, ssh):
    for host, other in zip(mixed.hosts, reversed(mixed.hosts), strict=True):
        assert ok(ssh(mixed, host, f"getent hosts {other.name}")).split()[0] == other.address


@pytest.mark.parametrize("user", ["trainer", "root"])
def test_both_users_log_in_with_the_key(mixed, ssh, user):
    assert [ok(ssh(mixed, host, "id -un", user=user)) for host in mixed.hosts] == [user, user]


def test_sudo_without_password(mixed, ssh):
    assert [ok(ssh(mixed, host, "sudo -n id -u")) for host in mixed.hosts] == ["0", "0"]


def test_the_hosts_are_bare(mixed, ssh):
    for host in mixed.hosts:
        assert ok(
            ssh(mixed, host, "command -v gcc make pip pip3 mpirun nvcc; python3 -c 'import ensurepip' 2>&1 | tail -1; true")
        ).endswith("No module named 'ensurepip'")


def test_ansible_reads_the_inventory_and_becomes_root(mixed):
    ansible = Path(sys.executable).with_name("ansible")
    result = subprocess.run(
        [ansible, "all", "-i", mixed.inventory, "-b", "-m", "command", "-a", "id -un"],
        capture_output=True,
        text=True,
        check=False,
        env=ansible_environment(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("root") == 2
    listed = subprocess.run(
        [ansible.with_name("ansible-inventory"), "-i", mixed.inventory, "--list"],
        capture_output=True,
        text=True,
        check=True,
        env=ansible_environment(),
    )
    assert json.loads(listed.stdout)["_meta"]["hostvars"]["node1"]["slots"] == 2


def ansible_environment() -> dict[str, str]:
    return {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0"}


# Only the right key, only the right host


def test_another_key_is_refused(mixed, ssh, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    for user in ("trainer", "root"):
        result = ssh(mixed, mixed.hosts[0], "true", user=user, key=tmp_path / "other")
        assert result.returncode == 255
        assert "Permission denied (publickey)" in result.stderr


def test_an_impostor_host_is_refused(mixed, ssh, tmp_path):
    lines = mixed.known_hosts.read_text().splitlines()
    swapped = tmp_path / "known_hosts"
    theirs = [line.split(" ", 1)[1] for line in lines if line.startswith("node2,")]
    swapped.write_text("".join(f"{mixed.hosts[0].address} {key}\n" for key in theirs))
    result = ssh(mixed, mixed.hosts[0], "true", known_hosts=swapped)
    assert result.returncode == 255
    assert "verification failed" in result.stderr


def test_keys_are_private(mixed):
    assert mixed.key.stat().st_mode & 0o777 == 0o600
    assert mixed.key.parent.stat().st_mode & 0o777 == 0o700


# The controller's settings reach the hosts


@pytest.mark.slow
def test_packages_from_the_controllers_mirror_and_index(mixed, ssh):
    """apt, then pip from the controller's index, with the controller's trust: what the product does first on every host."""
    for host in mixed.hosts:
        ok(ssh(mixed, host, "sudo apt-get -q update && sudo apt-get -q install -y --no-install-recommends python3-venv", timeout=600))
        ok(
            ssh(
                mixed,
                host,
                "python3 -m venv venv && venv/bin/pip download -q --no-deps --no-binary :none: -d wheels idna && ls wheels | grep idna",
            )
        )
        # A build that pip isolates reads nothing but files.
        ok(ssh(mixed, host, "sudo env -i HOME=/root PATH=/usr/bin:/bin ~trainer/venv/bin/pip download -q --no-deps -d /tmp/wheels idna"))


@pytest.fixture(scope="module")
def controller(engine, tmp_path_factory) -> Iterator[Path]:
    """A controller with a proxy that needs a password, an authority of its own and a local folder of wheels."""
    folder = tmp_path_factory.mktemp("controller")
    folder.chmod(0o755)
    with zipfile.ZipFile(folder / "sandboxprobe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sandboxprobe.py", "")
        wheel.writestr("sandboxprobe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sandboxprobe\nVersion: 1.0\n")
        wheel.writestr(
            "sandboxprobe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("sandboxprobe-1.0.dist-info/RECORD", "")
    authority = (
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=probe authority",
        "-addext",
        "keyUsage=critical,keyCertSign",
    )
    openssl(*authority, "-keyout", folder / "ca.key", "-out", folder / "ca.pem")
    gateway = str(
        ipaddress.ip_network(engine.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"])[1]
    )  # this machine, for containers
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=probe", "-keyout", folder / "leaf.key", "-out", folder / "leaf.csr")
    (folder / "leaf.ext").write_text(f"subjectAltName=IP:{gateway}\n")
    openssl(
        *("x509", "-req", "-in", folder / "leaf.csr", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial"),
        *("-extfile", folder / "leaf.ext", "-out", folder / "leaf.pem"),
    )
    with serve(gateway) as proxy, serve(gateway, folder) as secure:
        (folder / "secure").write_text(f"https://{gateway}:{secure}/")
        (folder / "proxy").write_text(f"http://someone:proxy-secret@{gateway}:{proxy}")
        (folder / "direct").write_text(gateway)
        yield folder


@pytest.fixture(scope="module")
def behind(controller, sandbox_factory) -> Sandbox:
    """A host made by that controller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", (controller / "proxy").read_text())
        patch.setenv("no_proxy", (controller / "direct").read_text())
        patch.setenv("CURL_CA_BUNDLE", str(controller / "ca.pem"))
        patch.setenv("PIP_FIND_LINKS", str(controller))
        return sandbox_factory(1, "debian:13", name="behind", sudo="password")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class serve:
    """A web server on an address that containers reach; with a folder of keys, over TLS. It answers with what it was asked."""

    def __init__(self, address: str, keys: Path | None = None) -> None:
        self.server = http.server.ThreadingHTTPServer((address, 0), Echo)
        if keys:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys / "leaf.pem", keys / "leaf.key")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def __enter__(self) -> int:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server.server_address[1]

    def __exit__(self, *_exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"asked for {self.path} with {self.headers.get('Proxy-Authorization', 'no password')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        return


FETCH = "python3 -c 'import urllib.request, sys; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())' "


@pytest.mark.parametrize("user", ["trainer", "root"])
def test_sessions_go_through_the_controllers_proxy(behind, ssh, user):
    seen = ok(ssh(behind, behind.hosts[0], FETCH + "http://nowhere.invalid/", user=user))
    assert seen.startswith("asked for http://nowhere.invalid/ with Basic ")


def test_proxy_and_trust_survive_sudo(behind, ssh):
    password = behind.become_password.read_text().strip()
    assert ssh(behind, behind.hosts[0], "sudo -n true").returncode != 0
    seen = ok(ssh(behind, behind.hosts[0], f"echo '{password}' | sudo -S -p '' env"))
    assert "proxy-secret" in seen
    assert "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" in seen
    assert "proxy-secret" in ok(ssh(behind, behind.hosts[0], "apt-config dump Acquire::http::Proxy"))
    assert behind.become_password.stat().st_mode & 0o777 == 0o600


def test_the_controllers_authority_is_trusted(behind, ssh, controller):
    assert ok(ssh(behind, behind.hosts[0], FETCH + (controller / "secure").read_text())).startswith("asked for /")


def test_local_wheels_are_found_at_the_same_path(behind, ssh, controller):
    assert f"find-links = {controller}" in ok(ssh(behind, behind.hosts[0], "cat /etc/pip.conf"))
    assert ok(ssh(behind, behind.hosts[0], f"ls {controller}/*.whl")).endswith("sandboxprobe-1.0-py3-none-any.whl")
    assert ssh(behind, behind.hosts[0], f"touch {controller}/x", user="root").returncode != 0


def test_no_secret_is_in_an_image(behind, engine):
    for image in engine.images.list(filters={"label": f"{names.LABEL}={behind.name}"}):
        assert "proxy-secret" not in json.dumps([image.attrs, image.history()])
        holder = engine.containers.create(image, labels={names.LABEL: behind.name}, command="true")
        try:
            assert not any(b"proxy-secret" in chunk for chunk in holder.export())
        finally:
            holder.remove()


def test_no_secret_is_in_the_cache(behind):
    for tar in (paths.cache() / "sandbox").glob("*.tar"):
        assert subprocess.run(["grep", "-q", "proxy-secret", tar], check=False).returncode == 1


@pytest.mark.slow
def test_sudo_none(sandbox_factory, ssh):
    sandbox = sandbox_factory(1, sudo="none", name="nosudo")
    assert ssh(sandbox, sandbox.hosts[0], "sudo -n true").returncode != 0
    assert ok(ssh(sandbox, sandbox.hosts[0], "id -un", user="root")) == "root"


# Up, status, down


def test_up_twice_is_the_same_sandbox(mixed):
    said: list[str] = []
    again = sandboxes.up(count=2, base=BASES, name=mixed.name, say=said.append)
    assert again == mixed
    assert said == [f"sandbox {mixed.name} is up already"]


def test_up_with_other_values_is_refused(mixed):
    with pytest.raises(ProvisionError) as refused:
        sandboxes.up(count=1, base="debian:12", name=mixed.name)
    assert "provision sandbox down" in (refused.value.hint or "")
    assert sandboxes.status(mixed.name) == mixed


def test_status_with_another_state_folder(mixed, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    with pytest.raises(ProvisionError, match="keys and inventory are not in") as error:
        sandboxes.status(mixed.name)
    assert "PROVISION_HOME" in (error.value.hint or "")


@pytest.mark.slow
def test_status_sees_a_stopped_host(sandbox_factory, engine):
    sandbox = sandbox_factory(1, name="stopped")
    assert sandboxes.status(sandbox.name) == sandbox
    engine.containers.get(sandbox.hosts[0].container).stop(timeout=0)
    now = sandboxes.status(sandbox.name)
    assert now in sandboxes.every()
    assert now is not None
    assert (now.hosts[0].state, now.hosts[0].address, now.running) == ("exited", "", False)
    with pytest.raises(ProvisionError, match="exited"):
        sandboxes.up(count=1, name=sandbox.name)


def test_an_unavailable_base(engine, name, world):
    before = world()
    with pytest.raises(ProvisionError) as refused:
        sandboxes.up(count=1, base="registry.invalid/nothing:1", name=name)
    assert "registry.invalid/nothing:1" in str(refused.value)
    assert refused.value.hint
    assert world() == before


def test_a_base_without_apt(engine, name, world):
    """A local image is taken as it is; one that cannot become a host is named, and stays the user's."""
    tar = paths.cache() / "no-apt.tar"
    subprocess.run(["tar", "-cf", tar, "-C", "/", "--files-from", "/dev/null"], check=True)
    engine.api.import_image(str(tar), f"{name}-empty", "1")
    tar.unlink()
    before = world()
    try:
        with pytest.raises(ProvisionError) as refused:
            sandboxes.up(count=1, base=f"{name}-empty:1", name=name)
        assert refused.value.where
        assert world() == before
        assert engine.images.get(f"{name}-empty:1")
    finally:
        engine.images.remove(f"{name}-empty:1")


def test_no_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    answers, sentence = sandboxes.engine_available()
    assert not answers
    assert "/nonexistent/docker.sock" in sentence
    names.folder("x").mkdir(parents=True)  # a sandbox whose containers may still exist
    try:
        for call in (lambda: sandboxes.up(name="x", engine="docker"), lambda: sandboxes.status("x"), lambda: sandboxes.down("x")):
            with pytest.raises(ProvisionError, match="No container engine answers"):
                call()
    finally:
        names.folder("x").rmdir()


def test_wrong_usage():
    for wrong in ({"count": 0}, {"base": "De bian"}, {"name": "../x"}, {"slots": 0}, {"count": 1, "base": BASES}):
        with pytest.raises(UsageError):
            sandboxes.up(**wrong)


# Nothing is left behind


@pytest.fixture
def name(request) -> Iterator[str]:
    """A sandbox's name for a test that makes and removes it itself."""
    own = f"it{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
    yield own
    sandboxes.down(own, say=lambda _line: None)


@pytest.fixture
def world(engine, own_state, name):
    """Takes stock of the engine, the state folder, the user's ~/.ssh and the mounts; what other tests meanwhile is left out."""

    def foreign(labels: dict[str, str] | None) -> bool:
        if names.LABEL in (labels or {}):
            return labels[names.LABEL] != name
        return any(label.startswith("org.provision.") for label in labels or ())  # made by `provision image`

    def take() -> dict[str, object]:
        others = images_of_image_tests(engine)
        containers = [one for one in engine.api.containers(all=True) if not foreign(one["Labels"])]
        images = [one for one in engine.api.images(all=True) if not foreign(one["Labels"])]
        others |= images_of_image_tests(engine)  # one that came or went while we looked
        ssh_folder = Path("~/.ssh").expanduser()
        partial = paths.cache() / "sandbox" / "partial"
        return {
            "containers": {name for one in containers if one["ImageID"] not in others for name in one["Names"]},
            "networks": {one.name for one in engine.networks.list() if not foreign(one.attrs.get("Labels"))},
            "images": {(one["Id"], *(one["RepoTags"] or ())) for one in images if one["Id"] not in others},
            "volumes": {one.name for one in engine.volumes.list()},
            "state": (own_state / "sandbox" / name).exists(),
            "partial": sorted(map(str, partial.glob("*"))),
            "ssh": {path: path.stat().st_mtime for path in ssh_folder.glob("*")} if ssh_folder.is_dir() else None,
            "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(partial) in line],
        }

    return take


def test_down_leaves_nothing_and_can_be_repeated(name, world):
    before = world()
    sandbox = sandboxes.up(count=1, name=name)
    assert world() != before
    removed = sandboxes.down(name)
    assert f"container {sandbox.hosts[0].container}" in removed
    assert world() == before
    assert sandboxes.down(name) == []
    assert sandboxes.status(name) is None


@pytest.mark.slow
def test_down_needs_no_state_folder(name, world, own_state):
    """The state folder lost, a host stopped: the labels in the engine are enough."""
    before = world()
    sandboxes.up(count=1, name=name)
    shutil.rmtree(own_state / "sandbox" / name)
    sandboxes.down(name)
    assert world() == before


class Registry:
    """An image registry of one image, on this machine's loopback, which an engine takes without TLS."""

    NAME = "probe/base"

    def __init__(self, tar: Path) -> None:
        data = tar.read_bytes()
        layer = gzip.compress(data, compresslevel=1)
        config = json.dumps(
            {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [self.digest(data)]}}
        ).encode()
        kinds = {"config": "application/vnd.docker.container.image.v1+json", "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip"}
        part = {
            kind: {"mediaType": kinds[kind], "size": len(blob), "digest": self.digest(blob)}
            for kind, blob in (("config", config), ("layer", layer))
        }
        self.kind = "application/vnd.docker.distribution.manifest.v2+json"
        self.manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": self.kind, "config": part["config"], "layers": [part["layer"]]}
        ).encode()
        self.blobs = {self.digest(blob): blob for blob in (config, layer)}
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.base = f"127.0.0.1:{self.server.server_address[1]}/{self.NAME}:1"

    @staticmethod
    def digest(data: bytes) -> str:
        return "sha256:" + hashlib.sha256(data).hexdigest()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        if path == "/v2/":
            return "application/json", b"{}"
        if path.startswith(f"/v2/{self.NAME}/manifests/"):
            return self.kind, self.manifest
        blob = self.blobs.get(path.rpartition("/")[2])
        return ("application/octet-stream", blob) if blob else None

    def handler(self) -> type[Echo]:
        registry = self

        class Handler(Echo):
            def do_GET(self) -> None:
                kind, body = registry.answer(self.path) or ("", b"")
                self.send_response(200 if kind else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Docker-Content-Digest", registry.digest(body))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

        return Handler

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.base

    def __exit__(self, *_exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.slow
def test_a_base_that_is_pulled_gets_what_it_lacks(name, world, engine, ssh):
    bare = debootstrap.make("bookworm", controller_settings.read(os.environ), print)
    before = world()
    with Registry(bare) as base:
        said: list[str] = []
        sandbox = sandboxes.up(count=1, base=base, name=name, say=said.append)
        assert f"pulling {base}" in said
        assert ok(ssh(sandbox, sandbox.hosts[0], "hostname")) == "node1"
        sandboxes.down(name)
        engine.images.remove(base)
    assert world() == before


class Controller:
    """`up` in a process of its own, to be stopped at the moment that it says a certain thing."""

    CODE = """
        import sys
        from provision import sandbox
        sandbox.up(count=2, name=sys.argv[1], say=lambda line: print(line, flush=True))
    """

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.CODE), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if word in line:
                return
        pytest.fail(f"'{word}' was never said: {self.process.stderr.read() if self.process.stderr else ''}")

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=120)
        return output + errors


MOMENTS = [
    pytest.param("starting 2 host", 0.0, marks=pytest.mark.slow),
    ("starting 2 host", 0.7),
    pytest.param("waiting for sshd", 0.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("said", "later"), MOMENTS)
def test_ctrl_c_removes_what_was_made(name, world, said, later):
    before = world()
    controller = Controller(name)
    controller.wait_for(said)
    time.sleep(later)
    told = controller.end(signal.SIGINT)
    assert "removing what was made so far" in told
    assert "KeyboardInterrupt" in told
    assert controller.process.returncode not in (0, None)
    assert world() == before
    assert sandboxes.down(name) == []


@pytest.mark.parametrize(("said", "later"), MOMENTS)
def test_down_after_sigkill(name, world, said, later):
    before = world()
    controller = Controller(name)
    controller.wait_for(said)
    time.sleep(later)
    controller.end(signal.SIGKILL)
    assert world() != before
    sandboxes.down(name)
    assert world() == before


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_debootstrap_dies_with_its_controller(name, world, engine, monkeypatch, tmp_path, number):
    if missing := debootstrap.missing():
        pytest.skip(missing)
    if engine.images.list("debian:12"):
        pytest.skip("debian:12 is on this machine: nothing is to be made")
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    before = world()
    controller = Controller(name)
    controller.wait_for("debootstrap")
    wait_until(lambda: running_in(tmp_path / "cache"))
    time.sleep(4)
    assert running_in(tmp_path / "cache")
    controller.end(number)
    wait_until(lambda: not running_in(tmp_path / "cache"))
    sandboxes.down(name)
    assert world() == before
    assert not list((tmp_path / "cache" / "sandbox").glob("*.tar"))


def running_in(folder: Path) -> list[str]:
    """The command lines of processes that work on that folder."""
    lines = []
    for path in proc_files("cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if str(folder) in line]


def proc_files(what: str) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        if (process / what).exists():
            yield process / what
