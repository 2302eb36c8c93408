"""Looks at hosts: one read-only round trip to each, as the survey makes it. It takes no lock, and keeps no folder of a run.

What changes fast (load, GPUs, ranks) is asked every time; what an installation consists of, for which a host reads thousands of entries,
first and then every few minutes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from pydantic import ValidationError

from provision.base.errors import ProvisionError, UsageError
from provision.catalog import overlay
from provision.install import drift
from provision.inventory import Host, Inventory, last_run
from provision.plan import lock_file
from provision.plan.lock import Lock
from provision.remote import ssh
from provision.report import runs
from provision.report.status.model import (
    MAX_DIFFERENCES,
    HostAnswer,
    HostStatus,
    Job,
    LastRun,
    RanksOfJob,
    State,
    Status,
    command,
)
from provision.report.status.show import HOUR_S, Sample, moment, sample
from provision.survey import collect
from provision.survey.document import BEGIN, parse_output
from provision.survey.model import Drift, Installed

CHECK_EVERY_S = 120.0  # of installations
_CHECK_S, _NOW_S = 80.0, 30.0  # for a host's whole answer, with what is installed and without
_SECTION_S = 50.0, 22.0  # of it for one section: a host that trains is slow, and nvidia-smi may wake eight GPUs first
_LONGEST_UNCHECKED = 3  # intervals for which the last comparison counts
_NOW, _CHECK = ("activity", "gpu_load"), ("installed", "drift")  # functions of hostside/survey
_WAIT = "wait until that run has ended; where it was killed, the next provision up takes its lock over"
_SAMPLES = 60  # of the last hour
_RUNS_READ = 100  # each has a folder, which is read


@dataclass(frozen=True)
class _Check:
    """What is known of a host's installation.

    Attributes:
        when: it was read, in seconds since 1970.
        asked: when the host was asked for it last, on our clock.
        failure: why it could not be read then.
    """

    installed: Installed | None = None
    drift: tuple[Drift, ...] | None = None
    when: float = 0.0
    asked: float = float("-inf")
    failure: str | None = None


class Observer:
    """Of the hosts of one inventory. One thread at a time may `look`.

    Attributes:
        waiting_for: the hosts that have not answered the look that is being made, in the order of the inventory; for any thread.
    """

    def __init__(self, inventory: Inventory, passwords: Mapping[str, str]) -> None:
        self._visitor = ssh.Visitor(inventory, passwords)
        self._inventory = inventory
        self._catalog = overlay.own()
        self._checks: dict[str, _Check] = {}
        self.waiting_for: tuple[str, ...] = ()
        self._answered = threading.Lock()

    def look(self, stopped: threading.Event) -> Status:
        """The status now. Where ``stopped`` is set meanwhile, hosts that have not answered yet are unreachable."""
        began, when = time.monotonic(), time.time()
        lock, problem = None, None
        try:
            lock = lock_file.read(self._inventory)
        except UsageError as error:
            problem = str(error)
        due = {host.name for host in self._inventory.hosts if began - self._check(host).asked >= CHECK_EVERY_S}
        scripts = {host.name: self._script(host, is_due=host.name in due) for host in self._inventory.hosts}
        timeouts = {name: _CHECK_S if name in due else _NOW_S for name in scripts}
        self.waiting_for = tuple(scripts)
        answers = ssh.look(self._visitor, scripts, stopped, timeouts, self._note_answer)
        hosts, jobs = [], dict[str, Job]()
        for host in self._inventory.hosts:
            try:
                found, of_host = self._read(host, answers[host.name], lock, was_due=host.name in due)
            except Exception as error:  # noqa: BLE001  one host's answer must not hide the others
                what = f"its answer cannot be read: {type(error).__name__}"
                found, of_host = HostStatus(host=host.name, state="unknown", problem=what), ()
            hosts.append(found)
            for each in of_host:
                job = jobs.get(each.run) or _job(each.run, each.program, when)
                jobs[each.run] = job.model_copy(
                    update={
                        "ranks": job.ranks + each.ranks,
                        "hosts": {**job.hosts, host.name: each.ranks},
                        "began": min(job.began, when - each.age),  # the host's clock may be wrong
                    }
                )
        return Status(
            when=when,
            seconds=round(time.monotonic() - began, 3),
            inventory=self._inventory.argument,
            hosts=tuple(hosts),
            jobs=tuple(sorted(jobs.values(), key=lambda job: job.began)),
            last_run=_last_run(self._inventory),
            problem=problem,
        )

    def _note_answer(self, name: str, _answer: ssh.Answer) -> None:
        with self._answered:
            self.waiting_for = tuple(each for each in self.waiting_for if each != name)

    def _check(self, host: Host) -> _Check:
        return self._checks.get(host.name, _Check())

    def _script(self, host: Host, *, is_due: bool) -> str:
        """The survey script; ``is_due``: what is installed is asked for, too."""
        installed = self._check(host).installed
        sections, timeout = ([*_NOW, *_CHECK], _SECTION_S[0]) if is_due else (_NOW, _SECTION_S[1])
        prefix = host.prefix or (installed.prefix if installed else None)  # known without asking sudo
        with_password = bool(ssh.secret(host.sudo_password, self._visitor.passwords.get("become")))
        more = {"timeout": timeout, "sections": sections, **({"prefix": prefix} if prefix else {})}
        return collect.script_on(host, self._catalog, with_password=with_password, **more)

    def _read(self, host: Host, answer: ssh.Answer, lock: Lock | None, *, was_due: bool) -> tuple[HostStatus, tuple[RanksOfJob, ...]]:
        """A host's row, and the ranks of jobs there."""
        if answer.code == ssh.UNREACHABLE:
            self._checks.pop(host.name, None)  # it may come back as another one
            found = collect.connection_problem(host, answer.err, self._catalog)
            return HostStatus(host=host.name, state="unreachable", problem=found.what, remedy=found.hint), ()
        check, now = self._check(host), time.monotonic()
        if was_due or answer.code is None:  # one that is late is not asked for more
            check = self._checks[host.name] = replace(check, asked=now, failure="it did not answer in time")
        try:
            said = _parse(host, answer)
        except ProvisionError as error:
            return HostStatus(host=host.name, state="unknown", problem=error.what, remedy=error.hint), ()
        if was_due:
            failure = "; ".join(said.errors[name] for name in _CHECK if name in said.errors)
            if said.installed is not None and not failure:
                check = _Check(said.installed, said.drift, time.time(), now)
            else:
                check = replace(check, failure=failure or "no answer")
            self._checks[host.name] = check
        activity = said.activity
        if activity is None:
            what = "; ".join(said.errors.values()) or "it did not say what goes on there"
            return HostStatus(host=host.name, state="unknown", problem=what, remedy=f"log in: provision ssh {host.name}"), ()
        differences = tuple(_differences(host, check.installed, check.drift, lock)) if check.installed else ()
        problem = gpu_error = said.gpu_load.error if said.gpu_load else said.errors.get("gpu_load")
        state: State = "installed"
        if check.installed is None:
            state, problem = "unknown", f"what is installed could not be found out: {check.failure}"
        elif activity.locked:
            state = "busy"
            self._checks[host.name] = replace(check, asked=float("-inf"))  # what is installed there changes
        elif not check.installed.was_completed:
            state = "not installed"
        elif gpu_error:
            state = "GPU error"
        elif check.failure and time.time() - check.when > _LONGEST_UNCHECKED * CHECK_EVERY_S:
            state = "unknown"
        elif differences:
            state = "drifted"
        if check.failure and check.installed:
            problem = "; ".join(filter(None, (problem, f"not compared since {moment(check.when)}: {check.failure}")))
        return HostStatus(
            host=host.name,
            state=state,
            problem=problem,
            remedy=_WAIT
            if state == "busy"
            else command(state, self._inventory.argument, [host.name] * (len(self._inventory.everyone) > 1)),
            drift=differences if state != "busy" else (),
            checked=check.when if check.installed else None,
            uptime=activity.uptime,
            load=activity.load,
            cores=activity.cores,
            memory=activity.memory,
            disk=activity.disk,
            locked=activity.locked,
            gpus=said.gpu_load.gpus if said.gpu_load else (),
        ), activity.jobs


