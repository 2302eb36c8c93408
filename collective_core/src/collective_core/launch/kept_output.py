"""Files of what ranks print, as horovodrun lays them out: ``DIR/rank.N/stdout`` and ``stderr``, N with leading zeros."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from collective_core.launch.frames import Frame

STREAMS = {"out": "stdout", "err": "stderr"}


class KeptOutput:
    """``ranks``: how many there are. Files appear with their first line."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder, self._digits = Path(folder), len(str(max(ranks - 1, 0)))
        self._files: dict[Path, IO[bytes]] = {}

    def note(self, frame: Frame) -> None:
        """Keeps a piece of output."""
        path = self._folder / f"rank.{frame.rank:0{self._digits}}" / STREAMS[frame.kind]
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("wb", buffering=0)
        self._files[path].write(frame.body)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
