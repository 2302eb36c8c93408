"""Read from the NCCL in a wheel which GPUs it has code for: the catalogue's `code` of wheels.

    pip download --no-deps nvidia-nccl-cu12==2.28.9 -d wheels; python scripts/nccl_architectures.py wheels/*.whl

For each wheel it prints the CUDA that it was built for and the compute capabilities of its machine code. PTX, which the driver compiles for
newer GPUs, does not count: from 2.27.3 on a few kernels have it, the others not. No CUDA tool is needed (`hostside/gpu_code.py`).
"""

from __future__ import annotations

import mmap
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from provision.hostside import gpu_code
from provision.hostside.gpu_code import GpuCode


def architectures(code: GpuCode) -> list[str]:
    """The compute capabilities of machine code, lowest first: ``["7.0", "9.0"]``. Code of a family or one GPU alone comes beside it."""
    return sorted((each for each in code.machine_code if each[-1].isdigit()), key=lambda each: tuple(map(int, each.split("."))))


def main() -> None:
    """Print a line for each wheel."""
    for wheel in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("libnccl.so.2"))
            library = archive.extract(name, folder)
            with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = re.search(rb"NCCL version (\d+\.\d+\.\d+)[^\0+]*\+cuda(\d+\.\d+)", content)
                version, cuda = (part.decode() for part in found.groups()) if found else ("?", "?")
            code = gpu_code.read(library)
            print(f"{wheel.name}: NCCL {version}, CUDA {cuda}: {', '.join(architectures(code)) if code else 'no GPU code'}")


if __name__ == "__main__":
    main()
