"""One controller at a time per host; the second is told who holds the lock."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from provision import hold
from provision.errors import ProvisionError

A, B = ("10.0.0.1", 22), ("10.0.0.2", 22)


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    with (
        hold.hosts(tmp_path, [A, B], "provision up"),
        pytest.raises(ProvisionError) as raised,
        hold.hosts(tmp_path, [B], "provision smoke"),
    ):
        pass
    assert f"pid {os.getpid()}" in str(raised.value)
    assert "`provision up`" in str(raised.value)
    assert raised.value.where == "10.0.0.2"


def test_a_refused_holder_keeps_none_of_the_others(tmp_path: Path) -> None:
    with hold.hosts(tmp_path, [B], "one"):
        with pytest.raises(ProvisionError), hold.hosts(tmp_path, [A, B], "two"):
            pass
        with hold.hosts(tmp_path, [A], "three"):
            pass


def test_other_hosts_and_a_second_time_are_free(tmp_path: Path) -> None:
    with hold.hosts(tmp_path, [A], "one"), hold.hosts(tmp_path, [B], "two"):
        pass
    with hold.hosts(tmp_path, [A, B], "three"):
        pass


def test_a_holder_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from provision import hold
        with hold.hosts(Path({str(tmp_path)!r}), [{A!r}], "doomed"):
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    died = subprocess.run([sys.executable, "-c", program], check=False)
    assert died.returncode == -9
    with hold.hosts(tmp_path, [A], "next"):
        pass
