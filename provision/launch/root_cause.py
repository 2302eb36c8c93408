"""The root cause of a failed job: the rank, by how and when ranks have ended and which of them raised an error. Pure.

The first rank that failed is the cause, with two exceptions: an error that does not tell of another rank's end explains one that does; and
where only the latter were raised, a rank has ended without an error, perhaps with exit code 0, while others waited for it. Errors of ranks
that went on afterwards, until they succeeded or the launcher ended them, were caught and logged, and explain nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from provision.base.text import joined
from provision.launch.jobs import Ended, JobResult, how_it_ended
from provision.launch.rank_output import RankOutput, RankTraceback

#: How a launcher ends the ranks that are left.
_BY_LAUNCHER = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True)
class RootCause:
    """The root cause of a job's end; empty where it is not a rank that ended by itself, or unknown.

    Attributes:
        failure: a traceback, which says it.
        ended: the rank that it is, where it has printed none. ``words``: what it said last. ``was_awaited``: others waited for it.
        code: the rank's exit code; 0 where it has none that a job can have.
    """

    failure: RankTraceback | None = None
    ended: Ended | None = None
    words: str = ""
    was_awaited: bool = False
    code: int = 0


def of(output: RankOutput, result: JobResult) -> RootCause:
    """The root cause of a failed job."""
    verdict = result.verdict
    if not result.code or (verdict is not None and (verdict.kind != "ended" or verdict.code < 0)):
        return RootCause()
    codes = {one.rank: one.code for one in result.ended}
    # One that hangs after its error is ended by the launcher, too; then the errors of those that waited for it tell of that.
    went_on = {0} if verdict is None or output.has_symptoms() else {0, *_BY_LAUNCHER}
    failure = output.first_failure(verdict.rank if verdict else None, [rank for rank, code in codes.items() if code in went_on])
    if failure is not None and not failure.is_symptom:
        return RootCause(failure, code=max(codes.get(failure.rank, 0), 0))
    first = next((one for one in result.ended if verdict is not None and one.rank == verdict.rank), None)
    if first is None:
        return RootCause(failure)
    if not output.has_raised(first.rank):
        return RootCause(None, first, output.last_words(first.rank), output.has_symptoms(), first.code)
    silent = [one for one in result.ended if not output.has_raised(one.rank)]
    # A launcher may have ended the rank while it was exiting. Then only the others' errors tell it from those that were still at work.
    awaited = [one for one in silent if one.code not in _BY_LAUNCHER] or [one for one in silent if one.rank in output.accused()]
    if not awaited:
        return RootCause(failure)
    cause = awaited[0]
    words = output.last_words(cause.rank) if cause.code else ""  # who has succeeded did not complain
    return RootCause(None, cause, words, was_awaited=True, code=max(cause.code, 0))


def alike(found: RootCause, output: RankOutput, result: JobResult) -> list[str]:
    """How other ranks failed that raised nothing: ``ranks 0 and 2 ended the same way``, a line for each way."""
    ways: dict[str, list[int]] = {}
    causing = found.ended.rank if found.ended else None
    for one in result.ended if found.ended else ():
        if one.rank == causing or one.code in (0, *_BY_LAUNCHER) or output.has_raised(one.rank):
            continue
        words = output.last_words(one.rank)
        is_same = found.ended is not None and (one.code, words) == (found.ended.code, found.words)
        way = "ended the same way" if is_same else how_it_ended(one.code) + (f": {words}" if words else "")
        ways.setdefault(way, []).append(one.rank)
    return [f"{'ranks' if len(some) > 1 else 'rank'} {joined([str(rank) for rank in sorted(some)])} {way}" for way, some in ways.items()]
