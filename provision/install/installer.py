"""Renders the plan into a playbook with its variables, and runs it. It reads the plan and decides nothing."""

from __future__ import annotations

import base64
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from provision import __version__
from provision.base import aptsources, resources, uv_support
from provision.base.engine_source import pack_horovod_names
from provision.base.problems import Problem
from provision.base.text import counted, grouped
from provision.install import artifacts, builds, engine_builds, from_source, on_host, ssh_mesh
from provision.install.rollout import Rollout, build_packages
from provision.launch.program_files import MAX_NEIGHBOURS
from provision.launch.push import hand_on
from provision.plan.lock import Files
from provision.plan.model import HOROVOD_NAMES, HostPlan, Plan
from provision.remote import ansible, ansible_vars, ssh
from provision.remote.ansible import Event, Outcome, Play, headline
from provision.remote.session import Session
from provision.survey import Facts
from provision.survey.model import noted_files

DRIVER = "driver.yml"  # the playbook of drivers, next to site.yml, which runs it first
_CONNECT = "connect.yml"  # the first roles of site.yml that hosts need to take the bundle from each other
#: As the role `bundle` looks: a folder of which one file is gone is unpacked again.
_IS_UNPACKED = """import json, os, sys; os.chdir(sys.argv[1]); note = json.load(open(".provision-archive.json"))
sys.exit(note["key"] != sys.argv[2] or not all(map(os.path.lexists, note["files"])))"""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the survey reads the same: a container on this machine has the same, a clone another


def _variables(rollout: Rollout, engine_archive: Path) -> dict[str, object]:
    """The playbook's Ansible variables, but for those of `artifacts.gather`."""
    plan, sources = rollout.plan, rollout.sources
    found: dict[str, object] = {
        "provision_plan": plan.as_dict(logins=True),
        "provision_cluster": ssh_mesh.cluster_id(rollout.inventory),
        "provision_members": rollout.members,
        # Without the members, which are the same for all: a thousand times a thousand.
        "provision_manifests": {
            name: {key: value for key, value in manifest.as_dict().items() if key != "members" or not rollout.complete}
            for name, manifest in rollout.manifests.items()
        },
        "provision_networks": ssh_mesh.networks(rollout.members),
        "provision_build_packages": build_packages(rollout.request.options.catalog),
        "provision_engine": {"archive": str(engine_archive), "sha256": sources.engine.sha256},
        "provision_whole": rollout.request.options.first_step is None,
    }
    if any(HOROVOD_NAMES in host.engine.options for host in plan.hosts.values()):
        names = pack_horovod_names()
        found["provision_horovod_names"] = {
            "archive": str(names.save(engine_archive.parent)),
            "sha256": names.sha256,
            "version": names.version,
        }
    if sources.bundle:
        bundled = {name: host.model_dump() for name, host in sources.bundle.hosts.items()}
        found["provision_bundle"] = {"hosts": bundled, "archives": sources.bundle.archives(engine_archive.parent)}
    if sources.locked:
        found["provision_locked"] = {
            name: {folder: [file.model_dump() for file in files] for folder, files in folders.items()}
            for name, folders in sources.locked.items()
        }
    if sources.index_url:
        found["provision_index_url"] = sources.index_url
    if sources.apt_mirror:
        address = urlsplit(sources.apt_mirror)
        login, _, place = address.netloc.rpartition("@")
        found["provision_apt_mirror"] = {"url": address._replace(netloc=place).geturl(), "login": login}
    return found


def render(
    rollout: Rollout, folder: Path, *, fetch: bool = True, say: Callable[[str], None] = lambda _line: None
) -> tuple[Path, Mapping[str, object], artifacts.Supplies]:
    """Write the playbook, its roles, modules, variables and the engine's sources into ``folder``; returns the playbook's path, its
    variables, and those of them that name the supplies.

    The folder stands alone: ``ansible-playbook -i INVENTORY site.yml -e @vars.json`` does there what ``provision up`` does. Without
    ``fetch`` it lacks the downloaded files, which a dry run does not need.
    """
    plan, sources, catalog = rollout.plan, rollout.sources, rollout.request.options.catalog
    bundled = sources.bundle.folder / "supplies" if sources.bundle else None
    copy_modules(folder, "roles")
    made = _variables(rollout, sources.engine.save(folder))
    engine_builds.adopt_wheels(plan, sources.engine, bundled)
    supplies = artifacts.gather(plan, folder / "supplies", sources.user_files, catalog, fetch=fetch, bundled=bundled, say=say)
    made |= supplies
    made["provision_uv"] = artifacts.uv(plan, folder / "supplies/uv", sources.index_url, catalog, bundled, say) if fetch else {}
    if fetch and sources.bundle is None:
        made["provision_torch_wheels"] = _torch_wheels(plan, rollout.facts, sources.wheels)
    ansible_vars.write(folder / "vars.json", made)
    shown = {"hosts": plan.hosts, "drivers": rollout.drivers, "notes": plan.notes, "roles": rollout.roles, "version": __version__}
    templates = resources.templates(resources.folder("playbooks"), _one_line)
    for name in ("site.yml", *([DRIVER] if rollout.drivers else []), *([_CONNECT] if sources.bundle else [])):
        shown["begins"] = ["guard", "ssh_mesh"] if name == _CONNECT else []
        text = templates.get_template(f"{name.replace(_CONNECT, 'site.yml')}.j2").render(shown, mirrored="provision_apt_mirror" in made)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "site.yml", made, supplies


