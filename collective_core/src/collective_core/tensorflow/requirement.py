"""The TensorFlow that must be installed. Imported first."""

from __future__ import annotations

from collective_core.common.requirement import require

require("tensorflow", "TensorFlow", (2, 16), "pip install 'tensorflow>=2.16' (without a GPU: 'tensorflow-cpu>=2.16')")
