"""Errors that a user can act on: what went wrong, where, and what to do next. They are shown without a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterable


class ProvisionError(Exception):
    """Something ran and is wrong (exit code 1).

    Args:
        what: one sentence, what went wrong.
        where: ``file:line``, or host and step; None when the sentence says it.
        hint: the next thing to type or change; None when nothing helps.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(f"{text}\n  → {hint}" if hint else text for text, hint in self.parts())

    def parts(self) -> Iterable[tuple[str, str | None]]:
        """(sentence with its place, hint) for each thing that is wrong."""
        return [(f"{self.where}: {self.what}" if self.where else self.what, self.hint)]


class UsageError(ProvisionError):
    """Wrong usage, or input that cannot be read (exit code 2)."""

    exit_code = 2


class Interrupted(ProvisionError):
    """The user pressed Ctrl-C (or the command got SIGTERM), and what it had started has been ended (exit code 130)."""

    exit_code = 130


def as_provision_error(error: BaseException) -> ProvisionError:
    """What ended a command as an error for the user: a ProvisionError as it is, anything else as one sentence."""
    if isinstance(error, ProvisionError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, SystemExit):  # as rich ends a program whose output goes into a pipe
        return Interrupted("interrupted: its output is not read any more")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError("invalid path: expected names of at most 255 bytes", where=error.filename and str(error.filename))
    if isinstance(error, OSError) and error.strerror:  # of this machine: a full disk, a folder that is gone, a terminal that is closed
        return ProvisionError(error.strerror, where=str(error.filename) if error.filename else None, hint="--debug shows where it happened")
    return ProvisionError(
        f"internal error (please report it): {type(error).__name__}: {error}", hint="run it again with --debug and report what it prints"
    )
