"""CUDA tensors on a machine with a GPU: ``python -m pytest tests/gpu -s`` in an environment with PyTorch for CUDA and Open MPI.

Not part of ``make test``, whose machines have no GPU: there tests/engine/test_gpus.py runs the same code on CPU tensors. One GPU is enough:
for a communicator of one rank, for the way through host memory and, where NCCL is 2.30 or newer, for two ranks that share it.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
WORKERS = Path(__file__).parent / "workers"
EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LINE = re.compile(r"sum of weights (-?\d+\.\d+)")
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


def run(command: list[str], variables: dict[str, str], may_fail: bool = False) -> str:
    """What it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **variables})
    print(done.stdout)
    assert done.returncode == 0 or may_fail, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(worker: str, n: int, variables: dict[str, str], *options: str) -> str:
    """What the ranks print."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *options, "-np", str(n)]
    return run([*command, sys.executable, str(WORKERS / worker)], variables, may_fail="--enable-recovery" in options)


@pytest.mark.parametrize(("n", "variables"), [ONE, SHARED, *OWN])
def test_results_are_right_and_nobody_waits_for_the_gpu(n: int, variables: dict[str, str]):
    assert launch("results.py", n, {**variables, "TEST_WAY": "nccl"}).count("REPORT ") == n


@pytest.mark.parametrize(("n", "variables"), [ONE, SHARED, *OWN])
def test_a_graph_is_captured_while_a_collective_is_under_way(n: int, variables: dict[str, str]):
    assert launch("captured.py", n, variables).count("REPORT captured") == n


def test_two_ranks_on_one_gpu_go_through_host_memory():
    said = launch("results.py", 2, {"TEST_WAY": "host"})
    assert said.count("REPORT ") == 2
    assert said.count("ranks 0 and 1 use the same GPU") == 1


@pytest.mark.parametrize(("n", "variables"), [SHARED, OWN[0]])
def test_a_dead_rank_does_not_keep_the_gpus_of_others(n: int, variables: dict[str, str]):
    going_on = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
    assert "REPORT dead (1,)" in launch("dead_rank.py", n, variables, *going_on)


def test_a_gpu_error_is_not_committed_and_the_job_goes_on(tmp_path: Path):
    job = [sys.executable, "-m", "collective_core.launch", "-np", "2", "--min-np", "1", "--max-restarts", "2"]
    said = run([*job, sys.executable, str(WORKERS / "gpu_error.py"), str(tmp_path / "failed")], {})
    assert "REPORT not committed: " in said
    assert "device-side assert" in said
    assert "REPORT done 0" in said


HOST = pytest.param("collective", 2, {"TEST_WAY": "host"}, id="two ranks through host memory")
NCCL = [
    pytest.param("collective", 1, {"TEST_WAY": "nccl"}, id="one rank"),
    pytest.param("cpu:collective,cuda:nccl", 1, {"TEST_WAY": "nccl"}, id="one rank, both named"),
    pytest.param("collective", *SHARED.values, id=SHARED.id, marks=SHARED.marks),
]


@pytest.mark.parametrize(("backend", "n", "variables"), [HOST, *NCCL])
def test_torch_distributed_with_tensors_of_a_gpu(backend: str, n: int, variables: dict[str, str]):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    said = run([*command, str(WORKERS / "distributed.py"), backend], {"TEST_WAY": "nccl", **variables})
    assert said.count("REPORT ") == n
    assert ("go through host memory" in said) == (variables.get("TEST_WAY") == "host")


@pytest.mark.parametrize("n", [1, 2])
def test_all_ranks_skip_a_step_in_which_one_overflows(n: int):
    assert launch("scaled.py", n, {}).count("REPORT ") == n


@pytest.mark.parametrize("n", [1, 2])
def test_jax_on_a_gpu(n: int):
    pytest.importorskip("jax_cuda13_plugin")
    assert launch("jax_gpu.py", n, {}).count("REPORT ") == n


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("script", ["pytorch_mnist", "pytorch_imagenet_resnet", "elastic_pytorch"])
def test_examples_in_horovods_style(script: str, n: int, tmp_path: Path):
    arguments = ["--checkpoints", str(tmp_path)] if "imagenet" in script else []
    elastic = ["--min-np", "1"] if "elastic" in script else []
    command = [sys.executable, "-m", "collective_core.launch", "-np", str(n), *elastic]
    said = run([*command, sys.executable, str(EXAMPLES / f"{script}.py"), *arguments], {})
    assert len(set(LAST_LINE.findall(said))) == 1, said


@pytest.mark.parametrize("script", ["pytorch_ddp", "pytorch_fsdp2", "accelerate_ddp", "hf_trainer", "lightning_ddp"])
def test_examples_for_torch_distributed(script: str):
    n = 2 if script in ("pytorch_ddp", "pytorch_fsdp2") else 1
    arguments = ["--devices", "1"] if "lightning" in script else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    said = run([*command, str(EXAMPLES / f"{script}.py"), *arguments], {"HF_HUB_OFFLINE": "1"})
    assert len(set(LAST_LINE.findall(said))) == 1, said


@pytest.mark.parametrize(("n", "variables"), [ONE, SHARED, *OWN])
def test_a_training_step_beside_ddp_over_nccl(n: int, variables: dict[str, str]):
    """Prints the figure; it has no bound, because machines differ."""
    assert "REPORT ms a step" in launch("step_beside_ddp.py", n, variables)
