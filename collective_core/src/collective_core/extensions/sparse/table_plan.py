"""Plan of where each table of a model should live: chosen from sizes, a memory budget and the costs of moving rows, with reasons.

Of a table with rows of D bytes, of which a rank's batch uses U distinct ones, a step moves per rank, to and from n - 1 others (8 bytes per
position; gradients go the way back):

    row-wise      2·U·(8 + D)·(n - 1)/n, in 4·(n - 1) messages
    table-wise    2·U·(8 + D)·(n - 1) for the owner, 2·U·(8 + D) for the others in 4 messages
    column-wise   2·U·(8·(n - 1) + D·(n - 1)/n), in 4·(n - 1) messages
    replicated    2·(n - 1)/n·rows·D, the dense gradient, in the buckets of the other parameters

and reads and writes the rows where they live: the used ones, or of a replicated table all.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from collective_core.extensions.sparse.sharding import COLUMN_WISE, ROW_WISE, TABLE_WISE, place

REPLICATED = "replicated"
POSITION_BYTES = 8
#: Accesses to a row in a step: the lookup, and the update's read and write.
ACCESSES = 3


class Table(NamedTuple):
    """A table to be placed.

    ``ids_per_sample``: looked up for each sample. ``distinct``: rows that a rank's batch uses, where that is known; otherwise each id
    counts. ``state``: numbers that the optimizer keeps for each of the table's (SGD 0, Adagrad 1, Adam and FTRL 2). ``bytes_per_number``:
    4 for float32.
    """

    name: str
    rows: int
    columns: int
    ids_per_sample: float = 1.0
    distinct: int | None = None
    state: float = 1.0
    bytes_per_number: int = 4

    def row_bytes(self) -> int:
        return self.columns * self.bytes_per_number

    def used_rows(self, batch: int) -> float:
        used = self.ids_per_sample * batch if self.distinct is None else self.distinct
        return min(float(used), float(self.rows))


class Costs(NamedTuple):
    """Costs of moving rows: bytes per second from one rank to others, seconds of a message, bytes per second of rows in memory."""

    bandwidth: float = 1e9
    latency: float = 50e-6
    memory_bandwidth: float = 2e9


class Candidate(NamedTuple):
    """A way to place a table: seconds of a step and bytes kept, by rank. ``problem``: why it is impossible; empty if it is not."""

    sharding: str
    owner: int
    seconds: tuple[float, ...]
    kept: tuple[int, ...]
    problem: str = ""


class Choice(NamedTuple):
    """Placement of a table, why, and what else was possible (seconds of the slowest rank's step) or was not (why)."""

    table: Table
    sharding: str
    owner: int
    seconds: float
    bytes_per_rank: tuple[int, ...]
    reason: str
    rejected: dict[str, str]


class TablePlan(NamedTuple):
    """A choice for each table, by name. ``seconds``: of all tables' part of a step, ``bytes_per_rank``: of tables and optimizer state."""

    choices: dict[str, Choice]
    seconds: tuple[float, ...]
    bytes_per_rank: tuple[int, ...]
    memory: int
    batch: int
    costs: Costs

    def options(self, name: str) -> dict[str, Any]:
        """Arguments of ``ShardedEmbedding`` for a table. Raises ValueError for one that is replicated."""
        choice = self.choices[name]
        if choice.sharding == REPLICATED:
            raise ValueError(f"{name} is to be replicated: make it with torch.nn.Embedding({choice.table.rows}, {choice.table.columns})")
        sizes = {"num_embeddings": choice.table.rows, "embedding_dim": choice.table.columns}
        return {**sizes, "sharding": choice.sharding, "owner": choice.owner, "name": name}

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        tables = [{**choice._asdict(), "table": choice.table._asdict()} for choice in self.choices.values()]
        return {"schema": 1, **self._asdict(), "costs": self.costs._asdict(), "choices": tables}

    def explain(self) -> str:
        """The plan for people: a table's choice, its cost, and what was decided against."""
        most = spelled(max(self.bytes_per_rank))
        lines = [
            f"{len(self.choices)} tables on {len(self.seconds)} ranks with {spelled(self.memory)} for them, batch {self.batch} per rank",
            f"the slowest rank spends {1e3 * max(self.seconds):.2f} ms of a step on them, the fullest holds {most}",
        ]
        for name, choice in self.choices.items():
            where = f" on rank {choice.owner}" if choice.sharding == TABLE_WISE else ""
            size = f"{choice.table.rows} x {choice.table.columns}"
            lines.append(f"{name} ({size}): {choice.sharding}{where}, {1e3 * choice.seconds:.2f} ms; {choice.reason}")
            lines += [f"  not {sharding}: {why}" for sharding, why in choice.rejected.items()]
        return "\n".join(lines)


def plan_tables(tables: Sequence[Table], ranks: int, memory: int, batch: int, costs: Costs | None = None) -> TablePlan:
    """Places each table within ``memory`` bytes on each rank, the largest tables first.

    Each goes where the squares of the ranks' seconds add up to the least: little work in all, and evenly spread. The slowest rank's time
    alone would never give a table to one owner, as that is slower until the other ranks have tables of their own.

    Args:
        batch: samples per rank and step.
        costs: measured or assumed; without, those of a network of 10 Gbit/s.

    Raises ValueError for a table that fits nowhere, saying what it needs, and for two of one name.
    """
    prices = costs or Costs()
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"tables need different names: {', '.join(sorted(names))}")
    if ranks < 1 or batch < 1 or memory < 1:
        raise ValueError(f"ranks={ranks}, batch={batch} and memory={memory} must be at least 1")
    seconds, kept = [0.0] * ranks, [0] * ranks
    choices: dict[str, Choice] = {}
    for table in sorted(tables, key=lambda table: (-table.rows * table.row_bytes(), table.name)):
        choice = _choose(table, seconds, kept, memory, batch, prices)
        choices[table.name] = choice[0]
        seconds = [a + b for a, b in zip(seconds, choice[1].seconds)]
        kept = [a + b for a, b in zip(kept, choice[1].kept)]
    return TablePlan({name: choices[name] for name in names}, tuple(seconds), tuple(kept), memory, batch, prices)


