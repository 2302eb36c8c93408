"""The command line of the benchmark: what was asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import importlib.util
import re
from typing import NamedTuple, NoReturn, Sequence

COLLECTIVE_PEERS = ("mpi", "gloo")
TRAINING_PEERS = ("ddp", "collective-ddp", "fsdp", "collective-fsdp")
EVERY_MPI = "all"  # of `peers.PEERS`
CTR, DLRM = "ctr", "dlrm"
TABLES = (CTR, DLRM)  # trainings with a table of many rows
CTR_PEERS = ("rowwise", "torchrec", "sparse", "ddp-sparse", "dense", "ddp")
TRAININGS = ("mnist", "mlp", "small", *TABLES)
DEFAULT_ROWS = 10_000_000
DEFAULT_SIZES = "4K,64K,1M,8M,64M"
DEFAULT_RANKS = 2
#: Rounds whose median counts: odd, so that the median is one of them.
DEFAULT_ROUNDS = 9
MAX_RANKS = 1024
#: Ranks of the worlds of --negotiation: each is a process with a connection to each other one.
DEFAULT_WORLDS = "2,4,8,16,32,64,128,256"
MAX_BYTES = 1 << 40
ELEMENT_BYTES = 4  # float32
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Options(NamedTuple):
    """A checked command line.

    ``ranks`` is None when it was not given; ``train`` is None for collectives; ``negotiation``: ranks of each world, or empty.
    """

    ranks: int | None
    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    train: str | None
    batch: int | None
    rows: int
    negotiation: tuple[int, ...]
    overhead: bool
    rounds: int
    json: bool
    report: str | None


class UsageError(Exception):
    """A command line that makes no sense; the text says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _whole(text: str, what: str, least: int, most: int) -> int:
    if not re.fullmatch(r"\d+", text.strip()) or not least <= int(text) <= most:
        raise UsageError(f"{what} {text!r}: a whole number from {least} to {most} is needed")
    return int(text)


def parse_sizes(text: str) -> tuple[int, ...]:
    """``4K,1M`` in bytes, K, M and G binary. Each must be a multiple of float32's four bytes."""
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", part.strip(), re.IGNORECASE)
        if not found:
            raise UsageError(f"--sizes {text!r}: {part.strip()!r} is not a size; write for example 4K,64K,1M")
        size = int(found[1]) * UNITS[found[2].upper()]
        if size < ELEMENT_BYTES or size % ELEMENT_BYTES or size > MAX_BYTES:
            raise UsageError(
                f"--sizes {text!r}: {part.strip()!r} must be a multiple of {ELEMENT_BYTES} bytes, from {ELEMENT_BYTES} to 1024G"
            )
        sizes.append(size)
    return tuple(sizes)


def parse_peers(text: str | None, train: str | None) -> tuple[str, ...]:
    """Names of peers, all that there are unless told otherwise; ``none`` for no peer."""
    known = CTR_PEERS if train in TABLES else TRAINING_PEERS if train else COLLECTIVE_PEERS
    if text is None:
        return known
    if text.strip() == "none":
        return ()
    if text.strip() == EVERY_MPI and not train:
        return (EVERY_MPI,)
    peers = tuple(part.strip() for part in text.split(","))
    for peer in peers:
        if peer not in known:
            where = f"--train {train}" if train else "the collectives"
            raise UsageError(f"--peers: {peer!r} is not a peer of {where}; choose from {', '.join(known)}, or none")
    return tuple(dict.fromkeys(peers))


def parse(arguments: Sequence[str]) -> Options:
    """Raises :class:`UsageError` for what cannot be run, SystemExit after ``--help``."""
    parser = _Parser(
        prog=f"python -m {__package__}",
        description="The engine, its peers and the machine's own limit in one run. Under mpirun, torchrun or srun it uses their ranks.",
    )
    parser.add_argument("--np", metavar="N", help=f"ranks to start on this host ({DEFAULT_RANKS}); under mpirun, the ranks there must be")
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="LIST", help=f"bytes per rank, K, M and G binary ({DEFAULT_SIZES})")
    peers = "mpi,gloo (default); all: every MPI that is a wheel, each in an environment of its own, and gloo; "
    peers += "with --train: ddp, fsdp (over Gloo), collective-ddp, collective-fsdp; with --train ctr or dlrm: rowwise, torchrec, "
    peers += "sparse, ddp-sparse, dense, ddp; none: only the engine"
    parser.add_argument("--peers", metavar="LIST", help=peers)
    parser.add_argument("--train", choices=TRAININGS, help="training steps instead of collectives")
    parser.add_argument("--batch", metavar="N", help="samples per rank and step, with --train (mnist: 64, ctr and dlrm: 2048, otherwise 8)")
    parser.add_argument(
        "--rows", metavar="N", help=f"rows of the table of --train ctr and dlrm ({DEFAULT_ROWS}); all sides together take 1 KB for each"
    )
    parser.add_argument(
        "--negotiation",
        nargs="?",
        const=DEFAULT_WORLDS,
        metavar="LIST",
        help=f"what agreeing on an operation costs in worlds of so many ranks, each on a host of its own ({DEFAULT_WORLDS})",
    )
    parser.add_argument("--overhead", action="store_true", help="what timeline, flight recorder, autotune, init and memory cost")
    parser.add_argument("--rounds", default=str(DEFAULT_ROUNDS), metavar="N", help=f"rounds whose median counts ({DEFAULT_ROUNDS})")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, and nothing else")
    parser.add_argument(
        "--report", metavar="FILE", help="write the JSON document into this file, too; with plots if it ends in .html or .svg"
    )
    given = parser.parse_args(arguments)
    if given.batch is not None and not given.train:
        raise UsageError("--batch goes with --train")
    if given.rows is not None and given.train not in TABLES:
        raise UsageError("--rows goes with --train ctr or dlrm")
    if given.negotiation is not None and (given.train or given.np is not None):
        raise UsageError("--negotiation starts its own ranks: leave out --np and --train")
    if given.overhead and (given.train or given.negotiation is not None):
        raise UsageError("--overhead goes without --train and --negotiation")
    if given.report is not None and given.report.endswith((".html", ".svg")):
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--report {given.report}: plots need Matplotlib: pip install matplotlib")
        if given.train or given.overhead or given.negotiation is not None:
            raise UsageError(f"--report {given.report}: plots are of collectives: leave out --train, --negotiation and --overhead")
    worlds = [] if given.negotiation is None else given.negotiation.split(",")
    return Options(
        ranks=None if given.np is None else _whole(given.np, "--np", 1, MAX_RANKS),
        sizes=parse_sizes(given.sizes),
        peers=parse_peers(given.peers, given.train),
        train=given.train,
        batch=None if given.batch is None else _whole(given.batch, "--batch", 1, 1 << 20),
        rows=DEFAULT_ROWS if given.rows is None else _whole(given.rows, "--rows", 1 << 10, 1 << 40),
        negotiation=tuple(_whole(part, "--negotiation", 2, MAX_RANKS) for part in worlds),
        overhead=given.overhead,
        rounds=_whole(given.rounds, "--rounds", 1, 10_001),
        json=given.json,
        report=given.report,
    )
