"""What must be installed for Keras. Imported first, so that what is missing is said at once."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

try:
    import keras
except ImportError as error:
    raise ImportError(f"collective_core.keras needs Keras 3: pip install 'keras>=3.3' ({error})") from error
if int(keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"collective_core.keras needs Keras 3, and Keras {keras.__version__} is installed: pip install -U keras")

_backend = keras.backend.backend()
if _backend not in ("tensorflow", "jax", "torch"):
    raise ImportError(f"Keras's backend is {_backend}: set KERAS_BACKEND to tensorflow, jax or torch")

# Keras imports TensorFlow sooner or later, with every backend. Where that comes after Open MPI, whose functions then call TensorFlow's of
# the same names, a process under mpirun ends with a segmentation fault.
if "OMPI_COMM_WORLD_RANK" in os.environ and find_spec("tensorflow") is not None:
    import_module("tensorflow")

#: The functions that tensors of Keras's backend go through.
framework: Any = import_module(f"collective_core.{_backend}")