class Poller:
    """Looks at the hosts again and again in a thread of its own, until ``stopped`` is set. After a look that failed the last status stays,
    which says when it was. ``history``: a sample of each minute, for an hour."""

    def __init__(self, observer: Observer, interval: float, stopped: threading.Event) -> None:
        self._observer, self._interval, self._stopped = observer, interval, stopped
        self.latest: Status | None = None
        self.history: deque[Sample] = deque(maxlen=_SAMPLES)
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                found = self._observer.look(self._stopped)
            except Exception as error:  # noqa: BLE001  raised by `check`, in the main thread, where there is no status to keep
                self.failure = error
                if self.latest is not None:
                    self.latest = self.latest.model_copy(update={"problem": f"a later look failed: {error}"})
            else:
                if not self._stopped.is_set():  # else hosts are missing that were cut off
                    self.latest = found
                    if not self.history or found.when - self.history[-1][0] >= HOUR_S / _SAMPLES:
                        self.history.append(sample(found))
            self._stopped.wait(self._interval)

    def check(self) -> None:
        """Raise what kept the first look from a status."""
        if self.latest is None and self.failure is not None:
            raise self.failure


def _job(run: str, program: str, began: float) -> Job:
    found = runs.stalls(run)
    stalled = found.stalls[-1].since.timestamp() if found.stalls and found.stalls[-1].seconds is None else None
    late = tuple(each.said for each in found.stragglers if each.seconds is None)
    return Job(run=run, program=program, ranks=0, hosts={}, began=began, stalled_since=stalled, stragglers=late)


