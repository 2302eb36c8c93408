"""The roles of the playbook: what runs on hosts, in which order, and where each has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from provision.base.errors import UsageError
from provision.base.problems import Problem
from provision.base.validation import did_you_mean
from provision.install import from_source
from provision.plan.model import HostPlan
from provision.survey import Facts

SMOKE = "smoke"  # the last step, which has no role


def _on_all(_host: HostPlan) -> bool:
    return True


@dataclass(frozen=True)
class Role:
    """A role of ``playbooks/roles``.

    Attributes:
        used: whether it does something on a host: it is left out where it does nothing on any, because a task that Ansible skips costs a
            process per host on the controller.
        partly_checked: whether a dry run leaves out tasks on a host, because they read what earlier tasks would have installed.
        as_root: whether it is left out on hosts where the user cannot become root.
        as_login: whether it runs as the login user, also where the inventory sets another one.
        whole_cluster: whether it configures the cluster and not a single host: it runs where the run has every host.
        always: whether ``--from`` never leaves it out.
        reads: the role that finds what this one reads: ``--from`` starts there.
    """

    name: str
    used: Callable[[HostPlan], bool] = _on_all
    partly_checked: Callable[[HostPlan], bool] = lambda _host: False
    as_root: bool = False
    as_login: bool = False
    whole_cluster: bool = False
    always: bool = False
    reads: str = ""


#: In the order they run. The linker comes after everything that installs libraries and before everything that loads them.
ROLES = (
    Role("guard", always=True),  # the host lock
    Role("bundle", always=True),  # the files that a closed network cannot reach
    Role("packages", as_root=True, partly_checked=lambda host: host.root),
    Role("hwloc", as_root=True, used=lambda host: host.hwloc is not None and host.hwloc.source == "remove"),
    Role("python"),
    Role("from_source", used=lambda host: any(recipe.of(host) for recipe in from_source.RECIPES)),
    Role("openmpi", partly_checked=_on_all),
    Role("nccl", partly_checked=lambda host: host.nccl_packages is not None),
    Role("linker", partly_checked=lambda host: host.root or host.nccl is not None, reads="nccl"),
    Role("pytorch", used=lambda host: host.torch is not None),
    Role("engine", partly_checked=_on_all),
    Role("mpi_network", whole_cluster=True),
    Role("ssh_mesh", whole_cluster=True, as_login=True, partly_checked=_on_all),
    Role("manifest", always=True, partly_checked=_on_all),
)


def steps(first: str | None = None) -> list[str]:
    """The names of the steps, from ``first`` on; raises UsageError where there is no step of that name."""
    names = [*(role.name for role in ROLES[1:]), SMOKE]
    if first is None:
        return names
    if first not in names:
        raise UsageError(f"invalid --from {first}: expected a step{did_you_mean(first, names)}", hint=f"steps are {', '.join(names)}")
    reads = next((role.reads for role in ROLES if role.name == first), "")
    return names[names.index(reads or first) :]


def unprepared(first: str | None, hosts: Mapping[str, Facts]) -> list[Problem]:
    """The hosts on which a run cannot start at the step ``first``."""
    if first is None or "python" in steps(first):
        return []
    what = f"--from {first}: earlier steps have not run here: the prefix has no working environment; nothing was changed"
    without = [name for name, facts in hosts.items() if not facts.installed.venv.works]
    return [Problem("error", what, "leave --from out", host=name, where="survey", id="earlier-steps-missing") for name in without]


def partly_checked(host: HostPlan) -> set[str]:
    """The roles of which a dry run leaves out tasks on this host."""
    return {role.name for role in ROLES if role.partly_checked(host)} | ({"driver"} if host.driver is not None else set())
