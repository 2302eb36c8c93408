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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import provision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
VERSION = provision.__version__  # also the engine's
ENGINE = {
    "type": "library",
    "name": "collective-core",
    "bom-ref": "engine",
    "version": VERSION,
    "purl": f"pkg:generic/collective-core@{VERSION}",  # in no package index
    "licenses": [{"license": {"id": "Apache-2.0"}}],
}
# collective_core/NOTICE. FP16 has no releases.
FP16 = {
    "type": "library",
    "name": "FP16",
    "bom-ref": "FP16",
    "purl": "pkg:github/Maratyszcza/FP16",
    "licenses": [{"license": {"id": "MIT"}}],
}


def bill(project: Path, environment: Path, kind: str, contained: list[dict[str, Any]]) -> str:
    """The bill of a project whose dependencies are installed in this environment; ``contained``: as for :func:`completed`."""
    pyproject = project / "pyproject.toml"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", f"--pyproject={pyproject}", f"--mc-type={kind}"]
    command += ["--output-reproducible", str(environment / "bin/python")]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    required = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    document = completed(json.loads(made), [Requirement(each).name for each in required], contained)
    text = json.dumps(document, indent=2) + "\n"
    if error := JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text):
        raise SystemExit(f"not a valid bill of materials: {error}")
    return text


def completed(document: dict[str, Any], required: list[str], contained: list[dict[str, Any]]) -> dict[str, Any]:
    """The generator's document with the version, which pyproject.toml leaves to the build, and what the project's own files hold of others.

    ``contained``: the first is part of the project, each further one of that before it. What only an extra asks for is no dependency of the
    project, also where something else has installed it; the generator makes no difference.
    """
    root = document["metadata"]["component"]
    root["version"] = VERSION
    document["components"] += contained
    names = {each["bom-ref"]: canonicalize_name(each["name"]) for each in document["components"]}
    wanted = {canonicalize_name(name) for name in required}
    (of_root,) = (each for each in document["dependencies"] if each["ref"] == root["bom-ref"])
    of_root["dependsOn"] = [ref for ref in of_root["dependsOn"] if names[ref] in wanted]
    last = of_root
    for each in contained:
        last.setdefault("dependsOn", []).append(each["bom-ref"])
        last = {"ref": each["bom-ref"]}
        document["dependencies"].append(last)
    return document


def main(folder: Path) -> None:
    """Write the bills into the folder, from its environments ``toolkit`` and ``engine``."""
    for name, project, kind, contained in (
        ("toolkit", ROOT, "application", [ENGINE, FP16]),
        ("engine", ROOT / "collective_core", "library", [FP16]),
    ):
        path = folder / f"{name}.cdx.json"
        path.write_text(bill(project, folder / name, kind, contained), encoding="utf-8")
        print(f"written: {path}: {len(json.loads(path.read_text())['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
