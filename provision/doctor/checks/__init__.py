"""Looks at hosts through the facts that the survey brought home. Pure: nothing here connects anywhere or changes anything.

Importing the modules registers their checks.
"""

from __future__ import annotations

from provision.doctor.checks import across, between, gpus, software, system
from provision.doctor.checks.model import CHECKS, Answer
from provision.doctor.checks.run import examine

__all__ = ["CHECKS", "Answer", "across", "between", "examine", "gpus", "software", "system"]
