"""No one joins uninvited, and nothing is left behind."""

from __future__ import annotations

import hashlib
import hmac
import os
import time

import pytest
from cases import slow_but_last
from leftovers import MARK, files, processes_marked
from processes import GONE

from collective_core import _native


@pytest.mark.parametrize("hosts", slow_but_last(1, 2))
@pytest.mark.parametrize("who", ["strangers", "flood"])
def test_strangers_do_not_disturb_the_start(launch, tmp_path, hosts, who):
    reports = launch("security.py", 2, hosts, [who, str(tmp_path)], own_interpreter=True).must_succeed().reports()
    for entry in reports.values():
        assert entry["connected"], entry
        assert not entry["still_listening"], "the listener must close once all ranks are there"


def test_a_rank_that_was_hung_up_on_calls_again(launch, tmp_path):
    reports = launch("security.py", 2, 2, ["dropped", str(tmp_path)], own_interpreter=True).must_succeed().reports()
    assert all(entry["connected"] for entry in reports.values()), reports
    assert reports[1]["calls"] == 4, "three for control, one for data"


def test_what_a_rank_said_at_an_earlier_start_opens_no_door(launch, tmp_path):
    reports = launch("security.py", 2, 2, ["replay", str(tmp_path)], own_interpreter=True).must_succeed().reports()
    assert all(entry["connected"] for entry in reports.values()), reports
    answers = reports[1]["answers"]
    assert answers, "nothing was recorded"
    assert set(answers) == {32 + 32}, "each time a challenge and a proof of its own, and not a word more"


@pytest.mark.parametrize("hosts", slow_but_last(1, 2))
def test_a_rank_with_another_secret_is_refused(launch, tmp_path, hosts):
    reports = launch("security.py", 2, hosts, ["wrong-secret", str(tmp_path)], keep_going=True, own_interpreter=True).reports()
    assert not any(entry["connected"] for entry in reports.values())
    # Over a network both call; who is first has proof that the other is a stranger, and hangs up on the call that is under way.
    assert any("does not know this job's secret" in entry["error"] for entry in reports.values())
    assert reports[0]["kind"] in ("timeout", "peer_lost")  # it waited for rank 1, or called it and was not convinced either
    assert reports[0]["ranks"] == [1]


def test_hmac_is_the_standard_one():
    for key_length in (0, 1, 32, 64, 65, 200):
        for length in (0, 1, 55, 56, 63, 64, 65, 1000):
            key, message = os.urandom(key_length), os.urandom(length)
            digest = bytearray(32)
            buffer = (_native.ctypes.c_char * 32).from_buffer(digest)
            _native.library().cc_hmac_sha256(key, key_length, message, length, buffer)
            assert bytes(digest) == hmac.new(key, message, hashlib.sha256).digest()


def test_killed_ranks_leave_nothing_behind(launch, tmp_path):
    before, mark = files(), str(tmp_path)
    reports = launch("litter.py", 2, env={MARK: mark}).reports()
    assert len(reports) >= 1
    assert all(entry["marked"] for entry in reports.values()), "its processes could not be told from others"
    end = time.monotonic() + GONE
    while processes_marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not processes_marked(mark)  # nor their sockets: those have no other owner
    assert files() <= before


def test_a_forked_child_is_told_and_hides_no_death(launch):
    outcome = launch("forked.py", 2, keep_going=True)
    lines = [line for line in outcome.stdout.splitlines() if "REPORT" in line]
    child = next(line for line in lines if "child" in line)
    assert child.count("spawn or forkserver") == 3, "neither an operation nor another init nor the end of a timeline is possible"
    parent = outcome.reports()[0]
    assert parent["ranks"] == [1]
    assert parent["outlived"]
