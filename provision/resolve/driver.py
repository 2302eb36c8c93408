"""NVIDIA's driver, where it was asked for: the branch, its kernel modules, and the packages that install it.

Everything else is planned for the hosts as they are with that driver (`with_driver`). A driver is installed by root, needs a reboot, and
belongs to the system afterwards, so anything that speaks against it is a conflict before anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from provision.base.errors import UsageError
from provision.base.problems import Problem
from provision.base.text import joined
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.catalog.models import DriverPackages
from provision.plan.model import Driver, Rejected
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass, HostClasses, by_class, nvidia_repository
from provision.resolve.remedies import Conflict, ConflictId, Proposal, Trial, change_requirements, exclude
from provision.survey import Facts, gpus, hardware
from provision.survey.model import Driver as DriverFacts
from provision.survey.model import Gpu

AUTO = "auto"
_FLAVOUR = re.compile(r"\d[\d.]*(?:\+[a-z]\w*)?(?:-\d+)?-([a-zA-Z][\w-]*)")  # 6.8.0-60-generic, 6.1.0-20-cloud-amd64, 6.12.38+deb13-amd64


def known_branch(value: str, where: str, catalog: Catalog, *others: str) -> str:
    """The value. Raises UsageError unless it is a branch to install, as ``--driver`` and ``--what-if`` take them, or one of ``others``."""
    known = (*others, *catalog.driver().branches.of)
    if value not in known:
        what = f"{where}: not a branch of NVIDIA's driver whose packages are known"
        raise UsageError(what, hint=f"write one of {', '.join(known)}")
    return value


def drivers(
    facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], requirements: Requirements
) -> tuple[dict[str, Driver], dict[Hashable, Conflict]]:
    """(host → its driver, conflicts); hosts without GPUs have neither."""
    found: dict[str, Driver] = {}
    conflicts: dict[Hashable, Conflict] = {}
    same: dict[Driver, Driver] = {}
    for name, host in facts.items():
        if not gpus.has_gpu(host, requirements.catalog):
            continue
        try:
            made = _driver(name, host, class_of[name], requirements)
        except Conflict as conflict:
            conflicts[f"the driver of {name}"] = conflict
        else:
            found[name] = same.setdefault(made, made)  # hosts with the same components are shown as one
    return found, conflicts


def problems(
    facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], requirements: Requirements, conflicts: Mapping[Hashable, Conflict]
) -> tuple[Problem, ...]:
    """The conflicts of drivers as problems. Their remedies are tried for drivers alone: what runs with them is planned afterwards."""

    def resolved(host_classes: HostClasses, changed: Requirements) -> Mapping[Hashable, Conflict]:
        left = {name: facts[name] for names in host_classes.values() for name in names}
        return drivers(left, class_of, changed)[1] if changed.driver else {}

    return Trial(by_class(class_of), requirements, conflicts, resolved).problems()


def with_driver(facts: Facts, driver: Driver, catalog: Catalog) -> Facts:
    """The facts of a host once it runs this driver."""
    if not driver.is_new:
        return facts
    if driver.services:  # the fabric manager, which is installed and started with it
        facts = facts.model_copy(update={"nvidia": facts.nvidia.model_copy(update={"fabric_manager": True})})
    return running(facts, oldest_version(driver.version, driver.cuda, catalog), driver.cuda, driver.modules == "open", catalog)


def running(facts: Facts, version: str, cuda: str | None, open_modules: bool | None, catalog: Catalog) -> Facts:
    """The facts of a host on which this version of the driver runs, installed or only thought of."""
    count = max(len(facts.nvidia.pci_devices), len(facts.gpus), 1)
    capabilities = gpus.capabilities(facts, catalog) or [""]
    listed = [Gpu(compute_capability=each or None) for each in capabilities]
    return facts.model_copy(
        update={
            "driver": DriverFacts(version=version, cuda=cuda, open=open_modules),
            "gpus": facts.gpus or [*listed, *[listed[-1]] * (count - len(listed))],
            "nvidia": facts.nvidia.model_copy(update={"smi_error": None, "nouveau": False}),
            "missing": [each for each in facts.missing if each not in ("driver.cuda", "gpus")],
        }
    )


def notes(found: Mapping[str, Driver], facts: Mapping[str, Facts], catalog: Catalog) -> list[str]:
    """What happens on hosts besides the installation of packages."""
    new = sorted(name for name, driver in found.items() if driver.is_new)
    if not new:
        return []
    said = [
        f"{joined(new)}: the driver comes first; then these hosts are rebooted one after the other, and surveyed again",
        "`provision remove` leaves drivers, held at their version",
    ]
    if racks := [name for name in new if set(facts[name].nvidia.pci_ids) & set(catalog.hardware().fabric.imex)]:
        said.append(
            f"{joined(racks)}: IMEX is installed and not started: list the addresses of the hosts of its NVLink domain in "
            "/etc/nvidia-imex/nodes_config.cfg on each, then: systemctl enable --now nvidia-imex"
        )
    return said


def oldest_version(branch: str, cuda: str | None, catalog: Catalog) -> str:
    """The oldest version of a branch that runs that CUDA."""
    oldest = catalog.cuda().toolkits.of.get(cuda or "", "")
    return oldest if oldest.startswith(f"{branch}.") else branch


def installable(host_class: HostClass) -> bool:
    """Whether hosts of a class lack a driver that could be installed there."""
    packages, fault = host_class.catalog.driver().of(host_class.os_id), host_class.gpu_fault
    lacks = fault is not None and fault.id in ("no-driver", "nouveau")
    return lacks and host_class.root and packages is not None and host_class.of_release(packages.releases) is not None


def offer(facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], requirements: Requirements) -> str | None:
    """`--driver auto` as a remedy, with all that it does; None where it installs nothing or has a conflict on any host."""
    missing = {name for name, host_class in class_of.items() if installable(host_class)}
    found, conflicts = drivers(facts, class_of, replace(requirements, driver=AUTO)) if missing else ({}, {})
    new = sorted(name for name, each in found.items() if each.is_new)
    if conflicts or not new:
        return None
    replaced = [name for name in new if name not in missing]
    others = f", replaces the older one of {joined(replaced)}" if replaced else ""
    return f"--driver auto: provision installs NVIDIA's driver on {joined(sorted(missing))}{others}, and reboots all of these"


@dataclass(frozen=True)
class _Host:
    """A host that gets a driver, and the packages of its distribution."""

    name: str
    facts: Facts
    host_class: HostClass
    packages: DriverPackages
    catalog: Catalog

    def conflict(self, id: ConflictId, what: str, *proposals: Proposal) -> Conflict:
        """A conflict of this host, whose last remedy is to leave it out."""
        return Conflict(id, self.name, what, (*proposals, exclude([self.name])))


def _driver(name: str, facts: Facts, host_class: HostClass, requirements: Requirements) -> Driver:
    requested = str(requirements.driver)
    host = _Host(name, facts, host_class, _packages(name, host_class), requirements.catalog)
    branch, rejected = _branch(host, requested)
    installed = facts.driver.version if facts.driver and gpus.fault(facts, requirements.catalog) is None else None
    if installed and (requested == AUTO or key(installed)[0] == int(branch)) and key(installed)[0] >= int(branch):
        why = (
            f"driver {installed} works, and {branch}, which `auto` would take, is not newer"
            if requested == AUTO
            else f"driver {installed} is of that branch"
        )
        newer = tuple(each for each in rejected if int(each.candidate) > key(installed)[0])
        return Driver(installed, f"driver {installed}", "host", (why,), newer, cuda=host_class.cuda)
    if installed and key(installed)[0] > int(branch) and not requirements.allow_downgrade:
        proposals = (
            change_requirements("--driver auto, which keeps it", driver=AUTO),
            change_requirements("--allow-downgrade: replace it by the older one", allow_downgrade=True),
        )
        raise Conflict("driver-is-newer", name, f"driver {installed} works there, and {branch} is older", proposals)
    _refuse_obstacles(host)
    is_open = _open_modules(host)
    return _component(host, branch, _why(host, branch, requested, is_open=is_open), rejected, is_open=is_open)


def _packages(name: str, host_class: HostClass) -> DriverPackages:
    """The packages of its distribution. Raises Conflict without any for its release."""
    packages = host_class.catalog.driver().of(host_class.os_id)
    if packages is None or host_class.of_release(packages.releases) is None:
        listed = ", ".join(f"{os_id} {joined(list(each.releases))}" for os_id, each in host_class.catalog.driver().packages.items())
        what = f"no packages of NVIDIA's driver for {host_class.system} are known; they are for {listed}"
        by_hand = Proposal("install a driver there by hand, and leave --driver out")
        raise Conflict("driver-packages", name, what, (by_hand, exclude([name])))
    return packages


def _branch(host: _Host, requested: str) -> tuple[str, tuple[Rejected, ...]]:
    """(the requested branch, for `auto` the longest supported that fits GPUs and system; rejected newer ones). Raises Conflict."""
    known, production, capabilities = host.catalog.driver(), host.catalog.production_branches(), gpus.capabilities(host.facts, host.catalog)
    offered = host.host_class.of_release(host.packages.releases) or ()
    if not capabilities and requested == AUTO:
        ids = f" (PCI device {joined([f'10de:{each}' for each in host.facts.nvidia.pci_ids])})" if host.facts.nvidia.pci_ids else ""
        what = f"which GPUs it has is not known{ids}, so that no branch of the driver can be chosen for them"
        longest = [*sorted(offered, key=int), *(each for each in production if each in offered)][-1]
        by_name = change_requirements(f"name a branch that supports them: --driver {longest}", driver=longest)
        raise host.conflict("driver-gpus-unknown", what, by_name)
    rejected = []
    for branch in sorted(known.branches.of, key=int, reverse=True):
        if (misfit := known.gpus.misfit(branch, capabilities)) is not None:
            rejected.append(Rejected(branch, misfit, id="gpu"))
        elif branch not in offered:
            rejected.append(Rejected(branch, "no package of it is known for that system", id="absent"))
        elif requested == AUTO and branch not in production:
            rejected.append(Rejected(branch, "`auto` takes branches for production that NVIDIA still supports", id="version"))
    unfit = {each.candidate: each for each in rejected}
    usable = sorted((branch for branch in known.branches.of if branch not in unfit), key=int, reverse=True)
    if requested in unfit:
        others = [change_requirements(f"--driver {branch}", driver=branch) for branch in usable]
        raise host.conflict("driver-branch", f"driver {requested} does not fit: {unfit[requested].cause}", *others)
    if requested != AUTO:
        return requested, ()
    if not usable:
        raise host.conflict("driver-branch", f"no branch of the driver fits: {rejected[0].cause}")
    best, *shorter = sorted(usable, key=production.index, reverse=True)
    ends = host.catalog.cuda().driver_branches.of
    rejected += [
        Rejected(branch, f"supported until {ends.get(branch, 'an unknown date')}, {best} longer", id="version") for branch in shorter
    ]
    newer = [each for each in rejected if int(each.candidate) > int(best)]
    return best, tuple(sorted(newer, key=lambda each: int(each.candidate), reverse=True))


def _open_modules(host: _Host) -> bool:
    """Whether the open kernel modules run its GPUs; unknown ones are newer than the catalogue. Raises Conflict where neither runs all."""
    known, capabilities = host.catalog.driver().modules, gpus.capabilities(host.facts, host.catalog)
    if not capabilities or key(capabilities[0]) >= key(known.open_from):
        return True
    if key(capabilities[-1]) >= key(known.open_only_from):
        what = f"no kernel modules run all its GPUs: {capabilities[0]} needs the proprietary ones, {capabilities[-1]} the open ones"
        raise host.conflict("driver-modules", what, Proposal(f"take the GPUs of one kind out of {host.name}"))
    return False


def _refuse_obstacles(host: _Host) -> None:
    """Raise Conflict for what prevents the installation."""
    facts, security = host.facts, host.facts.security
    found: dict[ConflictId, object] = {
        "driver-privileges": not host.host_class.root,
        "driver-container": facts.container,
        "driver-wsl": hardware.wsl(facts),
        "driver-vgpu": gpus.is_vgpu(facts, host.catalog),
        "driver-runfile": facts.nvidia.runfile,
        "driver-secure-boot": host.packages.built and security.secure_boot and not security.dkms_key_enrolled,
    }
    if id := next((each for each, holds in found.items() if holds), None):
        refusal = host.catalog.driver().repairs.refusals[id]
        raise host.conflict(id, refusal["what"], Proposal(refusal["remedy"].format(host=host.name)))


def _component(host: _Host, branch: str, why: tuple[str, ...], rejected: tuple[Rejected, ...], *, is_open: bool) -> Driver:
    packages, kernel_flavour = host.packages, _flavour(host)
    repository = nvidia_repository(host.host_class) if packages.from_ == "repository" else None
    if isinstance(repository, Rejected):
        raise host.conflict("driver-repository", repository.cause)
    fabric, ids = host.catalog.hardware().fabric, set(host.facts.nvidia.pci_ids)

    def filled(names: tuple[str, ...]) -> list[str]:
        return [each.format(branch=branch, flavour=kernel_flavour) for each in names]

    def of_branch(names: tuple[str, ...]) -> list[str]:
        branched = packages.with_branch_until is not None and int(branch) <= int(packages.with_branch_until)
        return [f"{each}-{branch}" if branched else each for each in filled(names)]

    driver = filled(packages.open if is_open else packages.proprietary)
    services = []
    if host.facts.nvidia.pci_switches or ids & set(fabric.nvswitch):
        driver += of_branch(packages.fabric)
        services.append("nvidia-fabricmanager")
    if ids & set(fabric.imex):
        driver += of_branch(packages.imex)
    kernel = filled(packages.kernel)
    held = (*driver, *(() if packages.built else kernel))
    why = (*why, f"with {joined(services)} for its NVSwitches") if services else why
    stream = packages.stream and (packages.stream.open if is_open else packages.stream.proprietary)
    return Driver(
        branch,
        driver[0],
        packages.from_,
        (*why, f"held against upgrades: {', '.join(held)}"),
        rejected,
        modules="open" if is_open else "proprietary",
        packages=(*kernel, *driver),
        first=tuple(filled(packages.first)),
        stream=stream.format(branch=branch) if stream else None,
        held=held,
        services=tuple(services),
        repository=repository,
        cuda=host.catalog.cuda().toolkits.of_branch(branch),
    )


def _flavour(host: _Host) -> str:
    """The kernel's flavour, as packages name it."""
    if not any("{flavour}" in each for each in (*host.packages.kernel, *host.packages.open)):
        return ""
    release, system = host.facts.os.kernel or "", host.host_class.os_version
    found = _FLAVOUR.fullmatch(release)
    if found is None:
        what = f"the packages for its kernel are not known{f': {release}' if release else ', because its facts do not name it (os.kernel)'}"
        raise host.conflict("driver-kernel", what, Proposal(f"boot one of the distribution's kernels on {host.name}"))
    own = host.packages.own_kernels.get(system)
    enabled = own is not None and found[1] == "generic" and key(minor(release)) > key(own)
    return f"generic-hwe-{system}" if enabled else found[1]


def _why(host: _Host, branch: str, requested: str, *, is_open: bool) -> tuple[str, ...]:
    known, capabilities = host.catalog.driver(), gpus.capabilities(host.facts, host.catalog)
    until = host.catalog.cuda().driver_branches.of.get(branch)
    chosen = "requested by name" if requested != AUTO else "the longest supported that fits"
    why = [f"{branch} is a {known.branches.of[branch]} branch{f' (until {until})' if until else ''}, {chosen}"]
    if not capabilities:
        why.append("open kernel modules, because GPUs that are not known are taken for newer ones")
    elif is_open:
        why.append(f"open kernel modules, because all its GPUs have compute capability {known.modules.open_from} or higher")
    else:
        why.append(f"proprietary kernel modules, because compute capability {capabilities[0]} is lower than {known.modules.open_from}")
    if host.facts.nvidia.nouveau:
        why.append("nouveau is disabled, which uses the GPUs now")
    if not host.packages.built:
        why.append("its kernel modules are signed by the distribution" + (", for Secure Boot" if host.facts.security.secure_boot else ""))
    elif host.facts.security.secure_boot:
        why.append("Secure Boot is on, and the key of DKMS is enrolled")
    return tuple(why)
