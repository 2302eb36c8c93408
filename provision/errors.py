"""Errors that a user can act on. They carry what went wrong, where, and what to do next; no traceback is shown."""

from __future__ import annotations


class ProvisionError(Exception):
    """Something ran and is wrong (exit code 1).

    Args:
        what: one sentence, what went wrong.
        where: ``file:line``, or host and step; None when the sentence says it.
        todo: the next thing to type or change; None when there is nothing sensible to say.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f"\n  → {self.todo}" if self.todo else ""
        return f"{place}{self.what}{remedy}"


class UsageError(ProvisionError):
    """Wrong usage, or input that cannot be read (exit code 2)."""

    exit_code = 2


def told(error: BaseException) -> ProvisionError:
    """What a user is told of whatever ended a command: our own errors as they are, all else as one sentence."""
    if isinstance(error, ProvisionError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return ProvisionError("interrupted", todo="run the same command again: it goes on where it stopped")
    return ProvisionError(
        f"a defect of provision: {type(error).__name__}: {error}", todo="run it again with --debug and report what it prints"
    )
