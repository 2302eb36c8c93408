"""What a dry run came to, as what a real run would do: per step, and for the host. Pure."""

from __future__ import annotations

from provision.playbook import HostResult
from provision.report import HostReport, Prospect


def foretell(report: HostReport, result: HostResult, *, rewritten: bool, drifted: bool) -> None:
    """Put into a host's line of the report what a real run would do.

    Args:
        rewritten: whether the manifest there is to say something else, which no dry run of its step tells.
        drifted: whether the survey found that something is not as it was left.
    """
    steps = prospects(result, drifted=drifted)
    if rewritten and "manifest" in steps:
        steps["manifest"] = "will change"
    report.steps = steps
    report.state = "would change" if drifted or result.changed or "will change" in steps.values() else "unchanged"


def prospects(result: HostResult, *, drifted: bool) -> dict[str, Prospect]:
    """What a dry run says of each step.

    What it left out it cannot know once an earlier step will change the host; nor where it could not look at anything, and something is not
    as it was left.
    """
    found: dict[str, Prospect] = {}
    changing = False
    for name, step in result.steps.items():
        if name == "guard":
            continue
        unknown = step.unchecked and (changing or (drifted and step.ran == 0))
        found[name] = "will change" if step.changed else "cannot know yet" if unknown else "will not change"
        changing = changing or step.changed > 0
    return found
