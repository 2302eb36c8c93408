"""Which ways out of a conflict work: each is tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from provision.plan.model import Conflict, Remedy
from provision.plan.requirements import Requirements
from provision.resolve.blocked import Blocked, Kinds, Way, leave_out, remaining

MOST = 2  # as many are offered: the cheapest

# What is blocked (a component of all hosts, a kind of host, …) → how.
Trouble = Mapping[Hashable, Blocked]


def _is_left(before: Blocked, now: Blocked | None) -> bool:
    return now is not None and (now.host, now.constraint) == (before.host, before.constraint)


@dataclass(frozen=True)
class Trial:
    """The question that met trouble, and what answers another one: the trouble that it meets."""

    kinds: Kinds
    requirements: Requirements
    trouble: Trouble
    again: Callable[[Kinds, Requirements], Trouble]

    def conflicts(self) -> list[Conflict]:
        """All trouble as conflicts, each with its cheapest ways out that work."""
        return [Conflict(blocked.host, blocked.constraint, self._ways_out(what, blocked)) for what, blocked in self.trouble.items()]

    def _ways_out(self, what: Hashable, blocked: Blocked) -> tuple[Remedy, ...]:
        """Those that end in a plan; where there is none, those that do away with this conflict, if only to meet that of the next host. Then
        what cannot be tried. None asks for something else than what an earlier run has decided: the user has not asked for that."""
        whole: dict[str, Remedy] = {}
        part: dict[str, Remedy] = {}
        step: dict[str, Remedy] = {}
        untried = []
        for way in blocked.ways:
            sort = way.sort or way.text
            if self.requirements.are_kept(way.asks):
                continue
            if way.then is None:
                untried.append(way.remedy())
            elif sort not in whole and len(whole) < MOST:
                enough = self._with_all_that_must_go(way, what)
                left = self._left(enough)
                if not left:
                    whole[sort] = enough.remedy()
                elif set(left) <= set(self.trouble) and not _is_left(blocked, left.get(what)):
                    (step if what in left else part).setdefault(sort, enough.remedy(" (not enough by itself)"))
        return tuple([*(whole or part or step).values(), *untried][:MOST])

    def _left(self, way: Way) -> Trouble:
        """The trouble that is left after a way out; without any host it is all of it."""
        kinds, requirements = way.then(self.kinds, self.requirements) if way.then else (self.kinds, self.requirements)
        return self.again(kinds, requirements) if kinds else self.trouble

    def _with_all_that_must_go(self, way: Way, what: Hashable) -> Way:
        """Behind the first host that blocks there may be others: they are left out with it, if that leaves any with a plan."""
        if not way.without:
            return way
        return self._grown(way, lambda left: next(iter(left.values()), None)) or self._grown(way, lambda left: left.get(what)) or way

    def _grown(self, way: Way, still_blocked: Callable[[Trouble], Blocked | None]) -> Way | None:
        while left := remaining(self.kinds, way.without):
            blocked = still_blocked(self._left(way))
            if blocked is None:
                return way
            way = leave_out([*way.without, *next(names for names in left.values() if blocked.host in names)])
        return None
