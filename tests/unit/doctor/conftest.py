"""Fixtures: the sample logs, and the findings in a log."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.catalog import OURS
from provision.diagnosis.findings import Finding
from provision.diagnosis.logs import Scanner, findings

DATA = Path(__file__).parents[2] / "data" / "doctor"


@pytest.fixture(scope="session")
def load() -> Callable[[str], dict[str, Any]]:
    """``load(NAME)``: a file of logs, id → log or logs."""
    return cache(lambda name: yaml.safe_load((DATA / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def explain() -> Callable[..., list[Finding]]:
    """``explain(log, …)``: the findings of one or more logs together."""

    def call(*logs: str | bytes) -> list[Finding]:
        scanner = Scanner(OURS)
        for number, log in enumerate(logs):
            scanner.read(io.BytesIO(log if isinstance(log, bytes) else log.encode()), f"log{number}")
        return findings(scanner)

    return call
