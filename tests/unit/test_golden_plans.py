"""Golden plans of realistic inventories: `tests/data/plans/NAME.json` (facts) → `NAME.txt` (the plan as text).

`real-*` are machines from public reports, whose addresses are their facts' `report`, and combinations of these; `assumed` is what a
report leaves open.

After a change of the catalogue or the resolver: `python tests/unit/test_golden_plans.py`, then look at `git diff tests/data/plans`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from provision import facts
from provision.base.terminal import Console
from provision.plan import summary
from provision.plan.requirements import Requirements
from provision.resolve import resolve

PLANS = Path(__file__).parents[1] / "data" / "plans"
INVENTORIES = sorted(PLANS.glob("*.json"))
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


def as_text(known: Path) -> str:
    text = io.StringIO()
    requirements = Requirements(engine_version="0.0.0", **REQUIREMENTS.get(known.stem, {}))  # independent of the engine's version
    summary.show(resolve(facts.load_file(known), requirements, {}), Console(file=text, width=100, color_system=None))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip() + "\n"


def test_there_are_enough() -> None:
    assert len(INVENTORIES) >= 12


@pytest.mark.parametrize("known", INVENTORIES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(known: Path) -> None:
    made = as_text(known)
    assert made == known.with_suffix(".txt").read_text(encoding="utf-8")
    assert max(len(line) for line in made.splitlines() if " " in line.strip()) <= 120


def test_each_cause_is_printed_once() -> None:
    lost = [line for line in as_text(PLANS / "blackwell-580.json").replace("\n               ", " ").splitlines() if " not " in line[:16]]
    assert sum("compute capability 10.0 yet (12.8 or newer)" in line for line in lost) == 1
    assert sum("it does not exist (nccl#533, nccl#1142" in line for line in lost) == 1


if __name__ == "__main__":
    for each in INVENTORIES:
        each.with_suffix(".txt").write_text(as_text(each), encoding="utf-8")
