"""Facts of hosts on the controller: their model, their documents, and preflight problems.

Nothing here connects to a host; the survey itself is `hostside/survey`.
"""

from __future__ import annotations

from provision.facts.document import BEGIN, END, load_file, parse_output, parse_survey, with_python
from provision.facts.model import Facts, Unsurveyed
from provision.facts.preflight import (
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
    "parse_output",
    "parse_survey",
    "unsurveyed_problem",
    "untested_system",
    "why_no_root",
    "with_python",
]
