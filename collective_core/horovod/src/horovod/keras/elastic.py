"""Ranks that come and go."""

from collective_core.keras.elastic import *  # noqa: F403
