"""Training with Keras on each of its backends. Workers import it, in interpreters of their own: the frameworks' threads survive no fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import WORKERS

pytestmark = pytest.mark.frameworks

NAMES = Path(__file__).parents[2] / "collective_core" / "horovod" / "src"
BACKENDS = ("tensorflow", "jax", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_two_ranks_is_training_with_the_whole_batch(launch, backend, tmp_path):
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    outcome = launch("keras_training.py", 2, arguments=[str(tmp_path)], env=environment, own_interpreter=True, limit=600).must_succeed()
    reports = outcome.reports()
    assert len(reports) == 2
    for report in reports.values():
        assert report["backend"] == backend
        assert len(report["found"]) >= 45
        assert [name for name, is_so in report["found"].items() if not is_so] == []
    assert outcome.stdout.count("finished gradual learning rate warmup to 0.4") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_elastic_job_goes_on_without_a_rank_that_was_killed(backend, tmp_path):
    """The rank is killed in ``model.fit``; the weights are those of one process, so that no epoch is lost or done twice."""
    job = [sys.executable, "-m", "collective_core.launch", "-np", "2", "--min-np", "1", sys.executable]
    command = [*job, str(WORKERS / "keras_elastic.py"), str(tmp_path)]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert "rank 0 epoch 4 same True sizes [2, 1" in done.stdout


#: What Horovod 0.28 has in horovod.keras or horovod.tensorflow.keras.
OF_HOROVOD = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def test_it_has_horovods_names():
    code = f"""
import collective_core.keras as hvd, collective_core.tensorflow.keras, horovod.keras, horovod.tensorflow.keras
from horovod.keras.callbacks import MetricAverageCallback
for module in (collective_core.tensorflow.keras, horovod.keras, horovod.tensorflow.keras):
    assert all(hasattr(module, name) for name in {OF_HOROVOD})
    assert all(getattr(module, name) is getattr(hvd, name) for name in hvd.__all__ if name not in ("callbacks", "elastic"))
    assert module.callbacks.MetricAverageCallback is MetricAverageCallback is hvd.callbacks.MetricAverageCallback
    assert module.elastic.KerasState is hvd.elastic.KerasState
"""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(NAMES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
