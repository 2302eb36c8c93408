"""Ranks that come and go."""

from collective_core.tensorflow.elastic import *  # noqa: F403
