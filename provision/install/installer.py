"""Renders the plan into a playbook with its variables, and runs it. It reads the plan and decides nothing."""

from __future__ import annotations

import base64
import difflib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from provision import __version__, catalog
from provision.base import aptsources, resources, uv_support
from provision.base.engine_source import EngineSource, pack_horovod_names
from provision.base.errors import UsageError
from provision.install import artifacts, builds, engine_builds, from_source
from provision.install.bundle.archive import Bundle
from provision.install.ssh_mesh import Member, cluster_id, members, networks, remembered
from provision.inventory import Inventory
from provision.plan.lock import Files
from provision.plan.model import COMPONENTS, HOROVOD_NAMES, HostPlan, Plan
from provision.remote import ansible_vars
from provision.remote.ansible import Event, Outcome, headline
from provision.remote.session import Session
from provision.survey import Facts
from provision.survey.model import noted_files

# In the order they run. The linker comes after everything that installs libraries and before everything that loads them.
ROLES = (
    *("guard", "bundle", "packages", "hwloc", "python", "from_source", "openmpi"),
    *("nccl", "linker", "pytorch", "engine", "mpi_network"),
)

# Left out on hosts where the user cannot become root.
ONLY_AS_ROOT = ("packages", "hwloc")

AFTER_THE_ROLES = ("ssh_mesh", "manifest", "smoke")
# Not left out by --from: the host lock, and the files that a closed network cannot reach.
ALWAYS = ("guard", "bundle")
# A step that reads what an earlier one has found.
NEEDS = {"linker": "nccl"}
# Roles that configure the cluster and not a single host.
FOR_THE_CLUSTER = ("mpi_network",)

DRIVER = "driver.yml"  # the playbook of drivers, next to site.yml, which runs it first
MANIFEST_SCHEMA = 2


@dataclass(frozen=True)
class PackageSources:
    """Where everything that is installed comes from, besides the hosts' own package indexes.

    Attributes:
        wheels: a folder with the user's wheels: of PyTorch, and of the engine.
        locked: host → environment in the prefix → the files that uv must install there, by provision.lock.
        bundle: with it nothing is downloaded.
    """

    engine: EngineSource
    wheels: Path | None = None
    index_url: str | None = None
    apt_mirror: str | None = None
    user_files: artifacts.UserFiles = field(default_factory=artifacts.UserFiles)
    locked: Mapping[str, Mapping[str, list[dict[str, Any]]]] = field(default_factory=dict)
    bundle: Bundle | None = None


def manifest(plan: Plan, name: str, cluster: str, known: Mapping[str, Member]) -> dict[str, Any]:
    """What is installed on one host, for its users and for the next survey, which compares it with the plan."""
    host = plan.hosts[name].as_dict()
    for component in (host[name] for name in COMPONENTS if host[name] is not None):
        component["why"], component["rejected"] = [], []  # their wording may change; they are in the run's plan
        component.pop("builders", None)
    del host["driver"]  # it belongs to the system
    host["hwloc"] = None  # it was removed, not installed
    return {"schema": MANIFEST_SCHEMA, "cluster": cluster, "host": host, "members": dict(known), "build": build_packages()}


