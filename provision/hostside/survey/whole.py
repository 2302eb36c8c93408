"""The survey: looks at one host and prints what it is as ONE JSON document.

It never writes, never fails as a whole, and connects to nothing.

It is sent over SSH as one text (``python3 -c``), which `provision.base.resources` makes of this package's files: standard library only, and
Python 3.6 and later. Its parts see each other's names by ``from .part import name``, and no two parts may use one name for two things.
The document stands between two marker lines, so that login banners do not disturb it. Every section is looked at in a thread of
its own; one that raises or hangs costs only itself and is named under ``errors``.

Options come as JSON in the environment variable PROVISION_SURVEY_OPTIONS:
    prefix     where our own things lie or will lie (default /opt/provision, or ~/provision where root is not to be had)
    root       "no": do without root although it may be had; "password": a sudo password will be given
    venv       the virtual environment (default PREFIX/venv)
    python     an interpreter to look at besides the running one
    patience   seconds any section may take (default 8; most hosts are done in half a second)
"""

import json
import os
import sys
import threading
import time

from . import (  # noqa: F401 - they register their sections
    identity,
    hardware,
    user,
    python,
    packages,
    nvidia,
    libraries,
    toolchain,
    network,
    ssh,
    installed,
    elsewhere,
)
from .looking import Machine, SECTIONS

SCHEMA = 1
BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="


def survey(machine):
    """Look at everything at the same time and return the document."""
    started = time.time()
    facts, errors, guard = {}, {}, threading.Lock()

    def look(name, function):
        try:
            value = function(machine)
            with guard:
                facts.update(value if name is None else {name: value})
        except Exception as error:  # each section is on its own: whatever is wrong with it is reported, and the rest goes on
            with guard:
                errors[function.__name__] = "%s: %s" % (type(error).__name__, error)

    threads = []
    for name, function, patience in SECTIONS:
        thread = threading.Thread(target=look, args=(name, function), daemon=True)
        thread.start()
        threads.append(
            (thread, function.__name__, max(patience or 0, machine.patience) if "patience" not in machine.options else machine.patience)
        )
    for thread, name, patience in threads:
        thread.join(max(0.0, started + patience - time.time()))
        if thread.is_alive():
            with guard:
                errors[name] = "no answer within %.0f s" % patience
    with guard:
        document = dict(facts, schema=SCHEMA, errors=dict(errors))
    document["survey"] = {
        "seconds": round(time.time() - started, 3),
        "options": {key: machine.options[key] for key in sorted(machine.options)},
    }
    if isinstance(document.get("time"), dict):
        document["time"] = dict(document["time"], epoch=time.time())
    return document


def main():
    problem = None
    try:
        options = json.loads(os.environ.get("PROVISION_SURVEY_OPTIONS") or "{}")
        if not isinstance(options, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        options, problem = {}, "PROVISION_SURVEY_OPTIONS: %s" % error
    document = survey(Machine(options=options))
    if problem:
        document["errors"]["options"] = problem
    sys.stdout.write("\n%s\n%s\n%s\n" % (BEGIN, json.dumps(document, sort_keys=True), END))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread stuck in a dead file system must not keep the session open
