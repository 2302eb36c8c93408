"""``COLLECTIVE_AUTOTUNE=1``: the size of DistributedOptimizer's buckets, chosen by what the program waits for collectives.

While the program trains, every size has its turn for a few steps, again and again in another order, so that a change of the machine's
mood meets all. What counts is the exposed communication (the time for which callers wait) and the time of a step, each of the slowest
rank; all ranks know the same figures and so decide alike. The best size is then measured against the default once more, on fresh steps:
it must save the margin again, and no step may have become longer. Otherwise the default stays. Bucket sizes change no bit of any sum.

:class:`Tuner` is pure: no clock, no files, no communication but ``agree``. :class:`BucketTuner` has these.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import torch

from collective_core import _native
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch import gpu
from collective_core.torch.ops import allreduce, broadcast
from collective_core.version import __version__

#: MB, around the default: many small sums overlap more with the backward pass, few large ones cost less each.
CANDIDATES_MB = (1, 4, 10, 25, 60, 150)
#: A size in the cache beyond this is no size.
MAX_BYTES = 1 << 40
#: Steps in a turn that are measured, after one in which the new buckets are filled for the first time.
STEPS, WARM_UP = 4, 1
#: Steps before the first turn: a program's first steps are its slowest, and the default would pay for them.
SETTLE = 5
#: Turns of every candidate, then of the best and the default.
TURNS, CONFIRMATIONS = 3, 5
#: Of the default's step that a change must save: less is within the noise, and not worth a change.
MARGIN = 0.02
#: A candidate whose first turn was so much slower than the default's has no other.
HOPELESS = 1.2


class Turn(NamedTuple):
    """Seconds per step of the slowest rank: in all, and waiting for collectives."""

    step: float
    exposed: float


def median(turns: Sequence[Turn]) -> Turn:
    return Turn(statistics.median(t.step for t in turns), statistics.median(t.exposed for t in turns))


def is_better(candidate: Sequence[Turn], default: Sequence[Turn]) -> bool:
    """Whether the candidate saves the margin of exposed communication, and costs no time elsewhere."""
    ours, theirs = median(candidate), median(default)
    return theirs.exposed - ours.exposed >= MARGIN * theirs.step and ours.step <= theirs.step


class Tuner:
    """Choice of the size in use, step by step. ``agree``: of all ranks' figures the largest, one by one."""

    def __init__(self, default: int, candidates: Sequence[int], agree: Callable[[list[float]], list[float]]) -> None:
        self.default, self._agree = default, agree
        self.turns: dict[int, list[Turn]] = {size: [] for size in dict.fromkeys([default, *candidates])}
        self.finalist: int | None = None
        self.finals: dict[int, list[Turn]] = {}
        self.chosen: int | None = default if len(self.turns) == 1 else None
        self._plan = list(self.turns) * TURNS
        self.size = self._plan[0]
        self._steps = -SETTLE
        self._begin = (0.0, 0.0)

    def step_done(self, now: float, waited: float) -> bool:
        """After every step; clock and time waited so far in seconds. True when the size, or that it is final, has changed."""
        if self.chosen is not None:
            return False
        self._steps += 1
        if self._steps == WARM_UP:
            self._begin = now, waited
        if self._steps < WARM_UP + STEPS:
            return False
        step, exposed = self._agree([(now - self._begin[0]) / STEPS, (waited - self._begin[1]) / STEPS])
        self._note(Turn(step, exposed))
        self._steps = 0
        return True

    def _note(self, turn: Turn) -> None:
        size = self._plan.pop(0)
        (self.turns if self.finalist is None else self.finals)[size].append(turn)
        if self.finalist is None and size != self.default and turn.step > HOPELESS * self.turns[self.default][0].step:
            self._plan = [planned for planned in self._plan if planned != size]
        if self._plan:
            self.size = self._plan[0]
        elif self.finalist is None:
            self._begin_final()
        else:
            won = is_better(self.finals[self.finalist], self.finals[self.default])
            self.size = self.chosen = self.finalist if won else self.default

    def _begin_final(self) -> None:
        whole = {size: turns for size, turns in self.turns.items() if len(turns) == TURNS}
        best = min(whole, key=lambda size: median(whole[size]).exposed)
        if best == self.default or not is_better(whole[best], whole[self.default]):
            self.size = self.chosen = self.default
            return
        self.finalist = best
        self.finals = {self.default: [], best: []}
        self._plan = [self.default, best, best, self.default] * CONFIRMATIONS
        self._plan = self._plan[: 2 * CONFIRMATIONS]
        self.size = self._plan[0]

    def report(self) -> str:
        """What was measured and decided, for people."""
        lines = ["autotune: bucket size, step and exposed communication (slowest rank, median)"]
        for size, turns in self.turns.items():
            if turns:
                ours = median(turns)
                mark = " default" if size == self.default else ""
                lines.append(f"  {size / (1 << 20):8.2f} MB  {ours.step * 1e3:9.2f} ms  {ours.exposed * 1e3:9.2f} ms{mark}")
        if self.finalist is not None:
            best, default = median(self.finals[self.finalist]), median(self.finals[self.default])
            lines.append(
                f"  again, {self.finalist / (1 << 20):.2f} MB against the default: {best.step * 1e3:.2f} against {default.step * 1e3:.2f} "
                f"ms a step, {best.exposed * 1e3:.2f} against {default.exposed * 1e3:.2f} ms exposed"
            )
        chosen = self.chosen or self.default
        why = "" if chosen != self.default else f": none saves {100 * MARGIN:g} % of a step"
        lines.append(f"  chosen: {chosen / (1 << 20):.2f} MB{' (the default)' if chosen == self.default else ''}{why}")
        return "\n".join(lines)


