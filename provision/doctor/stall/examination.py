"""The examination of a job's ranks, on this machine or on all hosts at once: one round trip, and nothing is left there."""

from __future__ import annotations

import base64
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import folded
from provision.doctor.stall import judgement
from provision.doctor.stall.model import Document, HostAnswer, Rank
from provision.launch.stall_watch import Finding
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey.document import parse_answer

THIS_MACHINE = "this machine"
SECONDS = 12  # on a host
_BEGIN, _WHAT = "===PROVISION-STALL-BEGIN===", "the examination of the job"  # as hostside/stall.py writes it
# Root sees what ptrace refuses to others, but not in every container. The script looks at no other user's processes then.
_AS_ROOT = '[ "$(id -u)" = 0 ] || ! sudo -n head -c 1 /proc/$$/environ >/dev/null 2>&1 || as="sudo -n"; $as '


def of_processes(pids: Sequence[int] | None) -> Document:
    """Verdicts on the jobs that processes of this machine are ranks of, or have started; None: on all jobs of this user here.

    Raises:
        UsageError: one does not exist, may not be read, or is of no job.
    """
    command = [sys.executable, "-I", "-c", resources.script("stall.py")]
    try:
        done = subprocess.run(command, input=_order(pids, None), capture_output=True, timeout=SECONDS + 20, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError("the job could not be examined: reading its processes takes too long", where=THIS_MACHINE) from error
    answer = parse_answer(HostAnswer, done.stdout.decode(errors="replace"), _BEGIN, _WHAT)
    if answer.missing:
        raise UsageError(f"no such process: {answer.missing[0]}", where=THIS_MACHINE)
    if not answer.ranks and answer.refused:
        raise UsageError(
            f"process {answer.refused[0]} may not be read: it belongs to another user", hint="run this as that user, or as root"
        )
    if not answer.ranks and pids is not None:
        hint = "name a rank, or its launcher (mpirun, torchrun, srun)"
        raise UsageError(f"process {pids[0]} is of no job: neither it nor what it has started has a launcher's RANK", hint=hint)
    return Document(jobs=judgement.judge({THIS_MACHINE: answer.ranks}))


def of_hosts(session: Session, run: str | None, stopped: threading.Event | None = None) -> Document:
    """The verdict on the newest job of this user that has ranks on these hosts, or on the job of a run.

    Args:
        stopped: cuts it off where it is set; with it, this may run in any thread.
    """
    scripts = {host.name: _AS_ROOT + resources.inline_command("stall.py") for host in session.inventory.hosts}
    order, seconds = _order(None, run), SECONDS + ssh.TIMEOUT_S
    if stopped is None:
        answers = ssh.run(session, scripts, stdin=order, timeout=seconds)
    else:
        answers = ssh.look(session, scripts, stopped, dict.fromkeys(scripts, seconds), stdin=order)
    ranks: dict[str, Sequence[Rank]] = {}
    failed = {}
    for name, answer in answers.items():
        try:
            ranks[name] = parse_answer(HostAnswer, answer.out, _BEGIN, _WHAT).ranks
        except ProvisionError as error:
            failed[name] = error.what if answer.code == 0 else answer.error
    found = Document(jobs=judgement.judge(ranks)[:1], failed=failed)
    if not found.jobs and ranks and not failed:
        raise UsageError(f"no job{f' of run {run}' if run else ''} has ranks on {folded(sorted(ranks))}", hint="provision status HOSTS")
    return found


def of_run(session: Session, stopped: threading.Event, *, is_elastic: bool) -> Finding:
    """What an examination of the job of `session` says, in any thread. ``is_elastic``: some of its ranks may be on other hosts.

    Raises:
        ProvisionError: its ranks cannot be seen.
    """
    found = of_hosts(session, session.run_id, stopped)
    if not found.jobs or (found.failed and found.jobs[0].missing):
        host, why = next(iter(found.failed.items()))
        raise ProvisionError(f"not examined: {why}", where=host)
    verdict = found.jobs[0]
    is_stalled = verdict.state == "stalled" and not (is_elastic and verdict.missing)
    return Finding(is_stalled, verdict.said, tuple(verdict.steps), verdict.model_dump(mode="json"))


def _order(pids: Sequence[int] | None, run: str | None) -> bytes:
    """What hostside/stall.py is to do, with this installation's py-spy, if it has one."""
    spy = (shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")) if sys.platform == "linux" else None
    packed = base64.b64encode(zlib.compress(Path(spy).read_bytes(), 1)).decode() if spy else None
    return json.dumps({"pids": pids, "run": run, "spy": packed, "machine": platform.machine(), "seconds": SECONDS}).encode()
