"""Profiles of property tests: `--hypothesis-profile thorough` tries twenty times as many examples (`make unit-thorough`)."""

import os

from hypothesis import settings

#: Of the `make` that runs the tests: a `make` that a test starts would take its options, such as to keep output back.
os.environ.pop("MAKEFLAGS", None)

settings.register_profile("quick", max_examples=50)
settings.register_profile("thorough", max_examples=1000)
settings.load_profile("quick")
