"""Data that does not divide evenly: every sample once, a word before the epoch where ranks differ, averages by sample.

Together with ``join`` for the rest of the epoch::

    sampler = hvd.ShardSampler(dataset, batch_size=64)
    for batch in DataLoader(dataset, batch_size=64, sampler=sampler):
        loss = criterion(model(batch.x), batch.y) * hvd.sample_weight(len(batch.x))
        ...
    hvd.join()
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized

import torch

from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.ops.allgather import allgather
from collective_core.torch.ops.allreduce import allreduce


class UnevenDataWarning(UserWarning):
    """Some ranks have fewer steps than others and would keep them waiting."""


def compare_steps(steps: int, process_set: ProcessSet | None = None) -> dict[int, int]:
    """How many steps each rank has before it, by rank. Collective; call it before an epoch.

    Where they differ, the first rank warns (:class:`UnevenDataWarning`): ranks that end early must call ``join``, or the others
    wait for them. Raises ValueError for a negative number.
    """
    if steps < 0:
        raise ValueError(f"a number of steps is not negative: {steps}")
    pairs = allgather(torch.tensor([[membership.rank(), steps]]), process_set=process_set).tolist()
    found = {int(rank): int(number) for rank, number in pairs}
    most = max(found.values())
    short = {rank: number for rank, number in found.items() if number < most}
    if short and membership.rank() == min(found):
        named = ", ".join(f"rank {rank} has {number}" for rank, number in list(short.items())[:8])
        more = f" and {len(short) - 8} more ranks have fewer" if len(short) > 8 else ""
        text = f"the epoch has {most} steps, but {named}{more}: call join() after the last step, or the other ranks wait for them"
        warnings.warn(text, UnevenDataWarning, stacklevel=2)
    return found


def sample_weight(samples: int, process_set: ProcessSet | None = None) -> float:
    """What to multiply the mean loss of ``samples`` samples by, so that the average over ranks is the average over samples.

    Collective; call it before the backward pass. Ranks that have joined do not count. 1.0 when all ranks have equally many.
    Raises ValueError for a negative number.
    """
    if samples < 0:
        raise ValueError(f"a number of samples is not negative: {samples}")
    mean = float(allreduce(torch.tensor([float(samples)], dtype=torch.float64), process_set=process_set))
    return samples / mean if mean else 0.0


class ShardSampler(torch.utils.data.Sampler[int]):
    """This rank's share of a dataset: every sample exactly once over all ranks, none repeated to make shares equal.

    ``batch_size`` says how many samples a step takes: ranks compare their numbers of steps when an epoch begins
    (:func:`compare_steps`); ``whole_batches``: of these only whole ones, as a DataLoader with ``drop_last`` takes. ``drop_last``:
    leave out what does not divide, then all shares are equal. ``shuffle``: a permutation from ``seed`` and the epoch, the same for the
    same job; call ``set_epoch`` before each. After ``advance`` it goes on behind what was trained on, also in a job that was started again
    with its ``state_dict`` and another number of ranks. Raises ValueError for a batch of none.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        whole_batches: bool = False,
        process_set: ProcessSet | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self._samples = len(dataset)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._whole_batches = whole_batches
        self._process_set = process_set
        self._epoch = 0
        self._behind = 0  # samples of this epoch, over all ranks, that were trained on

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of this epoch. Another one than before begins at its begin."""
        if epoch != self._epoch:
            self._epoch, self._behind = epoch, 0

    def advance(self, samples: int) -> None:
        """Notes that every rank has trained on ``samples`` more of its samples, as far as it has them: for ``state_dict``."""
        if samples < 0:
            raise ValueError(f"a number of samples is not negative: {samples}")
        self._behind = min(self._samples, self._behind + samples * self._number_and_size()[1])

    def state_dict(self) -> dict[str, int]:
        """Where this epoch stands, the same on all ranks."""
        return {"epoch": self._epoch, "behind": self._behind, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where another job stood. Raises ValueError for the position in a dataset of another length."""
        if state["samples"] != self._samples:
            raise ValueError(f"the position is one in {state['samples']} samples; this dataset has {self._samples}")
        self._epoch, self._behind = state["epoch"], state["behind"]

    def __len__(self) -> int:
        number, size = self._number_and_size()
        ahead = self._samples - self._behind
        left = 0 if self._drop_last else ahead % size
        return ahead // size + (1 if number < left else 0)

    def __iter__(self) -> Iterator[int]:
        if self._behind == self._samples:
            self._behind = 0  # the same epoch once more
        steps = len(self) // self._batch_size if self._whole_batches else -(-len(self) // self._batch_size)
        compare_steps(steps, self._process_set)
        number, size = self._number_and_size()
        order = list(range(self._samples))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._samples, generator=generator).tolist()
        return iter(order[self._behind :][number::size][: len(self)])

    def _number_and_size(self) -> tuple[int, int]:
        """This rank's number in the process set, and the set's size."""
        members = members_of(self._process_set)
        return members.rank, members.size
