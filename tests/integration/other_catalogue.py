"""`provision` with parts of the catalogue replaced: python other_catalogue.py CHANGES.json WORDS…

For what tests cannot reach: NVIDIA's repository and its key, open-mpi.org. CHANGES is {"file of the catalogue": {"key": {…}}}, merged over
the real catalogue, where null removes a key; everything else is what users have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from provision import catalog
from provision.cli import main


def merged(real: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {**real, **changes}
    return {
        key: merged(real[key], value) if isinstance(value, dict) and isinstance(real.get(key), dict) else value
        for key, value in both.items()
        if value is not None or real.get(key) is None
    }


changes = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
read = catalog.content
catalog.content = lambda name: json.dumps(merged(yaml.safe_load(read(name)), changes.get(name, {})), default=str).encode()
sys.argv = ["provision", *sys.argv[2:]]
main.main()
