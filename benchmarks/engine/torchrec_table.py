"""A side of ``--train ctr`` and ``dlrm``: TorchRec's row-wise sharded table, with FBGEMM's kernels for CPUs, over Gloo.

`peers.fetch_torchrec` brings both, in releases that fit PyTorch's (1.8 with 2.13; 1.9 needs symbols that 2.13 has not).
"""

from __future__ import annotations

import sys
from typing import Any

from . import peers

sys.path.append(str(peers.torchrec_folder()))  # behind everything: what it needs, others may have

import fbgemm_gpu  # noqa: F401 - registers the kernels
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class _Bags(nn.Module):
    def __init__(self, rows: int, columns: int, keys: list[str], lr: float) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="rows", embedding_dim=columns, num_embeddings=rows, feature_names=keys)
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": lr})

    def forward(self, ids: Any) -> Any:
        return self.bags(ids)


class Table(nn.Module):
    """Rows of ids (n, features): (n, features, columns). SGD is a part of its backward pass, so that it has no parameters to show."""

    def __init__(self, rows: int, columns: int, features: int, lr: float, group: Any) -> None:
        super().__init__()
        self._keys = [f"f{number}" for number in range(features)]
        bags, size, sharder = _Bags(rows, columns, self._keys, lr), group.size(), EmbeddingBagCollectionSharder()
        where = {"sharder": sharder, "local_size": size, "world_size": size, "device_type": "cpu"}
        plan = ShardingPlan({"bags": construct_module_sharding_plan(bags.bags, {"rows": row_wise(compute_kernel="fused")}, **where)})
        env = ShardingEnv.from_process_group(group)
        sharded = DistributedModelParallel(bags, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        self._shape, self._sharded = (features, columns), [sharded]  # in a list, it is no module of ours

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        jagged = KeyedJaggedTensor(self._keys, ids.t().reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int32))
        rows: torch.Tensor = self._sharded[0](jagged).values()
        return rows.view(len(ids), *self._shape)
