"""``--cpu``: hosts that were installed with it keep to it, whatever runs there later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from invented_hosts import gpu
from rollouts import as_json, rollout

from provision.catalog import OURS
from provision.cli import options
from provision.commands import planning
from provision.doctor import fixes
from provision.doctor.host_checks import Examination
from provision.plan.model import Plan
from provision.plan.options import Options
from provision.plan.request import Request


def builds(plan: Plan) -> dict[str, tuple[str, bool]]:
    """Host → (PyTorch, whether it gets NCCL)."""
    return {name: (each.torch.package if each.torch else "", each.nccl is not None) for name, each in plan.hosts.items()}


def test_it_stays_from_run_to_run_and_under_doctor_and_comes_to_new_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts.ini"
    file.write_text("a ansible_host=10.0.0.1\nb ansible_host=10.0.0.2\n")
    inventory = options.inventory_of(str(file), None)
    known = {"a": gpu("13.0"), "b": gpu("13.0", address="10.0.0.2")}

    def planned(facts: Mapping[str, Any], given: Options) -> Plan:
        return planning.make_plan(Request(inventory, given), facts).plan

    asked = Options(smoke=None)
    with_cuda = builds(planned(known, asked))
    assert all("+cpu" not in torch and nccl for torch, nccl in with_cuda.values())
    first = planned(known, replace(asked, cpu=True))
    for_cpus = builds(first)
    assert all(torch.endswith("+cpu") and not nccl for torch, nccl in for_cpus.values())
    done = as_json(rollout(first, inventory, known).manifests["a"])
    later = {**known, "a": gpu("13.0", installed={"manifest": done, "packages": {}})}
    assert builds(planned(later, asked)) == for_cpus
    assert builds(planned(later, fixes._as_installed(Examination(later, [], ["a", "b"]), SimpleNamespace(catalog=OURS)))) == for_cpus
    assert builds(planned(later, replace(asked, upgrade=True))) == for_cpus
    assert builds(planned(later, replace(asked, cpu=False))) == with_cuda
    assert as_json(rollout(planned(later, asked), inventory, later).manifests["a"])["host"]["engine"] == done["host"]["engine"]


def test_where_the_gpus_driver_runs_no_build_of_the_installed_release_upgrade_is_the_remedy(tmp_path: Path) -> None:
    """PyTorch 2.15, which CPUs get, has no build for CUDA 12."""
    file = tmp_path / "hosts.ini"
    file.write_text("a ansible_host=10.0.0.1\n")
    inventory, asked = options.inventory_of(str(file), None), Options(smoke=None)
    first = planning.make_plan(Request(inventory, replace(asked, cpu=True)), {"a": gpu("12.4")}).plan
    done = as_json(rollout(first, inventory, {"a": gpu("12.4")}).manifests["a"])
    later = {"a": gpu("12.4", installed={"manifest": done, "packages": {}})}
    (conflict,) = planning.make_plan(Request(inventory, replace(asked, cpu=False)), later).plan.conflicts
    assert conflict.remedies[0].text.startswith("--upgrade")
    assert (
        builds(planning.make_plan(Request(inventory, replace(asked, cpu=False, upgrade=True)), later).plan)["a"][0] == "torch==2.14.1+cu126"
    )
