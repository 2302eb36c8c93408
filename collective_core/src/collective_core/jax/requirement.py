"""The JAX that must be installed. Imported first."""

from __future__ import annotations

from collective_core.common.requirement import require

require("jax", "JAX", (0, 6, 2), "pip install 'jax>=0.6.2'")
