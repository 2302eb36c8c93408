"""Agreeing on an operation over many hosts: steps, messages and bytes grow with the logarithm of the hosts, as counted by the engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

#: Of a frame, a run and a header, where all ranks ask for the same.
MESSAGE_BYTES = 256


@pytest.fixture(scope="module")
def worlds():
    command = [sys.executable, "-m", "benchmarks.engine", "--negotiation", "2,8,9,24,40", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["negotiation"]


@pytest.mark.slow
def test_steps_messages_and_bytes_grow_with_the_logarithm(worlds):
    assert [world["np"] for world in worlds] == [2, 8, 9, 24, 40]
    for world in worlds:
        few, steps = world["np"] <= 8, math.ceil(math.log2(world["np"]))
        assert world["steps"] == (1 if few else steps)
        assert world["messages"] == (world["np"] - 1 if few else steps)
        assert world["bytes"] <= MESSAGE_BYTES * world["messages"]


@pytest.mark.parametrize("arguments", [["--negotiation", "1"], ["--negotiation", "2,,4"], ["--negotiation", "--np", "2"]])
def test_a_wrong_command_line_is_one_sentence(arguments):
    command = [sys.executable, "-m", "benchmarks.engine", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=CHECKOUT)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--negotiation" in done.stderr
