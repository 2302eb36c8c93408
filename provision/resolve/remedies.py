"""Which remedies for a conflict work: each is tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from provision.base.problems import Problem, Remedy
from provision.plan.requirements import Requirements
from provision.resolve.blocked import Attempt, Blocked, Kinds, leave_out, remaining

MOST = 2  # as many are offered: the cheapest

# What is blocked (a component of all hosts, a kind of host, …) → how.
Trouble = Mapping[Hashable, Blocked]


def _is_left(before: Blocked, now: Blocked | None) -> bool:
    return now is not None and (now.host, now.what) == (before.host, before.what)


@dataclass(frozen=True)
class Trial:
    """The question that met trouble, and what answers another one: the trouble that it meets."""

    kinds: Kinds
    requirements: Requirements
    trouble: Trouble
    again: Callable[[Kinds, Requirements], Trouble]

    def conflicts(self) -> list[Problem]:
        """All trouble as problems, each with its cheapest remedies that work."""
        return [blocked.problem(self._remedies(what, blocked)) for what, blocked in self.trouble.items()]

    def _remedies(self, what: Hashable, blocked: Blocked) -> tuple[Remedy, ...]:
        """Those that end in a plan; where there is none, those that do away with this conflict, if only to meet that of the next host. Then
        what cannot be tried. None asks for something else than what an earlier run has decided: the user has not asked for that."""
        whole: dict[str, Remedy] = {}
        part: dict[str, Remedy] = {}
        step: dict[str, Remedy] = {}
        untried = []
        for attempt in blocked.attempts:
            sort = attempt.sort or attempt.text
            if self.requirements.are_kept(attempt.asks):
                continue
            if attempt.then is None:
                untried.append(attempt.remedy())
            elif sort not in whole and len(whole) < MOST:
                enough = self._with_all_that_must_go(attempt, what)
                left = self._left(enough)
                if not left:
                    whole[sort] = enough.remedy()
                elif set(left) <= set(self.trouble) and not _is_left(blocked, left.get(what)):
                    (step if what in left else part).setdefault(sort, enough.remedy(" (not enough by itself)"))
        return tuple([*(whole or part or step).values(), *untried][:MOST])

    def _left(self, attempt: Attempt) -> Trouble:
        """The trouble that is left after an attempt; without any host it is all of it."""
        kinds, requirements = attempt.then(self.kinds, self.requirements) if attempt.then else (self.kinds, self.requirements)
        return self.again(kinds, requirements) if kinds else self.trouble

    def _with_all_that_must_go(self, attempt: Attempt, what: Hashable) -> Attempt:
        """Behind the first host that blocks there may be others: they are left out with it, if that leaves any with a plan."""
        if not attempt.without:
            return attempt
        return (
            self._grown(attempt, lambda left: next(iter(left.values()), None))
            or self._grown(attempt, lambda left: left.get(what))
            or attempt
        )

    def _grown(self, attempt: Attempt, still_blocked: Callable[[Trouble], Blocked | None]) -> Attempt | None:
        while left := remaining(self.kinds, attempt.without):
            blocked = still_blocked(self._left(attempt))
            if blocked is None:
                return attempt
            attempt = leave_out([*attempt.without, *next(names for names in left.values() if blocked.host in names)])
        return None
