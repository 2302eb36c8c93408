"""Verdicts: one word per host about its GPUs' health, the table of them, and the list of hosts to leave out. Pure, but for that file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from provision.base import downloads
from provision.base.documents import Document
from provision.base.errors import UsageError
from provision.base.text import counted
from provision.diagnosis.findings import Finding
from provision.doctor.checks import CHECKS
from provision.doctor.health.model import Health
from provision.inventory import listed

Word = Literal["healthy", "degraded", "unfit"]
_COUNTED = frozenset(check.id for check in CHECKS if check.of_health)
WORDS: tuple[Word, ...] = ("unfit", "degraded", "healthy")  # worst first


@dataclass(frozen=True)
class Verdict:
    """Whether a host can take a job. ``reasons``: the findings behind it, errors first; ``gpus``: such as `8 × NVIDIA H200`."""

    host: str
    word: Word
    gpus: str
    reasons: tuple[Finding, ...] = ()

    @property
    def ids(self) -> list[str]:
        """Of the reasons, each once."""
        return list(dict.fromkeys(each.id for each in self.reasons))

    def as_dict(self) -> Document:
        return {"verdict": self.word, "gpus": self.gpus, "findings": [each.id for each in self.reasons]}


def verdicts(hosts: Sequence[str], healths: Mapping[str, Health], findings: Iterable[Finding]) -> list[Verdict]:
    """The verdict on each host, the worst first.

    Args:
        findings: of all checks; those of health count, and those of the driver layer that are errors.
    """
    made = []
    found = list(findings)
    for host in hosts:
        if host not in healths:
            made.append(Verdict(host, "unfit", "not reached", tuple(each for each in found if each.host == host)))
            continue
        reasons = [
            each
            for each in found
            if each.host == host and each.severity != "note" and (each.id in _COUNTED or (each.layer, each.severity) == ("driver", "error"))
        ]
        word: Word = "unfit" if any(each.severity == "error" for each in reasons) else "degraded" if reasons else "healthy"
        made.append(Verdict(host, word, _gpus(healths[host]), tuple(sorted(reasons, key=lambda each: each.severity != "error"))))
    return sorted(made, key=lambda verdict: WORDS.index(verdict.word))


def _gpus(health: Health) -> str:
    if health.gpus is None:
        return f"{health.devices} unknown" if health.devices or health.unreadable else "no GPU"
    counts = Counter(gpu.name for gpu in health.gpus.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


def write_quarantine(path: Path, unfit: Mapping[str, bool]) -> str:
    """Update a list of unfit hosts, one name per line, as `--limit '!@FILE'` reads them.

    Args:
        unfit: each host that was examined, and whether it is unfit. Those that are not are removed from the list, all others stay.

    Returns a sentence that says so.

    Raises:
        UsageError: the file cannot be written, or lists something else than hosts.
    """
    kept = {name for name in (listed(path) if path.exists() else ()) if name not in unfit}
    names = sorted(kept | {name for name, is_unfit in unfit.items() if is_unfit})
    try:
        downloads.store(path, "".join(f"{host}\n" for host in names).encode())  # who reads it meanwhile sees the old list or the new one
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    unexamined = f" ({len(kept)} of them not examined now)" if kept else ""
    return f"{counted(len(names), 'unfit host')}{unexamined} listed in {path}; to leave them out: --limit '!@{path}'"
