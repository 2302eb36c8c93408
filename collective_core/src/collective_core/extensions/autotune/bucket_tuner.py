"""Autotune of a DistributedOptimizer (tuner.py): its clock, its agreement, its cache, what it prints."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any, Sequence

import torch

from collective_core import _native
from collective_core.extensions.autotune.tuner import CANDIDATES_MB, Cache, Tuner
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members
from collective_core.torch import gpu
from collective_core.torch.ops import allreduce, broadcast
from collective_core.version import __version__


class BucketTuner:
    """Chooses ``size``, bytes of a bucket, while the optimizer trains; or knows it from an earlier job. Collective over the set."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any, name: str, process_set: ProcessSet | None) -> None:
        settings, who = membership.current().config, members(process_set)
        self._name, self._process_set, self._speaks = f"{name}.autotune", process_set, who.rank == 0
        self._cache = Cache(settings.autotune_cache)
        shapes = [(str(p.dtype), p.numel()) for p in parameters]
        host_ids = [membership.current().peers[rank].host_id for rank in who.ranks]
        hosts = [host_ids.count(host) for host in dict.fromkeys(host_ids)]
        on_gpu = any(map(gpu.holds, parameters))
        how = [settings.backend, on_gpu, settings.nccl, getattr(compression, "__name__", ""), settings.fusion_bytes]
        facts = [__version__, shapes, hosts, *how, torch.get_num_threads()]
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()
        # The first rank's cache counts: the others' may lie on other disks.
        known = torch.tensor([(self._cache.read(self._key) or 0) if self._speaks else 0], dtype=torch.int64)
        found = int(broadcast.broadcast_(known, who.ranks[0], name=f"{self._name}.known", process_set=process_set).item())
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
            self._say(f"autotune: {self._cache.path} cannot be written, so the next job begins anew: {error.strerror}")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, file=sys.stderr, flush=True)
