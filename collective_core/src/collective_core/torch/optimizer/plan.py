"""Plan that ranks agree on before gradients can be summed while others are still computed: their order, and which of them go as sparse."""

from __future__ import annotations

from typing import NamedTuple, Sequence
from zlib import crc32

import torch

from collective_core import arrays
from collective_core.runtime.process_sets import ProcessSet


class Plan(NamedTuple):
    """By the numbers of an optimizer's trained parameters; the same on all ranks."""

    order: list[int]  # in which their gradients go
    is_sparse: list[bool]
    unseen: frozenset[int] = frozenset()  # of which no rank had a gradient when they agreed: whether it is sparse is seen later

    @classmethod
    def until_agreed(cls, parameters: int) -> Plan:
        """Models use their parameters in the order in which they list them, so gradients come the other way round."""
        return cls(list(range(parameters))[::-1], [False] * parameters)

    def mark(self) -> str:
        """For the names of what is sent: a rank with another plan is told so by them."""
        return f"{crc32(repr((self.order, self.is_sparse)).encode()):x}"


def agree(
    last: Plan, parameters: Sequence[torch.nn.Parameter], arrived: Sequence[int], late: set[int], name: str, process_set: ProcessSet
) -> Plan:
    """The next plan, after a backward pass: gradients go in the order in which they came on the first rank; as sparse, what is so on any.

    Those that have not come are the last. A rank that has joined has no say. Collective over the process set.

    Args:
        arrived: numbers of the parameters whose gradients have come here, in order.
        late: those whose gradients had come as sparse after an earlier plan, and were made dense.
        name: of the operation.
    """
    order = dict.fromkeys([*arrived, *reversed(range(len(parameters)))])
    is_sparse = [number in late or (p.grad is not None and p.grad.is_sparse) for number, p in enumerate(parameters)]
    ever_sparse = [was or now for was, now in zip(last.is_sparse, is_sparse)]
    has_come = [p.grad is not None for p in parameters]
    mine = torch.tensor([[[*order], ever_sparse, has_come]], dtype=torch.int64)
    plans = torch.from_numpy(arrays.allgather_without_joined(mine.numpy(), name, process_set))
    unseen = (plans[:, 2].amax(0) == 0).nonzero().flatten().tolist()
    return Plan(plans[0, 0].tolist(), plans[:, 1].amax(0).bool().tolist(), frozenset(unseen))
