"""Where an exported job may run: hosts that hold the same, or containers of one image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from provision.base.errors import ProvisionError, UsageError
from provision.base.text import counted, grouped, shortened
from provision.image import local_images
from provision.image.recipe import versions
from provision.inventory import Inventory
from provision.launch.launchers import Environment, RunOptions
from provision.plan import lock_file
from provision.plan.model import COMPONENTS, HostPlan, Plan
from provision.plan.requirements import DEFAULT_PREFIX
from provision.remote.session import Session
from provision.sandbox.containers import image_names
from provision.survey import installed

_NOT_HELD = ("driver", "hwloc", "cmake")  # components that no manifest names, or that nothing of a job uses


@dataclass(frozen=True)
class Pool:
    """Hosts or containers on which one job runs.

    Attributes:
        origin: what it was exported from.
        versions: component → version, as installed.
        shown: title → what tells pools apart: versions with their builds, the prefix and the like.
        variables: those of every rank; ``:{inherited}`` at the end stands for the value that is there.
        nodes, slots: hosts or containers, and ranks on each.
        gpus: whether PyTorch's build runs on GPUs.
        image: name and digest; empty for hosts.
    """

    origin: str
    versions: Mapping[str, str]
    shown: Mapping[str, str]
    gpus: bool
    nodes: int = 2
    slots: int = 1
    prefix: str = DEFAULT_PREFIX
    arch: str = "x86_64"
    hosts: tuple[HostPlan, ...] = ()
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Of the job."""
        return self.nodes * self.slots

    @property
    def python(self) -> str:
        """Path of the Python that has the engine."""
        return f"{self.prefix}/venv/bin/python"


def of_hosts(inventory: Inventory, session: Session) -> list[Pool]:
    """The pools of hosts that `provision up` made ready: one where all hold the same.

    Raises:
        UsageError: there is no lock, or it is invalid.
        ProvisionError: a host cannot be reached, holds nothing, or holds something else than the lock says.
    """
    again, path = f"provision up {inventory.argument}", lock_file.path_of(inventory)
    lock = lock_file.read(inventory)
    if lock is None:
        raise UsageError("no lock of these hosts: nothing says which versions they should hold", where=str(path), hint=again)
    plan = installed.read_plan(session)
    if differences := lock.differences(plan):
        what = f"the hosts hold something else than {path} says: {'; '.join(differences[:3])}"
        raise ProvisionError(what, where=inventory.where, hint=f"{again}, then export again")
    return of_plan(plan, f"{inventory.where}, lock {lock.as_dict()['digest']}")


def of_plan(plan: Plan, origin: str) -> list[Pool]:
    """The pools of a plan, the largest first."""
    groups = grouped((frozenset(_shown(host).items()), host) for host in plan.hosts.values())
    return sorted((_pool(hosts, origin) for hosts in groups.values()), key=lambda pool: -pool.nodes)


def _pool(hosts: Sequence[HostPlan], origin: str) -> Pool:
    first, title = hosts[0], f"{origin}: {counted(len(hosts), 'host')}, {shortened([host.name for host in hosts], 200)}"
    return Pool(
        title,
        {name: version for name, version in versions(first).items() if name not in _NOT_HELD},
        _shown(first),
        first.torch is not None and first.torch.for_gpus,
        len(hosts),
        first.slots,
        first.prefix,
        first.arch,
        tuple(hosts),
        variables=Environment.of(Plan({host.name: host for host in hosts})).variables(RunOptions(())),
    )


def _shown(host: HostPlan) -> dict[str, str]:
    shown = {}
    for name in COMPONENTS:
        if name not in _NOT_HELD and (part := getattr(host, name)) is not None and part.version:
            shown[str(name)] = part.version + (f" for CUDA {cuda}" if (cuda := getattr(part, "cuda", None)) else "")
    own = {"architecture": host.arch, "prefix": host.prefix, "ranks per host": str(host.slots), "as root": "yes" if host.root else "no"}
    return {**shown, **own}


def of_image(name: str) -> Pool:
    """The pool of an image that this machine's container engine has, by its digest.

    Raises UsageError for a name without a digest, an unknown image, and one that is not of `provision image build`.
    """
    if "@sha256:" not in name:
        hint = f"docker push {name}, then its digest: docker image inspect --format '{{{{index .RepoDigests 0}}}}' {name}"
        raise UsageError("an image without its digest: expected NAME@sha256:…", where=name, hint=hint)
    with local_images.engine() as client:
        info = local_images.get(client, image_names.checked(name))
    held: dict[str, str] = {each: info.of(each) for each in COMPONENTS if each not in _NOT_HELD and info.of(each)}
    arch, cuda = info.of("arch") or "x86_64", info.of("cuda")
    shown = {**held, **({"CUDA": cuda} if cuda else {}), "architecture": arch}
    state = "verified" if info.ready else "not verified: provision image verify"
    return Pool(f"image {name} ({state})", held, shown, bool(cuda), arch=arch, image=name)
