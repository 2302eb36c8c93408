"""Reads logs of any size and names the known errors in them, root causes first.

The parts, in the order in which a log passes them: `prefilter` (which lines can match at all, by the `words` of patterns), `lines` (a
line without its prefixes), `scanner` (where patterns match), `root_causes` (which match explains which).
"""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from provision.base.errors import UsageError
from provision.catalog import Catalog
from provision.diagnosis.findings import UNKNOWN, Finding
from provision.diagnosis.logs.root_causes import findings
from provision.diagnosis.logs.scanner import Scanner
from provision.diagnosis.signatures import signs


@dataclass(frozen=True)
class Reading:
    """What was found in logs, how many lines they have, and whether all of those that might be errors were examined."""

    scanner: Scanner
    findings: list[Finding]
    lines: int
    is_complete: bool

    def on(self, worlds: Set[str]) -> list[Finding]:
        """The findings for hosts where these signs hold (signs.yaml), also against what the logs show."""
        kinds = {sign.kind for sign in signs() if sign.id in worlds}
        return findings(self.scanner, worlds | {sign.id for sign in signs() if sign.id in self.scanner.worlds and sign.kind not in kinds})


def read(names: Sequence[str], catalog: Catalog) -> Reading:
    """Read these files together; ``-`` is standard input.

    Raises:
        UsageError: one of them cannot be read.
    """
    scanner = Scanner(catalog)
    for name in names:
        try:
            with _opened(name) as stream:
                scanner.read(stream, name)
        except (OSError, EOFError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UsageError(f"cannot read it: {reason}", where=name) from error
    return Reading(scanner, findings(scanner), sum(scanner.lines_of), scanner.is_complete)


def known_errors(text: str, where: str, catalog: Catalog) -> list[Finding]:
    """The known errors in the output of a program, root causes first. ``where`` names the output in their evidence."""
    if not text:
        return []
    scanner = Scanner(catalog)
    scanner.read(io.BytesIO(text.encode(errors="replace")), where)
    return [finding for finding in findings(scanner) if finding.id != UNKNOWN]


def root_cause(text: str, where: str, catalog: Catalog) -> Finding | None:
    """The first root cause in the output of a program, if it is a known error."""
    return next((finding for finding in known_errors(text, where, catalog) if finding.is_root_cause), None)


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    return cast(BinaryIO, gzip.open(name, "rb")) if name.endswith(".gz") else Path(name).open("rb")
