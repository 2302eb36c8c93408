"""Golden plans of realistic inventories: `tests/data/plans/NAME.json` (facts) → `NAME.txt` (the plan as text), and as a table of decisions
those in `tests/data/decisions.yaml`.

`real-*` are machines from public reports, whose addresses are their facts' `report`, and combinations of these; `assumed` is what a
report leaves open. After a change of the catalogue or the resolver: `pytest tests/unit/plan/test_golden_plans.py --update`, then
`git diff`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_facts import DECISIONS, PLANS, facts_in_table

from provision.base.terminal import Console
from provision.catalog import OURS
from provision.plan import summary
from provision.plan.model import HostPlan, Plan
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.survey import Facts
from provision.survey.document import load_file

INVENTORIES = sorted(PLANS.glob("*.json"))
HEAD = """\
# NAME → facts of its hosts, reduced to what decides; what the resolver plans; the number of each conflict's remedies, and of notes.
"""
# Requirements, where they are not the defaults.
_OLDER = {"nccl_source": "repository", "nccl_version": "2.21.5"}
_DRIVERS = (
    *("driver-for-hgx-h100-on-ubuntu", "driver-for-volta-on-debian", "driver-for-a100-on-rocky", "driver-for-gb200"),
    *("driver-is-prevented", "driver-auto-keeps-the-newer-one"),
)
REQUIREMENTS: dict[str, dict[str, Any]] = {
    "nccl-from-source": {"nccl_source": "source"},
    "gpus-left-unused-with-cpu": {"cpu": True},
    "amd-instinct-with-cpu": {"cpu": True},
    "jetson-orin-with-cpu": {"cpu": True},
    "newer-nccl-is-installed": {"nccl_source": "repository"},
    "newer-nccl-is-installed-and-an-older-asked-for": _OLDER,
    **{name: {"driver": "auto"} for name in _DRIVERS},
    "driver-580-and-one-host-is-newer": {"driver": "580"},
    "newer-nccl-is-replaced": {**_OLDER, "allow_downgrade": True},
}


#: Of the components of a plan those that the resolver decides.
DECIDED = ("driver", "hwloc", "python", "openmpi", "nccl", "torch")


def planned(name: str, known: Mapping[str, Facts]) -> Plan:
    return resolve(known, Requirements(engine_version="0.0.0", **REQUIREMENTS.get(name, {})), {})  # independent of the engine's version


def as_text(known: Path) -> str:
    text = io.StringIO()
    summary.show(planned(known.stem, load_file(known, OURS)), Console(file=text, width=100, color_system=None), why=True)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip() + "\n"


def decisions(plan: Plan) -> dict[str, Any]:
    """What was decided for each host, how many remedies each conflict has, and how many notes there are."""

    def described(host: HostPlan) -> str:
        found = {name: component for name in DECIDED if (component := getattr(host, name))}
        return ", ".join(f"{name} {each.version or '-'}{cuda_of(each)} {each.source}" for name, each in found.items())

    def cuda_of(component: Any) -> str:
        cuda = getattr(component, "cuda", None)
        return f" cu{cuda}" if cuda else ""

    hosts = {name: described(host) for name, host in plan.hosts.items()}
    conflicts = {str(each.host): len(each.remedies) for each in plan.conflicts}
    return {**({"plan": hosts} if hosts else {}), **({"conflicts": conflicts} if conflicts else {}), "notes": len(plan.notes)}


@pytest.mark.parametrize("known", INVENTORIES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(known: Path, pytestconfig: pytest.Config) -> None:
    made, golden = as_text(known), known.with_suffix(".txt")
    if pytestconfig.getoption("update"):
        golden.write_text(made, encoding="utf-8")
    assert made == golden.read_text(encoding="utf-8")
    assert max(len(line) for line in made.splitlines() if " " in line.strip()) <= 120


def test_the_decisions_are_those_of_the_table(pytestconfig: pytest.Config) -> None:
    table = yaml.safe_load(DECISIONS.read_text(encoding="utf-8"))
    made = {name: {"hosts": entry["hosts"], **decisions(planned(name, facts_in_table(name)))} for name, entry in table.items()}
    if pytestconfig.getoption("update"):
        DECISIONS.write_text(HEAD + "".join(row(name, entry) for name, entry in made.items()), encoding="utf-8")
        table = made
    for name, entry in made.items():
        assert entry == table[name], name
    assert len(made) >= 70


def row(name: str, entry: dict[str, Any]) -> str:
    lines = [f"{name}:", "  hosts:", *(f"    {host}: {json.dumps(each)}" for host, each in entry["hosts"].items())]
    lines += ["  plan:", *(f"    {host}: {each}" for host, each in entry["plan"].items())] if "plan" in entry else []
    lines += [f"  {key}: {json.dumps(entry[key])}" for key in ("conflicts", "notes") if key in entry]
    return "\n".join(lines) + "\n"


def test_each_cause_is_printed_once() -> None:
    lost = [line for line in as_text(PLANS / "blackwell-580.json").replace("\n               ", " ").splitlines() if " not " in line[:16]]
    assert sum("compute capability 10.0 yet (12.8 or newer)" in line for line in lost) == 1
    assert sum("it does not exist (nccl#533, nccl#1142" in line for line in lost) == 1


def short(plan: Plan, width: int = 80) -> list[str]:
    text = io.StringIO()
    summary.show(plan, Console(file=text, width=width, color_system=None))
    return text.getvalue().splitlines()


@pytest.mark.parametrize("known", INVENTORIES, ids=lambda path: path.stem)
def test_a_plan_is_short(known: Path) -> None:
    lines = short(planned(known.stem, load_file(known, OURS)))
    assert len(lines) <= 23  # and two for a hint
    assert max(map(len, lines)) <= 80


def test_three_unlike_hosts_are_a_row_each_with_a_reason_per_component() -> None:
    names = ("full-rhel-10-h100-580", "real-h100-and-a-host-without-gpu", "debian-12-and-13")
    hosts = [load_file(PLANS / f"{name}.json", OURS) for name in names]
    facts = {name: one for known in hosts for name, one in list(known.items())[:1]}
    assert len(facts) == 3
    lines = short(planned("", facts))
    assert len(lines) <= 23
    start = next(number for number, line in enumerate(lines) if line.startswith("hosts"))
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == list(facts)
    reasons = [line.split()[0] for line in lines[lines.index("why") + 1 :] if line.startswith("  ") and line[2] != " "]
    assert reasons == ["Python", "Open", "NCCL", "PyTorch", "also"]
    assert "rejected candidates" in " ".join(lines[-2:])


def test_alike_hosts_are_one_row() -> None:
    (one,) = list(load_file(PLANS / "blackwell-580.json", OURS).values())[:1]
    many = {f"node{number}": one for number in range(1, 501)}
    lines = short(planned("", many))
    assert len(lines) <= 25
    assert lines[0].startswith("Plan for 500 hosts")
    assert lines[2].startswith("node[1-500] ")
    refused = short(resolve(many, Requirements(torch_version="2.4.1"), {}))
    assert refused[0].startswith("node1: no plan fits")
    assert len(refused) <= 25


def test_conflicts_come_first_and_the_rest_on_request() -> None:
    plan = planned("", load_file(PLANS / "debian-12-and-13.json", OURS))
    conflicts = [replace(each, what=f"{each.what} {number}") for number in range(5) for each in _refused().conflicts]
    lines = short(replace(plan, conflicts=tuple(conflicts)))
    assert lines[0].startswith(f"{conflicts[0].host}: no plan fits")
    assert re.search(r"more with --why: \d+ more conflicts", " ".join(lines))


def _refused() -> Plan:
    name = "driver-is-prevented"
    return planned(name, load_file(PLANS / f"{name}.json", OURS))
