"""The facts of hosts on the controller's side: read what the survey printed or a file holds, and say what is a problem of them.

Nothing here connects to a host or runs anything; the survey itself is `hostside/survey`.
"""

from __future__ import annotations

from provision.facts.conditions import against_inventory, problems, problems_across, unsurveyed, untested, why_no_root
from provision.facts.document import BEGIN, END, answer, load_file, normalise, parse, with_python
from provision.facts.model import Facts, Unsurveyed

__all__ = [
    "BEGIN",
    "END",
    "Facts",
    "Unsurveyed",
    "against_inventory",
    "answer",
    "load_file",
    "normalise",
    "parse",
    "problems",
    "problems_across",
    "unsurveyed",
    "untested",
    "why_no_root",
    "with_python",
]
