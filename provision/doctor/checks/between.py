"""What shows only when hosts try to reach each other: blocked ports and slow links. What ssh said is explained in run.py."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping

from provision.doctor.checks.model import Answer, Seen, check_between

SLOW = 0.5  # of what most links carry


@check_between("btl-tcp-firewall")
def _blocked(answers: Mapping[str, Answer]) -> Iterator[Seen]:
    """A host that listened and was not reached. Where it did not listen, that says nothing."""
    for target, theirs in answers.items():
        kept_out: dict[str, list[str]] = defaultdict(list)
        for source, mine in answers.items():
            if theirs.port is not None and (error := mine.tcp.get(target, {}).get(theirs.port)):
                kept_out[error].append(source)
        for error, sources in kept_out.items():
            yield Seen(f"a free port that it opened was not reached from {_list(sources)}: {error}", "a connection", host=target)


@check_between("host-warning")
def _mute(answers: Mapping[str, Answer]) -> Iterator[Seen]:
    for name, answer in answers.items():
        if answer.port is None:
            yield Seen(f"it could not open a port on its own address: {answer.problem}", "a free port", host=name)


@check_between("slow-link")
def _slow(answers: Mapping[str, Answer]) -> Iterator[Seen]:
    links = {(source, target): mbit for source, answer in answers.items() for target, mbit in answer.mbit.items()}
    if not links:
        return
    usual = statistics.median(links.values())
    for (source, target), mbit in links.items():
        if mbit < SLOW * usual:
            yield Seen(f"to {target} it sends {mbit:.0f} Mbit/s", f"{usual:.0f} Mbit/s, as on most ways here", host=source)


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
