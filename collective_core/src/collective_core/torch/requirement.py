"""The PyTorch that must be installed. Imported first."""

from __future__ import annotations

from collective_core.common.requirement import require

require("torch", "PyTorch", (1, 10), "pip install 'torch>=1.10'")
