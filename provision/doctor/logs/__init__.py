"""Reads logs of any size and names the known errors in them, roots first."""

from __future__ import annotations

from provision.doctor.logs.judge import judge
from provision.doctor.logs.reading import read
from provision.doctor.logs.scan import Scanner

__all__ = ["Scanner", "judge", "read"]
