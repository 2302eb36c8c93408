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
WORKERS = Path(__file__).parent / "workers"


def launch(worker: str, n: int, *options: str, arguments: tuple[str, ...] = (), limit: int = 300) -> subprocess.CompletedProcess[str]:
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "--allow-run-as-root", "--bind-to", "none", *options, "-np", str(n), "-x", "COLLECTIVE_NCCL=on"]
    return subprocess.run([*command, sys.executable, str(WORKERS / worker), *arguments], capture_output=True, text=True, timeout=limit)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("worker", ["nccl_ranks.py", "nccl_rows.py"])
def test_results_are_right_and_nobody_waits_for_the_gpu(worker: str):
    done = launch(worker, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("REPORT ") == 2


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_rows_of_a_process_set():
    done = launch("nccl_rows.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("REPORT ") == 3


def ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    going_on = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
    return launch("dead_rank.py", 2, *going_on, arguments=arguments, limit=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_dead_rank_does_not_keep_the_gpus_of_others():
    done = ranks()
    assert "REPORT dead (1,)" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_two_ranks_on_one_gpu_go_through_host_memory():
    done = ranks("shared")
    assert done.stdout.count("REPORT shared") == 2, done.stdout + done.stderr
