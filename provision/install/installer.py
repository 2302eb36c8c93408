"""Renders the plan into a playbook with its variables, and runs it. It reads the plan and decides nothing."""

from __future__ import annotations

import base64
import difflib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from provision import __version__, catalog
from provision.base import aptsources, resources, uv_support
from provision.base.engine_source import EngineSource, pack_horovod_names
from provision.base.errors import UsageError
from provision.facts import Facts
from provision.facts.model import noted_files
from provision.install import artifacts, builds, from_source
from provision.install.bundle.archive import Bundle
from provision.install.ssh_mesh import Member, cluster_id, members, networks, remembered
from provision.inventory import Inventory
from provision.plan.cluster_lock import Files
from provision.plan.model import COMPONENTS, HOROVOD_NAMES, HostPlan, Plan
from provision.remote import ansible_vars
from provision.remote.ansible import Event, Outcome, headline
from provision.remote.session import Session

# In the order they run. The linker comes after everything that brings libraries and before everything that loads them.
ROLES = (
    *("guard", "bundle", "packages", "hwloc", "python", "from_source", "openmpi"),
    *("nccl", "linker", "pytorch", "engine", "mpi_network"),
)

# Left out where root is not to be had.
ONLY_AS_ROOT = ("packages", "hwloc")

AFTER_THE_ROLES = ("ssh_mesh", "manifest", "smoke")
# Never left out: what keeps others off, and what a closed network cannot reach.
ALWAYS = ("guard", "bundle")
# What a step reads of an earlier one: it cannot begin without it.
NEEDS = {"linker": "nccl"}
# Of these, the ones that are about the set of hosts and not about one.
OF_THE_SET = ("mpi_network",)


MANIFEST_SCHEMA = 2


@dataclass(frozen=True)
class Sources:
    """Where things that the hosts do not fetch themselves come from, and the index and apt's mirror for what they do fetch.

    ``bundle``: everything else then comes from there. ``locked``: host → folder in the prefix → the files that uv must
    take there, as provision.lock has them.
    """

    engine: EngineSource
    wheels: Path | None = None
    index_url: str | None = None
    apt_mirror: str | None = None
    given: artifacts.Given = field(default_factory=artifacts.Given)
    locked: Mapping[str, Mapping[str, list[dict[str, Any]]]] = field(default_factory=dict)
    bundle: Bundle | None = None


def manifest(plan: Plan, name: str, cluster: str, known: Mapping[str, Member]) -> dict[str, Any]:
    """What one host is to hold, as it is written down there for everyone to read; a survey compares it with a later plan."""
    host = plan.hosts[name].as_dict()
    for component in (host[name] for name in COMPONENTS if host[name] is not None):
        component["why"], component["rejected"] = [], []  # reasons may be worded again every time; they are in the run's plan
        component.pop("builders", None)  # not what this host holds
    host["hwloc"] = None  # taken off, not put there
    return {"schema": MANIFEST_SCHEMA, "cluster": cluster, "host": host, "members": dict(known), "build": build_packages()}


