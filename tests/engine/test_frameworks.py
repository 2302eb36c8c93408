"""What must be installed for each framework, and ranks of one job that use different ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "mixed_frameworks.py"


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("torch", "1.9.1+cu111", "collective_core.torch needs PyTorch 1.10 or newer: pip install 'torch>=1.10'; installed is 1.9.1+cu111"),
        ("tensorflow", "2.15.1", "needs TensorFlow 2.16 or newer: pip install 'tensorflow>=2.16' (without a GPU: 'tensorflow-cpu>=2.16')"),
        ("keras", "2.15.0", "needs Keras 3.3 or newer: pip install 'keras>=3.3'; installed is 2.15.0"),
        ("jax", "0.4.30", "needs JAX 0.6.2 or newer: pip install 'jax>=0.6.2'; installed is 0.4.30"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_framework_that_is_missing_or_too_old_is_named(tmp_path, package, version, text, is_there):
    """In its place a package that is not there, or that has no more than an old one's version."""
    (tmp_path / package).mkdir()
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\")\n"
    (tmp_path / package / "__init__.py").write_text(f"__version__ = {version!r}\n" if is_there else missing)
    said = _import(tmp_path, package)
    assert text.partition("; installed")[0] in said
    assert (f"installed is {version}" if is_there else f"importing {package} failed: No module named '{package}'") in said


def test_a_backend_of_keras_that_is_not_known_is_named(tmp_path):
    (tmp_path / "keras.py").write_text("__version__ = '3.15.1'\nclass backend:\n    backend = staticmethod(lambda: 'openvino')\n")
    assert "Keras's backend is openvino: set KERAS_BACKEND to tensorflow, jax or torch" in _import(tmp_path, "keras")


def _import(folder: Path, package: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import collective_core.{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def _run(*frameworks: str, options: tuple[str, ...] = ()) -> list[str]:
    """What the ranks print, under our launcher."""
    job = [sys.executable, "-m", "collective_core.launch", "-np", str(len(frameworks)), *options, sys.executable, str(WORKER), *frameworks]
    done = subprocess.run(job, capture_output=True, text=True, timeout=100, check=False)
    return sorted(
        line.partition(" rank ")[2] for line in (done.stdout + done.stderr).splitlines() if line.startswith("[") and " rank " in line
    )


def test_numpy_arrays_and_pytorchs_tensors_meet_where_they_agree():
    assert _run("numpy", "torch") == ["0: [0.5, 0.5, 0.5]", "1: [0.5, 0.5, 0.5]"]


@pytest.mark.parametrize("calls", [["distributed", "torch"], pytest.param(["torch", "distributed"], marks=pytest.mark.slow)])
def test_a_group_of_torch_distributed_and_init_do_not_meet(launch, calls):
    (said,) = _run(*calls, options=("--start-timeout", "2"))  # of PyTorch's rank our launcher makes an end: its store waits for minutes
    assert f"{calls.index('torch')}: rank" in said
    assert ". All ranks must call the same: init(), or torch.distributed.init_process_group" in said
    names = {"torch": "init()", "distributed": "torch.distributed.init_process_group"}
    text = f"the ranks do not call the same to join the job: {names[calls[0]]} on rank 0; {names[calls[1]]} on rank 1"
    assert launch("mixed_frameworks.py", 2, arguments=calls).stdout.count(text) == 2


@pytest.mark.frameworks
def test_ranks_with_different_frameworks_are_refused():
    text = "the ranks use different frameworks: collective_core.tensorflow on rank 0; collective_core.torch on rank 1, 2."
    said = _run("tensorflow", "torch", "torch")
    assert len(said) == 3
    assert all(line.startswith(f"{rank}: {text}") for rank, line in enumerate(said))


@pytest.mark.frameworks
def test_a_framework_that_is_imported_after_the_start_is_told_by_its_operations():
    said = _run("late tensorflow", "late torch")
    assert len(said) == 2
    for line in said:
        assert "the ranks ask for different things: rank 0" in line
        assert "'one.fused.0' of float32[3] with Average; rank 1" in line
