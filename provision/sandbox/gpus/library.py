"""The stand-in for NVIDIA's libraries (``nvml.c``), compiled once by this machine's C compiler and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from provision.base import paths
from provision.base.errors import ProvisionError

#: One text under both names: which of the two a program has loaded decides what it asks.
NAMES = ("libnvidia-ml.so.1", "libcuda.so.1")
_SECONDS = 60


def built() -> dict[str, bytes]:
    """Name → library, for hosts of this machine's architecture. Raises ProvisionError without a compiler."""
    source = resources.files(__package__).joinpath("nvml.c").read_bytes()
    folder = paths.cache() / "sandbox" / f"nvml-{os.uname().machine}-{hashlib.sha256(source).hexdigest()[:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work, "made")
            made.mkdir()
            Path(work, "nvml.c").write_bytes(source)
            for name in NAMES:
                _compile(Path(work, "nvml.c"), made / name)
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    return {name: (folder / name).read_bytes() for name in NAMES}


def _compile(source: Path, library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        what = "Simulated GPU hosts need a C compiler on this machine, for the library that answers nvidia-smi."
        raise ProvisionError(what, hint="Install one: `sudo apt-get install gcc libc6-dev`.")
    options = ["-std=c99", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{library.name}"]
    command = [compiler, *options, "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"{compiler} did not end within {_SECONDS} s.", where="nvml.c") from error
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise ProvisionError(f"The stand-in library could not be compiled: {said}", where="nvml.c", hint="Install libc6-dev.")
