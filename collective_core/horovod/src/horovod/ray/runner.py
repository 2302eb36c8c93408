from __future__ import annotations

from horovod.ray import RayExecutor as RayExecutor