def variables(
    plan: Plan, inventory: Inventory, facts: Mapping[str, Facts], sources: PackageSources, engine_archive: Path
) -> dict[str, Any]:
    """The playbook's Ansible variables, but for those of `artifacts.gather`."""
    cluster_members = members(plan, inventory, facts)
    found: dict[str, Any] = {
        "provision_plan": plan.as_dict(logins=True),
        "provision_cluster": cluster_id(inventory),
        "provision_members": cluster_members,
        "provision_manifests": manifests(plan, inventory, facts),
        "provision_networks": networks(cluster_members),
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
        found["provision_bundle"] = {"hosts": bundled, "archives": sources.bundle.archives(engine_archive.parent)}
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
    """Exact pins of what builds the engine, and of pip for packages that users add."""
    return [f"{name}=={version}" for name, version in catalog.python_packages().build.items()]


def is_complete(plan: Plan, inventory: Inventory) -> bool:
    """Whether the plan has every host of the run; otherwise the cluster's configuration stays as it is, instead of shrinking."""
    return {host.name for host in inventory.hosts} == set(plan.hosts)


def steps(first: str | None = None) -> list[str]:
    """The names of the steps, from ``first`` on; raises UsageError when there is no step of that name."""
    names = [*ROLES[1:], *AFTER_THE_ROLES]
    if first is None:
        return names
    if first not in names:
        close = difflib.get_close_matches(first, names, n=1)
        raise UsageError(
            f"invalid --from {first}: expected a step", hint=f"did you mean {close[0]}?" if close else f"steps are {', '.join(names)}"
        )
    return names[names.index(NEEDS.get(first, first)) :]


def render(
    plan: Plan,
    inventory: Inventory,
    facts: Mapping[str, Facts],
    sources: PackageSources,
    folder: Path,
    *,
    first: str | None = None,
    fetch: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[Path, dict[str, Any]]:
    """Write the playbook, its roles, modules, variables and the engine's sources into ``folder``; returns the playbook's path, and its
    variables.

    The folder stands alone: ``ansible-playbook -i INVENTORY site.yml -e @vars.json`` does there what ``provision up`` does. Without
    ``fetch`` it lacks the downloaded files, which a dry run does not need.
    """
    origin = resources.folder("playbooks")
    copy_modules(folder, "roles")
    archive = sources.engine.save(folder)
    made = variables(plan, inventory, facts, sources, archive) | {"provision_whole": first is None}
    engine_builds.adopt_wheels(plan, facts, sources.engine, sources.wheels)
    made |= artifacts.gather(
        plan,
        folder / "supplies",
        sources.user_files,
        fetch=fetch,
        keys=sources.bundle is None,
        index_url=sources.index_url,
        bundled=sources.bundle.folder / "supplies" if sources.bundle else None,
        say=say,
    )
    if fetch and sources.bundle is None:
        made["provision_torch_wheels"] = _torch_wheels(plan, facts, sources.wheels)
    ansible_vars.write(folder / "vars.json", made)
    playbook = folder / "site.yml"
    run = roles_of(plan, inventory, facts, sources, first)
    drivers = new_drivers(plan)
    templates = resources.templates(origin, _one_line)
    text = templates.get_template("site.yml.j2").render(
        hosts=plan.hosts,
        drivers=drivers,
        roles=[role for role in run if role in ROLES],
        only_as_root=ONLY_AS_ROOT,
        connect="ssh_mesh" in run,
        mirrored="provision_apt_mirror" in made,
        notes=plan.notes,
        version=__version__,
    )
    playbook.write_text(text, encoding="utf-8")
    if drivers:
        text = templates.get_template("driver.yml.j2").render(hosts=drivers, version=__version__)
        (folder / DRIVER).write_text(text, encoding="utf-8")
    return playbook, made


def roles_of(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts], sources: PackageSources, first: str | None = None) -> list[str]:
    """The roles of the rendered playbook, in their order."""
    complete = is_complete(plan, inventory)
    wanted = steps(first)
    unused = _unused_roles(plan, sources) | (set() if complete else set(FOR_THE_CLUSTER))
    roles = [role for role in ROLES if (role in ALWAYS or role in wanted) and role not in unused]
    if complete and len(members(plan, inventory, facts)) > 1 and "ssh_mesh" in wanted:
        roles.append("ssh_mesh")
    return [*roles, "manifest"]


def copy_modules(folder: Path, *more: str) -> None:
    """Copy our Ansible modules, and ``more`` folders of the playbooks, into ``folder``, with what they share with this machine."""
    origin = resources.folder("playbooks")
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("library", "module_utils", *more):
        shutil.copytree(origin / part, folder / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for helper in (aptsources.__file__, uv_support.__file__, resources.hostside("trust.py")):
        shutil.copy(helper, folder / "module_utils")


def new_drivers(plan: Plan) -> list[str]:
    """The hosts on which the plan installs a driver."""
    return [name for name, host in plan.hosts.items() if host.driver is not None and host.driver.is_new]


def install_drivers(session: Session, plan: Plan, facts: Mapping[str, Facts], sources: PackageSources) -> Outcome:
    """Install the plan's drivers and reboot these hosts, one after the other. What else is installed depends on the survey after it."""
    names = new_drivers(plan)
    folder = session.folder / "driver-playbook"
    only = replace(plan, hosts={name: plan.hosts[name] for name in names})
    _playbook, variables_ = render(only, session.inventory, facts, sources, folder, fetch=False)
    keys = artifacts.repository_keys(only, folder / "supplies", session.progress.doing)
    extra = {**variables_, "provision_repository_keys": keys, **session.of_locks}
    outcome = session.play(folder / DRIVER, "Driver", hosts=names, extra_vars=extra)
    if outcome.failed:
        session.release(names)
    return outcome


def _unused_roles(plan: Plan, sources: PackageSources) -> set[str]:
    """Roles that would do nothing on any host: a task that Ansible skips costs a process per host on the controller."""
    hosts = plan.hosts.values()
    used = {
        "bundle": sources.bundle is not None,
        "hwloc": any(host.hwloc is not None and host.hwloc.source == "remove" for host in hosts),
        "from_source": any(recipe.of(host) is not None for recipe in from_source.RECIPES for host in hosts),
        "pytorch": any(host.torch is not None for host in hosts),
    }
    return {role for role, is_used in used.items() if not is_used}


def partly_checked(host: HostPlan) -> set[str]:
    """Roles of which a dry run leaves out tasks on this host, because they read what earlier tasks would have installed."""
    roles = {"openmpi", "engine", "ssh_mesh", "manifest"}
    if host.root:
        roles.add("packages")
    if host.root or host.nccl is not None:
        roles.add("linker")
    if host.nccl_packages is not None:
        roles.add("nccl")
    if host.driver is not None:
        roles.add("driver")
    return roles


def _torch_wheels(plan: Plan, facts: Mapping[str, Facts], folder: Path | None) -> dict[str, str]:
    """Host → the user's wheel of PyTorch that it lacks. Raises ProvisionError where the wheel is not in the folder."""
    found = {}
    for name, host in plan.hosts.items():
        if host.torch is None or not host.torch.file or _holds_torch(host, facts.get(name)):
            continue
        found[name] = str(artifacts.torch_wheel(host, folder))
    return found


def _holds_torch(host: HostPlan, facts: Facts | None) -> bool:
    """Whether a host has PyTorch from that very file, and nothing of ours was changed there."""
    if host.torch is None or facts is None:
        return False
    noted = facts.installed.files.get("venv") or {}
    return noted.get("torch", {}).get("sha256") == host.torch.sha256 and not facts.drift


def _one_line(value: Any) -> Any:
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


def install(
    session: Session,
    plan: Plan,
    facts: Mapping[str, Facts],
    sources: PackageSources,
    on_complete: Callable[[str, Files], None],
    *,
    check: bool = False,
    first: str | None = None,
) -> Installed:
    """Run the rendered playbook on the plan's hosts, from the step ``first`` on. With ``check`` nothing is changed; Ansible reports what
    would be.

    Args:
        on_complete: called for each host as soon as its manifest is written, with the files that its packages came from: the caller knows
            the complete hosts of an interrupted run, too.
    """
    folder = session.folder / "playbook"
    say = session.progress.doing
    playbook, variables_ = render(plan, session.inventory, facts, sources, folder, first=first, fetch=not check, say=say)
    extra = {**variables_, **session.of_locks}
    unlocked: dict[str, list[str]] = {}
    made: dict[str, str] = {}
    failures: dict[tuple[str, str], str] = {}

    def note(event: Event) -> None:
        if attempt := (event.result.get("ansible_facts") or {}).get("from_source_attempt"):
            if attempt["failure"]:
                failures[attempt["key"], event.host] = headline(attempt["failure"])
            elif attempt["sha256"]:
                made[attempt["key"]] = event.host
        if event.role == "manifest" and event.kind == "ok":
            entries = [entry for entry in event.result.get("results") or () if "content" in entry]
            if entries:
                contents = {entry["item"]: json.loads(base64.b64decode(entry["content"])) for entry in entries}
                on_complete(event.host, noted_files(contents))
        if found := event.result.get("unlocked"):
            unlocked.setdefault(event.host, []).extend(found)

    title = "Install (dry run)" if check else "Install"
    try:
        roles = roles_of(plan, session.inventory, facts, sources, first)
        outcome = session.play(playbook, title, hosts=list(plan.hosts), steps=roles, extra_vars=extra, check=check, on_event=note)
    finally:
        builds.adopt(folder / "supplies")
    if outcome.failed and not check:
        session.release(list(plan.hosts))
    parts = {**extra["provision_from_source"], "engine": {"title": "the engine", **extra["provision_engine_builds"]}}
    return Installed(outcome, unlocked, from_source.fallbacks(parts, made, failures))


def manifests(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, dict[str, Any]]:
    """Each host's manifest, as it will be once the plan is installed."""
    cluster, everyone, complete = cluster_id(inventory), members(plan, inventory, facts), is_complete(plan, inventory)
    return {name: manifest(plan, name, cluster, everyone if complete else remembered(facts.get(name))) for name in plan.hosts}
