"""CUDA tensors on a machine with a GPU: ``python -m pytest tests/gpu -s`` in an environment with PyTorch for CUDA and Open MPI.

Not part of ``make test``, whose machines have no GPU: there tests/engine/test_gpus.py runs the same code on CPU tensors. One GPU is enough:
for a communicator of one rank, for the way through host memory and, where NCCL is 2.30 or newer, for two ranks that share it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
WORKERS = Path(__file__).parent / "workers"
GPUS = torch.cuda.device_count()


def nccl_version() -> int:
    """As NCCL numbers it (23007), of the library in use: ``torch.cuda.nccl.version()`` is the one that PyTorch was compiled with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


CAN_SHARE = GPUS > 0 and nccl_version() >= 23000
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

ONE = pytest.param(1, {}, id="one rank")
SHARED = pytest.param(
    2,
    {"COLLECTIVE_NCCL": "on", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    id="two ranks on one GPU",
    marks=pytest.mark.skipif(not CAN_SHARE, reason="needs NCCL 2.30 or newer"),
)
OWN = [
    pytest.param(n, {"TEST_OWN_GPUS": "1"}, id=f"{n} ranks with their own", marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs"))
    for n in (2, 3)
]


def launch(worker: str, n: int, variables: dict[str, str], *options: str, arguments: tuple[str, ...] = ()) -> str:
    """What the ranks print."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *options, "-np", str(n)]
    command += [sys.executable, str(WORKERS / worker), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **variables})
    print(done.stdout)
    assert done.returncode == 0 or "--enable-recovery" in options, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(("n", "variables"), [ONE, SHARED, *OWN])
def test_results_are_right_and_nobody_waits_for_the_gpu(n: int, variables: dict[str, str]):
    assert launch("results.py", n, {**variables, "TEST_WAY": "nccl"}).count("REPORT ") == n


def test_two_ranks_on_one_gpu_go_through_host_memory():
    said = launch("results.py", 2, {"TEST_WAY": "host"})
    assert said.count("REPORT ") == 2
    assert said.count("ranks 0 and 1 use the same GPU") == 1


@pytest.mark.parametrize(("n", "variables"), [SHARED, OWN[0]])
def test_a_dead_rank_does_not_keep_the_gpus_of_others(n: int, variables: dict[str, str]):
    going_on = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
    assert "REPORT dead (1,)" in launch("dead_rank.py", n, variables, *going_on)


@pytest.mark.parametrize(("n", "variables"), [ONE, SHARED, *OWN])
def test_a_training_step_beside_ddp_over_nccl(n: int, variables: dict[str, str]):
    """Prints the figure; it has no bound, because machines differ."""
    assert "REPORT ms a step" in launch("step_beside_ddp.py", n, variables)
