"""The whole way of hosts with GPUs, on simulated ones: PyTorch's real CUDA build, training, health, removal.

Simulated is what `provision sandbox` simulates. The packages are those of the Python index: gigabytes, once per host. Tests run in order.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import docker
import nccl_packages
import pytest
from hosts import good, provision, report, root, state
from pip._internal.models.index import PyPI

from provision.base import resources
from provision.sandbox import Sandbox, names
from provision.sandbox.gpus import model
from provision.sandbox.gpus.model import Gpus
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate
from provision.survey.gpu_code import Gpu, Library, Scan, missing_code

pytestmark = pytest.mark.slow

#: The build for CUDA 13 of this release is in the Python index itself, which here is the index for PyTorch, too.
BUILD = ("--torch", "2.15.0", "--index-url", f"torch={PyPI.simple_url}")
LIMIT_S = 2700  # 6 GB are unpacked, by two cores that other tests use, too
CUDA, NCCL = "13.2", "2.30.7"
VERDICT = "installed; GPU not verified: simulated"
PYTHON, PACKAGES = "/opt/provision/venv/bin/python", "/opt/provision/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def one(sandbox_factory) -> tuple[Sandbox, list[str]]:
    """A host with two H100, and what it was before anything ran."""
    made: Sandbox = sandbox_factory(1, "debian:12", name="gpu-way", slots=2)
    simulate(made.name, Simulation(Gpus.requested("h100:2", fabric="ib")), say=lambda _line: None)
    return made, state(made.hosts[0])


def test_the_cuda_build_is_installed_and_the_host_is_not_called_ready(one):
    sandbox, _before = one
    found = report(good(provision("up", str(sandbox.inventory), *BUILD, "--json", timeout=LIMIT_S)))
    assert (found["ok"], found["simulated"], {line["state"] for line in found["hosts"]}) == (True, ["node1"], {"installed"})
    assert {(line["torch"], line["nccl"]) for line in found["hosts"]} == {("2.15.0", NCCL)}
    assert [(each["device"], each["host"]) for each in found["smoke"]["participants"]] == [("cpu", "node1")] * 2
    assert found["smoke"]["torch"] == f"2.15.0+cu{CUDA.replace('.', '')}"
    runs = json.loads(good(provision("runs", "--json", "-n", "1")).stdout)["runs"]
    assert runs[0]["verdict"] == VERDICT


def test_a_second_run_changes_nothing_and_says_the_same(one):
    sandbox, _before = one
    done = good(provision("up", str(sandbox.inventory), *BUILD))
    assert "up to date; nothing to do" in done.stderr
    assert f"{VERDICT}: 1 host, " in done.stdout + done.stderr


def test_the_libraries_have_code_for_every_gpu_of_a_profile_but_volta(one):
    """CUDA 13 has ended it; nothing else is missing, and nothing is said of what has its kernels elsewhere, such as cuFFT."""
    sandbox, _before = one
    host = sandbox.hosts[0]
    scan = json.loads(root(host, resources.inline_command("gpu_code.py", interpreter=PYTHON)).splitlines()[-1])
    assert scan["complete"]
    libraries = [Library.model_validate(each) for each in scan["libraries"]]
    assert {"libtorch_cuda.so", "libnccl.so.2", "libcublasLt.so.13"} <= {Path(each.path).name for each in libraries}
    for name, profile in model.profiles().profiles.items():
        if profile.vendor == "nvidia":
            gpu = Gpu(name=profile.name, architecture=profile.capability)
            lost = {Path(each.what.split()[0]).name for each in missing_code("a", Scan(gpus=[gpu], libraries=libraries, complete=True))}
            assert ("libtorch_cuda.so" in lost) if name == "v100" else not lost, (name, lost)


def test_a_missing_library_and_another_build_are_named(one):
    sandbox, _before = one
    host, library = sandbox.hosts[0], f"{PACKAGES}/nvidia/cu13/lib/libcufft.so.12"
    root(host, f"mv {library} /root/kept && sed -i 's/^cuda.*13.2.*/cuda = None/' {PACKAGES}/torch/version.py")
    try:
        failed = provision("up", str(sandbox.inventory), *BUILD, "--from", "pytorch", "--no-smoke")
        assert failed.returncode == 1
        assert "libcufft.so.12: cannot open shared object file" in failed.stdout + failed.stderr
        root(host, f"mv /root/kept {library}")
        failed = provision("up", str(sandbox.inventory), *BUILD, "--from", "pytorch", "--no-smoke")
        assert "torch.version.cuda is None: 2.15.0+cu132 is not the build in the plan, cuda=13.2" in failed.stdout + failed.stderr
    finally:
        as_it_was = f"sed -i 's/^cuda = None/cuda: Optional[str] = \"{CUDA}\"/' {PACKAGES}/torch/version.py"
        root(host, f"[ ! -e /root/kept ] || mv /root/kept {library}; {as_it_was}")


def test_the_doctor_finds_them_healthy_and_puts_a_sick_one_into_quarantine(one, tmp_path):
    sandbox, _before = one
    file = tmp_path / "quarantine"
    words = ("doctor", str(sandbox.inventory), "--gpu", "--quarantine", str(file), "--json")
    healthy = report(provision(*words))
    assert {host: each["verdict"] for host, each in healthy["verdicts"].items()} == {"node1": "healthy"}, healthy
    good(provision("sandbox", "fault", "xid79@node1", "--name", sandbox.name))
    try:
        sick = report(provision(*words))
        assert {host: each["verdict"] for host, each in sick["verdicts"].items()} == {"node1": "unfit"}, sick
        left = provision("status", str(sandbox.inventory), "--limit", f"!@{file}")
        assert (left.returncode, "it leaves no host" in left.stderr) == (2, True), left.stderr
    finally:
        good(provision("sandbox", "fault", "--clear", "--name", sandbox.name))


def test_status_and_page_show_the_gpus_and_the_verdict(one, tmp_path):
    sandbox, _before = one
    shown = report(good(provision("status", str(sandbox.inventory), "--json")))
    assert {len(each["gpus"]) for each in shown["hosts"]} == {2}
    page = Path(json.loads(good(provision("runs", "--json", "-n", "20")).stdout)["runs"][-1]["folder"]) / "report.html"
    text = page.read_text(encoding="utf-8")
    assert f"<h1>{VERDICT}: the host has what was planned" in text
    assert text.count("<svg") >= 2


def test_removal_leaves_the_host_as_it_was(one):
    sandbox, before = one
    removed = report(good(provision("remove", str(sandbox.inventory), "--yes", "--json")))
    assert {each["state"] for each in removed["hosts"]} == {"removed"}, removed
    assert sorted(set(state(sandbox.hosts[0])) ^ set(before)) == []


#: A stand-in of the build that no reachable index has; what it needs is real.
RELEASE, NEEDS = "2.14.1", ("nvidia-cuda-runtime-cu12==12.6.77", "nvidia-nccl-cu12==2.29.3")
STAND_IN = {
    "torch/version.py": f"__version__ = '{RELEASE}+cu126'\ncuda = '12.6'\nhip = None\n",
    "torch/_dynamo.py": "",
    "torch/__init__.py": """
