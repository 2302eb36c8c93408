"""Calls of an environment's pip, for modules. Python 3.7+, standard library only."""

from __future__ import annotations

import os
import re

from ansible.module_utils.locked_files import digest

ERROR_LINES = 12  # of pip's output, from shortly before the first error: what follows are its consequences


def verified_url(module, path, expected):
    """The address of a file for pip, with its checksum; ends the module when the file is another one."""
    try:
        found = digest(path)
    except OSError as error:
        module.fail_json(msg=f"cannot read {path}: {error}")
    if found != expected:
        module.fail_json(msg=f"{path} has checksum {found}, not {expected}; nothing of it was used")
    return f"file://{os.path.abspath(path)}#sha256={expected}"


def excerpt(lines):
    """The part of pip's output that tells the cause."""
    first = next((at for at, line in enumerate(lines) if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), len(lines))
    begin = max(0, min(first - 2, len(lines) - ERROR_LINES))
    return lines[begin : begin + ERROR_LINES]


def run(module, venv, arguments, scratch, wanted, settings=None):
    """Run pip; its own caches stay out of anybody's home, and what an interrupted run leaves in ``scratch`` goes with it.

    ``wanted`` names for the error what it was to install or build; ``settings`` are variables of its environment.
    """
    environment = {
        "TMPDIR": scratch,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PATH": os.path.join(venv, "bin") + os.pathsep + os.environ["PATH"],
        **(settings or {}),
    }
    command = [os.path.join(venv, "bin", "python"), "-m", "pip", *arguments[:1], "--no-input", "--progress-bar", "off", *arguments[1:]]
    rc, out, err = module.run_command(command, environ_update=environment)
    if rc != 0:
        lines = excerpt([line for line in (out + "\n" + err).splitlines() if line.strip() and not line.startswith("WARNING: Location")])
        module.fail_json(msg="\n".join([f"pip could not {arguments[0]} {wanted}:", *lines]), rc=rc)
