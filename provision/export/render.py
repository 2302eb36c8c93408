"""The files of an export. Pure.

Names of hosts, logins, and labels of images are data: what is filled into a template is quoted for the language of its file.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jinja2
import yaml

from provision import __version__
from provision.base import resources, terminal
from provision.base.errors import UsageError
from provision.base.versions import minor
from provision.export.pools import Pool
from provision.image.render import File
from provision.plan.model import HostPlan

#: Target → its files.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "slurm": ("train.sbatch",),
    "kubernetes": ("mpijob.yaml", "trainjob.yaml"),
    "ray": ("cluster.yaml", "train_ray.py"),
}
RAY = "2.40.0"  # with which the files were tested
_RAY_PYTHONS = ("3.9", "3.10", "3.11", "3.12")  # that it has wheels for
_OTHER_PYTHON = "choose one with provision_python in the inventory, then provision up"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # as Kubernetes calls them
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a NodeName of Slurm: not the list that brackets and commas make of one


class _Quoted(str):
    """Text that is quoted already."""

    __slots__ = ()


def _yaml(value: object) -> str:
    made: str = yaml.safe_dump(value, default_style='"', default_flow_style=True, width=1 << 30)
    return str(value) if isinstance(value, int) else made.strip()


def _shell(value: object) -> str:
    return shlex.quote(str(value))


_QUOTES: Mapping[str, Callable[[object], str]] = {".sbatch": _shell, ".yaml": _yaml, ".py": repr}


def files(target: str, pools: Sequence[Pool]) -> dict[str, File]:
    """Path → file: those of each pool, in a folder of its own where there are several. Raises UsageError for what a target cannot take."""
    _check(target, pools)
    found = {}
    for number, pool in enumerate(pools, 1):
        folder = f"pool-{number}/" if len(pools) > 1 else ""
        others = [host for other in pools if other is not pool for host in other.hosts]
        for name in TARGETS[target]:
            if name != "trainjob.yaml" or "torch" in pool.versions:  # it starts PyTorch's own launcher
                found[folder + name] = _filled(name, pool, reasons(pools)[number - 1] if folder else "", others)
    return found


def reasons(pools: Sequence[Pool]) -> list[str]:
    """For each pool what it holds, or lacks, in which not all of them agree."""
    titles = [
        title for title in dict.fromkeys(t for pool in pools for t in pool.shown) if len({pool.shown.get(title) for pool in pools}) > 1
    ]
    return [
        f"pool {number} of {len(pools)}: {', '.join(f'{t} {pool.shown[t]}' if t in pool.shown else f'without {t}' for t in titles)}"
        for number, pool in enumerate(pools, 1)
    ]


def check_kind(target: str, source: str, *, image: bool) -> None:
    """Raise UsageError for an unknown target, and for one that runs on the other of hosts and images."""
    if target not in TARGETS:
        raise UsageError(f"invalid TARGET {target}: expected one of {', '.join(TARGETS)}")
    if image and target == "ray":
        raise UsageError(f"{target} runs on hosts: an image names none", where=source, hint=f"provision export {target} HOSTS")
    if not image and target == "kubernetes":
        hint = "provision image build HOSTS, docker push, then provision export kubernetes NAME@sha256:…"
        raise UsageError("Kubernetes runs images: HOSTS have none", where=source, hint=hint)


def _check(target: str, pools: Sequence[Pool]) -> None:
    """What a target cannot take of these hosts."""
    hosts = [host for pool in pools for host in pool.hosts]
    if target == "slurm" and len(pools) > 1 and (odd := [host.name for host in hosts if not _NODE.fullmatch(_node(host.hostname))]):
        raise UsageError("invalid host name for Slurm's list of nodes", where=odd[0])
    if target == "ray":
        if len(logins := sorted({host.login for host in hosts})) > 1 or any(host.ssh_port != 22 for host in hosts):
            what = f"Ray logs in to all hosts as one user, at port 22: expected one, not {', '.join(logins)}"
            raise UsageError(what, hint="choose hosts: --limit")
        if odd := [pool.versions["python"] for pool in pools if minor(pool.versions["python"]) not in _RAY_PYTHONS]:
            raise UsageError(f"Ray {RAY} has no build for Python {odd[0]}: expected {', '.join(_RAY_PYTHONS)}", hint=_OTHER_PYTHON)


def _node(hostname: str) -> str:
    return hostname.partition(".")[0]


def _filled(name: str, pool: Pool, reason: str, others: Sequence[HostPlan]) -> File:
    suffix = Path(name).suffix
    shown = ", ".join(f"{title} {value}" for title, value in pool.shown.items())
    about = [f"Exported by provision {__version__} from {pool.origin}", shown, *([reason] if reason else [])]
    manifest, variables = f"{pool.prefix}/manifest.json", dict(pool.variables)
    prepare = _template("prepare.py", ".py").render(manifest=manifest, versions=dict(pool.versions), variables=variables)
    environment = f"~/provision-ray-{hashlib.sha256(f'{RAY} {prepare}'.encode()).hexdigest()[:8]}"
    text = _template(name, suffix).render(
        pool=pool,
        about=[_Quoted(terminal.neutral(line)) for line in about],
        prepare=_Quoted(prepare.rstrip()) if suffix == ".sbatch" else prepare,
        exports=[(_Quoted(variable), _Quoted(_exported(variable, value))) for variable, value in variables.items()],
        container=_of_enroot(pool.image),
        excluded=",".join(_node(host.hostname) for host in others),
        arch=_ARCHITECTURES.get(pool.arch, pool.arch),
        addresses=[host.network.address or host.hostname for host in pool.hosts],
        environment=_Quoted(environment),
        setup=_ray_setup(pool, environment) if pool.hosts else "",
    )
    return File(text.encode())


def _template(name: str, suffix: str) -> jinja2.Template:
    def quoted(value: object) -> object:
        return value if isinstance(value, _Quoted) else _QUOTES[suffix](value)

    return resources.templates(Path(__file__).parent, quoted).get_template(f"{name}.j2")


def _of_enroot(image: str) -> str:
    """``registry/team/mine:1@sha256:…`` as enroot writes it: ``registry#team/mine:sha256:…``."""
    name, _, digest = image.partition("@")
    registry, slash, path = name.partition("/")
    if not slash or not (set(".:") & set(registry) or registry == "localhost"):  # Docker Hub's
        registry, path = "registry-1.docker.io", name if slash else f"library/{name}"
    return f"{registry}#{path.partition(':')[0]}:{digest}"


