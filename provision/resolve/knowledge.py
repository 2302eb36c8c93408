"""How far the catalogue reaches for these hosts: what a plan cannot know, and drivers that NVIDIA no longer supports."""

from __future__ import annotations

from collections.abc import Mapping

from provision import catalog
from provision.base.text import joined
from provision.base.versions import key
from provision.plan.model import Knowledge
from provision.survey import Facts


def knowledge(facts: Mapping[str, Facts]) -> Knowledge:
    """The newest releases that the catalogue knows, and the hosts whose driver is newer."""
    reach = catalog.reach()
    newer = tuple(
        sorted(name for name, host in facts.items() if host.driver and host.driver.cuda and key(host.driver.cuda) > key(reach.cuda))
    )
    return Knowledge(reach.pytorch, reach.cuda, reach.nccl, reach.date, reach.overlay, newer)


def notes_on_driver_branches(facts: Mapping[str, Facts]) -> list[str]:
    """Drivers whose branch gets no fixes any more, by the date of the catalogue: the clock would make plans irreproducible."""
    known = catalog.cuda().driver_branches
    ended: dict[tuple[str, str], list[str]] = {}
    for name, host in sorted(facts.items()):
        version = host.driver.version if host.driver else None
        if version and (month := known.ended(version)):
            ended.setdefault((version.split(".")[0], month), []).append(name)
    return [
        f"{joined(names)}: NVIDIA's support for driver branch {branch} ended in {month}: it gets no security fixes any more"
        for (branch, month), names in ended.items()
    ]
