"""A table whose rows live on one rank each: lookups, the gradients that wait for a step, and the step."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np
import torch

from collective_core.errors import CollectiveError, InvalidUseError
from collective_core.extensions.sparse import shards
from collective_core.extensions.sparse.exchange import Received, exchange_for
from collective_core.extensions.sparse.hashing import bucket
from collective_core.extensions.sparse.row_optimizers import RowOptimizer, Update
from collective_core.extensions.sparse.sharding import COLUMN_WISE, Placement, common_columns, common_rows, part_of
from collective_core.extensions.sparse.storage import Storage
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.functions import allgather_object

#: Rows that are initialised with one seed: the table is the same on any number of ranks.
INITIALISED_TOGETHER = 1 << 14
#: Rows of a checkpoint that are in memory at a time.
TAKEN_TOGETHER = 1 << 18
IN_MEMORY = Storage()
#: Backward passes whose gradients may wait for a step. More of them are a program that never takes one.
MAX_PASSES = 1024
Initialise = Callable[[torch.Tensor], Any]


class TableConfig(NamedTuple):
    """Configuration of every table. ``name``: in errors; :func:`agree` gives one that all ranks know where it is None."""

    placement: Placement
    optimizer: RowOptimizer
    dtype: torch.dtype
    process_set: ProcessSet | None
    name: str | None = None


class ShardedTable:
    """This rank's part of a table. Ranks make their tables in one order.

    ``id_kind``: what ids are: ``rows`` of the table, ``hashed`` into its rows, or, of a dynamic table, ``any``.

    ``weight``: the rows of ``placement.rows_of(rank)``, as a parameter that no reduction takes, for programs. ``rows``: them, and what the
    optimizer keeps for each, for all here.
    """

    def __init__(self, config: TableConfig, storage: Storage = IN_MEMORY, hash_ids: bool = False) -> None:
        placement, self.optimizer, dtype, process_set, name = config
        self.placement = placement
        self.id_kind = "hashed" if hash_ids else "rows"
        self.process_set = process_set
        self.name = str(name)
        self.steps = 0
        self._who = members_of(process_set)
        self.rank = self._who.rank
        #: Of this rank's positions.
        self._first = 0 if placement.sharding == COLUMN_WISE else placement.row_bounds[self.rank]
        self._generation = membership.generation()
        self._exchange = exchange_for(placement, self.name, process_set)
        self.rows = storage.rows(placement.shape(self._who.rank), self.optimizer.slots, dtype)
        self.weight = self.rows.parameter()
        self.weight.collective_shard = self
        #: Positions and gradients of backward passes since the last step.
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    # --- contents

    def initialise(self, initialise: Initialise, seed: int) -> None:
        """Fills the table block by block with ``initialise``, which draws from PyTorch's generator: the same whatever the ranks."""
        self.rows.clear()
        rows, columns = self.placement.rows_of(self._who.rank), self.placement.columns_of(self._who.rank)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for begin in range(0, self.placement.rows, INITIALISED_TOGETHER):
                end = min(begin + INITIALISED_TOGETHER, self.placement.rows)
                first, last = bisect_left(rows, begin), bisect_left(rows, end)
                if first == last:
                    continue
                block = torch.empty(end - begin, self.placement.columns, dtype=self.rows.weight.dtype)
                # Not torch.manual_seed, which would seed the program's GPUs, too.
                torch.default_generator.manual_seed((seed * 1_000_003 + begin) % (1 << 63))
                initialise(block)
                self.rows.weight[first:last] = block[rows[first] - begin : end - begin : rows.step, columns]

    def load_whole(self, whole: torch.Tensor) -> None:
        """Takes this rank's part of ``whole``, a tensor of all rows and columns. Not collective."""
        if tuple(whole.shape) != (self.placement.rows, self.placement.columns):
            raise ValueError(f"{self.name} has {self.placement.rows} x {self.placement.columns} numbers, not {tuple(whole.shape)}")
        rows = self.placement.rows_of(self._who.rank)
        self.rows.clear()
        with torch.no_grad():
            self.rows.weight.copy_(whole[rows.start : rows.stop : rows.step, self.placement.columns_of(self._who.rank)])

    def gather_whole(self) -> torch.Tensor:
        """All rows and columns of the weights, on every rank. Collective; for tables that fit."""
        self._refuse_changed_ranks()
        ids = torch.arange(self.placement.rows, device=self.rows.weight.device)
        positions, where = torch.unique(self.placement.position(ids), return_inverse=True)
        return self.read(positions, "", None).index_select(0, where)

    def row_tensors(self) -> dict[str, torch.Tensor]:
        """What is kept for rows, by name: ``weight``, and the optimizer's state. Read and written as ``rows`` says."""
        return {"weight": self.rows.weight, **{f"state.{name}": tensor for name, tensor in self.rows.state.items()}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of this rank, by name; to be read before the next lookup."""
        self.rows.flush()
        return self.row_tensors()

    def is_narrow(self, name: str) -> bool:
        """Whether one of :meth:`row_tensors` has one number per row."""
        return name != "weight" and not self.optimizer.slots[name[len("state.") :]].is_wide

    def begin_from(self, steps: int) -> None:
        """After the tensors were read: so many steps led to them."""
        self.steps = steps
        self.drop_gradients()

    def load(self, tensors: dict[str, torch.Tensor], steps: int) -> str:
        """Takes what :meth:`tensors` has given on this rank of as many. Why it cannot, or nothing."""
        for name, tensor in self.row_tensors().items():
            if name not in tensors:
                return f"{self.name}: {name} is missing; is the state that of a table with {self.optimizer.describe()}?"
            if tensors[name].shape != tensor.shape:
                shapes = f"{tuple(tensors[name].shape)}, and this rank's shard is {tuple(tensor.shape)}"
                return f"{self.name}: {name} is {shapes}: a state_dict is of as many ranks as it was made by; hvd.Checkpoints is not"
        self.rows.clear()
        with torch.no_grad():
            for name, tensor in self.row_tensors().items():
                if tensors[name].data_ptr() != tensor.data_ptr():  # what it has already would be written to the file again
                    tensor.copy_(tensors[name])
        self.begin_from(steps)
        return ""

    def take(self, found: dict[str, np.ndarray[Any, Any]], was: Placement, writer: int) -> None:
        """Takes what this rank has of a shard: the :meth:`tensors` of rank ``writer`` of the placement ``was``.

        Raises ValueError where it does not hold what it should.
        """
        old_rows, rows = was.rows_of(writer), self.placement.rows_of(self.rank)
        old_columns, columns = was.column_ranges[writer], self.placement.column_ranges[self.rank]
        both, shared = common_rows(old_rows, rows), common_columns(old_columns, columns)
        if not len(both) or not len(shared):
            return
        self.rows.clear()
        for name, tensor in self.row_tensors().items():
            wide = not self.is_narrow(name)
            array = checked(found, name, len(old_rows), len(range(*old_columns)) if wide else 1)
            here, there = (part_of(range(*whole), shared) if wide else slice(None) for whole in (columns, old_columns))
            for begin in range(0, len(both), TAKEN_TOGETHER):
                part = both[begin : begin + TAKEN_TOGETHER]
                mine = torch.from_numpy(np.array(array[part_of(old_rows, part), there])).to(tensor)
                with torch.no_grad():
                    tensor[part_of(rows, part), here] = mine

    # --- checkpoints (torch/sharded.py)

    def ranks(self) -> int:
        """Over how many it is divided."""
        return self.placement.size

    def describe_rows(self) -> dict[str, Any]:
        """What a checkpoint's header says of it, in plain values."""
        kinds = {"steps": self.steps, "optimizer": type(self.optimizer).__name__, "id_kind": self.id_kind}
        return {**kinds, **self.placement._asdict()}

    def mismatch(self, key: str, written: dict[str, Any]) -> str:
        """Why it cannot be the table that was described as ``written``; empty if it can."""
        if written["id_kind"] != self.id_kind:
            return f"the ids of {key} were {written['id_kind']}, and are {self.id_kind}"
        # A dynamic table may have another capacity now.
        rows = written["rows"] if self.id_kind == "any" else self.placement.rows
        mine = (rows, self.placement.columns, type(self.optimizer).__name__)
        theirs = tuple(written[name] for name in ("rows", "columns", "optimizer"))
        return "{} was {} x {} with {}, and is {} x {} with {}".format(key, *theirs, *mine) if mine != theirs else ""

    def save_rows(self, tables: Mapping[str, ShardedTable], path: Path) -> dict[str, Any]:
        """Writes this rank's rows of all these tables, of which this is one, into a file; returns its ``bytes`` and ``sha256``."""
        return shards.write(path, shards.contents(tables))

    def load_rows(self, tables: Mapping[str, ShardedTable], written: dict[str, Any], path: Path, writer: int) -> None:
        """Has all these tables take their rows from the file of rank ``writer``; ValueError where it does not hold what it should."""
        shards.take(tables, written, path, writer)

    # --- lookups

    def lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows among ``ids``, in the order of their positions, and for each id, in one dimension, its number among them.

        Both are on the device of ``ids``. Collective. Gradients of the rows wait for the next :func:`step_all`. Raises
        :class:`CollectiveError` on every rank for ids that are no rows on any.
        """
        self._refuse_changed_ranks()
        problem = self._unsupported_reason(ids)
        flat = (ids.new_empty(0) if problem else ids.reshape(-1)).to(self.rows.weight.device, torch.int64)
        positions, where, occurrences = self._requests(flat)
        rows: torch.Tensor = _Rows.apply(self.weight, self, positions, problem, occurrences)
        return rows.to(ids.device), where.to(ids.device)

    def _requests(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Distinct positions, ascending, and each id's number among them; and what their owners count, if anything."""
        rows = bucket(ids, self.placement.rows) if self.id_kind == "hashed" else ids
        return (*torch.unique(self.placement.position(rows), return_inverse=True), None)

    def _unsupported_reason(self, ids: torch.Tensor) -> str:
        if ids.dtype not in (torch.int64, torch.int32):
            return f"{self.name}: ids must be of int64 or int32, not of {ids.dtype}"
        if self.id_kind != "rows" or not ids.numel():
            return ""
        least, most = (int(end) for end in torch.aminmax(ids))
        if least < 0 or most >= self.placement.rows:
            wrong = least if least < 0 else most
            return f"{self.name}: id {wrong} is out of range: the table has rows 0 to {self.placement.rows - 1}"
        return ""

    def _refuse_changed_ranks(self) -> None:
        if self._generation != membership.generation():
            raise InvalidUseError(
                f"{self.name} is divided over the ranks that there were before the job changed: make the table "
                "again, and bring it its rows with Checkpoints.restore()",
                "invalid",
            )

    def read(self, positions: torch.Tensor, problem: str, occurrences: torch.Tensor | None) -> torch.Tensor:
        return self._exchange.lookup(positions, self._serve, problem, occurrences)

    def _serve(self, asked: torch.Tensor) -> torch.Tensor:
        """The values of this rank's rows at these positions."""
        return self.rows.values(asked - self._first)

    def _rows_at(self, positions: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows at these positions, by number within the shard, and their gradients."""
        return positions - self._first, gradients

    # --- steps

    def add_gradient(self, positions: torch.Tensor, gradient: torch.Tensor) -> None:
        if len(self._waiting) == MAX_PASSES:
            raise InvalidUseError(
                f"{self.name}: the gradients of {MAX_PASSES} backward passes wait for a step: wrap the optimizer of the model's "
                "parameters in hvd.DistributedOptimizer, whose step() updates the rows",
                "invalid",
            )
        self._waiting.append((positions, gradient))

    def drop_gradients(self) -> None:
        self._waiting.clear()

    def send_gradients(self, blocking: bool) -> Received:
        """Starts what brings waiting gradients to the ranks that hold their rows. Collective."""
        self._refuse_changed_ranks()
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            return self._exchange.send_gradients(*waiting[0], blocking)
        width = self.placement.columns
        none = (torch.empty(0, dtype=torch.int64, device=self.rows.weight.device), self.rows.weight.new_empty(0, width).detach())
        positions, gradients = (torch.cat(parts) for parts in zip(none, *waiting))
        return self._exchange.send_gradients(*merged(positions, gradients), blocking)

    def update(self, positions: torch.Tensor, gradients: torch.Tensor, divisor: int, lr: float) -> None:
        """Applies gradients, in the order of the ranks, that :meth:`send_gradients` has brought; their sums are divided by ``divisor``."""
        self.steps += 1
        used, sums = self._rows_at(*(merged(positions, gradients) if self._who.size > 1 else (positions, gradients)))
        if divisor != 1:
            sums = sums / divisor
        with torch.no_grad():
            values, kept = self.rows.read(used)
            rate = lr if self.optimizer.lr is None else self.optimizer.lr
            self.optimizer.update(Update(values, sums, kept, rate, self.steps, self._exchange.row_mean))
            self.rows.write(used, values, kept)


def checked(found: dict[str, np.ndarray[Any, Any]], name: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    if name not in found or found[name].shape != (rows, columns):
        raise ValueError(f"it holds no {name} of {rows} x {columns}")
    return found[name]


def merged(rows: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row once, ascending, and the sum of its gradients, which are added in their order."""
    used, where = torch.unique(rows, return_inverse=True)
    return used, gradients.new_zeros(len(used), gradients.shape[1]).index_add_(0, where, gradients)


class _Rows(torch.autograd.Function):
    """The parameter's own gradient stays None: its rows are not all here."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,  # noqa: ARG004 - makes the result one that has gradients
        table: ShardedTable,
        positions: torch.Tensor,
        problem: str,
        occurrences: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.table, ctx.positions = table, positions
        return table.read(positions, problem, occurrences)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.table.add_gradient(ctx.positions, gradients[0].contiguous())
        return None, None, None, None, None


def agree(config: TableConfig, what: str, seed: int | None) -> tuple[TableConfig, int]:
    """The same table with a name, and the seed of its initial values, which the first rank draws where it is None. Collective.

    ``what``: all else that ranks must agree on. Raises :class:`CollectiveError` where they do not, and TypeError or ValueError for an
    optimizer or a type that cannot be.
    """
    placement, optimizer, dtype, process_set, name = config
    if not isinstance(optimizer, RowOptimizer):
        raise TypeError(f"optimizer is one of hvd.nn's (SGD, Adagrad, RowWiseAdagrad, Adam, FTRL), not a {type(optimizer).__name__}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a sharded table has numbers of float32 or float64, not of {dtype}")
    members = members_of(process_set)
    number = membership.next_name("embedding", members.id)
    drawn = int(torch.randint(1 << 31, (1,))) if seed is None else seed
    described = f"{placement.sharding} of {placement.rows} x {placement.columns} {dtype} with {optimizer.describe()}, "
    described += f"name {name}, {what}, seed {seed}"
    everyone = allgather_object((described, placement, drawn), f"{number}.made", process_set)
    for rank, theirs in zip(members.ranks, everyone):
        if theirs[:2] != everyone[0][:2]:
            text = f"ranks make different sharded tables: rank {members.ranks[0]} {everyone[0][0]}; rank {rank} {theirs[0]}"
            raise CollectiveError(text, "mismatch", (rank,))
    return config._replace(name=name or number.replace(".noname", "")), everyone[0][2]
