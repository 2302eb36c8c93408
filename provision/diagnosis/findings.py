"""Findings of the doctor: problems of which it knows the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from provision.base.documents import Document
from provision.base.problems import Problem
from provision.diagnosis.signatures import Signature

UNKNOWN = "unknown"  # the id of an error that no signature describes


@dataclass(frozen=True)
class Evidence:
    """A line of a log that shows the error. ``line`` counts from 1."""

    file: str
    line: int
    text: str

    def as_dict(self) -> Document:
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True, kw_only=True)
class Finding(Problem):
    """A problem that is a known error, on a host (``host``), in a log (``evidence``), or both. ``what`` is the error's title.

    Attributes:
        layer, summary, cause, fix: as in the error's entry (`signatures.Signature`); ``fix`` with the host's own paths, where known.
        observed, expected: what a check saw on the host and what it should have seen; empty for what only a log shows.
        times: how often a log shows it.
        caused_by: the id of its root cause; None if it is one itself.
    """

    layer: str
    summary: str
    cause: str
    fix: tuple[str, ...]
    observed: str = ""
    expected: str = ""
    evidence: tuple[Evidence, ...] = ()
    times: int = 1
    caused_by: str | None = None

    @classmethod
    def of(cls, error: Signature, **details: Any) -> Finding:
        """The finding of a known error; ``details`` are further attributes, or replace the entry's own."""
        entry = {"severity": error.severity, "layer": error.layer, "summary": error.summary, "cause": error.cause, "fix": error.fix}
        return cls(**{"what": error.title, "id": error.id, **entry, **details})

    @classmethod
    def on_host(cls, error: Signature, host: str | None, **details: Any) -> Finding:
        """The finding of a check of hosts, in the entry's words for these."""
        words = error.on_host or error
        return cls.of(error, what=words.title, summary=words.summary, host=host, **details)

    @property
    def is_root_cause(self) -> bool:
        return self.caused_by is None

    def as_dict(self) -> Document:
        return {
            "id": self.id,
            "layer": self.layer,
            "severity": self.severity,
            "host": self.host,
            "title": self.what,
            "cause": f"{self.cause} Seen here: {self.observed}." if self.observed else self.cause,
            "fix": list(self.fix),
            "evidence": [each.as_dict() for each in self.evidence],
            "role": "root" if self.is_root_cause else "consequence",
        }


def document(findings: Sequence[Finding]) -> Document:
    """The document that ``--json`` prints."""
    return {"schema": 1, "findings": [finding.as_dict() for finding in findings]}
