"""A table four times larger than memory: steps per second and peak memory of the ways to keep it on a disk.

    sudo .venv-engine/bin/python -m benchmarks.engine.stored_tables --folder /mnt/nvme          # root makes control groups; ten minutes
    sudo .venv-engine/bin/python -m benchmarks.engine.stored_tables --folder /mnt/nvme --sides mapped,cached --report stored.json

Each way is a process of its own, in a control group with a limit of memory, which holds for pages of files, too. It trains the model of
`--train ctr` alone, with Adagrad; ids are drawn by Zipf's law, afresh for every step, and a hash scatters them over the rows. The ways take
turns; a ratio is one of neighbouring turns, and the report has medians.

`mapped`: values and state in a file each, mapped into memory as PyTorch does it. `file`: `storage=` with cache_bytes=0. `cached`: with a
cache of rows. `lmdb`, `rocksdb`: the same cache over LMDB (pip install lmdb) and RocksDB (pip install rocksdict) instead of the file.
`memory`: in memory, without a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Callable
from unittest import mock

SIDES = ("mapped", "file", "cached", "lmdb", "rocksdb", "memory")
MIB = 1 << 20
BATCH = 2048
#: Rows that are brought into LMDB or RocksDB at once.
LOADED_TOGETHER = 1 << 16


class Group:
    """A control group with a limit, of version 1 or 2."""

    def __init__(self, name: str, limit: int | None) -> None:
        old = Path("/sys/fs/cgroup/memory")
        self._path = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"stored-tables-{os.getpid()}-{name}"
        limited, peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if old.is_dir() else ("memory.max", "memory.peak")
        self._peak = self._path / peak
        self._path.mkdir()
        if limit is not None:
            (self._path / limited).write_text(str(limit))

    def enter(self) -> None:
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        return int(self._peak.read_text())

    def remove(self) -> None:
        self._path.rmdir()


# --- one side


def _mapped(folder: Path) -> Any:
    """What makes rows in files that PyTorch maps."""
    import torch
    from collective_core.extensions.sparse.storage import Rows

    class Mapped(Rows):
        def _make(self, rows: int, widths: dict[str, int], dtype: torch.dtype) -> None:
            tensors = {}
            for name, width in widths.items():
                path = folder / f"mapped-{name}"
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, rows * width * 4)
                tensors[name] = torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype).view(rows, width)
                path.unlink()
            self.weight, self.state = tensors.pop(""), tensors

    return Mapped


class _StoreFile:
    """What takes the place of the file below the cache; loaded with the file's rows when the first is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_loaded = False

    def load(self, whole: Any) -> None:
        self._is_loaded = True
        for begin in range(0, len(whole), LOADED_TOGETHER):
            part = whole[begin : begin + LOADED_TOGETHER]
            self.put(range(begin, begin + len(part)), part)

    def read(self, file: Any, rows: Any) -> Any:
        import numpy as np

        if not self._is_loaded:
            self.load(file.whole)
        found = np.frombuffer(b"".join(self.get(rows.tolist())), file.whole.dtype)
        return found.reshape(len(rows), file.whole.shape[1])

    def write(self, _: Any, rows: Any, records: Any) -> None:
        if len(rows):
            self.put(rows.tolist(), records)

    def get(self, rows: Any) -> Any:
        raise NotImplementedError

    def put(self, rows: Any, records: Any) -> None:
        raise NotImplementedError


class _Lmdb(_StoreFile):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import lmdb

        self._env = lmdb.open(str(folder / "lmdb"), map_size=1 << 40, sync=False, metasync=False, writemap=True, readahead=False)

    def get(self, rows: Any) -> Any:
        with self._env.begin(buffers=True) as transaction:
            return [bytes(transaction.get(row.to_bytes(8, "big"))) for row in rows]

    def put(self, rows: Any, records: Any) -> None:
        with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti([(row.to_bytes(8, "big"), record.tobytes()) for row, record in sorted(zip(rows, records), key=lambda x: x[0])])


class _RocksDb(_StoreFile):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from rocksdict import Options, Rdict, WriteBatch

        options = Options(raw_mode=True)
        options.set_write_buffer_size(16 * MIB)
        options.set_use_direct_reads(True)
        self._db, self._batch = Rdict(str(folder / "rocksdb"), options), WriteBatch

    def get(self, rows: Any) -> Any:
        return self._db[[row.to_bytes(8, "big") for row in rows]] if rows else []

    def put(self, rows: Any, records: Any) -> None:
        batch = self._batch(raw_mode=True)
        for row, record in zip(rows, records):
            batch.put(row.to_bytes(8, "big"), record.tobytes())
        self._db.write(batch)