def _exported(name: str, value: str) -> str:
    """A value for the shell, in which `{inherited}` at the end stands for the one that is there."""
    text, inherits, _ = value.partition(":{inherited}")
    return shlex.quote(text) + (f'"${{{name}:+:${name}}}"' if inherits else "")


def _ray_setup(pool: Pool, environment: str) -> str:
    """A shell command that makes an environment with Ray over the installed one, with the uv that installed that."""
    python, uv = f"python{minor(pool.versions['python'])}", shlex.quote(f"{pool.prefix}/uv")
    over = f"import site; site.addsitedir({f'{pool.prefix}/venv/lib/{python}/site-packages'!r})"
    packages = [
        f"ray[default,train]=={RAY}",
        *(f"{name}=={pool.versions[name]}" for name in ("numpy", "cloudpickle") if name in pool.versions),
    ]
    steps = (
        f"rm -rf {environment}",
        f"{uv} venv --quiet --python {shlex.quote(pool.python)} {environment}",
        f"echo {shlex.quote(over)} > {environment}/lib/{python}/site-packages/provision.pth",
        f"{uv} pip install --quiet --python {environment}/bin/python {shlex.join(packages)}",
        f"touch {environment}/complete",
    )
    return f"test -e {environment}/complete || {{ {' && '.join(steps)}; }}"
