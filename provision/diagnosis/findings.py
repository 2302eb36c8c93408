"""What doctor says: one finding is one thing that is wrong, with where it was seen and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first
UNKNOWN = "unknown"  # the id of an error that no signature knows


@dataclass(frozen=True)
class Evidence:
    """A line that says so. ``line`` counts from 1."""

    file: str
    line: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass
class Finding:
    """One thing that is wrong: on a host (``host``), or in a log (``evidence``), or both.

    Args:
        plain: one sentence for people who do not know the field.
        seen, expected: what a probe of the host saw and what it should have seen; empty for what only a log says.
        under: the id of the finding that explains this one; None for a root.
    """

    id: str
    layer: str
    severity: Severity
    title: str
    plain: str
    cause: str
    fix: list[str]
    host: str | None = None
    seen: str = ""
    expected: str = ""
    evidence: list[Evidence] = field(default_factory=list)
    times: int = 1
    under: str | None = None

    @property
    def role(self) -> str:
        return "root" if self.under is None else "consequence"

    def as_dict(self) -> dict[str, Any]:
        cause = f"{self.cause} Seen here: {self.seen}." if self.seen else self.cause
        return {
            "id": self.id,
            "layer": self.layer,
            "severity": self.severity,
            "host": self.host,
            "title": self.title,
            "cause": cause,
            "fix": self.fix,
            "evidence": [each.as_dict() for each in self.evidence],
            "role": self.role,
        }


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The whole answer for ``--json``."""
    return {"schema": 1, "findings": [finding.as_dict() for finding in findings]}
