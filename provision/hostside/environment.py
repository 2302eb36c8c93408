"""The Python environment that runs it, as one line of JSON: its platform, and what each of its packages is and depends on. Standard
library only; Python 3.8+, because it runs in the environment of the engine."""

import json
import os
import platform
import sys
from importlib import metadata


def main():
    packages = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name:  # None: the rest of a package that was removed by hand
            packages.setdefault(name, {"version": each.version, "requires": each.requires or []})
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "arch": platform.machine(),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2],
        "packages": packages,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
