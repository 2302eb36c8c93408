"""Libraries without code for a GPU of their host: the scan of an environment, the verdict, and the refusal of `provision run`.

The libraries were made by nvcc (`tests/data/gpu_code`); `nvidia-smi` is a fake that answers as that of a host with these GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from invented_hosts import stated
from typer.testing import CliRunner

from provision import inventory as inventories
from provision.base import resources
from provision.base.errors import ProvisionError
from provision.cli.main import app
from provision.hostside import gpu_code as script
from provision.launch import program
from provision.launch.launchers import RunOptions
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect, gpu_code
from provision.survey.gpu_code import Gpu, Library, Scan

LIBRARIES = Path(__file__).parents[2] / "data" / "gpu_code"
V100, H100, B300 = (
    Gpu(name="V100", architecture="7.0"),
    Gpu(name="H100", architecture="9.0"),
    Gpu(name="B300", architecture="10.3"),
)
Environment = Callable[[str], Path]


def library(path: str = "/v/x.so", code: str = "8.0", ptx: str = "", containers: int = 4, with_ptx: int = 4) -> Library:
    return Library(
        path=path, containers=containers, machine_code=dict.fromkeys(code.split(), containers), ptx=dict.fromkeys(ptx.split(), with_ptx)
    )


@pytest.mark.parametrize(
    ("capability", "found", "runs"),
    [
        ("8.6", library(code="8.0"), True),
        ("8.0", library(code="8.6"), False),
        ("9.0", library(code="8.0"), False),
        ("9.0", library(code="8.0", ptx="8.0"), True),
        ("7.5", library(code="8.0", ptx="8.0"), False),
        ("12.0", library(code="8.0", ptx="9.0", with_ptx=1), False),
        ("9.0", library(code="9.0a"), True),
        ("10.3", library(code="10.0a"), False),
        ("10.3", library(code="10.0f"), True),
        ("10.3", library(code="9.0", ptx="9.0a"), False),
        ("gfx942", library(code="gfx90a gfx942"), True),
        ("gfx90a", library(code="gfx908 gfx942"), False),
        ("gfx90a", library(code="gfx9-generic"), True),
        ("gfx1103", library(code="gfx1100 gfx11-generic"), True),
        ("gfx1201", library(code="gfx11-generic"), False),
        ("gfx1201", library(code="amdgcnspirv"), True),
        ("gfx1201", library(code="gfx942 unknown"), True),
        ("gfx1201", library(code="8.0"), True),  # it is not for GPUs of AMD
        ("8.0", library(code="gfx942"), True),
    ],
)
def test_which_gpus_run_a_library(capability: str, found: Library, runs: bool) -> None:
    assert found.runs_on(capability) is runs


def test_a_problem_names_library_architectures_gpus_and_remedy() -> None:
    scan = Scan(gpus=[V100, H100, V100], libraries=[library("/v/site-packages/flash_attn_2_cuda.so")], complete=True)
    (problem,) = gpu_code.missing_code("a", scan)
    assert (problem.host, problem.id, problem.severity) == ("a", "cuda-no-kernel-image", "error")
    assert problem.what == "/v/site-packages/flash_attn_2_cuda.so has no code for its V100 (7.0) and its H100 (9.0); it has 8.0"
    assert 'TORCH_CUDA_ARCH_LIST="7.0;8.0;9.0"' in (problem.hint or "")
    (problem,) = gpu_code.missing_code("a", replace_libraries(scan, library("/v/torch/lib/libtorch_cuda.so", "7.5 9.0")))
    assert problem.what.endswith("has no code for its V100 (7.0); it has 7.5, 9.0")
    assert "a build of PyTorch" in (problem.hint or "")
    assert list(gpu_code.missing_code("a", scan, package="torch")) == [], "flash-attn may be optional"


def test_on_hosts_with_gpus_of_amd_the_same_is_said() -> None:
    gpu = Gpu(name="AMD GPU", architecture="gfx90a")
    names = ("flash_attn_2_hip.so", "libhipblaslt.so", "libMIOpenCKGroupedConv_gfx942.so", "flash_attn_2_cuda.so")
    codes = ("gfx942 gfx1100", "gfx942", "gfx942", "8.0")
    scan = Scan(gpus=[gpu], libraries=[library(f"/v/{name}", code) for name, code in zip(names, codes, strict=True)], complete=True)
    (problem,) = gpu_code.missing_code("a", scan)
    assert problem.id == "cuda-no-kernel-image"
    assert problem.what == "/v/flash_attn_2_hip.so has no code for its AMD GPU (gfx90a); it has gfx1100, gfx942"
    assert 'PYTORCH_ROCM_ARCH="gfx1100;gfx90a;gfx942"' in (problem.hint or "")


def test_code_that_cannot_be_read_is_said_to_be_unknown_and_not_missing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="AMD GPU", architecture="gfx90a")
    for gpus, said in (([gpu], 1), ([H100], 0)):
        body = Scan(gpus=gpus, libraries=[library("/v/a.so", "gfx942 unknown")], complete=True).model_dump_json()
        monkeypatch.setattr(ssh, "run", lambda *_, body=body, **__: {"localhost": ssh.Answer(0, f"{ssh.ANSWER}\n{body}\n", "")})
        problems = gpu_code.check(session, {"localhost": "python3"})
        assert [(each.severity, "not known" in each.what) for each in problems] == [("warning", True)] * said


def test_variants_and_libraries_for_some_gpus_are_no_problem() -> None:
    of_each_cuda = [
        library("/v/bitsandbytes/libbitsandbytes_cuda118.so", "8.0"),
        library("/v/bitsandbytes/libbitsandbytes_cuda126.so", "9.0"),
    ]
    scan = Scan(gpus=[H100], libraries=[*of_each_cuda, library("/v/flash_attn_3.so", "10.0a")], complete=True)
    assert list(gpu_code.missing_code("a", scan)) == []
    assert len(list(gpu_code.missing_code("a", replace_libraries(scan, library("/w/libbitsandbytes_cuda118.so"))))) == 1


def replace_libraries(scan: Scan, *libraries: Library) -> Scan:
    return scan.model_copy(update={"libraries": list(libraries)})


# -------------------------------------------------------------------------------------------- on a host


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Session(inventories.load("localhost"), Progress(), {}) as session:
        yield session


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A Python with libraries, on a host with these GPUs (as nvidia-smi lists them)."""

    def make(gpus: str) -> Path:
        smi = tmp_path / "bin/nvidia-smi"
        smi.parent.mkdir(exist_ok=True)
        smi.write_text(f"#!/bin/sh\ncat <<E\n{gpus}\nE\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
        modules = tmp_path / "modules/kernels"
        modules.mkdir(parents=True, exist_ok=True)
        for name in ("architectures", "compressed"):
            shutil.copy(LIBRARIES / f"{name}.so", modules / f"{name}.cpython-311.so")
        (modules / "damaged.so").write_bytes((LIBRARIES / "linked.so").read_bytes()[:5000])
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/modules exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        return python

    return make


def test_an_environment_is_held_against_the_gpus(session: Session, environment: Environment, tmp_path: Path) -> None:
    python = environment("NVIDIA H200, 9.0\nTesla P100, 6.0")
    problems = gpu_code.check(session, {"localhost": str(python)})
    place = tmp_path / "modules/kernels"
    assert {problem.what for problem in problems} == {
        f"{place}/compressed.cpython-311.so has no code for its Tesla P100 (6.0); it has 7.5, 9.0, PTX of 9.0",
        f"{place}/architectures.cpython-311.so has no code for its Tesla P100 (6.0); it has 7.5, 8.0, 9.0a, 10.0f, 12.0, PTX of 12.0",
    }
    assert gpu_code.check(session, {"localhost": str(environment("NVIDIA H100, 9.0"))}) == []
    planned = gpu_code.check(session, {"localhost": str(python)}, ["9.0", "6.0"])
    assert [problem.what.partition("; ")[0].partition(" has ")[2] for problem in planned] == ["no code for its GPU (6.0)"] * 2


def test_what_was_read_is_read_again_only_where_it_has_changed(
    session: Session, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "modules/kernels"
    python = str(environment("Tesla P100, 6.0"))
    before = gpu_code.check(session, {"localhost": python})
    cache = tmp_path / "cache/provision" / script.CACHE
    kept = json.loads(cache.read_text())["libraries"]
    kept = {path: entry for path, entry in kept.items() if path.startswith(str(place))}
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules")])
    reads: list[str] = []
    read = script.read
    monkeypatch.setattr(script, "read", lambda path: reads.append(path) or read(path))
    assert script.scan(kept, float("inf")) == (kept, True)
    assert reads == [f"{place}/damaged.so"]
    os.utime(place / "compressed.cpython-311.so")
    script.scan(kept, float("inf"))
    assert f"{place}/compressed.cpython-311.so" in reads
    for wrong in ("", "[]", '{"libraries": {"x": 1}, "gpus": 3}', "[" * 100_000):
        cache.write_text(wrong)
        assert gpu_code.check(session, {"localhost": python}) == before


def test_without_time_the_next_run_goes_on(environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment("Tesla P100, 6.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules")])
    assert script.scan({}, 0.0) == ({}, False)


def test_without_gpus_no_python_is_started(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "env"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert gpu_code.check(session, {"localhost": "/absent/python"}) == []


@pytest.mark.parametrize("answer", ["", "{}", '{"gpus": [{"name": "x", "architecture": "9"}], "libraries": [], "complete": true}'])
def test_an_answer_that_is_none_is_a_warning(session: Session, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(ssh, "run", lambda *_, **__: {"localhost": ssh.Answer(0, f"motd\n{ssh.ANSWER}\n{answer}\n", "oh")})
    (problem,) = gpu_code.check(session, {"localhost": "python3"})
    assert (problem.severity, problem.what) == ("warning", "which GPUs its environment has code for is not known: oh")


def test_run_refuses_and_can_be_told_not_to(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = environment("Tesla P100, 6.0")
    (tmp_path / "modules/collective_core").mkdir(parents=True)
    (tmp_path / "modules/collective_core/__init__.py").touch()
    followed: list[object] = []
    monkeypatch.setattr(program, "follow", lambda _session, job, *_, **__: followed.append(job) or 0)
    options = RunOptions(("true",), 1, {}, str(tmp_path), (), python=str(python), launcher="own")
    inventory = inventories.load("localhost")
    with pytest.raises(ProvisionError, match=r"no code for its Tesla P100 \(6\.0\)") as refused:
        program.run(inventory, options, Progress(), {})
    assert refused.value.where == "localhost"
    assert "--no-gpu-check" in (refused.value.hint or "")
    assert followed == []
    assert program.run(inventory, options, Progress(), {}, gpu_check=False) == 0
    assert program.run(inventory, replace(options, python=str(environment("NVIDIA H100, 9.0"))), Progress(), {}) == 0
    assert len(followed) == 2


@pytest.mark.parametrize(("gpus", "wrong"), [("Tesla P100, 6.0", 2), ("NVIDIA H100, 9.0", 0), ("", 0)])
def test_the_doctor_finds_it(environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, wrong: int) -> None:
    """The facts are stated; the environment is looked at by the script that hosts run."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, _, capability = gpus.partition(", ")
    seen = [{"name": name, "compute_capability": capability}] if gpus else []
    known = stated({"python": {"executable": str(environment(gpus))}, "gpus": seen})
    monkeypatch.setattr(collect, "survey_hosts", lambda *_, **__: collect.Survey({"localhost": known}))
    done = CliRunner().invoke(app, ["doctor", "localhost", "--only", "cuda-no-kernel-image", "--json"])
    assert done.exit_code == (1 if wrong else 0), done.output
    found = json.loads(done.stdout)["findings"]
    assert [(each["id"], each["severity"]) for each in found] == [("cuda-no-kernel-image", "error")] * bool(wrong)
    for library in ("compressed", "architectures") if wrong else ():
        assert f"kernels/{library}.cpython-311.so has no code for its Tesla P100 (6.0)" in found[0]["cause"]


def test_it_can_be_sent_as_one_argument() -> None:
    assert len(resources.inline_command("gpu_code.py")) < 20_000
