"""Draws the timeline of a job that did not end well: ``python -m collective_core.trace TIMELINE`` (observe/trace.py).

It takes the files that the ranks have left next to it; those of hosts without a common folder must be brought there first.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

from collective_core.errors import CollectiveError
from collective_core.observe import timeline_file
from collective_core.observe.timeline_file import Part
from collective_core.observe.trace import table, write


def _of_newest_run(paths: Sequence[str]) -> tuple[list[Part], list[str]]:
    """The parts of the run that wrote last, by rank, and the files of earlier ones."""
    found = sorted(((os.stat(path).st_mtime_ns, path, timeline_file.read(path)) for path in paths), key=lambda entry: entry[:2])
    newest = found[-1][2].head
    of_newest = {part.head.rank: part for _, _, part in found if part.head[1:4:2] == (newest.job, newest.generation)}
    others = [path for _, path, part in found if part.head[1:4:2] != (newest.job, newest.generation)]
    return [part for _, part in sorted(of_newest.items())], others


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collective_core.trace", description="Draws what the ranks of a job that did not end well have left of its timeline."
    )
    parser.add_argument("timeline", help="the file that COLLECTIVE_TIMELINE or start_timeline named; the ranks' files lie beside it")
    parser.add_argument("-o", metavar="FILE", help="write the trace there instead")
    options = parser.parse_args(arguments)
    try:
        paths = timeline_file.find(options.timeline)
        if not paths:
            print(f"no rank has left a part of a timeline beside {options.timeline} ({options.timeline}.rank*.events)", file=sys.stderr)
            return 2
        parts, others = _of_newest_run(paths)
        write(options.o or options.timeline, parts)
    except (CollectiveError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"timeline: {options.o or options.timeline}\n{table(parts)}")
    for path in others:
        print(f"left out, of an earlier run: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
