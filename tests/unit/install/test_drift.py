"""Whether a host needs the installation at all, who its peers are under --limit, and which hosts failed last time. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollouts import as_json, host_plan, rollout

from provision.base import paths
from provision.base.errors import UsageError
from provision.catalog import OURS
from provision.install import drift, roles, ssh_mesh
from provision.inventory import Inventory, last_run, load
from provision.plan.manifest import digest_of
from provision.plan.model import Plan
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve
from provision.survey import Facts
from provision.survey.document import load_file

DATA = Path(__file__).parents[2] / "data"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIexample"


@pytest.fixture
def inventory() -> Inventory:
    return load(str(DATA / "lint.ini"))


def plan_of(facts: dict[str, Any]) -> Plan:
    made = resolve(read(facts), Requirements(), {name: HostRequirements() for name in facts})
    assert not made.conflicts
    return made


@pytest.fixture
def done(inventory: Inventory) -> dict[str, dict[str, Any]]:
    """The facts of hosts on which a run has just ended."""
    facts = {name: found.model_dump() for name, found in load_file(DATA / "lint-facts.json", OURS).items()}
    for found in facts.values():
        found["ssh"]["mesh_key"] = KEY
        found["user"]["name"] = "trainer"
    for name, manifest in rollout(plan_of(facts), inventory, read(facts)).manifests.items():
        facts[name]["installed"]["manifest"] = as_json(manifest)
        facts[name]["drift"] = []
    return facts


def read(facts: dict[str, dict[str, Any]]) -> dict[str, Facts]:
    return {name: Facts.model_validate(each) for name, each in facts.items()}


def reasons(inventory: Inventory, facts: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    wanted = rollout(plan_of(facts), inventory, read(facts)).manifests
    found = {name: drift.reason_to_run(wanted[name], read(facts)[name]) for name in wanted}
    assert all(reason.id for reason in found.values() if reason)
    return {name: reason and reason.what for name, reason in found.items()}


def test_hosts_that_hold_the_plan_need_nothing(inventory: Inventory, done: dict[str, dict[str, Any]]) -> None:
    assert reasons(inventory, done) == {"node1": None, "gpu1": None}


def test_the_plan_comes_back_from_a_manifest(inventory: Inventory, done: dict[str, dict[str, Any]]) -> None:
    for name, planned in plan_of(done).hosts.items():
        found = host_plan(done[name]["installed"]["manifest"]["host"])
        assert (found.network, found.openmpi.version, found.prefix) == (planned.network, planned.openmpi.version, planned.prefix)


def test_a_reworded_reason_changes_nothing(inventory: Inventory, done: dict[str, dict[str, Any]]) -> None:
    done["node1"]["installed"]["manifest"]["host"]["openmpi"]["why"] = ["other words"]
    assert reasons(inventory, done)["node1"] is None


def test_a_manifest_is_rewritten_for_what_it_says_and_not_for_what_is_missing_on_the_host(
    inventory: Inventory, done: dict[str, dict[str, Any]]
) -> None:
    wanted = rollout(plan_of(done), inventory, read(done)).manifests["node1"]
    done["node1"]["drift"] = [{"kind": "package-missing", "subject": "g++"}]
    assert drift.reason_to_run(wanted, read(done)["node1"])
    assert not drift.is_rewritten(wanted, read(done)["node1"])
    done["node1"]["installed"]["manifest"]["host"]["slots"] = 9
    assert drift.is_rewritten(wanted, read(done)["node1"])
    done["node1"]["installed"]["manifest"] = None
    assert drift.is_rewritten(wanted, read(done)["node1"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["installed"].update(manifest=None), "nothing is installed"),
        (lambda found: found.update(drift=None), "could not find out"),
        (lambda found: found["errors"].update(drift="no answer within 8 s"), "could not find out"),
        (lambda found: found.update(drift=[{"kind": "package-missing", "subject": "g++"}]), r"package g\+\+ is gone"),
        (lambda found: found.update(dpkg_interrupted=True), "interrupted"),
        (lambda found: found["installed"]["manifest"]["host"]["openmpi"].update(version="4.1.7"), r"installation: Open MPI 4\.1\.7 → 4\."),
        (lambda found: found["installed"]["manifest"]["host"]["engine"].update(sha256="0" * 64), r"engine \S+ has other sources'"),
        (lambda found: found["installed"]["manifest"]["host"]["engine"].update(options=["cpu-only"]), r"engine \S+ without cpu-only'"),
        (lambda found: found["installed"]["manifest"]["host"]["torch"].update(version="2.5.0+cpu"), r"PyTorch 2\.5\.0\+cpu → \S+"),
        (lambda found: found["installed"]["manifest"]["host"]["python"].update(version="3.9.2"), r"Python 3\.9\.2 → 3\."),
        (lambda found: found["installed"]["manifest"]["host"].update(slots=9), r"slots 9 → \d+"),
        (lambda found: found["installed"]["manifest"].update(cluster="0123456789ab"), "the inventory has other hosts or addresses"),
        (lambda found: found["installed"]["manifest"]["build"].pop(), "the tools that build the engine have other versions"),
        (lambda found: found["installed"]["manifest"].update(schema=1), "written by another version"),
        (lambda found: found["installed"]["manifest"]["members"].pop("gpu1"), "another host has other keys"),
        (lambda found: found["installed"]["manifest"]["members"].update(gpu1="no mapping"), "another host has other keys"),
        (lambda found: found["installed"]["manifest"].update(members="0" * 64), "another host has other keys"),
        (lambda found: found["ssh"].update(mesh_key=None), "key"),
    ],
)
def test_what_is_missing_or_changed_is_noticed(inventory: Inventory, done: dict[str, dict[str, Any]], change: Any, said: str) -> None:
    change(done["node1"])
    with pytest.raises(AssertionError, match=said):
        assert reasons(inventory, done)["node1"] is None


def test_hosts_outside_the_limit_stay_members(done: dict[str, dict[str, Any]]) -> None:
    limited = load(str(DATA / "lint.ini"), limit="node1")
    only = {"node1": done["node1"]}
    assert set(ssh_mesh.members(plan_of(only), limited, read(only))) == {"node1", "gpu1"}
    assert ssh_mesh.cluster_id(limited) == ssh_mesh.cluster_id(load(str(DATA / "lint.ini")))
    assert reasons(limited, only) == {"node1": None}


def test_a_digest_of_the_members_says_as_much_and_is_kept(inventory: Inventory, done: dict[str, dict[str, Any]]) -> None:
    for found in done.values():
        found["installed"]["manifest"]["members"] = digest_of(found["installed"]["manifest"]["members"])
    assert reasons(inventory, done) == {"node1": None, "gpu1": None}
    only = {"node1": done["node1"]}  # as gpu1 does not answer
    (manifest,) = rollout(plan_of(only), inventory, read(only)).manifests.values()
    assert manifest.members == done["node1"]["installed"]["manifest"]["members"]
    assert reasons(inventory, only) == {"node1": None}


def test_a_host_that_left_the_inventory_is_no_member_any_more(tmp_path: Path, done: dict[str, dict[str, Any]]) -> None:
    (tmp_path / "hosts.ini").write_text((DATA / "lint.ini").read_text().replace("gpu1", "gpu9"))
    only = {"node1": done["node1"]}
    assert set(ssh_mesh.members(plan_of(only), load(str(tmp_path / "hosts.ini"), limit="node1"), read(only))) == {"node1"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", KEY + "\nssh-ed25519 AAAAevil"),
        ("host_keys", [KEY + "\n*"]),
        ("login", "me\nProxyCommand evil"),
        ("address", "192.0.2.1 evil"),
        ("port", "22"),
    ],
)
def test_a_manifest_cannot_smuggle_lines_into_other_hosts_files(done: dict[str, dict[str, Any]], field: str, value: Any) -> None:
    done["node1"]["installed"]["manifest"]["members"]["gpu1"][field] = value
    assert "gpu1" not in ssh_mesh.remembered(read(done)["node1"])


def test_the_hosts_that_failed_last_time(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no earlier run"):
        last_run.failed_hosts(inventory)
    for number, (of, failed) in enumerate([(inventory, ["node1"]), (inventory, ["gpu1"]), (load("other,"), ["node1"])]):
        folder = paths.runs() / f"2026010{number}-000000-aaaaaa"
        folder.mkdir(parents=True)
        failures = [{"host": name} for name in failed]
        report = {"inventory": last_run.identity(of), "failures": failures, "hosts": [], "folder": str(folder)}
        (folder / "report.json").write_text(json.dumps(report))
    assert last_run.failed_hosts(inventory) == ["gpu1"]
    (paths.runs() / "20260101-000000-aaaaaa" / "report.json").write_text(
        json.dumps({**report, "inventory": str(inventory.source), "failures": []})
    )
    with pytest.raises(UsageError, match="no host failed"):
        last_run.failed_hosts(inventory)


def test_steps_begin_where_they_are_told_to() -> None:
    assert roles.steps("engine") == ["engine", "mpi_network", "ssh_mesh", "manifest", "smoke"]
    assert roles.steps("linker")[0] == "nccl"  # the linker reads what that step finds
    with pytest.raises(UsageError, match="expected a step") as refused:
        roles.steps("engin")
    assert "did you mean `engine`?" in str(refused.value)
