"""The file that ``provision run`` starts before a program under mpirun: runtime/cores.py, without the package's imports."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    run_path(str(Path(__file__).with_name("runtime") / "cores.py"), run_name="__main__")
