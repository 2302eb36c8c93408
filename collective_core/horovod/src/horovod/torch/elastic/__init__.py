"""Ranks that come and go."""

from collective_core.torch.elastic import *  # noqa: F403
