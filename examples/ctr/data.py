"""Records of the shape of Criteo's click logs: 13 numbers, 26 categories and whether there was a click. They are made here.

Record i is the same in every program with the same seed, whatever its ranks and batches are. Clicks come from a hidden model of the
numbers, the categories, and pairs of categories, so that there is something to learn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

NUMBERS = 13
#: Different values of each category in Criteo's Kaggle data set: 33,762,577 in all.
CATEGORIES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194)
CATEGORIES += (27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
#: Records that are drawn with one seed.
TOGETHER = 128
#: Of the hidden model: what records without any preference click, and how far numbers, categories and pairs of them move that.
BIAS, OF_NUMBERS, OF_CATEGORIES, OF_PAIRS = -1.5, 0.25, 0.25, 0.2
TASTES = 2  # hidden numbers of a category's value, beside its own effect


class Records(NamedTuple):
    numbers: torch.Tensor  # (n, 13), float32: logarithms of counts
    ids: torch.Tensor  # (n, 26), int64: rows of one table of all categories
    clicks: torch.Tensor  # (n), float32: 0 or 1


class Clicks:
    """``rows``: of a table of all categories, each of which has at most ``most_ids`` values."""

    def __init__(self, most_ids: int, seed: int) -> None:
        sizes = torch.tensor([min(size, most_ids) for size in CATEGORIES])
        self.rows = int(sizes.sum())
        self._sizes, self._first = sizes, sizes.cumsum(0) - sizes
        self._seed = seed
        hidden = torch.Generator().manual_seed(seed)
        self._of_numbers = torch.randn(NUMBERS, generator=hidden)
        self._of_ids = torch.randn(self.rows, 1 + TASTES, generator=hidden)

    def records(self, first: int, count: int) -> Records:
        """Records ``first`` to ``first + count - 1``; both are multiples of ``TOGETHER``."""
        if first % TOGETHER or count % TOGETHER:
            raise ValueError(f"records come in multiples of {TOGETHER}, not {count} from {first} on")
        parts = [self._drawn(number) for number in range(first // TOGETHER, (first + count) // TOGETHER)]
        return Records(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _drawn(self, number: int) -> Records:
        generator = torch.Generator().manual_seed((self._seed << 40) + number + 1)
        numbers = torch.randn(TOGETHER, NUMBERS, generator=generator).exp().floor().log1p()
        # Zipf's law with exponent 1: an id's probability is about 1 / (id + 1).
        uniform = torch.rand(TOGETHER, len(CATEGORIES), generator=generator, dtype=torch.float64)
        ids = self._first + (uniform * (self._sizes + 1).log()).exp().long().sub(1).clamp(min=0).minimum(self._sizes - 1)
        hidden = self._of_ids[ids]
        tastes = hidden[:, :, 1:]
        logits = BIAS + OF_NUMBERS * (numbers @ self._of_numbers) + OF_CATEGORIES * hidden[:, :, 0].sum(1)
        logits += OF_PAIRS * (tastes[:, 0::2] * tastes[:, 1::2]).sum((1, 2)) / math.sqrt(TASTES)
        return Records(numbers, ids, torch.bernoulli(logits.sigmoid(), generator=generator))