def variables(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts], sources: Sources, engine_archive: Path) -> dict[str, Any]:
    """What the playbook needs besides itself, as Ansible variables."""
    together = members(plan, inventory, facts)
    found: dict[str, Any] = {
        "provision_plan": plan.as_dict(logins=True),
        "provision_cluster": cluster_id(inventory),
        "provision_members": together,
        "provision_manifests": manifests(plan, inventory, facts),
        "provision_networks": networks(together),
        "provision_build_packages": build_packages(),
        "provision_engine": {"archive": str(engine_archive), "sha256": sources.engine.sha256},
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
        found["provision_bundle"] = {"hosts": bundled, "parcels": sources.bundle.parcels(engine_archive.parent)}
    if sources.locked:
        found["provision_locked"] = dict(sources.locked)
    if sources.index_url:
        found["provision_index_url"] = sources.index_url
    if sources.apt_mirror:
        address = urlsplit(sources.apt_mirror)
        login, _, place = address.netloc.rpartition("@")
        found["provision_apt_mirror"] = {"url": address._replace(netloc=place).geturl(), "login": login}
    return found


def build_packages() -> list[str]:
    """What builds the engine, and pip for what users add, as exact pins."""
    return [f"{name}=={version}" for name, version in catalog.python_packages().build.items()]


def is_complete(plan: Plan, inventory: Inventory) -> bool:
    """Whether no host of the run is missing; what concerns the set of hosts is left as it is otherwise, instead of shrinking it."""
    return {host.name for host in inventory.hosts} == set(plan.hosts)


def steps(first: str | None = None) -> list[str]:
    """The names of the steps, from ``first`` on; raises UsageError when there is no step of that name."""
    names = [*ROLES[1:], *AFTER_THE_ROLES]
    if first is None:
        return names
    if first not in names:
        close = difflib.get_close_matches(first, names, n=1)
        raise UsageError(
            f"--from {first}: there is no such step", hint=f"did you mean {close[0]}?" if close else f"steps are {', '.join(names)}"
        )
    return names[names.index(NEEDS.get(first, first)) :]


def render(
    plan: Plan,
    inventory: Inventory,
    facts: Mapping[str, Facts],
    sources: Sources,
    folder: Path,
    *,
    first: str | None = None,
    fetch: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[Path, dict[str, Any]]:
    """Write the playbook, its roles, modules, variables and the engine's sources into ``folder``; returns the playbook's path, and its
    variables.

    The folder stands alone: ``ansible-playbook -i INVENTORY site.yml -e @vars.json`` does there what ``provision up`` does. Without
    ``fetch`` it lacks the files that come from elsewhere, and does for a dry run.
    """
    origin = resources.folder("playbooks")
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("roles", "library", "module_utils"):
        shutil.copytree(origin / part, folder / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for helper in (aptsources, uv_support):
        shutil.copy(str(helper.__file__), folder / "module_utils")
    archive = sources.engine.save(folder)
    made = variables(plan, inventory, facts, sources, archive) | {"provision_whole": first is None}
    made |= artifacts.gather(
        plan, folder / "supplies", sources.given, fetch=fetch, keys=sources.bundle is None, index_url=sources.index_url, say=say
    )
    if fetch and sources.bundle is None:
        made["provision_torch_wheels"] = _torch_wheels(plan, facts, sources.wheels)
    ansible_vars.write(folder / "vars.json", made)
    playbook = folder / "site.yml"
    # What concerns the set of hosts is left as it is while one of them is missing: it would be written for a smaller cluster.
    complete = is_complete(plan, inventory)
    wanted = steps(first)
    roles = [role for role in ROLES if role in ALWAYS or (role in wanted and (complete or role not in OF_THE_SET))]
    template = resources.templates(origin, _one_line).get_template("site.yml.j2")
    text = template.render(
        hosts=plan.hosts,
        roles=roles,
        only_as_root=ONLY_AS_ROOT,
        connect=complete and len(made["provision_members"]) > 1 and "ssh_mesh" in wanted,
        mirrored="provision_apt_mirror" in made,
        notes=plan.notes,
        version=__version__,
    )
    playbook.write_text(text, encoding="utf-8")
    return playbook, made


def _torch_wheels(plan: Plan, facts: Mapping[str, Facts], folder: Path | None) -> dict[str, str]:
    """Host → the user's wheel of PyTorch that it lacks. Raises ProvisionError where the wheel is not in the folder."""
    found = {}
    for name, host in plan.hosts.items():
        if host.torch is None or not host.torch.file or _holds_torch(host, facts.get(name)):
            continue
        found[name] = str(artifacts.torch_wheel(host, folder))
    return found


def _holds_torch(host: HostPlan, facts: Facts | None) -> bool:
    """Whether a host has PyTorch from that very file, and nothing has happened to what we installed there."""
    if host.torch is None or facts is None:
        return False
    noted = facts.installed.files.get("venv") or {}
    return noted.get("torch", {}).get("sha256") == host.torch.sha256 and not facts.drift


def _one_line(value: Any) -> Any:
    """What hosts say stands in comments and names of the playbook: a line of its own would be a play of its own, run on the controller."""
    return " ".join(value.splitlines()) if isinstance(value, str) else value


@dataclass
class Installed:
    """How the installation went.

    Attributes:
        unlocked: host → packages that provision.lock said nothing of, though it had the files of the others.
        stand_ins: a line for each build that its first host could not make and another one made.
    """

    outcome: Outcome
    unlocked: dict[str, list[str]]
    stand_ins: list[str]


def install(
    session: Session,
    plan: Plan,
    facts: Mapping[str, Facts],
    sources: Sources,
    ready: dict[str, Files],
    *,
    check: bool = False,
    first: str | None = None,
) -> Installed:
    """Run the rendered playbook on the plan's hosts, from the step ``first`` on. With ``check`` nothing is changed; Ansible says what
    would be.

    Args:
        ready: gets each host whose manifest says what the plan says, as soon as it does, with the files that its packages came from: it is
            known also of a run that is interrupted.
    """
    folder = session.folder / "playbook"
    playbook, given = render(plan, session.inventory, facts, sources, folder, first=first, fetch=not check, say=session.progress.line)
    extra = {**given, "provision_owner": session.owner, "provision_dead_runs": session.dead_runs()}
    unlocked: dict[str, list[str]] = {}
    made: dict[str, str] = {}
    not_made: dict[tuple[str, str], str] = {}

    def note(event: Event) -> None:
        if attempt := (event.result.get("ansible_facts") or {}).get("from_source_attempt"):
            if attempt["failure"]:
                not_made[attempt["key"], event.host] = headline(attempt["failure"])
            elif attempt["sha256"]:
                made[attempt["key"]] = event.host
        if event.role == "manifest" and event.kind == "ok":
            entries = [entry for entry in event.result.get("results") or () if "content" in entry]
            if entries:
                ready[event.host] = noted_files({entry["item"]: json.loads(base64.b64decode(entry["content"])) for entry in entries})
        if found := event.result.get("unlocked"):
            unlocked.setdefault(event.host, []).extend(found)
        session.progress.event(event)

    title = "Install (dry run)" if check else "Install"
    try:
        outcome = session.play(playbook, title, hosts=list(plan.hosts), extra_vars=extra, check=check, on_event=note)
    finally:
        builds.adopt(folder / "supplies")
    if outcome.failed and not check:
        session.release(list(plan.hosts))
    parts = {**extra["provision_from_source"], "engine": {"title": "the engine", **extra["provision_engine_builds"]}}
    return Installed(outcome, unlocked, from_source.stand_ins(parts, made, not_made))


def manifests(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, dict[str, Any]]:
    """What each host's manifest is to say after the plan."""
    cluster, together, complete = cluster_id(inventory), members(plan, inventory, facts), is_complete(plan, inventory)
    return {name: manifest(plan, name, cluster, together if complete else remembered(facts.get(name))) for name in plan.hosts}