class Cache:
    """Cache of what was chosen earlier, by a text that names model and job, in a file of the user's."""

    def __init__(self, path: str | None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self.path = Path(path or os.path.join(home, "collective_core", "autotune.json"))

    def read(self, key: str) -> int | None:
        """The size in bytes; None if it is not known or the file cannot be read."""
        try:
            size = json.loads(self.path.read_text())[key]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return size if type(size) is int and 0 < size < MAX_BYTES else None

    def write(self, key: str, size: int) -> None:
        """Raises OSError where nothing can be written. Another job that writes at the same moment may win; the file stays whole."""
        try:
            known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            known = {}
        known = {**(known if isinstance(known, dict) else {}), key: size}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        beside.write_text(json.dumps(known, indent=1))
        beside.replace(self.path)


class BucketTuner:
    """Chooses ``size``, bytes of a bucket, while the optimizer trains; or knows it from an earlier job. Collective over the set."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any, name: str, process_set: ProcessSet | None) -> None:
        settings, members = membership.current().config, members_of(process_set)
        self._name, self._process_set, self._speaks = f"{name}.autotune", process_set, members.rank == 0
        self._cache = Cache(settings.autotune_cache)
        shapes = [(str(p.dtype), p.numel()) for p in parameters]
        host_ids = [membership.current().peers[rank].host_id for rank in members.ranks]
        hosts = [host_ids.count(host) for host in dict.fromkeys(host_ids)]
        on_gpu = any(map(gpu.holds, parameters))
        how = [settings.backend, on_gpu, settings.nccl, getattr(compression, "__name__", ""), settings.fusion_bytes]
        facts = [__version__, shapes, hosts, *how, torch.get_num_threads()]
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()
        # The first rank's cache counts: the others' may lie on other disks.
        known = torch.tensor([(self._cache.read(self._key) or 0) if self._speaks else 0], dtype=torch.int64)
        found = int(broadcast.broadcast_(known, members.ranks[0], name=f"{self._name}.known", process_set=process_set).item())
        total = sum(p.numel() * p.element_size() for p in parameters)
        sizes = [mb << 20 for mb in CANDIDATES_MB]
        # All sizes that hold the whole model are the same. On GPUs the host does not see what is exposed.
        whole = [] if settings.fusion_bytes >= total else [size for size in sizes if size >= total][:1]
        candidates = [] if found or on_gpu else [size for size in sizes if size < total] + whole
        self._found = bool(found)
        self._tuner = Tuner(found or settings.fusion_bytes, candidates, self._agree)
        self.size = self._tuner.size
        if found:
            self._say(f"autotune: buckets of {found / (1 << 20):.2f} MB, as chosen by an earlier job ({self._cache.path})")

    def step_done(self) -> bool:
        """After every step; True when the size has changed."""
        before = self.size
        if not self._tuner.step_done(time.perf_counter(), _native.waited()):
            return False
        self.size = self._tuner.size
        if self._tuner.chosen is not None:
            self._say(self._tuner.report())
            if self._speaks:
                self._remember(self._tuner.chosen)
        return self.size != before

    def give_up(self) -> bool:
        """Takes the default, because ranks that join do fewer steps than others and would have their turns at other times.

        Returns whether the size changes. What an earlier job has chosen stays: all ranks have it from the beginning.
        """
        before = self.size
        if not self._found:
            if self._tuner.chosen is None:
                self._say("autotune: given up, because ranks with less data join: the default stays")
            self.size = self._tuner.size = self._tuner.chosen = self._tuner.default
        return self.size != before

    def _agree(self, figures: list[float]) -> list[float]:
        mine = torch.tensor(figures, dtype=torch.float64)
        largest: list[float] = allreduce.allreduce_(mine, name=self._name, op=allreduce.Max, process_set=self._process_set).tolist()
        return largest

    def _remember(self, size: int) -> None:
        try:
            self._cache.write(self._key, size)
        except OSError as error:
            self._say(f"autotune: {self._cache.path} cannot be written, so the next job starts over: {error.strerror}")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, file=sys.stderr, flush=True)
