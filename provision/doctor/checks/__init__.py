"""Checks of hosts, by the facts that the survey collected and by their connections to each other. Pure.

Importing the modules registers their checks.
"""

from __future__ import annotations

from provision.doctor.checks import cluster, gpus, health, software, system
from provision.doctor.checks.examination import examine
from provision.doctor.checks.registry import CHECKS
from provision.survey import gpu_code
from provision.survey.reachability import Reachability

#: Ids of the errors that hosts are checked for: by their facts, and by the libraries of their environments.
CHECKED = frozenset((*(check.id for check in CHECKS), gpu_code.ID))

__all__ = ["CHECKED", "CHECKS", "Reachability", "cluster", "examine", "gpus", "health", "software", "system"]
