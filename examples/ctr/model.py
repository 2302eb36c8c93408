"""Wide & Deep and DLRM over tables that their caller makes: plain ones, sharded ones, or those of parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from data import CATEGORIES, NUMBERS
from torch import nn

COLUMNS = 16
HIDDEN = (256, 64)

#: Makes a table of all categories' values: (columns, width of the initial values) to a module that sums the rows of each bag of ids.
MakeTable = Callable[[int, float], nn.Module]


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLUs between them."""
    made = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*made[:-1])


class WideDeep(nn.Module):
    """A linear model of the categories beside a network of their embeddings and the numbers (Cheng et al., arXiv 1606.07792)."""

    def __init__(self, make_table: MakeTable) -> None:
        super().__init__()
        self.wide = make_table(1, 0.0)
        self.deep = make_table(COLUMNS, 0.1)
        self.network = layers(len(CATEGORIES) * COLUMNS + NUMBERS, *HIDDEN, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a click, (n)."""
        rows = self.deep(ids.view(-1, 1)).view(len(ids), -1)
        return (self.wide(ids) + self.network(torch.cat([rows, numbers], 1)))[:, 0]


class Dlrm(nn.Module):
    """A network of the numbers, dot products of all pairs of embeddings, a network above (Naumov et al., arXiv 1906.00091)."""

    def __init__(self, make_table: MakeTable) -> None:
        super().__init__()
        self.table = make_table(COLUMNS, 0.1)
        self.bottom = nn.Sequential(layers(NUMBERS, 64, COLUMNS), nn.ReLU())
        vectors = len(CATEGORIES) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.top = layers(COLUMNS + vectors * (vectors - 1) // 2, *HIDDEN, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a click, (n)."""
        dense = self.bottom(numbers)
        rows = self.table(ids.view(-1, 1)).view(len(ids), -1, COLUMNS)
        vectors = torch.cat([dense[:, None], rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1))[:, 0]


MODELS = {"wide_deep": WideDeep, "dlrm": Dlrm}
