"""The whole way of hosts with GPUs, on simulated ones: PyTorch's real CUDA build, NCCL as wheel and as package, training, health, removal.

Simulated is what `provision sandbox` simulates. The packages are those of the Python index: gigabytes, once per host. Tests run in order.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nccl_packages
import pytest
from hosts import container, good, is_namespace, provision, report, root, state, verdict
from pip._internal.models.index import PyPI

from provision.base import resources
from provision.sandbox import Sandbox
from provision.sandbox.gpus import model
from provision.sandbox.gpus.model import Gpus
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate
from provision.survey.gpu_code import Gpu, Library, Scan, missing_code

pytestmark = pytest.mark.slow

#: The build for CUDA 13 of this release is in the Python index itself, which here is the index for PyTorch, too.
BUILD = ("--torch", "2.15.0", "--index-url", f"torch={PyPI.simple_url}")
CUDA, NCCL = "13.2", "2.30.7"
VERDICT = "installed; GPU not verified: simulated"
PYTHON, PACKAGES = "/opt/provision/venv/bin/python", "/opt/provision/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def pair(sandbox_factory) -> tuple[Sandbox, dict[str, list[str]]]:
    """Two hosts with two H100 each, and what they were before anything ran."""
    made: Sandbox = sandbox_factory(2, "debian:12", name="gpu-way", slots=1)
    simulate(made.name, Simulation(Gpus.requested("h100:2", fabric="ib")), say=lambda _line: None)
    return made, {host.name: state(host) for host in made.hosts}


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> Iterator[nccl_packages.Key]:
    made = nccl_packages.Key(tmp_path_factory.mktemp("gpg"))
    yield made
    made.close()


def up(sandbox: Sandbox, *words: str) -> tuple[dict[str, Any], str]:
    """The report of a run that must end well, and its last words."""
    done = good(provision("up", str(sandbox.inventory), *BUILD, *words, "--json"))
    return report(done), verdict(done)


def test_the_cuda_build_is_installed_and_hosts_are_not_called_ready(pair):
    sandbox, _before = pair
    found, _said = up(sandbox)
    assert (found["ok"], found["simulated"], {line["state"] for line in found["hosts"]}) == (True, ["node1", "node2"], {"installed"})
    assert {(line["torch"], line["nccl"]) for line in found["hosts"]} == {("2.15.0", NCCL)}
    assert {(each["device"], each["host"]) for each in found["smoke"]["participants"]} == {("cpu", "node1"), ("cpu", "node2")}
    assert found["smoke"]["torch"] == f"2.15.0+cu{CUDA.replace('.', '')}"
    runs = json.loads(good(provision("runs", "--json", "-n", "1")).stdout)["runs"]
    assert runs[0]["verdict"] == VERDICT


def test_a_second_run_changes_nothing_and_says_the_same(pair):
    sandbox, _before = pair
    done = good(provision("up", str(sandbox.inventory), *BUILD))
    assert "up to date; nothing to do" in done.stderr
    assert f"{VERDICT} in " in done.stdout + done.stderr


def test_the_libraries_have_code_for_every_gpu_of_a_profile_but_volta(pair):
    """CUDA 13 has ended it; nothing else is missing, and nothing is said of what has its kernels elsewhere, such as cuFFT."""
    sandbox, _before = pair
    host = sandbox.hosts[0]
    scan = json.loads(root(host, resources.inline_command("gpu_code.py", interpreter=PYTHON)).splitlines()[-1])
    assert scan["complete"]
    libraries = [Library.model_validate(each) for each in scan["libraries"]]
    assert {"libtorch_cuda.so", "libnccl.so.2", "libcublasLt.so.13"} <= {Path(each.path).name for each in libraries}
    for name, profile in model.profiles().profiles.items():
        if profile.vendor == "nvidia":
            gpu = Gpu(name=profile.name, compute_capability=profile.capability)
            lost = {Path(each.what.split()[0]).name for each in missing_code("a", Scan(gpus=[gpu], libraries=libraries, complete=True))}
            assert ("libtorch_cuda.so" in lost) if name == "v100" else not lost, (name, lost)


def test_a_missing_library_and_another_build_are_named(pair):
    sandbox, _before = pair
    host, library = sandbox.hosts[0], f"{PACKAGES}/nvidia/cu13/lib/libcufft.so.12"
    root(host, f"mv {library} /root/kept && sed -i 's/^cuda.*13.2.*/cuda = None/' {PACKAGES}/torch/version.py")
    try:
        failed = provision("up", str(sandbox.inventory), *BUILD, "--from", "pytorch", "--no-smoke", "--limit", host.name)
        assert failed.returncode == 1
        assert "libcufft.so.12: cannot open shared object file" in failed.stdout + failed.stderr
        root(host, f"mv /root/kept {library}")
        failed = provision("up", str(sandbox.inventory), *BUILD, "--from", "pytorch", "--no-smoke", "--limit", host.name)
        assert "torch.version.cuda is None: 2.15.0+cu132 is not the build in the plan, cuda=13.2" in failed.stdout + failed.stderr
    finally:
        as_it_was = f"sed -i 's/^cuda = None/cuda: Optional[str] = \"{CUDA}\"/' {PACKAGES}/torch/version.py"
        root(host, f"[ ! -e /root/kept ] || mv /root/kept {library}; {as_it_was}")


def test_the_doctor_finds_them_healthy_and_puts_a_sick_one_into_quarantine(pair, tmp_path):
    sandbox, _before = pair
    file = tmp_path / "quarantine"
    words = ("doctor", str(sandbox.inventory), "--gpu", "--quarantine", str(file), "--json")
    healthy = report(provision(*words))
    assert {host: each["verdict"] for host, each in healthy["verdicts"].items()} == {"node1": "healthy", "node2": "healthy"}, healthy
    good(provision("sandbox", "fault", "xid79@node2", "--name", sandbox.name))
    try:
        sick = report(provision(*words))
        assert {host: each["verdict"] for host, each in sick["verdicts"].items()} == {"node1": "healthy", "node2": "unfit"}, sick
        shown = report(good(provision("status", str(sandbox.inventory), "--limit", f"!@{file}", "--json")))
        assert [each["name"] for each in shown["hosts"]] == ["node1"]
    finally:
        good(provision("sandbox", "fault", "--clear", "--name", sandbox.name))


def test_status_and_page_show_the_gpus_and_the_verdict(pair, tmp_path):
    sandbox, _before = pair
    shown = report(good(provision("status", str(sandbox.inventory), "--json")))
    assert {len(each["gpus"]) for each in shown["hosts"]} == {2}
    page = Path(json.loads(good(provision("runs", "--json", "-n", "20")).stdout)["runs"][-1]["folder"]) / "report.html"
    text = page.read_text(encoding="utf-8")
    assert f"<h1>{VERDICT}: both hosts have what was planned" in text
    assert text.count("<svg") >= 2


def test_nccl_comes_as_a_package_with_the_same_library(pair, key, tmp_path):
    """From a local repository package of that name, in which the library is the wheel's."""
    sandbox, _before = pair
    host = sandbox.hosts[0]
    assert not is_namespace(host)
    library = root(host, "find /opt/provision/nccl -name libnccl.so.2")
    parts, _stat = container(host).get_archive(library)
    with (tmp_path / "nccl.tar").open("wb") as file:
        file.writelines(parts)
    subprocess.run(["tar", "-C", tmp_path, "-xf", tmp_path / "nccl.tar"], check=True)
    full = f"{NCCL}-1+cuda13.3"
    package = nccl_packages.local_repository(tmp_path, tmp_path / "work", key, "debian12", full, library=tmp_path / "libnccl.so.2")
    found, _said = up(sandbox, "--nccl", str(package), "--no-smoke")
    assert {line["nccl"] for line in found["hosts"]} == {NCCL}
    version = "dpkg-query -W -f '${Status} ${Version}' libnccl2"
    said = root(host, f"ldconfig -p | grep libnccl.so.2; {version}; ls -d /opt/provision/nccl 2>&1 || true")
    assert "/usr/lib/x86_64-linux-gnu/libnccl.so.2" in said
    assert f"hold ok installed {full}" in said
    assert "No such file" in said
    shutil.rmtree(tmp_path)


def test_removal_leaves_the_hosts_as_they_were(pair):
    sandbox, before = pair
    removed = report(good(provision("remove", str(sandbox.inventory), "--yes", "--json")))
    assert {each["state"] for each in removed["hosts"]} == {"removed"}, removed
    for host in sandbox.hosts:
        assert sorted(set(state(host)) ^ set(before[host.name])) == []