def _step_of(side: str, folder: Path, rows: int, cache: int) -> Callable[[], None]:
    import collective_core.torch as hvd
    import torch
    from collective_core.extensions.sparse.row_file import RowFile
    from collective_core.extensions.sparse.storage import Storage
    from torch import nn

    from .ctr import COLUMNS, LR, Model, batches_of

    hvd.init()
    torch.set_num_threads(1)
    options: dict[str, Any] = {} if side in ("memory", "mapped") else {"storage": folder, "cache_bytes": 0 if side == "file" else cache}
    make = partial(hvd.nn.ShardedEmbedding, rows, COLUMNS, hvd.nn.Adagrad(LR), hash_ids=True, seed=0)
    if side == "mapped":
        mapped = _mapped(folder)
        with mock.patch.object(Storage, "rows", lambda _, *given: mapped(*given)):
            table = make()
    else:
        table = make(**options)
    if side in ("lmdb", "rocksdb"):
        store = (_Lmdb if side == "lmdb" else _RocksDb)(folder)
        mock.patch.object(RowFile, "_read_file", lambda file, rows: store.read(file, rows)).start()
        mock.patch.object(RowFile, "_write_file", lambda file, rows, records: store.write(file, rows, records)).start()
    model = Model(table)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), named_parameters=model.named_parameters())
    numbers = count()

    def step() -> None:
        ids, dense, clicks = batches_of(next(numbers), rows, BATCH, 1)[0]
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicks).backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()

    return step


def _moved() -> tuple[int, int]:
    """Bytes that this process had read from disks, and pages that it has changed, in bytes."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def serve(arguments: argparse.Namespace) -> None:
    """Makes as many steps as there are in the seconds of each line of standard input; says how many a second, and MiB of each."""
    folder = Path(tempfile.mkdtemp(prefix="stored-tables-", dir=arguments.folder))
    try:
        step = _step_of(arguments.side, folder, arguments.rows, arguments.cache * MIB)
        print("ready", flush=True)
        for line in sys.stdin:
            began, steps, moved = time.perf_counter(), 0, _moved()
            while time.perf_counter() - began < float(line):
                step()
                steps += 1
            took = time.perf_counter() - began
            print(steps / took, *((now - before) / steps / MIB for before, now in zip(moved, _moved())), flush=True)
    finally:
        shutil.rmtree(folder)


# --- all of them


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    groups = {side: Group(side, None if side == "memory" else arguments.memory * MIB) for side in arguments.sides}
    command = [sys.executable, "-m", "benchmarks.engine.stored_tables", *sys.argv[1:], "--side"]
    running: dict[str, subprocess.Popen[str]] = {}
    turns: dict[str, list[tuple[float, ...]]] = {side: [] for side in arguments.sides}

    def ask(side: str, seconds: float) -> tuple[float, ...]:
        process = running[side]
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
        return tuple(map(float, process.stdout.readline().split()))

    try:
        for side, group in groups.items():
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running[side] = subprocess.Popen([*command, side], preexec_fn=group.enter, **pipes)  # type: ignore[call-overload]
            if running[side].stdout.readline() != "ready\n":  # type: ignore[union-attr]
                sys.exit(f"{side} ended with {running[side].wait()}")
            print(f"{side}: {ask(side, arguments.warm_up)[0]:.3g} steps/s at first", file=sys.stderr)
        for number in range(arguments.rounds):
            for side in arguments.sides if number % 2 else reversed(arguments.sides):
                turns[side].append(ask(side, arguments.seconds))
        peaks = {side: group.peak() for side, group in groups.items()}
    finally:
        for side, process in running.items():
            process.communicate()
            groups[side].remove()
    first = arguments.sides[0]
    ratios = {side: [a[0] / b[0] for a, b in zip(turns[side], turns[first])] for side in arguments.sides}
    medians = {side: [statistics.median(numbers) for numbers in zip(*turns[side])] for side in arguments.sides}
    summary = {
        side: {
            "steps_per_second": medians[side][0],
            "read_mib": medians[side][1],
            "changed_mib": medians[side][2],
            "ratio": statistics.median(ratios[side]),
            "least": min(ratios[side]),
            "most": max(ratios[side]),
            "peak_mib": peaks[side] // MIB,
        }
        for side in arguments.sides
    }
    settings = {name: getattr(arguments, name) for name in ("rows", "memory", "cache", "warm_up", "seconds", "rounds")}
    return {**settings, "batch": BATCH, "beside": first, "summary": summary, "turns": turns}


def show(report: dict[str, Any]) -> None:
    print(
        f"{report['rows']} rows of 128 bytes with state, {report['memory']} MiB of memory, a cache of {report['cache']} MiB, "
        f"{report['rounds']} rounds"
    )
    print(f"side        steps/s   of {report['beside']} (least to most)   read a step   changed pages   peak memory")
    for side, row in report["summary"].items():
        between = f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        print(
            f"{side:>8}   {row['steps_per_second']:>8.2f}   {between:>24}   "
            f"{row['read_mib']:>7.1f} MiB   {row['changed_mib']:>9.1f} MiB   {row['peak_mib']:>7} MiB"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.stored_tables", description="A table that is larger than memory.")
    parser.add_argument("--folder", type=Path, required=True, help="on a local disk, with room for a table of each side")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES[:3]), help=", ".join(SIDES))
    parser.add_argument("--rows", type=int, default=12_000_000)
    parser.add_argument("--memory", type=int, default=384, help="MiB, of a process with PyTorch")
    parser.add_argument("--cache", type=int, default=96, help="MiB")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds of each side")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", type=Path, help="writes the figures there, as JSON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if set(arguments.sides) - set(SIDES):
        parser.error(f"--sides: choose from {', '.join(SIDES)}")
    if arguments.side:
        serve(arguments)
        return 0
    report = measure(arguments)
    show(report)
    if arguments.report:
        arguments.report.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
