"""What is loaded and compared after PyTorch was installed, in an environment with a stand-in of PyTorch and libraries of gcc's.

`tests/integration/test_gpu_way.py` does it with the real build.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "playbooks/roles/pytorch/files/load_pytorch.py"

TORCH = """
class version:
    cuda, hip = {cuda!r}, {hip!r}
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 30, 7))
class backends:
    class cudnn:
        version = staticmethod(lambda: 92600)
__version__ = "2.15.0"
"""

Environment = Callable[..., subprocess.CompletedProcess[str]]


def compiled(path: Path, source: str, *more: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source_file = path.with_suffix(".c")
    source_file.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source_file, *more], check=True)
    source_file.unlink()


@pytest.fixture
def loaded(tmp_path: Path) -> Environment:
    """Runs the script where PyTorch is for that CUDA; ``libraries``: name → the one that it needs, and ``without``: the deleted ones."""
    site = tmp_path / "site"

    def package(name: str, version: str, *files: str) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def run(
        planned: str,
        cuda: str | None = "13.2",
        hip: str | None = None,
        *,
        runtime: int = 13020,
        nccl: str = "2.30.7",
        **more: dict[str, str],
    ) -> subprocess.CompletedProcess[str]:
        (site / "torch").mkdir(parents=True)
        (site / "torch/__init__.py").write_text(TORCH.format(cuda=cuda, hip=hip))
        (site / "torch/_dynamo.py").write_text("")
        compiled(site / "nvidia/libcudart.so.13", f"int cudaRuntimeGetVersion(int *n) {{ *n = {runtime}; return 0; }}")
        names = ["libcudart.so.13"]
        for name, needed in more.get("libraries", {}).items():
            compiled(site / "nvidia" / needed, "")
            compiled(site / "nvidia" / name, "", "-Wl,--no-as-needed", str(site / "nvidia" / needed))
            names += [name, needed]
        for name in more.get("without", ()):
            (site / "nvidia" / name).unlink()
        package("torch", "2.15.0")
        package("nvidia-cuda-runtime", "13.2.86", *(f"nvidia/{name}" for name in names if name not in more.get("optional", ())))
        package("nvidia-nccl-cu13", nccl)
        settings = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(site / "nvidia"), "PATH": "/usr/bin:/bin"}
        return subprocess.run([sys.executable, SCRIPT, planned], env=settings, capture_output=True, text=True, check=False)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    return done.stderr.strip()


def test_the_build_in_the_plan_is_loaded_whole(loaded: Environment) -> None:
    done = loaded("cuda=13.0", libraries={"libone.so.1": "libtwo.so.1"})  # a build of the same major runs
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.15.0\n", "")


@pytest.mark.parametrize("cuda", [None, "12.6"])
def test_another_build_is_refused(loaded: Environment, cuda: str | None) -> None:
    assert refused(loaded("cuda=13.2", cuda)) == f"torch.version.cuda is {cuda}: 2.15.0 is not the build in the plan, cuda=13.2"


def test_a_build_for_cpus_in_place_of_amds_is_refused(loaded: Environment) -> None:
    assert "torch.version.hip is missing" in refused(loaded("hip", None))


def test_a_build_for_cpus_may_be_any(loaded: Environment) -> None:
    assert loaded("cpu", None).returncode == 0


def test_a_library_that_lacks_one_of_the_packages_is_named(loaded: Environment) -> None:
    said = refused(loaded("cuda=13.2", libraries={"libone.so.1": "libtwo.so.1"}, without=["libtwo.so.1"]))
    assert said.splitlines()[0] == "libtwo.so.1: cannot open shared object file: No such file or directory"
    assert len(said.splitlines()) == 2  # that library itself, too


def test_a_library_that_a_host_may_lack_is_not(loaded: Environment) -> None:
    done = loaded("cuda=13.2", libraries={"libone.so.1": "libmlx5.so.1"}, without=["libmlx5.so.1"], optional=["libmlx5.so.1"])
    assert done.returncode == 0, done.stderr


def test_versions_that_differ_are_named(loaded: Environment) -> None:
    assert refused(loaded("cuda=13.2", runtime=13000, nccl="2.29.7")).splitlines() == [
        "PyTorch is for CUDA 13.2, and its CUDA runtime is 13.0",
        "PyTorch loads NCCL 2.30.7, and its package is 2.29.7",
    ]
