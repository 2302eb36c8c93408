"""Libraries without code for a GPU of their host: the "no kernel image" of a job, found before it starts (`hostside/gpu_code.py`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, StringConstraints, ValidationError

from provision.base import resources
from provision.base.problems import Problem, Severity
from provision.base.text import joined
from provision.base.versions import key
from provision.remote import ssh
from provision.remote.session import Session

ID = "cuda-no-kernel-image"  # the doctor's
_TIMEOUT_S = 70.0  # the script ends before
_NO_GPU = '{"gpus": [], "libraries": [], "complete": true}'
_UNKNOWN, _SPIRV = "unknown", "amdgcnspirv"  # code that cannot be read here; code that AMD's runtime compiles for any GPU
_GpuArchitecture = Annotated[str, StringConstraints(pattern=r"^(\d{1,3}\.\d|gfx[0-9a-f]{3,5})$")]
_Architecture = Annotated[str, StringConstraints(pattern=rf"^(\d{{1,3}}\.\d[af]?|gfx[0-9a-f-]{{1,5}}(generic)?|{_UNKNOWN}|{_SPIRV})$")]
#: Libraries whose callers look at the GPU first, as they have kernels for few: PyTorch does for hipBLASLt, MIOpen for one of each target.
_CHOSEN_BY_GPU = re.compile(r"hip(blas|sparse)lt|gfx")


class Gpu(BaseModel, strict=True, frozen=True):
    """A GPU as the driver names it; ``architecture``: its compute capability, or AMD's target."""

    name: str
    architecture: _GpuArchitecture


class Library(BaseModel, strict=True, frozen=True):
    """A library with GPU code: architecture → number of its containers that have machine code, or PTX, for it."""

    path: str
    containers: int
    machine_code: dict[_Architecture, int]
    ptx: dict[_Architecture, int]

    @property
    def is_amd(self) -> bool:
        return any("." not in each for each in self.machine_code)

    def runs_on(self, gpu_architecture: str) -> bool:
        """Whether it has code for such GPUs: of its major and no newer minor, or PTX of most of its kernels; for AMD of its target, or a
        generic one of its generation. Code that cannot be read counts, and a library for another vendor's GPUs needs none."""
        if self.is_amd != gpu_architecture.startswith("gfx"):
            return True
        if self.is_amd:
            generic = f"{gpu_architecture[:-2]}-"
            return any(each in (gpu_architecture, _UNKNOWN, _SPIRV) or each.startswith(generic) for each in self.machine_code)
        gpu = key(gpu_architecture)

        def fits(architecture: str) -> bool:
            if architecture.endswith("a"):
                return architecture[:-1] == gpu_architecture
            code = key(architecture.rstrip("f"))
            return code[0] == gpu[0] and code <= gpu

        compiled_by_driver = any(
            each[-1].isdigit() and key(each) <= gpu and 2 * count >= self.containers for each, count in self.ptx.items()
        )
        return compiled_by_driver or any(map(fits, self.machine_code))

    @property
    def is_for_some_gpus(self) -> bool:
        """Whether it is made for single GPUs: its caller has looked at the GPU before."""
        if self.is_amd:
            return _CHOSEN_BY_GPU.search(PurePosixPath(self.path).name) is not None
        return all(not each[-1].isdigit() for each in (*self.machine_code, *self.ptx))

    @property
    def code(self) -> str:
        """``8.0, 9.0, PTX of 9.0``"""
        compiled = sorted(self.machine_code, key=_order)
        return ", ".join([*compiled, *(f"PTX of {each}" for each in sorted(self.ptx, key=_order))])


class Scan(BaseModel, strict=True, frozen=True):
    """The GPUs of a host and the libraries with GPU code in an environment; ``complete``: whether there was time for all of them."""

    gpus: list[Gpu]
    libraries: list[Library]
    complete: bool


