"""Bills of materials (CycloneDX) of the toolkit and of the engine: `make sbom` writes them into build/sbom.

Each lists what an installer would resolve today, read from an environment that holds nothing else. What hosts get (Open MPI, NCCL, PyTorch)
is not in them: the plan chooses it for each cluster, and `provision.lock` records it with checksums.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import provision

ROOT = Path(__file__).parents[1]
VERSION = provision.__version__  # also the engine's
ENGINE = {
    "type": "library",
    "name": "collective-core",
    "bom-ref": "engine",
    "version": VERSION,
    "licenses": [{"license": {"id": "Apache-2.0"}}],
}
# collective_core/NOTICE.
FP16 = {
    "type": "library",
    "name": "FP16",
    "bom-ref": "FP16",
    "purl": "pkg:github/Maratyszcza/FP16",
    "licenses": [{"license": {"id": "MIT"}}],
}


def bill(project: Path, environment: Path, contained: list[dict[str, Any]]) -> str:
    """The bill of a project whose dependencies are installed in this environment; ``contained``: what its own files hold of others."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(project / "pyproject.toml"), "--output-reproducible"]
    made = subprocess.run([*command, str(environment / "bin/python")], check=True, capture_output=True, text=True).stdout
    document = json.loads(made)
    document["metadata"]["component"]["version"] = VERSION  # which pyproject.toml leaves to the build
    document["components"] += contained
    text = json.dumps(document, indent=2) + "\n"
    if error := JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text):
        raise SystemExit(f"not a valid bill of materials: {error}")
    return text


def main(folder: Path) -> None:
    """Write the bills into the folder, from its environments ``toolkit`` and ``engine``."""
    for name, project, contained in (("toolkit", ROOT, [ENGINE, FP16]), ("engine", ROOT / "collective_core", [FP16])):
        path = folder / f"{name}.cdx.json"
        path.write_text(bill(project, folder / name, contained), encoding="utf-8")
        print(f"written: {path}: {len(json.loads(path.read_text())['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
