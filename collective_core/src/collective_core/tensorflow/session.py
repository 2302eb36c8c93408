"""TensorFlow 1: the variables of a graph, and the hook that brings all ranks to one state when a session begins."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective_core.tensorflow.engine_calls import not_converted
from collective_core.tensorflow.functions import broadcast_variables


@not_converted
def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that overwrites all global variables of the graph with the root's. Raises RuntimeError in eager execution."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Hook of ``tf.compat.v1.train.MonitoredTrainingSession``: all ranks begin with the root's variables, initialised or restored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:  # noqa: ARG002
        session.run(self.bcast_op)
