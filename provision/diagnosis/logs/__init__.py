"""Reads logs of any size and names the known errors in them, roots first."""

from __future__ import annotations

from provision.diagnosis.logs.explanation import read
from provision.diagnosis.logs.judge import judge
from provision.diagnosis.logs.scan import Scanner

__all__ = ["Scanner", "judge", "read"]
