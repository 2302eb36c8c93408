"""collective_core.tensorflow on real ranks, as a program calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import WORKERS

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("threads", [1, 4])
def test_every_collective_eagerly_and_in_functions(launch, threads):
    env = {"COLLECTIVE_STALL_WARNING": "1"}  # a mismatch of names next to idle threads of TensorFlow's is an error after six times as long
    outcome = launch("tensorflow_operations", 2, arguments=[str(threads)], env=env, own_interpreter=True, limit=300).must_succeed()
    reports = outcome.reports()
    assert set(reports) == {0, 1}
    for rank, facts in reports.items():
        assert facts["torch"] is False
        assert f"rank {rank} is not in process set" in facts["outside"]
        for case in ("shape", "shape in a function"):
            _, text, engines, _ = facts[case]
            assert engines == "mismatch"
            assert "float32[1]" in text
            assert "float32[2]" in text
        assert facts["shape"][0] == "CollectiveError"
        assert "FailedPreconditionError" in facts["shape"][3]
        assert "InvalidArgumentError" in facts["root"][3]
        assert facts["shape in a function"][0] == "UnknownError"
        assert "'pair.1'" in facts["group"][1]
        assert facts["number"][2] == "mismatch"
        for case in ("type", "type on one rank", "type in a function"):
            assert "cannot be sent" in facts[case][1], case
        assert "complex128" in facts["type"][1]
        assert facts["sparse"][2] == "mismatch"
        assert "root rank 77 is not in this job" in facts["root"][1]
        assert "Median" in facts["operation"][1]
        assert "jit_compile" in facts["xla"][1]
        assert "no gradient" in facts["gradient"][1]
        assert facts["average and op"][0] == "ValueError"


def test_three_ranks_on_two_hosts(launch):
    parts = ["0", "reductions", "groups", "gathers", "sparse", "gradients"]
    outcome = launch("tensorflow_operations", 3, hosts=2, arguments=parts, own_interpreter=True, limit=300).must_succeed()
    assert set(outcome.reports()) == {0, 1, 2}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_optimizers_of_keras_2_are_refused():
    """Around one of them nothing would be reduced: it has no method ``apply``, and a state of it could not be read."""
    done = run(
        """
import collective_core.tensorflow as hvd, types

class SGD:  # what the optimizers of the package tf_keras have
    iterations, get_config, apply_gradients, variables = 0, dict, print, list

hvd.init()
for make in (hvd.DistributedOptimizer, lambda one: hvd.elastic.TensorFlowKerasState(types.SimpleNamespace(variables=[]), one)):
    try:
        make(SGD())
    except ValueError as error:
        print("Keras 2 (TF_USE_LEGACY_KERAS=1)" in str(error), end=" ")
"""
    )
    assert done.stdout == "True True ", done.stderr


def test_torch_imports_neither_tensorflow_nor_keras_nor_jax():
    done = run("import sys, collective_core.torch; print([m for m in ('tensorflow', 'keras', 'jax') if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_tapes_optimizers_sessions_and_states(launch, tmp_path):
    outcome = launch("tensorflow_training", 2, env={"TEST_FOLDER": str(tmp_path)}, own_interpreter=True, limit=300).must_succeed()
    reports = outcome.reports()
    assert set(reports) == {0, 1}
    for facts in reports.values():
        assert facts["unknown optimizer"].startswith("invalid optimizer")
        assert "broadcast_variables" in facts["eager"]


def test_ctrl_c_ends_a_rank_that_waits_in_a_function(launch):
    outcome = launch("tensorflow_failures", 2, arguments=["interrupted"], own_interpreter=True, keep_going=True, limit=200)
    # The signal comes after two seconds; in the engine's eyes the other rank could still come.
    facts = outcome.reports()[0]
    assert 2.0 <= facts["seconds"] < 8.0
    assert "KeyboardInterrupt" in facts["error"]


def test_a_rank_that_dies_is_named_to_one_that_waits_in_a_function(launch):
    outcome = launch("tensorflow_failures", 2, arguments=["killed"], own_interpreter=True, keep_going=True, limit=200)
    facts = outcome.reports()[0]
    assert (facts["type"], facts["kind"], facts["ranks"]) == ("UnknownError", "peer_lost", [1])
    assert "rank 1" in facts["text"]


def test_an_elastic_job_goes_on_without_a_rank_that_was_killed(tmp_path):
    """The others' functions fail with TensorFlow's error, which elastic.run knows to be the engine's; no step is lost or done twice."""
    job = [sys.executable, "-m", "collective_core.launch", "-np", "3", "--min-np", "1", sys.executable]
    command = [*job, str(WORKERS / "tensorflow_elastic.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert done.stdout.count("step 12 variable [-66.0, -66.0, -66.0] calls [3, 2") == 2
