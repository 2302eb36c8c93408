"""The capabilities of the Python environment that runs it, as one line of JSON. Standard library only; it runs in the environment of the engine."""

import json
import os
import sys

PACKAGES = ("collective_core", "numpy", "torch", "mpi4py", "cloudpickle")


def version(name):
    """Of a package that can be imported, which is more than being installed; None otherwise."""
    try:
        module = __import__(name)
    except Exception:  # a library that it needs may be missing or broken in any way
        return None
    return str(getattr(module, "__version__", "yes"))


def main():
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: version(name) for name in PACKAGES},
        "mpirun": os.access(sys.argv[1] if len(sys.argv) > 1 else mpirun, os.X_OK),
        "cuda": False,
        "hip": None,
    }
    if found["packages"]["torch"]:
        import torch

        found["cuda"] = bool(torch.cuda.is_available())  # also with AMD's GPUs
        found["hip"] = getattr(torch.version, "hip", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