def copy_modules(folder: Path, *more: str) -> None:
    """Copy our Ansible modules, and ``more`` folders of the playbooks, into ``folder``, with what they share with this machine."""
    origin = resources.folder("playbooks")
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("library", "module_utils", *more):
        shutil.copytree(origin / part, folder / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for helper in (aptsources.__file__, uv_support.__file__, resources.hostside("trust.py"), resources.hostside("host_lock.py")):
        shutil.copy(helper, folder / "module_utils")


def own_reboots(rollout: Rollout) -> Iterator[Problem]:
    """Hosts whose reboot would end this run, because it runs on them: by a local connection, or by ssh to the machine itself."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else None
    local = {host.name for host in rollout.inventory.hosts if host.connection == "local"}
    for name in rollout.drivers:
        if name in local or (boot and rollout.facts[name].boot_id == boot):
            what = "a new driver needs a reboot, and this run is on that machine; nothing was changed"
            yield Problem(
                "error", what, "run provision from another machine, or leave --driver out", host=name, where="driver", id="own-reboot"
            )


def install_drivers(session: Session, rollout: Rollout) -> Outcome:
    """Install the plan's drivers and reboot these hosts, one after the other. What else is installed depends on the survey after it."""
    names = rollout.drivers
    folder = session.folder / "driver-playbook"
    only = replace(rollout, plan=replace(rollout.plan, hosts={name: rollout.plan.hosts[name] for name in names}))
    _playbook, variables, _supplies = render(only, folder, fetch=False)
    keys = artifacts.repository_keys(only.plan, folder / "supplies", session.progress.doing)
    extra = {**variables, "provision_repository_keys": keys, **session.of_locks}
    outcome = session.play(Play(folder / DRIVER, names, extra), "Driver")
    if outcome.failed:
        session.release(names)
    return outcome


def _torch_wheels(plan: Plan, facts: Mapping[str, Facts], folder: Path | None) -> dict[str, str]:
    """Host → the user's wheel of PyTorch that it lacks. Raises ProvisionError where the wheel is not in the folder."""
    lacking = [host for name, host in plan.hosts.items() if host.torch and host.torch.file and not _holds_torch(host, facts.get(name))]
    return {host.name: str(artifacts.torch_wheel(host, folder)) for host in lacking}


def _holds_torch(host: HostPlan, facts: Facts | None) -> bool:
    """Whether a host has PyTorch from that very file, and nothing of ours was changed there."""
    if host.torch is None or facts is None:
        return False
    noted = facts.installed.files.get("venv") or {}
    return noted.get("torch", {}).get("sha256") == host.torch.sha256 and not facts.drift


def _one_line(value: object) -> object:
    """A host's text on one line: it stands in the playbook's comments, and a second line could be a play that runs on the controller."""
    return " ".join(value.splitlines()) if isinstance(value, str) else value


@dataclass
class Installed:
    """How the installation went.

    Attributes:
        unlocked: host → packages that are not in provision.lock, though it has the files of the others.
        fallbacks: a line for each build that was made on another host than the first, because it failed there.
    """

    outcome: Outcome
    unlocked: dict[str, list[str]]
    fallbacks: list[str]


def _notes(encoded: object) -> Files:
    """What uv_packages says of its folders' files. A host is not trusted: invalid notes are dropped."""
    found = {}
    for folder, text in encoded.items() if isinstance(encoded, dict) else ():
        with suppress(ValueError, TypeError, RecursionError):
            found[folder] = json.loads(base64.b64decode(text))
    return noted_files(found)


def _pushed(session: Session, rollout: Rollout, connect: Play, run: Callable[..., Outcome]) -> tuple[dict[str, str], bool]:
    """Copy the bundle's files to the first host, then from host to host; (host → its archive there, whether all that need one have it).

    Where they are small, or hosts do not reach each other, Ansible copies them from here.
    """
    archives: dict[str, dict[str, str]] = cast(Any, connect.extra_vars["provision_bundle"])["archives"]
    looks = {
        name: shlex.join([host.interpreter, "-I", "-c", _IS_UNPACKED, f"{host.prefix}/bundle", archives[name]["sha256"]])
        for name, host in rollout.plan.hosts.items()
    }
    scripts = {name: f"{look} 2>/dev/null && echo {ssh.ANSWER} yes || :" for name, look in looks.items()}
    answers = ssh.run(session, scripts, task="Look at the bundle's files")
    groups = grouped((archives[name]["archive"], name) for name, answer in answers.items() if answer.body != "yes")
    found: dict[str, str] = {}
    is_much = any(Path(archive).stat().st_size > MAX_NEIGHBOURS and len(names) > 1 for archive, names in groups.items())
    if is_much and "ssh_mesh" in {role.name for role in rollout.roles}:
        try:
            failed = session.play(connect, "Connect the hosts", steps=["guard", "ssh_mesh"], run=run).failed
            for archive, names in groups.items():
                # A host that has failed may be locked by another controller.
                found |= hand_on(session, Path(archive), archives[names[0]]["sha256"], [name for name in names if name not in failed])
        except BaseException:
            session.release(looks)
            raise
    if rest := [name for names in groups.values() for name in names if name not in found]:
        session.progress.line(f"the bundle's files go to {counted(len(rest), 'host')} from this machine")
    return found, not rest


def install(session: Session, rollout: Rollout, on_complete: Callable[[str, Files], None], *, check: bool = False) -> Installed:
    """Run the rendered playbook on the plan's hosts. With ``check`` nothing is changed; Ansible reports what would be.

    Args:
        on_complete: called for each host as soon as its manifest is written, with the files that its packages came from: the caller knows
            the complete hosts of an interrupted run, too.
    """
    folder, hosts = (session.folder / "playbook").resolve(), list(rollout.plan.hosts)
    playbook, variables, supplies = render(rollout, folder, fetch=not check, say=session.progress.doing)
    extra, from_here = {**variables, **session.of_locks}, on_host.why_not(rollout, variables, check=check)
    run = ansible.run if from_here else on_host.OnHosts(session, on_host.pythons(rollout), folder)
    if rollout.sources.bundle and not check:
        extra["provision_pushed"], whole = _pushed(session, rollout, Play(folder / _CONNECT, hosts, extra), run)
        from_here = from_here or ("" if whole else "not every host has got its files of the bundle from another one")
    unlocked: dict[str, list[str]] = {}
    files: dict[str, Files] = {}
    made: dict[str, str] = {}
    failures: dict[tuple[str, str], str] = {}

    def note(event: Event) -> None:
        if attempt := (event.result.get("ansible_facts") or {}).get("from_source_attempt"):
            if attempt["failure"]:
                failures[attempt["key"], event.host] = headline(attempt["failure"])
            elif attempt["sha256"]:
                made[attempt["key"]] = event.host
        files[event.host] = {**files.get(event.host, {}), **_notes(event.result.get("noted"))}
        if event.role == "manifest" and event.kind in ("ok", "changed") and "venv" in files[event.host]:  # else its note is gone
            on_complete(event.host, files[event.host])
        if found := event.result.get("unlocked"):
            unlocked.setdefault(event.host, []).extend(found)

    title = "Install (dry run)" if check else "Install"
    try:
        steps_ = [role.name for role in rollout.roles]
        session.progress.detail(f"Ansible runs {f'from here: {from_here}' if from_here else 'on the hosts'}")
        run = ansible.run if from_here else run
        outcome = session.play(Play(playbook, hosts, extra, check), title, steps=steps_, on_event=note, run=run)
    finally:
        builds.adopt(folder / "supplies")
    if outcome.failed and not check:
        session.release(name for name in hosts if name not in outcome.hosts or outcome.hosts[name].failure)  # the others have done so
    parts: dict[str, builds.Shares] = {part["title"]: part for part in supplies["provision_from_source"].values()}
    parts["the engine"] = supplies["provision_engine_builds"]
    return Installed(outcome, unlocked, from_source.fallbacks(parts, made, failures))