def _last_run(inventory: Inventory) -> LastRun | None:
    """The newest run on the inventory, if it is one of the newest at all."""
    identity = last_run.identity(inventory)
    found = next((run for run in islice(runs.every(), _RUNS_READ) if run.inventory == identity), None)
    if found is None:
        return None
    began = found.began.timestamp() if found.began else None
    return LastRun(run=found.id, command=found.command, verdict=found.verdict, began=began, folder=str(found.folder))


def _parse(host: Host, answer: ssh.Answer) -> HostAnswer:
    """Raises ProvisionError for an invalid answer."""
    if answer.code is None:
        raise ProvisionError("it did not answer in time", hint=f"log in: provision ssh {host.name}")
    if answer.code == collect.NO_PYTHON:
        raise ProvisionError("there is no Python 3", hint="install python3, or name one: provision_python in the inventory")
    if BEGIN not in answer.out:
        raise ProvisionError(f"the survey did not run: {answer.error}", hint=f"log in: provision ssh {host.name}")
    try:
        return HostAnswer.model_validate_json(json.dumps(parse_output(answer.out)))
    except ValidationError as error:
        raise ProvisionError("its answer is invalid", hint=f"is its python3 what it should be? provision ssh {host.name}") from error


def _differences(host: Host, installed: Installed, changed: tuple[Drift, ...] | None, lock: Lock | None) -> list[Drift]:
    """How a host differs from what the last run installed there, and from the lock."""
    unreadable = Drift(kind="manifest-unreadable", subject=f"{installed.prefix}/manifest.json")
    if installed.plan is None:
        return [unreadable] if installed.manifest_error else []
    found = list(changed or ())
    try:
        found += drift.from_lock(lock, replace(installed.plan, name=host.name), installed.files) if lock else ()
    except ValueError:  # no lock can have such a component
        return [unreadable]
    more = len(found) - MAX_DIFFERENCES
    return [*found[:MAX_DIFFERENCES], Drift(kind="more", subject=str(more))] if more > 0 else found
