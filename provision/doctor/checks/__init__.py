"""Looks at hosts through the facts that the survey brought home. Pure: nothing here connects anywhere or changes anything.

Importing the modules registers their checks.
"""

from __future__ import annotations

from provision.doctor.checks import across, gpus, software, system
from provision.doctor.checks.model import CHECKS, Check, Seen
from provision.doctor.checks.run import examine

__all__ = ["CHECKS", "Check", "Seen", "across", "examine", "gpus", "software", "system"]
