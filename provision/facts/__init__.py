"""The facts of hosts on the controller's side: read what the survey printed, fill what is left out, say what stands in the way.

Nothing here connects to a host or runs anything; the survey itself is `hostside/survey`.
"""

from __future__ import annotations

from provision.facts.conditions import problems, problems_across, untested, why_no_root
from provision.facts.document import BEGIN, END, Facts, normalise, parse, with_python
from provision.facts.file import answer, load_file

__all__ = [
    "BEGIN",
    "END",
    "Facts",
    "answer",
    "load_file",
    "normalise",
    "parse",
    "problems",
    "problems_across",
    "untested",
    "why_no_root",
    "with_python",
]
