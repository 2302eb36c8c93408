"""Prints what the ranks of a job did last: ``python -m collective_core.flight DIRECTORY`` (observe/flight_recorder.py)."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from typing import Sequence

from collective_core.errors import CollectiveError
from collective_core.observe import recorder
from collective_core.observe.flight_recorder import describe, generation_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m collective_core.flight", description="What the ranks of a job did last.")
    parser.add_argument("directory", help="that COLLECTIVE_FLIGHT_RECORDER named")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="operations per rank (5)")
    options = parser.parse_args(arguments)
    paths = sorted(sorted(glob.glob(os.path.join(options.directory, "rank-*.flight"))), key=generation_of)
    if not paths:
        print(f"no flight recorder in {options.directory}", file=sys.stderr)
        return 2
    try:
        for path in paths:
            print("\n".join(describe(recorder.read_file(path), options.last, generation_of(path))))
    except (CollectiveError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
