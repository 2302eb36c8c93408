"""Training with JAX. Workers import it, in interpreters of their own: its threads survive no fork."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import WORKERS

pytestmark = pytest.mark.frameworks


REFUSED = {
    "shapes": ("CollectiveError", r"rank 0 .*float64\[2\].*rank 1 .*float64\[3\]"),
    "compiled shapes": ("JaxRuntimeError", r"CollectiveError: .*rank 0 .*float64\[2\].*rank 1 .*float64\[3\]"),
    "fused shapes": ("CollectiveError", "the ranks ask for different things"),
    "complex": ("InvalidUseError", "arrays of complex.* cannot be sent"),
    "op": ("JaxRuntimeError", "op='Median' is not possible here; choose from Sum, Average"),
    "text": ("InvalidUseError", "str cannot be sent: pass arrays or numbers, or broadcast_object"),
    "key": ("InvalidUseError", "of random keys pass jax.random.key_data"),
    "rows": ("JaxRuntimeError", "inside jit all ranks must give as many rows"),
    "scalar": ("InvalidUseError", "needs at least one dimension"),
    "splits": ("InvalidUseError", "alltoall with splits cannot be compiled"),
    "vmap": ("InvalidUseError", "only allreduce and broadcast can be under vmap"),
    "maximum": ("CollectiveError", "a reduction with op=Max has no gradient"),
    "trees": ("CollectiveError", "trees differ"),
}


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (3, 2)])
def test_collectives_give_what_numpy_gives_at_once_and_compiled(launch, n, hosts):
    reports = launch("jax_collectives.py", n, hosts, own_interpreter=True, limit=300).must_succeed().reports()
    assert len(reports) == n
    for report in reports.values():
        assert report["checked"] > 300
        for label, (kind, text) in REFUSED.items():
            assert report["errors"][label][0] == kind, report["errors"][label]
            if n == 2 or label not in ("shapes", "compiled shapes"):
                assert re.search(text, report["errors"][label][1], re.DOTALL), report["errors"][label]
    assert "is not in process set" in reports[1]["errors"]["not in the set"][1]


def test_training_on_two_ranks_is_training_with_the_whole_batch(launch):
    reports = launch("jax_training.py", 2, own_interpreter=True, limit=300).must_succeed().reports()
    assert len(reports) == 2
    for report in reports.values():
        assert len(report["found"]) >= 19
        assert [name for name, is_so in report["found"].items() if not is_so] == []


def test_other_parts_import_no_jax():
    code = "import sys, collective_core, collective_core.torch; print('jax' in sys.modules, 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_elastic_job_goes_on_without_a_rank_that_was_killed(tmp_path):
    """The others' compiled functions fail with JAX's error, which elastic.run knows to be the engine's."""
    launch = [sys.executable, "-m", "collective_core.launch", "-np", "2", "--min-np", "1"]
    command = [*launch, sys.executable, str(WORKERS / "jax_elastic.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert "step 12 params [12.0, 12.0, 12.0]" in done.stdout
