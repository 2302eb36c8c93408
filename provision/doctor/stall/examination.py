"""The look at a job's ranks, on this machine or on all hosts at once: one round trip, and nothing is left there."""

from __future__ import annotations

import base64
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.doctor.stall import judgement
from provision.doctor.stall.model import HostAnswer, Verdict
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import parse_answer

THIS_MACHINE = "this machine"
SECONDS = 10  # on a host
_BEGIN = "===PROVISION-STALL-BEGIN==="  # as hostside/stall.py writes it


def of_process(pid: int) -> list[Verdict]:
    """Verdicts on the job that a process of this machine is a rank of, or has started. Only ranks of this machine are seen.

    Raises:
        UsageError: there is no such process, or no rank of it.
    """
    order = {"pid": pid, "spy": _spy(platform.machine()), "seconds": SECONDS}
    command = [sys.executable, "-c", resources.script("stall.py")]
    try:
        done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, errors="replace", timeout=SECONDS + 10, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError("the job could not be looked at: reading its processes takes too long", where=THIS_MACHINE) from error
    answer = parse_answer(HostAnswer, done.stdout, _BEGIN, "the look at the job")
    if not answer.there:
        raise UsageError(f"there is no process {pid}", where=THIS_MACHINE)
    if not answer.ranks:
        hint = "name a rank, or its launcher (mpirun, torchrun, srun); another user's processes are seen by root"
        raise UsageError(f"process {pid} is of no job: it and what it started have no RANK, OMPI_COMM_WORLD_RANK or SLURM_PROCID", hint=hint)
    return judgement.judge({THIS_MACHINE: answer.ranks})


def of_hosts(session: Session) -> tuple[list[Verdict], Mapping[str, str]]:
    """(verdicts on the jobs whose ranks run on these hosts, host → why it could not be looked at)

    Hosts get py-spy for this machine's architecture; on others there are system calls and no stacks.
    """
    order = json.dumps({"pid": None, "spy": _spy(platform.machine()), "seconds": SECONDS}).encode()
    script = f'[ "$(uname -m)" = {platform.machine()} ] || exec 2>/dev/null\n{resources.inline_command("stall.py")}'
    answers = ssh.run(session, {host.name: script for host in session.inventory.hosts}, stdin=order, timeout=SECONDS + ssh.TIMEOUT_S)
    ranks, failed = {}, {}
    for name, answer in answers.items():
        try:
            ranks[name] = parse_answer(HostAnswer, answer.out, _BEGIN, "the look at the job").ranks
        except ProvisionError as error:
            failed[name] = error.what if answer.code == 0 else answer.error
    return judgement.judge(ranks), failed


@cache
def _spy(_machine: str) -> str | None:
    """py-spy as hosts get it; None where this installation has none."""
    found = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    return base64.b64encode(zlib.compress(Path(found).read_bytes())).decode() if found else None
