"""Opens the logs that the user named and hands back what they say."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, cast

from provision.base.errors import UsageError
from provision.diagnosis.findings import UNKNOWN, Finding
from provision.diagnosis.logs.judge import judge
from provision.diagnosis.logs.scan import Scanner
from provision.diagnosis.signatures import all_signatures, harmless


def read(names: Sequence[str]) -> list[Finding]:
    """The findings of these files together; ``-`` is standard input.

    Raises:
        UsageError: one of them cannot be read.
    """
    signatures = all_signatures()
    scanner = Scanner(signatures.values(), harmless())
    for name in names:
        try:
            with _opened(name) as stream:
                scanner.read(stream, name)
        except (OSError, EOFError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UsageError(f"cannot read it: {said}", where=name) from error
    return judge(scanner, signatures)


def explain(said: str, where: str) -> Finding | None:
    """The root cause in what a program said, if it is a known one. ``where`` names the place in its evidence."""
    signatures = all_signatures()
    scanner = Scanner(signatures.values(), harmless())
    scanner.read(io.BytesIO(said.encode()), where)
    return next((finding for finding in judge(scanner, signatures) if finding.id != UNKNOWN and finding.under is None), None)


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    path = Path(name)
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
