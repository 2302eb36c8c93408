"""How a step that failed is told of."""

from __future__ import annotations

import pytest
from rollouts import rollout

from provision.inventory import by_name
from provision.plan.model import Plan
from provision.remote.ansible import Event
from provision.report.entries import task_failure

ROLLOUT = rollout(Plan(), by_name("node1,", ["node1"], None), {})


def failed(said: str, kind: str = "failed") -> Event:
    return Event(kind, "node1", "cmake", "Install cmake", {"msg": said})  # type: ignore[arg-type]


def test_a_known_error_comes_with_its_way_out() -> None:
    failure = task_failure(ROLLOUT, failed("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"))
    assert failure.where == "cmake / Install cmake"
    assert failure.hint is not None
    assert "df -h" in failure.hint
    assert "provision doctor explain disk-full" in failure.hint


def test_an_unknown_error_is_quoted_and_not_explained() -> None:
    failure = task_failure(ROLLOUT, failed("the frobnicator is out of plumbus"))
    assert failure.what == "the frobnicator is out of plumbus"
    assert failure.hint == "fix it, then run the same command again: finished steps are kept (--limit @failed: only the hosts that failed)"


@pytest.mark.parametrize("then", ["", "Connection refused", "No route to host", "Connection timed out"])
def test_a_lost_connection_is_told_as_one(then: str) -> None:
    """Also where a second try told why it could not be made again."""
    again = f"ssh: connect to host 10.0.0.1 port 22: {then}" if then else ""
    lost = 'Data could not be sent to remote host "10.0.0.1". Make sure this host can be reached over ssh: '
    failure = task_failure(ROLLOUT, failed(lost + again, "unreachable"))
    assert failure.hint is not None
    assert "it goes on where it stopped" in failure.hint
