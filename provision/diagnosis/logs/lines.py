"""Lines of a log without what launchers, terminals and loggers add to them: prefixes of ranks, time stamps, colours."""

from __future__ import annotations

from typing import NamedTuple

from provision.diagnosis.patterns import Pattern, latin1

_ANSI = Pattern(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
# Prefixes: whose line it is, and when it was printed.
_PREFIX = Pattern(
    r"\s*(?:(?:"
    r"\[\d+,(?P<mpi>\d+)\](?:<\w+>)?:?"  # mpirun --tag-output
    r"|\[(?P<horovod>\d+)\]<\w+>:?"  # Horovod
    r"|\[(?:rank|default)(?P<torch>\d+)\]:?"  # torchrun
    r"|\[Rank (?P<named>\d+)\]:?"
    r"|(?P<srun>\d{1,5}): "  # srun --label
    r"|\(\w*\s?pid=\d+(?:, ip=[\w.:]+)?\)"  # Ray
    r"|[\w.-]+\s+\| "  # docker compose
    r")|(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?"
    r"|\[\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\]"
    r"|\[\s*\d+\.\d{6}\]"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?:kernel|\S+\[\d+\]):"
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?)\s)"
)
_LONGEST = 8192  # characters of a line that are matched


class Line(NamedTuple):
    """The message, the same in `patterns.latin1`, and the rank that printed it, if the line names one."""

    text: str
    latin1: bytes
    rank: str | None


def clean(raw: bytes) -> Line:
    """The message in a line. Any bytes are allowed."""
    text = raw[: _LONGEST * 2].decode("utf-8", "replace")[:_LONGEST]
    if "\x1b" in text:
        text = _ANSI.replace("", text)
    text = text.replace("\r", " ").replace("\x00", "")
    plain, begin = latin1(text), 0
    rank: bytes | None = None
    for _ in range(4):
        found = _PREFIX.at(plain, begin)
        if not found:
            break
        rank = next((value for value in found.groups() if value), rank)
        begin = found.end()
    text = text[begin:].strip()
    return Line(text, latin1(text), rank.decode() if rank else None)
