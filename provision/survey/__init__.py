"""The facts of hosts: their model and documents, one read-only round trip to each host, and preflight problems.

The survey itself is `hostside/survey`.
"""

from __future__ import annotations

from provision.survey.document import BEGIN, END, load_file, parse_answer, parse_output, parse_survey, with_python
from provision.survey.model import Facts, Unsurveyed
from provision.survey.preflight import (
    cluster_problems,
    host_problems,
    inventory_problems,
    lasting_problems,
    unsurveyed_problem,
    untested_system,
    why_no_root,
)

__all__ = [
    "BEGIN",
    "END",
    "Facts",
    "Unsurveyed",
    "cluster_problems",
    "host_problems",
    "inventory_problems",
    "lasting_problems",
    "load_file",
    "parse_answer",
    "parse_output",
    "parse_survey",
    "unsurveyed_problem",
    "untested_system",
    "why_no_root",
    "with_python",
]
