"""Compilers and build tools."""

import re

from .looking import section, together


def tool_version(machine, command, pattern):
    path = machine.which(command[0])
    if path is None:
        return None
    _, output, complaint = machine.run(command)
    said = re.search(pattern, output + complaint)
    return {"path": path, "version": said.group(1) if said else None}


@section(None)
def toolchain(machine):
    dotted = r"(\d+\.\d+[\w.]*|\d+)"
    wanted = (
        ("cmake", ["cmake", "--version"], r"version " + dotted),
        ("compiler", ["g++", "-dumpfullversion", "-dumpversion"], dotted),
        ("gcc", ["gcc", "-dumpfullversion", "-dumpversion"], dotted),
        ("make", ["make", "--version"], r"Make " + dotted),
        ("ninja", ["ninja", "--version"], dotted),
    )
    answers = together(
        *[lambda command=command, pattern=pattern: tool_version(machine, command, pattern) for _, command, pattern in wanted]
    )
    return {name: answer for (name, _, _), answer in zip(wanted, answers)}
