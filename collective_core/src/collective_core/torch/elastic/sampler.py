"""A sampler that knows which samples of the epoch are done, so that ranks that come and go divide what is left."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, Iterable, Iterator, Sized

import torch

from collective_core import context
from collective_core.torch.functions import allgather_object


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Horovod's: every rank gets the same number of the epoch's remaining samples; a few are repeated where they do not divide.

    Call ``record_batch`` or ``record_indices`` after each step, and ``set_epoch`` after each epoch; give it to TorchState. ``shuffle``: a
    permutation by ``seed`` and epoch. ``reset`` divides what is left among the ranks that are there.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.processed_indices: set[int] = set()
        self.rank, self.num_replicas = 0, 1
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with nothing done of it."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that batch ``batch_idx`` of this rank's samples is done, ``batch_size`` samples of each batch."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Notes that these samples are done."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        begin = batch_idx * batch_size
        return self.indices[begin : begin + batch_size]

    def reset(self) -> None:
        """Divides the samples that are not done among the ranks that are there now."""
        member = context.is_initialized()
        self.rank, self.num_replicas = (context.rank(), context.size()) if member else (0, 1)
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)  # noqa: S311  no secret
        each = math.ceil(len(left) / self.num_replicas)
        filled = list(itertools.islice(itertools.cycle(left), each * self.num_replicas))
        self.indices = filled[self.rank :: self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and the samples of it that are done."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def collective_state_dict(self) -> dict[str, Any]:
        """The same for all ranks together: each knows which samples it has done since they last met. Collective."""
        found = allgather_object(self.state_dict(), "elastic.sampler")
        epoch = max(each["epoch"] for each in found)
        done = set().union(*(each["processed_indices"] for each in found if each["epoch"] == epoch))
        return {"epoch": epoch, "processed_indices": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from such a position."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
