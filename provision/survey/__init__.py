"""The facts of hosts: their model and documents, one read-only round trip to each host, and preflight problems.

The survey itself is `hostside/survey`.
"""

from __future__ import annotations

from provision.survey.model import Facts, Unsurveyed

__all__ = ["Facts", "Unsurveyed"]
