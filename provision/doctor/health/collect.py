"""Collection of GPUs' health: the script on the hosts, its orders, and its answers."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.doctor.health import parsers
from provision.doctor.health.model import Health, HostAnswer, Test, Unreadable
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import Facts
from provision.survey.document import parse_answer

_BEGIN = "===PROVISION-GPU-HEALTH-BEGIN==="  # as hostside/gpu_health.py writes it
_SCRIPT = "gpu_health.py"
_LONGEST_S = 3600  # DCGM's level 3 takes most of it
_FULL_LEVEL = 2  # of DCGM: minutes, where level 3 takes half an hour


@dataclass(frozen=True)
class HealthRequest:
    """What to test besides what is always read. ``dcgm_level``: None without DCGM; the tests load the GPUs."""

    tests: tuple[Test, ...] = ()
    dcgm_level: int | None = None

    @classmethod
    def of(cls, dcgm: int | None, *, full: bool) -> HealthRequest:
        """DCGM at this level, with ``full`` all tests."""
        level = dcgm or (_FULL_LEVEL if full else None)
        return cls((*(("dcgm",) if level else ()), *(("nvbandwidth", "allreduce") if full else ())), level)

    def order(self) -> dict[str, object]:
        return {"tests": list(self.tests), "dcgm_level": self.dcgm_level or 1}


def of_hosts(session: Session, known: Mapping[str, Facts], request: HealthRequest) -> dict[str, Health]:
    """Host → its health, of the hosts that answered the survey (``known``)."""
    if not known:
        return {}
    session.progress.stage("GPU health", list(known))
    pythons = {name: shlex.quote(found.python.executable or "python3") for name, found in known.items()}
    scripts = {name: resources.inline_command(_SCRIPT, interpreter=python) for name, python in pythons.items()}
    answers = ssh.run(session, scripts, stdin=json.dumps(request.order()).encode(), timeout=_LONGEST_S)
    said = {name: answer.out if _BEGIN in answer.out else answer.err or answer.error for name, answer in answers.items()}
    return {name: parse(text, request) for name, text in said.items()}


def of_this_machine(request: HealthRequest) -> Health:
    command = [sys.executable, "-c", resources.script(_SCRIPT)]
    try:
        done = subprocess.run(command, input=json.dumps(request.order()).encode(), capture_output=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _nothing(str(error))
    return parse((done.stdout or done.stderr).decode(errors="replace"), request)


def parse(output: str, request: HealthRequest) -> Health:
    """The health in a host's output; one in which nothing is readable for another answer."""
    try:
        return parsers.health(parse_answer(HostAnswer, output, _BEGIN, "the check of GPUs"), request.tests)
    except ValidationError:
        return _nothing("the check of GPUs gave an invalid answer")
    except ProvisionError as error:
        return _nothing(error.what)


def _nothing(why: str) -> Health:
    return Health(unreadable=(Unreadable(what="nvidia-smi", why=why),), xids=None)
