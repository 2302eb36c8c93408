"""Checks of hosts, by the facts that the survey collected and by their connections to each other. Pure.

Importing the modules registers their checks.
"""

from __future__ import annotations

from provision.doctor.checks import cluster, gpus, software, system
from provision.doctor.checks.examination import examine
from provision.doctor.checks.registry import CHECKS, Reachability

__all__ = ["CHECKS", "Reachability", "cluster", "examine", "gpus", "software", "system"]
