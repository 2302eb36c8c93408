"""Which hosts are set aside after failures, and for how long. Pure."""

from __future__ import annotations

#: Seconds a host is set aside after its second failure; each further one doubles it, up to the longest.
FIRST, LONGEST = 2.0, 120.0
#: A host without a failure for so many seconds begins anew.
FORGIVEN = 300.0


class Cooldown:
    """A first failure costs a host nothing: its worker is started again at once. One that fails again and again is set aside.

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
