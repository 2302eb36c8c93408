"""Locks between processes and between controllers; the second one learns who has the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from provision.base import process_locks
from provision.base.errors import ProvisionError
from provision.remote import host_locks

A, B = ("10.0.0.1", 22), ("10.0.0.2", 22)


def test_a_second_process_learns_who_has_the_lock(tmp_path: Path) -> None:
    with (
        host_locks.hosts(tmp_path, [A, B], "provision up"),
        pytest.raises(ProvisionError) as raised,
        host_locks.hosts(tmp_path, [B], "provision smoke"),
    ):
        pass
    assert f"pid {os.getpid()}" in str(raised.value)
    assert "`provision up`" in str(raised.value)
    assert raised.value.where == "10.0.0.2"


def test_a_refused_process_keeps_no_other_lock(tmp_path: Path) -> None:
    with host_locks.hosts(tmp_path, [B], "one"):
        with pytest.raises(ProvisionError), host_locks.hosts(tmp_path, [A, B], "two"):
            pass
        with host_locks.hosts(tmp_path, [A], "three"):
            pass


def test_locks_are_per_host_and_released(tmp_path: Path) -> None:
    with host_locks.hosts(tmp_path, [A], "one"), host_locks.hosts(tmp_path, [B], "two"):
        pass
    with host_locks.hosts(tmp_path, [A, B], "three"):
        pass


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', '{"pid": "1; rm -rf /"}', '{"since": 1e300}', '{"since": "x"}', "[" * 9000, "no JSON", "\udcff"]
)
def test_text_of_another_user_in_a_lock_is_not_shown_as_a_hint(tmp_path: Path, text: str) -> None:
    with host_locks.hosts(tmp_path, [A], "provision up"):
        lock = next(tmp_path.iterdir())
        owner = {"pid": 1, "user": "u", "host": "h", "since": 0, "purpose": "p"}
        said = {**owner, **json.loads(text)} if text.startswith("{") else None
        lock.write_bytes(json.dumps(said).encode() if said else text.encode(errors="surrogateescape"))
        with pytest.raises(ProvisionError) as raised, host_locks.hosts(tmp_path, [A], "provision smoke"):
            pass
    assert (raised.value.what, raised.value.hint) == ("locked: another run of provision works on it", "wait until it has ended")


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from provision.remote import host_locks
        with host_locks.hosts(Path({str(tmp_path)!r}), [{A!r}], "doomed"):
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    died = subprocess.run([sys.executable, "-c", program], check=False)
    assert died.returncode == -9
    with host_locks.hosts(tmp_path, [A], "next"):
        pass


def test_a_lock_is_exclusive(tmp_path: Path) -> None:
    x, y = tmp_path / "locks/x.lock", tmp_path / "locks/y.lock"
    with process_locks.acquired(x) as first, process_locks.acquired(x) as second, process_locks.acquired(y) as other:
        assert first
        assert other
        assert second is None
    with process_locks.acquired(x) as again:
        assert again


def test_an_unwritable_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file")
    with pytest.raises(ProvisionError) as raised, process_locks.acquired(tmp_path / "locks/x.lock"):
        pass
    assert raised.value.where == str(tmp_path / "locks/x.lock")
