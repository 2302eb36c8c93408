"""Profiles of property tests: `--hypothesis-profile thorough` tries forty times as many examples (`make unit-thorough`)."""

import datetime
import os

import pytest
from hypothesis import HealthCheck, settings

from provision import catalog
from provision.catalog import OURS

#: Of the `make` that runs the tests: a `make` that a test starts would take its options, such as to keep output back.
os.environ.pop("MAKEFLAGS", None)

#: On a busy machine one example may take long.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", UNTIMED, max_examples=25)
settings.register_profile("thorough", UNTIMED, max_examples=1000)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def new_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier runs and downloads decide no test. A process's tests share a cache that begins empty: uv is downloaded once."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def day_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day on which tests run decides none: it is the one on which the catalogue was written."""
    monkeypatch.setattr(catalog, "now", lambda: datetime.datetime.fromisoformat(f"{OURS.reach().date}T12:00:00+00:00"))
