"""Rollouts and manifests of plans, without a request on the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from provision.base import engine_source
from provision.catalog import OURS
from provision.install.rollout import PackageSources, Rollout
from provision.inventory import Inventory
from provision.plan.manifest import Manifest
from provision.plan.model import HostPlan, Plan
from provision.plan.options import Options
from provision.plan.request import Request
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.survey import Facts
from provision.survey.document import load_file

#: A host's plan from JSON, as in its manifest.
host_plan = TypeAdapter(HostPlan).validate_python


def rollout(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts], first_step: str | None = None) -> Rollout:
    """The rollout of a plan."""
    engine = engine_source.pack()
    request = Request(inventory, Options(first_step=first_step), engine=engine)
    return Rollout(request, plan, facts, PackageSources(engine))


def manifest(plan: Plan, name: str) -> dict[str, Any]:
    """The manifest of one host alone, as its file has it."""
    return as_json(Manifest.of(plan.hosts[name], "c", {}, []))


def as_json(manifest: Manifest) -> dict[str, Any]:
    """As a survey reads it."""
    read: dict[str, Any] = json.loads(json.dumps(manifest.as_dict()))
    return read


@functools.cache
def lint_plan() -> Plan:
    """The plan of the hosts of lint-facts.json, of which gpu1 has GPUs."""
    return resolve(load_file(Path(__file__).parents[1] / "data/lint-facts.json", OURS), Requirements(), {})


def manifest_with(**components: dict[str, Any]) -> dict[str, Any]:
    """The manifest of some host with GPUs, with these fields of components."""
    made = manifest(lint_plan(), "gpu1")
    for name, fields in components.items():
        made["host"][name] = {**made["host"][name], **fields}
    return made
