"""``--horovod-names``: what the plan, the playbook and later runs make of it."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from invented_hosts import host, plan_for, remedies
from rendered import variables_in
from rollouts import as_json, rollout
from typer.testing import CliRunner

from provision.base import engine_source
from provision.base.errors import UsageError
from provision.cli import options
from provision.cli.main import app
from provision.commands import planning
from provision.image import image_request
from provision.plan.model import HOROVOD_NAMES, Plan
from provision.plan.options import Options
from provision.plan.request import Request
from provision.plan.requirements import HostRequirements, Requirements

ROLE = Path(__file__).parents[3] / "playbooks/roles/engine/tasks/main.yml"


def inner(source: engine_source.EngineSource) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(source.content)) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames()}


def named(plan: Plan) -> dict[str, bool]:
    return {name: HOROVOD_NAMES in each.engine.options for name, each in plan.hosts.items()}


def test_their_sources_are_an_archive_of_their_own() -> None:
    names = engine_source.pack_horovod_names()
    assert {"pyproject.toml", "backend/refusing.py", "src/horovod/torch/__init__.py"} <= inner(names)
    assert not any("horovod/" in name for name in inner(engine_source.pack())), "a change of the names must not build the engine again"


def test_the_playbook_gets_them_where_they_are_asked_for(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"schema": 1, "hosts": {"a": {"os": {"id": "debian", "version": "12"}, "arch": "x86_64"}}}))

    def variables(*words: str) -> Any:
        made = tmp_path / "-".join(("made", *words))
        done = CliRunner().invoke(app, ["plan", "--facts", str(facts), "--out", str(made), *words])
        assert done.exit_code == 0, done.output
        return variables_in(made / "vars.json")

    plain, wanted = variables(), variables("--horovod-names")
    assert "provision_horovod_names" not in plain
    assert wanted["provision_horovod_names"]["sha256"] == engine_source.pack_horovod_names().sha256
    assert Path(wanted["provision_horovod_names"]["archive"]).is_file()
    # The manifests differ in nothing but this, so that hosts without them are not ready, and others stay as they are.
    before, after = plain["provision_manifests"]["a"]["host"], wanted["provision_manifests"]["a"]["host"]
    assert {key for key in before if before[key] != after[key]} == {"engine"}
    assert (before["engine"]["options"], after["engine"]["options"]) == ([], [HOROVOD_NAMES])


def test_the_role_installs_them_last_and_takes_them_off_where_they_are_not_wanted() -> None:
    tasks = yaml.safe_load(ROLE.read_text())
    before = yaml.safe_load((ROLE.parents[2] / "python" / "tasks" / "main.yml").read_text())
    packages = next(task for task in before if task["name"] == "Install Python packages")
    assert f"'{HOROVOD_NAMES}' in host_plan.engine.options" in packages["uv_packages"]["absent"]
    assert "collective-core-horovod" in packages["uv_packages"]["absent"]
    names = next(task for task in tasks if task["name"] == "Install Horovod's names")
    assert names["when"] == f"'{HOROVOD_NAMES}' in host_plan.engine.options"
    assert tasks.index(names) > [task["name"] for task in tasks].index("Install the engine")


def test_they_are_refused_beside_the_real_horovod() -> None:
    both = {"a": host(), "b": host("10.0.0.2", installed={"packages": {"horovod": "0.28.1"}})}
    assert plan_for(both).hosts
    (conflict,) = plan_for(both, Requirements(horovod_names=True, torch=False)).conflicts
    assert conflict.host == "b"
    assert conflict.what == "Horovod 0.28.1 is in /opt/provision/venv, and --horovod-names would overwrite its files"
    assert set(remedies(conflict)) == {
        "uninstall it there: /opt/provision/venv/bin/pip uninstall horovod",
        "leave --horovod-names out",
    }


def test_they_stay_from_run_to_run_and_come_to_new_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts.ini"
    file.write_text("a ansible_host=10.0.0.1\nb ansible_host=10.0.0.2\n")
    inventory = options.inventory_of(str(file), None)
    known = {"a": host(), "b": host("10.0.0.2")}
    asked = Options(torch=False, smoke=None)

    def planned(facts: Mapping[str, Any], wanted: bool | None) -> Plan:
        return planning.make_plan(Request(inventory, replace(asked, horovod_names=wanted)), facts).plan

    assert named(planned(known, None)) == {"a": False, "b": False}
    first = planned(known, True)
    assert named(first) == {"a": True, "b": True}
    manifest = as_json(rollout(first, inventory, known).manifests["a"])
    later = {**known, "a": host(installed={"manifest": manifest, "packages": {}})}
    assert named(planned(later, None)) == {"a": True, "b": True}
    assert named(planned(later, False)) == {"a": False, "b": False}


def test_images_are_made_without_them() -> None:
    with pytest.raises(UsageError, match="without Horovod's names"):
        image_request.plan_all(Options(horovod_names=True))


def test_a_host_may_have_another_prefix() -> None:
    there = {"a": host(installed={"packages": {"horovod": "0.28.1"}})}
    (conflict,) = plan_for(there, Requirements(horovod_names=True, torch=False), a=HostRequirements(prefix="/srv/p")).conflicts
    assert "in /srv/p/venv" in conflict.what
