"""Training over slow networks: fewer synchronisations, compressed gradients, and a plan of what each costs. docs/slow-networks.md."""

from __future__ import annotations

from collective_core.extensions.slow_networks.communication import plan_communication
from collective_core.extensions.slow_networks.local_sgd import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD", "plan_communication"]
