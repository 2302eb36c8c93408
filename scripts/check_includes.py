"""Order of the engine's folders: a C++ file includes only what lies in its own folder or in one before it.

Prints each include that runs up, with file, line and rule, and exits with 1 if there is any. The tests include everything.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ORDER = ("base", "kernels", "transport", "liveness", "group", "negotiation", "algorithms", "engine", "api", "tests")
INCLUDE = re.compile(r'\s*#\s*include\s*"(?:([^"/]+)/)?')


def violations(root: Path) -> list[str]:
    """Includes below this folder that run up or lead into no folder of ORDER, each as `file:line: rule`."""
    found = []
    for path in sorted(file for suffix in ("h", "cpp", "inc") for file in root.rglob(f"*.{suffix}")):
        own = path.relative_to(root).parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            included = INCLUDE.match(line)
            if not included:
                continue
            if own not in ORDER or included[1] not in ORDER:
                found.append(f"{path}:{number}: every file is in, and names, one of {', '.join(ORDER)}")
            elif ORDER.index(included[1]) > ORDER.index(own):
                found.append(f"{path}:{number}: {own}/ must not include {included[1]}/, which is above it ({' < '.join(ORDER)})")
    return found


if __name__ == "__main__":
    problems = violations(Path(sys.argv[1]))
    print("\n".join(problems))
    sys.exit(bool(problems))
