"""Profiles of property tests: `--hypothesis-profile thorough` tries twenty times as many examples (`make unit-thorough`)."""

from hypothesis import settings

settings.register_profile("quick", max_examples=50)
settings.register_profile("thorough", max_examples=1000)
settings.load_profile("quick")
