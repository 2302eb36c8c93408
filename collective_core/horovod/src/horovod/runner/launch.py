"""horovodrun as a function."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from typing import Any

from collective_core.common.build_info import gloo_built as gloo_built
from collective_core.common.build_info import mpi_built as mpi_built
from collective_core.launch import __main__ as launcher
from collective_core.launch import run

__path__: list[str] = []  # so that names that are missing here are looked for, and refused, as modules


def parse_args() -> argparse.Namespace:
    """The command line, ``sys.argv``, as the options of ``python -m collective_core.launch``."""
    return launcher.make_parser().parse_args()


def _run(args: Any) -> list[Any] | None:
    """Runs ``args.run_func`` and returns each rank's result; without one runs the program ``args.command``.

    Raises what :func:`horovod.run` raises, and CalledProcessError where the program fails.
    """
    if args.run_func:
        options = {name: getattr(args, name) for name in inspect.signature(run).parameters if getattr(args, name) is not None}
        return run(args.run_func, **options)
    options = {"-np": args.num_proc, "--min-np": args.min_num_proc, "--max-np": args.max_num_proc, "-H": args.hosts or args.hostfile}
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    subprocess.run([sys.executable, "-m", "collective_core.launch", *words, *args.command], check=True)
    return None


def run_commandline() -> None:
    """Does what ``sys.argv`` says, as ``python -m collective_core.launch``, and ends the process."""
    sys.exit(launcher.main())


if __name__ == "__main__":
    run_commandline()
