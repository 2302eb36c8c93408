"""An image for GPUs, built from the plan of a simulated host, on plain Debian: PyTorch's own CUDA build with NVIDIA's libraries as wheels.

It takes 3 GB of wheels and makes an image of 6 GB. What runs on no GPU is said by `verify`, and everything up to there is real.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import docker
import docker.errors
import pytest
from conftest import PREFIX, SandboxFactory
from pip._internal.models.index import PyPI

from provision.base.engine_source import pack
from provision.catalog import overlay
from provision.cli import main
from provision.image import build, image_request, local_images
from provision.image.image_request import ImageRequest
from provision.inventory import loading
from provision.plan.options import Options
from provision.remote.progress import Progress
from provision.sandbox import Sandbox
from provision.sandbox.gpus.model import Gpus
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate

pytestmark = pytest.mark.slow

IMAGE = f"{PREFIX}-image/cuda:1"
TORCH, CUDA = "2.15.0", "13.2"  # the package index has this build, and PyTorch's own index is not needed
SITE = "/opt/provision/venv/lib/python3.11/site-packages"


def provision(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["image", *words], prog_name="provision"), debug=False)


@pytest.fixture(scope="module")
def hosts(engine: docker.DockerClient, sandbox_factory: SandboxFactory) -> Sandbox:
    made: Sandbox = sandbox_factory(1, "debian:12", name="cuda-image")
    simulate(made.name, Simulation(Gpus.requested("h100:8", driver="580.65.06")), say=lambda _line: None)
    return made


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient, hosts: Sandbox) -> Iterator[str]:
    index = f"torch={PyPI.simple_url}"
    assert provision("build", str(hosts.inventory), "--torch", TORCH, "--index-url", index, "-t", IMAGE) == 0
    yield IMAGE
    engine.images.remove(IMAGE, force=True)


def verdict(capsys: pytest.CaptureFixture[str], name: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = provision("verify", name, "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def test_it_is_the_planned_build_and_says_so(engine: docker.DockerClient, image: str) -> None:
    info = local_images.get(engine, image)
    assert (info.of("cuda"), info.of("gpus"), info.of("system")) == (CUDA, "9.0", "debian 12")
    script = "import torch; print(torch.version.cuda, torch.cuda.is_available(), 'sm_90' in torch.cuda.get_arch_list())"
    output: bytes = engine.containers.run(image, ["python", "-c", script], remove=True)
    assert output.decode().split() == [CUDA, "False", "True"]
    environment = engine.images.get(image).attrs["Config"]["Env"]
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(environment)


def test_it_is_verified_by_loading_and_its_gpus_are_not(
    engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = verdict(capsys, image)
    assert (code, found["faults"]) == (0, [])
    loads = f"CUDA {CUDA}: every library loads and has code for compute capability 9.0"
    assert found["summaries"][0] == f"{loads}; GPU not verified: the containers have none"
    assert "bit-identical on all ranks" in found["summaries"][-1]
    info = local_images.get(engine, image)
    assert info.ready
    assert "GPU not verified" in info.labels[local_images.VERIFIED_BY]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (f"RUN truncate -s 10 {SITE}/nvidia/cu13/lib/libnvrtc-builtins.so.{CUDA}", f"libnvrtc-builtins.so.{CUDA}: file too short"),
        ("LABEL org.provision.image.gpus=7.0", "libtorch_cuda.so has no code for its GPU (7.0)"),
        (f"RUN sed -i \"s/^cuda.*/cuda = '12.6'/\" {SITE}/torch/version.py", f"is not the build in the plan, cuda={CUDA}"),
    ],
)
def test_an_image_that_lacks_something_is_not_ready(
    change: str, what: str, engine: docker.DockerClient, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = f"{PREFIX}-image/cuda:broken"
    dockerfile = f"FROM {image}\nUSER 0\n{change}\nUSER 10001\n"
    engine.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=broken, rm=True)
    try:
        code, found = verdict(capsys, broken)
        assert code == 1
        assert any(what in fault["what"] for fault in found["faults"]), found["faults"]
        assert not any("every library loads" in summary for summary in found["summaries"])
    finally:
        engine.images.remove(broken, force=True)


def test_another_engine_costs_its_own_layer(engine: docker.DockerClient, image: str, hosts: Sandbox) -> None:
    options = Options(torch_version=TORCH, torch_index=PyPI.simple_url, catalog=overlay.own())
    request = ImageRequest(inventory=loading.load(str(hosts.inventory)))
    (target,), _ = image_request.plan_targets(request, options, Progress(), {})
    source = replace(pack(), sha256="0" * 64)  # in the labels and the manifest alone
    tag = f"{PREFIX}-image/cuda:2"
    try:
        build.build(replace(target, engine=source), tag, options, Progress())
        layers, others = (engine.images.get(name).attrs["RootFS"]["Layers"] for name in (image, tag))
    finally:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(tag, force=True)
    assert len(layers) == len(others)
    assert layers[:-2] == others[:-2]
