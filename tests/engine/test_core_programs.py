"""The whole core without Python (csrc/tests): ranks as threads, over TCP, in memory and on a network that misbehaves; strangers and
broken ranks; all interleavings of small programs; all of it under the sanitizers with COLLECTIVE_TEST_SANITIZERS=1."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from selftest import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.engine import simulation

AN_HOUR = os.environ.get("COLLECTIVE_TEST_FAULTS", "3600")  # seconds


# How the explorer's mutants (csrc/tests/explorer.cpp) show.
MUTANTS = {
    "blind": "lets operations run that differ",
    "forgetful": "the exchanges do not come to an end",
    "mute": "the exchanges do not come to an end",
    "absent": "a rank that has joined does not stay so",
    "selfish": "the exchanges do not come to an end",
    "impatient": "the exchanges do not come to an end",
    "touchy": "the ranks come to different verdicts",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def _run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (path,) = build(folder, [f"collective_core_{program}"])
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=2 * float(AN_HOUR) + 600)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["selftest", "memory"], marks=pytest.mark.slow),
        ["fuzz", "faults", "8", "0"],
        pytest.param(["fuzz", "faults", AN_HOUR, "1000000"], marks=pytest.mark.slow),
    ],
)
def test_ranks_in_memory_agree_whatever_their_network_does(folder, arguments):
    done = _run(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout or " 0 failures" in done.stdout


@pytest.mark.parametrize(("choice", "fewest"), [((), 3_500_000), pytest.param(("all",), 135_000_000, marks=pytest.mark.slow)])
def test_every_interleaving_of_small_programs_ends_well(folder, choice, fewest):
    done = _run(folder, "explorer", *choice)
    assert done.returncode == 0, done.stdout + done.stderr
    explored = re.search(r"(\d+) states, no violation", done.stdout)
    assert explored is not None, done.stdout
    assert int(explored[1]) >= fewest, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS)
def test_explorer_finds_spoilt_decisions(folder, mutant):
    done = _run(folder, "explorer", mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    violation, program, first, *_ = done.stdout.splitlines()
    assert re.fullmatch(f"violation: .*{MUTANTS[mutant]}.*", violation)
    assert program.startswith("  in the program ")
    assert first.startswith("  rank ")


def test_steps_grow_with_the_logarithm_of_the_hosts(folder):
    (program,) = build(folder, [simulation.PROGRAM])
    # Of small tensors that go with the headers, and others: how often the logarithm.
    operations = {("barrier", 0): 1, ("allreduce", 128): 1, ("broadcast", 128): 1, ("allgather", 8): 1}
    operations |= {("allreduce", 4096): 3, ("reducescatter", 20000): 3, ("broadcast", 100000): 2, ("allgather", 4096): 2}
    for hosts in (9, 16, 33, 64):
        for one in simulation.simulate(program, hosts, 2, list(operations)):
            assert one.steps <= operations[one.operation, one.size] * math.ceil(math.log2(hosts)), one
            assert one.messages <= hosts * one.steps, one


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("COLLECTIVE_TEST_SANITIZERS") != "1", reason="COLLECTIVE_TEST_SANITIZERS=1 runs it")
@pytest.mark.parametrize("sanitizer", ["ASAN", "TSAN"])
def test_core_is_clean(tmp_path, sanitizer):
    names = ["collective_core_selftest", "collective_core_fuzz", "collective_core_explorer"]
    programs = build(tmp_path, names, f"-DCOLLECTIVE_{sanitizer}=ON")
    # A count that a broken rank made up asks for more memory than there is: the engine must see that it gets none.
    environment = {**os.environ, f"{sanitizer}_OPTIONS": "allocator_may_return_null=1"}
    for program in programs:
        done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=900)  # the self-test takes minutes
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Sanitizer: " not in done.stderr.replace("WARNING: AddressSanitizer failed to allocate", ""), done.stderr
        assert "runtime error" not in done.stderr
