"""A sampler that knows how far the epoch is done, so that ranks that come and go divide what is left."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, Iterator, Sized

import torch

from collective_core.runtime import membership


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Horovod's: every rank gets the same number of the epoch's remaining samples; a few are repeated where they do not divide.

    Call ``record_batch`` after each step, and ``set_epoch`` after each epoch; give it to TorchState. ``shuffle``: a permutation by ``seed``
    and epoch, the same on all ranks. They deal it out like cards, so that after each step what is done is its beginning: one number,
    ``processed_num``, says where the epoch is, for any number of ranks. ``reset`` divides what is left among those that are there.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.processed_num = 0
        #: Samples that are done besides: of a state that named them one by one, as Horovod's did before 0.22.
        self.processed_indices: set[int] = set()
        self.rank, self.num_replicas = 0, 1
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0  # each rank's and all ranks', with those that are repeated
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with nothing done of it."""
        self.epoch, self.processed_num, self.processed_indices = epoch, 0, set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's parameter
        """Notes that every rank has done another ``batch_size`` samples. Once for each batch, whatever its number."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divides the samples that are not done among the ranks that are there now."""
        member = membership.is_initialized()
        self.rank, self.num_replicas = (membership.rank(), membership.size()) if member else (0, 1)
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311  no secret
        if self.processed_indices:
            order = [index for index in order if index not in self.processed_indices]
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and how many samples of it are done; those that an earlier state named, if any."""
        named = {"processed_indices": set(self.processed_indices)} if self.processed_indices else {}
        return {"epoch": self.epoch, "processed_num": self.processed_num, **named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from such a position, or from one of Horovod before 0.22, with ``processed_indices`` only."""
        self.epoch = state["epoch"]
        self.processed_num = state.get("processed_num", 0)
        self.processed_indices = set(state.get("processed_indices", ()))
        self.reset()

    def __iter__(self) -> Iterator[int]:
        filled = list(itertools.islice(itertools.cycle(self.remaining_indices), self.total_size))
        return iter(filled[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
