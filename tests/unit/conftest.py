"""Profiles of property tests: `--hypothesis-profile thorough` tries ten times as many examples (`make unit-thorough`)."""

from hypothesis import settings

settings.register_profile("thorough", max_examples=1000)