import ctypes
from .version import __version__
class cuda:
    class nccl:
        @staticmethod
        def version():
            number = ctypes.c_int()
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
            return number.value // 10000, number.value // 100 % 100, number.value % 100
class backends:
    class cudnn:
        version = staticmethod(lambda: None)
""",
}


def own_index(folder: Path) -> None:
    """A package index with the stand-in."""
    info = f"torch-{RELEASE}+cu126.dist-info"
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {RELEASE}+cu126", *(f"Requires-Dist: {each}" for each in NEEDS)]
    files = {**STAND_IN, f"{info}/METADATA": "".join(f"{line}\n" for line in lines)}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    name = f"torch-{RELEASE}+cu126-cp311-cp311-linux_x86_64.whl"
    (folder / "torch").mkdir(parents=True)
    with zipfile.ZipFile(folder / "torch" / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    (folder / "torch/index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')


def test_volta_gets_its_build_from_an_index_of_ones_own(one, tmp_path):
    """PyTorch's last build for it is of CUDA 12.6, which is in no index that this machine reaches."""
    sandbox, _before = one
    (sandbox.inventory.parent / "provision.lock").unlink(missing_ok=True)
    simulate(sandbox.name, Simulation(Gpus.requested("v100:2")), say=lambda _line: None)
    own_index(tmp_path / "simple")
    gateway = docker.from_env().networks.get(names.network(sandbox.name)).attrs["IPAM"]["Config"][0]["Gateway"]
    with nccl_packages.served(tmp_path, gateway) as address:
        words = ("--torch", RELEASE, "--index-url", f"torch={address}/simple", "--no-smoke", "--json")
        found = report(good(provision("up", str(sandbox.inventory), *words, timeout=LIMIT_S)))
    assert [(line["state"], line["torch"]) for line in found["hosts"]] == [("installed", RELEASE)]
    said = root(sandbox.hosts[0], f"{PYTHON} -c 'import torch; print(torch.__version__, torch.version.cuda)'; ls {PACKAGES}/nvidia")
    assert f"{RELEASE}+cu126 12.6" in said
    assert {"cuda_runtime", "nccl"} <= set(said.split())