def check(session: Session, pythons: Mapping[str, str], planned: Sequence[str] = (), package: str = "") -> list[Problem]:
    """What jobs cannot run on the hosts' GPUs. ``pythons``: host → the Python whose environment is looked at; a host without GPUs
    answers at once. An environment that cannot be checked is a warning. ``planned``: compute capabilities that count instead.
    ``package``: the only one whose libraries count, as others may be optional for a GPU."""
    problems = []
    scripts = {name: _script(python, planned) for name, python in pythons.items()}
    answers = ssh.run(session, scripts, timeout=_TIMEOUT_S) if pythons else {}
    for name, answer in answers.items():
        try:
            scan = Scan.model_validate_json(answer.body)
        except ValidationError:
            what = f"which GPUs its environment has code for is not known: {answer.error}"
            problems.append(Problem("warning", what, id="host-warning", host=name))
            continue
        problems += missing_code(name, scan, package)
        unread = [each.path for each in scan.libraries if _UNKNOWN in each.machine_code]
        if unread and any(gpu.architecture.startswith("gfx") for gpu in scan.gpus):
            what = f"which GPUs {len(unread)} libraries have code for is not known, as it cannot be decompressed: {unread[0]}"
            hint = "install libzstd (package libzstd1 or libzstd), if it is missing"
            problems.append(Problem("warning", what, hint, id="host-warning", host=name))
        if not scan.complete:
            what = "its environment has more libraries than could be checked for GPU code in time; the next run goes on with them"
            problems.append(Problem("warning", what, id="host-warning", host=name))
    return problems


def missing_code(host: str, scan: Scan, package: str = "") -> Iterator[Problem]:
    """A problem for each library, of ``package`` if it is given, that has no code for a GPU of its host."""
    for library in scan.libraries:
        if package and package not in PurePosixPath(library.path).parts:
            continue
        lost = {gpu.architecture: gpu.name for gpu in scan.gpus if not library.runs_on(gpu.architecture)}
        lost = {architecture: name for architecture, name in lost.items() if not _has_variant(library, architecture, scan)}
        if lost and not library.is_for_some_gpus:
            models = joined([f"its {name} ({architecture})" for architecture, name in lost.items()])
            what = f"{library.path} has no code for {models}; it has {library.code}"
            # Which of AMD's libraries their callers do without has not been tried.
            severity: Severity = "warning" if library.is_amd else "error"
            yield Problem(severity, what, _remedy(library, lost), id=ID, host=host)


def _has_variant(library: Library, architecture: str, scan: Scan) -> bool:
    """Whether another library runs there that differs in the numbers of its name alone, as one for each CUDA or GPU: one is loaded."""
    return any(_kind(each.path) == _kind(library.path) and each.runs_on(architecture) for each in scan.libraries)


def _kind(path: str) -> tuple[str, str]:
    whole = PurePosixPath(path)
    return str(whole.parent), re.sub(r"\d+", "", whole.name)


def _remedy(library: Library, lost: Mapping[str, str]) -> str:
    parts = PurePosixPath(library.path).parts
    for package in ("torch", "nvidia", "_rocm_sdk_libraries"):
        if package in parts[:-1]:
            title = "PyTorch" if package == "torch" else "this package"
            return f"install a build of {title} for these GPUs (`provision plan` says which), or leave the host out"
    variable = "PYTORCH_ROCM_ARCH" if library.is_amd else "TORCH_CUDA_ARCH_LIST"
    listed = ";".join(sorted({*(re.sub(r"(\.\d)[af]", r"\1", each) for each in library.machine_code), *lost}, key=_order))
    return f'build it again for all GPUs of the cluster ({variable}="{listed}"), or leave the host out'


def _script(python: str, planned: Sequence[str]) -> str:
    """A host without a driver of NVIDIA or AMD does not even start a Python."""
    scan = resources.inline_command("gpu_code.py", *planned, interpreter=shlex.quote(python))
    if planned:
        return f"cd; echo {ssh.ANSWER}; {scan}"
    has_driver = "[ -e /proc/driver/nvidia/gpus ] || [ -e /sys/class/kfd ] || command -v nvidia-smi >/dev/null"
    return f"cd; echo {ssh.ANSWER}; {{ {has_driver}; }} || {{ echo {shlex.quote(_NO_GPU)}; exit 0; }}; {scan}"


def _order(architecture: str) -> tuple[tuple[int, ...], str]:
    return key(architecture.rstrip("af")) if "." in architecture else (), architecture
