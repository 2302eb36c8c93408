"""The survey: collects the facts of one host and prints them as ONE JSON document.

It writes nothing, never fails as a whole, and connects to nothing.

It is sent over SSH as one text (``python3 -c``), which `provision.base.resources` makes of this package's files: standard library only, and
Python 3.6 and later. Its modules use each other's names by ``from .module import name``, and no two modules may define the same name.
The document is printed between two marker lines, so that login banners do no harm. Every section runs in a thread of its own; one that
raises or hangs is named under ``errors``, and the others are not affected.

Options come as JSON in the environment variable PROVISION_SURVEY_OPTIONS:
    prefix     the installation's folder (default /opt/provision, or ~/provision where the user cannot become root)
    root       "no": do not become root although it may be possible; "password": a sudo password will be given
    managed_libc  family, debian or rhel → the oldest glibc of its systems whose packages are managed
    sections   names of functions, which alone run; those of `activity.py` run on request only
    members    whether the manifest is to name the cluster's hosts, instead of a digest of them
    timeout    seconds that any section may take (default 8; most hosts need half a second)
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
    accelerators,
    software,
    network,
    ssh,
    installed,
    activity,
)
from .machine import Machine, ON_REQUEST, SECTIONS

SCHEMA = 1
BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="


def survey(machine):
    """Run all sections at the same time and return the document."""
    started = time.time()
    facts, errors, guard = {}, {}, threading.Lock()

    def collect(name, function):
        try:
            value = function(machine)
            with guard:
                facts.update(value if name is None else {name: value})
        except Exception as error:  # what is wrong with a section is reported, and the others go on
            with guard:
                errors[function.__name__] = "%s: %s" % (type(error).__name__, error)

    threads = []
    wanted = machine.options.get("sections")
    chosen = [each for each in SECTIONS + ON_REQUEST if each[1].__name__ in wanted] if wanted else SECTIONS
    for name, function, timeout in chosen:
        thread = threading.Thread(target=collect, args=(name, function), daemon=True)
        thread.start()
        wait = machine.timeout if "timeout" in machine.options else max(timeout or 0, machine.timeout)
        threads.append((thread, function.__name__, wait))
    for thread, name, wait in threads:
        thread.join(max(0.0, started + wait - time.time()))
        if thread.is_alive():
            with guard:
                errors[name] = "no answer within %.0f s" % wait
    with guard:
        document = dict(facts, schema=SCHEMA, errors=dict(errors))
    return dict(document, time={"epoch": time.time()})


def main():
    document = survey(Machine(options=json.loads(os.environ.get("PROVISION_SURVEY_OPTIONS") or "{}")))
    sys.stdout.write("\n%s\n%s\n%s\n" % (BEGIN, json.dumps(document, sort_keys=True), END))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread stuck in a dead file system must not keep the session open
