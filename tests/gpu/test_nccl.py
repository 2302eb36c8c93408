"""CUDA tensors through NCCL, on a machine with two GPUs: ``python -m pytest tests/gpu`` in an environment with PyTorch for CUDA.

Not part of ``make test``, whose machines have no GPU. What can be tested without one (which library is loaded, its version, the engine's
part of the protocol) is in tests/engine/test_nccl.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
WORKER = Path(__file__).parent / "workers" / "nccl_ranks.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_are_right_and_nobody_waits_for_the_gpu():
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "--allow-run-as-root", "--bind-to", "none", "-np", "2", "-x", "COLLECTIVE_NCCL=on"]
    done = subprocess.run([*command, sys.executable, str(WORKER)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("REPORT ") == 2


def ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    mpirun = Path(sys.executable).with_name("mpirun")
    going_on = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
    command = [str(mpirun), "--allow-run-as-root", "--bind-to", "none", *going_on, "-np", "2", "-x", "COLLECTIVE_NCCL=on"]
    worker = str(WORKER.with_name("dead_rank.py"))
    return subprocess.run([*command, sys.executable, worker, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_dead_rank_does_not_keep_the_gpus_of_others():
    done = ranks()
    assert "REPORT dead (1,)" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_two_ranks_on_one_gpu_go_through_host_memory():
    done = ranks("shared")
    assert done.stdout.count("REPORT shared") == 2, done.stdout + done.stderr
