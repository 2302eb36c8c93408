"""Whether the TensorFlow that is installed can be used. Imported first."""

from __future__ import annotations

import re

OLDEST = (2, 16)
_WANTED = (
    "collective_core.tensorflow needs TensorFlow 2.16 or newer: pip install 'tensorflow>=2.16' (without a GPU: 'tensorflow-cpu>=2.16')"
)

try:
    import tensorflow
except ImportError as error:
    raise ImportError(f"{_WANTED}; importing it failed: {error}") from error

_numbers = re.match(r"(\d+)\.(\d+)", getattr(tensorflow, "__version__", ""))
if _numbers is None or tuple(map(int, _numbers.groups())) < OLDEST:
    raise ImportError(f"{_WANTED}; installed is {getattr(tensorflow, '__version__', 'one without a version')}")
