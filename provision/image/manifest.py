"""A job of the MPI operator for Kubernetes (``kubeflow.org/v2beta1``, kind MPIJob), from the same plan as the hosts. Pure.

The operator gives the pods of a job one SSH key pair. It is their login and, because only they have its private half, their host key, too:
so the launcher can tell that it talks to workers of its own job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from provision import __version__, catalog, launch, mpirun
from provision.errors import UsageError
from provision.image import mesh, targets
from provision.plan import HostPlan, Plan
from provision.sandbox import bases

KEYS = ".ssh"  # in the home of the image's user: where the operator mounts its secret
_HOSTFILE = "/etc/mpi/hostfile"  # as the operator mounts it
_ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}  # Kubernetes' names
_PATIENCE = 300  # looks, a second apart, until a worker takes logins

# What the launcher writes down before it looks for the workers: the job's own key is the only one that it believes.
_LAUNCH = """set -eu
cd
printf '* %s\\n' "$(cat {keys}/id_rsa.pub)" > .provision_known_hosts
cat > .provision_config <<'END'
Host *
    Port {port}
    User {login}
    IdentityFile {keys}/id_rsa
    IdentitiesOnly yes
    UserKnownHostsFile {home}/.provision_known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    ServerAliveInterval 15
END
for host in $(cut -d ' ' -f 1 {hostfile}); do
    n=0
    until said=$(ssh -F .provision_config "$host" true 2>&1); do
        n=$((n + 1))
        [ $n -lt {patience} ] || {{ echo "$host takes no login: $said" >&2; exit 1; }}
        sleep 1
    done
done
exec {command}
"""


def check_names(name: str, image: str | None) -> None:
    """Raise UsageError for names that Kubernetes, or an engine, does not take."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UsageError(f"--name {name}: Kubernetes does not take it", todo="small letters, digits and dashes, 40 of them at most")
    if image is not None:
        bases.checked(image)


def render(
    plan: Plan, known: Mapping[str, Mapping[str, Any]], *, name: str, image: str | None = None, program: Sequence[str] | None = None
) -> str:
    """The file: for the same plan the same bytes.

    Args:
        plan: of the hosts.
        known: their facts.
        image: as the cluster's nodes pull it; None for the name that `provision image build` gives.
        program: None runs the engine's self-check.

    Raises:
        UsageError: the hosts need more than one image.
    """
    made = targets.of_hosts(plan, known)
    if len(made) > 1:
        kinds = "; ".join(f"{each.name}: {', '.join(each.hosts)}" for each in made)
        raise UsageError(f"these hosts need {len(made)} images, and a job has one ({kinds})", todo="choose hosts of one kind: --limit")
    held = job(name, image or f"provision:{made[0].name}", plan, known, made[0].host, program or ("python", "-m", "collective_core.check"))
    lines = [f"Rendered by provision {__version__} for {', '.join(plan.hosts)}. It needs the MPI operator: kubectl apply -f THIS-FILE"]
    if len({host.slots for host in plan.hosts.values()}) > 1:
        lines.append("The hosts have different slots; each worker has as many as the host with the fewest.")
    remarks = "".join(f"# {line}\n" for line in lines)
    return remarks + str(yaml.dump(held, Dumper=_Dumper, sort_keys=False, width=140))


def job(
    name: str, image: str, plan: Plan, known: Mapping[str, Mapping[str, Any]], held: HostPlan, program: Sequence[str]
) -> dict[str, Any]:
    """The MPIJob as data.

    Args:
        name: of the job.
        image: as the cluster's nodes pull it.
        plan: of the hosts: as many workers, with their slots.
        known: their facts: as much of them for each worker as all can give.
        held: what the image holds.
        program: its first word may be ``python``.
    """
    slots = min(host.slots for host in plan.hosts.values())
    user = catalog.load("images")["user"]
    pod = {"nodeSelector": {"kubernetes.io/arch": _ARCHES.get(held.arch, held.arch)}}
    container = {"image": image, "securityContext": {"runAsUser": user["uid"], "runAsGroup": user["uid"], "runAsNonRoot": True}}
    launcher = {
        **container,
        "name": "launcher",
        # Kubernetes expands $(NAME) in commands, and reads $$ as one $.
        "command": ["sh", "-c", _launch(held, len(plan.hosts), slots, program).replace("$", "$$")],
        "env": [{"name": key, "value": value} for key, value in sorted(_variables().items())],
        "resources": _same({"cpu": "1", "memory": "1Gi"}),
    }
    share, shared = _share(list(known.values()))
    worker = {
        **container,
        "name": "worker",
        "command": ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/provision/sshd_config"],
        # The secret's folder is writable to all, as Kubernetes mounts it.
        "args": ["-o", f"HostKey={mesh.home()}/{KEYS}/id_rsa", "-o", "StrictModes=no"],
        "ports": [{"name": "ssh", "containerPort": catalog.load("images")["ssh_port"]}],
        "resources": _same(share),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared}}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "provision"}},
        "spec": {
            "slotsPerWorker": slots,
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "sshAuthMountPath": f"{mesh.home()}/{KEYS}",
            "mpiImplementation": "OpenMPI",
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, {**pod, "containers": [launcher]}),
                "Worker": _replicas(len(plan.hosts), {**pod, "containers": [worker], "volumes": [memory]}),
            },
        },
    }


def _launch(held: HostPlan, workers: int, slots: int, program: Sequence[str]) -> str:
    where = launch.Environment.of(Plan({held.name: held}))
    command = mpirun.command(
        mpirun=where.mpirun,
        prefix=where.mpi_prefix,
        hosts=[(f"worker-{number}", slots) for number in range(workers)],  # their real names are in the operator's hostfile
        hostfile=_HOSTFILE,
        np=workers * slots,
        networks=(),
        ssh_config=f"{mesh.home()}/.provision_config",
        environment=_variables(),
        program=where.limited(program),
        as_root=False,
        oversubscribe=True,
    )
    known = catalog.load("images")
    return _LAUNCH.format(
        keys=f"{mesh.home()}/{KEYS}",
        home=mesh.home(),
        port=known["ssh_port"],
        login=known["user"]["name"],
        hostfile=_HOSTFILE,
        patience=_PATIENCE,
        command=shlex.join(command),
    )


def _variables() -> dict[str, str]:
    """What every rank gets; the way in of an SSH session sets its PATH."""
    return {"PYTHONUNBUFFERED": "1"}


def _share(hosts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """(of each node for a worker, of that for shared memory): what all nodes have, less what Kubernetes needs there itself."""
    cores = min((int(host["cpu"]["cores"] or 2) for host in hosts), default=2)
    megabytes = min((int(host["memory"]["total_mb"] or 4096) for host in hosts), default=4096) * 3 // 4
    gpus = min((len(host["gpus"]) for host in hosts), default=0)
    share: dict[str, Any] = {"cpu": str(max(1, cores - 1)), "memory": f"{megabytes}Mi"}
    if gpus:
        share["nvidia.com/gpu"] = gpus
    return share, f"{megabytes // 2}Mi"


def _same(share: Mapping[str, Any]) -> dict[str, Any]:
    """Asked for as much as allowed: nodes do not promise the same memory twice."""
    return {"requests": dict(share), "limits": dict(share)}


def _replicas(count: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": dict(pod)}}


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks of lines, and everything where it belongs instead of once."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _lines(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _lines)
