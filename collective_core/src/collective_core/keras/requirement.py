"""The Keras that must be installed, and the framework that it computes with. Imported first."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from collective_core.common.requirement import require

keras = require("keras", "Keras", (3, 3), "pip install 'keras>=3.3'")

_backend = keras.backend.backend()
if _backend not in ("tensorflow", "jax", "torch"):
    raise ImportError(f"Keras's backend is {_backend}: set KERAS_BACKEND to tensorflow, jax or torch")

# Keras imports TensorFlow sooner or later, with every backend. Where that comes after Open MPI, whose functions then call TensorFlow's of
# the same names, a process under mpirun ends with a segmentation fault.
if "OMPI_COMM_WORLD_RANK" in os.environ and find_spec("tensorflow") is not None:
    import_module("tensorflow")

#: The functions that tensors of Keras's backend go through.
framework: Any = import_module(f"collective_core.{_backend}")
