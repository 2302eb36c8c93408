"""Where a table's numbers lie: in memory, or in a file, of which the system keeps in memory the pages that are used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch


class Storage:
    """Makes tensors of zeros. ``folder``: on a local disk; the files have no name there, so that nothing is left when the process ends.

    Used pages stay in memory while the system has room: rows in use are cached, others cost a read. Raises OSError where the folder
    cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def zeros(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = shape[0] * shape[1]
        if self._folder is None or not count:
            return torch.zeros(shape, dtype=dtype, device=device)
        number, path = tempfile.mkstemp(prefix=".rows-", dir=self._folder)
        try:
            length = count * torch.empty(0, dtype=dtype).element_size()
            os.posix_fallocate(number, 0, length)  # a full disk is an error here, and not a signal at some row
            return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
        finally:
            os.close(number)
            os.unlink(path)
