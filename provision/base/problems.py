"""Problems and remedies: one type for everything that can be wrong, from the inventory to the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provision.base.documents import Document

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first


@dataclass(frozen=True)
class Remedy:
    """A sentence that says what helps, and whether it is a command-line option or a change on the hosts."""

    text: str
    about: Literal["options", "hosts"] = "hosts"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or may be.

    Attributes:
        severity: an error stops the command, a warning is shown.
        what: one sentence, what is wrong.
        hint: what to do about it; None when the sentence says it.
        id: of the kind of problem; the doctor's, where it is one of its known errors. Empty only in records of runs.
        host: the host that it is about, where it is about one.
        where: the file, with a line where one is known, the argument, or the step.
        message: of ssh or sudo, where that is the problem.
        remedies: any one of them helps, the cheapest first; there is no hint then.
    """

    severity: Severity
    what: str
    hint: str | None = None
    id: str = ""
    host: str | None = None
    where: str | None = None
    message: str = ""
    remedies: tuple[Remedy, ...] = ()

    @property
    def advice(self) -> str | None:
        """The hint, or the remedies as one line; None where there is neither."""
        return self.hint or "  or  ".join(remedy.text for remedy in self.remedies) or None

    def as_dict(self) -> Document:
        """Plain data for JSON."""
        names = ("id", "severity", "host", "where", "what")
        return {**{name: getattr(self, name) for name in names}, "hint": self.advice}

    def __str__(self) -> str:
        place = self.where or self.host
        return (f"{place}: {self.what}" if place else self.what) + (f"\n  → {self.advice}" if self.advice else "")
