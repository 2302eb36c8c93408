"""One process at a time per lock, and one controller per host; the second is told who holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from provision import inventory
from provision.base import process_locks
from provision.base.errors import ProvisionError
from provision.remote import host_locks

A, B = "10.0.0.1", "10.0.0.2"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))


def locked(*addresses: str, purpose: str = "provision up") -> AbstractContextManager[None]:
    return host_locks.acquired(inventory.load(",".join(addresses)), purpose)


def test_a_second_holder_is_told_who_has_it() -> None:
    with (
        locked(A, B),
        pytest.raises(ProvisionError) as raised,
        locked(B, purpose="provision smoke"),
    ):
        pass
    assert f"pid {os.getpid()}" in str(raised.value)
    assert "`provision up`" in str(raised.value)
    assert raised.value.where == "10.0.0.2"


def test_a_refused_holder_keeps_none_of_the_others() -> None:
    with locked(B):
        with pytest.raises(ProvisionError), locked(A, B):
            pass
        with locked(A):
            pass


def test_other_hosts_and_a_second_time_are_free() -> None:
    with locked(A), locked(B):
        pass
    with locked(A, B):
        pass


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', '{"pid": "1; rm -rf /"}', '{"since": 1e300}', '{"since": "x"}', "[" * 9000, "no JSON", "\udcff"]
)
def test_what_another_user_wrote_into_a_lock_is_no_advice(tmp_path: Path, text: str) -> None:
    with locked(A):
        lock = next((tmp_path / "locks").iterdir())
        owner = {"pid": 1, "user": "u", "host": "h", "since": 0, "purpose": "p"}
        said = {**owner, **json.loads(text)} if text.startswith("{") else None
        lock.write_bytes(json.dumps(said).encode() if said else text.encode(errors="surrogateescape"))
        with pytest.raises(ProvisionError) as raised, locked(A):
            pass
    assert (raised.value.what, raised.value.hint) == ("locked: another run of provision works on it", "wait until it has ended")


def test_a_holder_that_dies_leaves_no_lock() -> None:
    program = textwrap.dedent(f"""
        import os, signal
        from provision import inventory
        from provision.remote import host_locks
        with host_locks.acquired(inventory.load({A!r}), "doomed"):
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    died = subprocess.run([sys.executable, "-c", program], check=False)
    assert died.returncode == -9
    with locked(A):
        pass


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    x, y = tmp_path / "locks/x.lock", tmp_path / "locks/y.lock"
    with process_locks.acquired(x) as first, process_locks.acquired(x) as second, process_locks.acquired(y) as other:
        assert first
        assert other
        assert second is None
    with process_locks.acquired(x) as again:
        assert again


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file")
    with pytest.raises(ProvisionError) as raised, process_locks.acquired(tmp_path / "locks/x.lock"):
        pass
    assert raised.value.where == str(tmp_path / "locks/x.lock")