def _choose(table: Table, seconds: Sequence[float], kept: Sequence[int], memory: int, batch: int, costs: Costs) -> tuple[Choice, Candidate]:
    """The best candidate, given what the ranks have already."""
    ranks = len(seconds)
    owner = min(range(ranks), key=lambda rank: (seconds[rank], kept[rank]))
    candidates = [_candidate(table, sharding, ranks, owner, batch, costs) for sharding in (ROW_WISE, TABLE_WISE, COLUMN_WISE, REPLICATED)]
    problems = {c.sharding: c.problem or _unsupported_memory(c, kept, memory) for c in candidates}
    totals = {c.sharding: [a + b for a, b in zip(seconds, c.seconds)] for c in candidates}
    possible = [c for c in candidates if not problems[c.sharding]]
    if not possible:
        why = "; ".join(f"{sharding}: {problem}" for sharding, problem in problems.items())
        raise ValueError(f"{table.name} ({table.rows} x {table.columns}) fits nowhere: {why}. Give it more ranks or more memory")
    best = min(possible, key=lambda c: (sum(spent * spent for spent in totals[c.sharding]), sum(c.kept)))
    rejected = {c.sharding: problems[c.sharding] or _comparison(c, best) for c in candidates if c is not best}
    reason = "the least work, evenly spread" if len(possible) > 1 else "nothing else is possible"
    return Choice(table, best.sharding, best.owner, max(best.seconds), best.kept, reason, rejected), best


def _candidate(table: Table, sharding: str, ranks: int, owner: int, batch: int, costs: Costs) -> Candidate:
    used, row = table.used_rows(batch), table.row_bytes()
    bytes_per_row = row * (1 + table.state)
    others = ranks - 1
    sent = 2 * used * (POSITION_BYTES + row)
    # Rows that any rank uses, at most.
    touched = min(used * ranks, table.rows) * row * ACCESSES / costs.memory_bandwidth
    if sharding == REPLICATED:
        dense = table.rows * row
        # The gradient is another table.
        spent = 2 * others / ranks * dense / costs.bandwidth + ACCESSES * dense / costs.memory_bandwidth
        return Candidate(sharding, owner, (spent,) * ranks, (int(table.rows * (bytes_per_row + row)),) * ranks)
    if sharding == COLUMN_WISE and table.columns < ranks:
        return Candidate(sharding, owner, (0.0,) * ranks, (0,) * ranks, f"{table.columns} columns are fewer than {ranks} ranks")
    placement = place(sharding, table.rows, table.columns, ranks, owner)
    shapes = [placement.shape(rank) for rank in range(ranks)]
    kept = tuple(int(rows * columns * table.bytes_per_number * (1 + table.state)) for rows, columns in shapes)
    spread = 4 * others * costs.latency + touched / ranks
    if sharding == ROW_WISE:
        return Candidate(sharding, owner, (spread + sent * others / ranks / costs.bandwidth,) * ranks, kept)
    if sharding == COLUMN_WISE:
        moved = 2 * used * (POSITION_BYTES * others + row * others / ranks)
        return Candidate(sharding, owner, (spread + moved / costs.bandwidth,) * ranks, kept)
    mine = 4 * others * costs.latency + sent * others / costs.bandwidth + touched
    theirs = 4 * costs.latency + sent / costs.bandwidth
    return Candidate(sharding, owner, tuple(mine if rank == owner else theirs for rank in range(ranks)), kept)


def _unsupported_memory(candidate: Candidate, kept: Sequence[int], memory: int) -> str:
    fullest = max(a + b for a, b in zip(kept, candidate.kept))
    if fullest <= memory:
        return ""
    return f"a rank would hold {spelled(fullest)} of {spelled(memory)}"


def _comparison(other: Candidate, best: Candidate) -> str:
    """Both in milliseconds of a step."""
    theirs, ours = ((1e3 * max(c.seconds), 1e3 * sum(c.seconds) / len(c.seconds)) for c in (other, best))
    return f"{theirs[0]:.2f} ms on its slowest rank and {theirs[1]:.2f} ms on average, instead of {ours[0]:.2f} and {ours[1]:.2f} ms"


def spelled(size: float) -> str:
    """1.5 * 2**30 as "1.5 GiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
