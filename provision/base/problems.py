"""What can be wrong: one type for all of it, from the inventory to the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first


@dataclass(frozen=True)
class Remedy:
    """What would help, as a sentence, and whether it is an option of the command line or a change of the hosts."""

    text: str
    about: Literal["options", "hosts"] = "hosts"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or may be.

    Attributes:
        severity: an error stops what was asked for, a warning is shown.
        what: one sentence, what is wrong.
        hint: what to do about it; None when the sentence says it.
        id: the known error of the doctor's that it is; empty where there is no entry for it alone.
        host: the host that it is about, where it is about one.
        where: the file, with a line where one is known, the argument, or the step.
        said: what ssh or sudo said, in their own words, where that is what is wrong.
        remedies: any one of them helps, the cheapest first; where there are some, there is no hint.
    """

    severity: Severity
    what: str
    hint: str | None = None
    id: str = ""
    host: str | None = None
    where: str | None = None
    said: str = ""
    remedies: tuple[Remedy, ...] = ()

    @property
    def advice(self) -> str | None:
        """The hint, or the remedies as one line; None where there is neither."""
        return self.hint or "  or  ".join(remedy.text for remedy in self.remedies) or None

    def __str__(self) -> str:
        place = self.where or self.host
        return (f"{place}: {self.what}" if place else self.what) + (f"\n  → {self.advice}" if self.advice else "")
