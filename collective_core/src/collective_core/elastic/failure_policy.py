"""Policy after failures: which hosts are blacklisted, for how long, and how many exceptions a job survives. Pure."""

from __future__ import annotations

from typing import Iterable

#: Seconds a host is left out after its second failure; each further one doubles it, up to the longest.
FIRST, LONGEST = 2.0, 120.0
#: A host without a failure for so many seconds begins anew.
FORGIVEN = 300.0


class Cooldown:
    """Waits of hosts that fail: none after a first failure, longer and longer ones after more.

    ``first``, ``longest``: seconds, see above.
    """

    def __init__(self, first: float = FIRST, longest: float = LONGEST) -> None:
        self._first, self._longest = first, longest
        self._failures: dict[str, tuple[int, float]] = {}  # how many, and when the last one was

    def note(self, host: str, now: float) -> None:
        """Something failed there."""
        count, last = self._failures.get(host, (0, now))
        self._failures[host] = (1 if now - last > FORGIVEN else count + 1, now)

    def failures(self, host: str) -> int:
        """How many there were, one after the other."""
        return self._failures.get(host, (0, 0.0))[0]

    def until(self, host: str) -> float:
        """When the host may be used again."""
        count, last = self._failures.get(host, (0, 0.0))
        return last + min(self._first * 2.0 ** (count - 2), self._longest) if count > 1 else 0.0


#: Generations in which workers of one host end with an exception that are too many, and those in which workers of any host may.
MAX_OF_HOST, MAX_RESTARTS = 2, 3


class FailurePolicy:
    """Verdict on workers that ended by themselves: whether the host is to blame, or the program.

    A fault of a GPU is an exception as a mistake of the program is: only where it happens again tells. A host with a second one gets no
    new workers, those that it has go on; of the program, not of a host, are exceptions in more than ``restarts`` generations, or on all
    hosts, or with the same traceback on two of them. Workers of one host that end in the same generation count once, and nothing counts
    any more after ``FORGIVEN`` seconds without another. ``of_host``: how many of one host are too many.
    """

    def __init__(self, restarts: int = MAX_RESTARTS, of_host: int = MAX_OF_HOST) -> None:
        self._restarts, self._of_host = restarts, of_host
        self._when: dict[tuple[str, int], float] = {}  # host, generation
        self._hosts_of: dict[str, set[str]] = {}  # by traceback

    def note(self, host: str, generation: int, now: float, traceback: str = "") -> None:
        """A worker of this host ended by itself in this generation. ``traceback``: where, and with what exception, if that is known."""
        if self._when and now > max(self._when.values()) + FORGIVEN:
            self._when.clear()
            self._hosts_of.clear()
        self._when[host, generation] = now
        if traceback:
            self._hosts_of.setdefault(traceback, set()).add(host)

    def is_blacklisted(self, host: str, now: float) -> bool:
        """Whether the host gets no new workers."""
        own = [when for (name, _), when in self._when.items() if name == host]
        return len(own) >= self._of_host and now <= max(own) + FORGIVEN

    def are_too_many(self, hosts: Iterable[str], now: float) -> bool:
        """Whether the program, or all the job's hosts, are to blame."""
        if any(len(known) > 1 for known in self._hosts_of.values()):
            return True
        return len({generation for _, generation in self._when}) > self._restarts or all(self.is_blacklisted(host, now) for host in hosts)
