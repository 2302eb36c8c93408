"""Jobs for Kubernetes: held against the operators' own schemas, and against what an image holds."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from provision.base.engine_source import EngineSource
from provision.catalog import OURS
from provision.export import render as export
from provision.export.pools import Pool
from provision.image import container_hosts, render, targets
from provision.launch import launchers
from provision.plan.model import Plan
from provision.plan.requirements import Requirements

CRDS = Path(__file__).parents[2] / "data/crds"
ENGINE = EngineSource(b"sources", "0.0.0", "0" * 64)
IMAGE = targets.of_system("debian 12", None, Requirements(engine_version=ENGINE.version, engine_sha256=ENGINE.sha256), ENGINE)
NAME = f"registry.example:5000/team/mine:1@sha256:{'0' * 64}"
HOSTFILE = "/etc/mpi/hostfile"  # where the operator mounts it


def texts(**changed: Any) -> list[str]:
    """The files of an image with CUDA."""
    known: dict[str, Any] = {"origin": f"image {NAME}", "versions": {"torch": "2.13.0"}, "shown": {"torch": "2.13.0"}, "gpus": True}
    files = export.files("kubernetes", [Pool(**{**known, "image": NAME, **changed})])
    return [file.content.decode() for file in files.values()]


def exported(**changed: Any) -> dict[str, Any]:
    """Kind → the job."""
    return {job["kind"].lower(): job for job in map(yaml.safe_load, texts(**changed))}


JOB: dict[str, Any] = exported()["mpijob"]


def strict(schema: Any) -> Any:
    """The schema of a custom resource as an API server with strict validation takes it: a field that it does not name is an error."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {**made, "additionalProperties": False} if is_object else made


def refused(kind: str, job: dict[str, Any]) -> list[str]:
    schema = strict(yaml.safe_load((CRDS / f"{kind}.yaml").read_text(encoding="utf-8")))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


def pod(role: str, job: dict[str, Any] = JOB) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    return found


def container(role: str, job: dict[str, Any] = JOB) -> dict[str, Any]:
    (found,) = pod(role, job)["containers"]
    return dict(found)


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_the_operators_schema_accepts_it(kind: str, gpus: bool) -> None:
    assert refused(kind, exported(gpus=gpus)[kind]) == []


@pytest.mark.parametrize(("kind", "path", "value"), [
    ("mpijob", ("slotsPerWorkers",), 1), ("mpijob", ("mpiImplementation",), "mpich"), ("mpijob", ("slotsPerWorker",), "2"),
    ("trainjob", ("trainer", "image"), 1), ("trainjob", ("trainer", "numNodes"), -1), ("trainjob", ("trainers",), {}),
])  # fmt: skip
def test_the_schema_refuses_what_kubernetes_would_drop_or_refuse(kind: str, path: tuple[str, ...], value: object) -> None:
    wrong = copy.deepcopy(exported()[kind])
    place = wrong["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert refused(kind, wrong)


def test_jobs_name_the_image_by_its_digest_and_say_what_it_holds() -> None:
    for job, text in zip(exported().values(), texts(), strict=True):
        assert text.count(NAME) >= 2
        assert "# torch 2.13.0" in text
        assert job["metadata"] == {"name": "train"}


def test_an_image_without_pytorch_has_no_job_for_its_launcher() -> None:
    assert list(exported(versions={"engine": "0.1.0"})) == ["mpijob"]


def test_names_of_images_and_versions_are_data() -> None:
    hostile = "x: y # \"'\n  z: [[ 1 ]] {{ 1 }}\u2028- a"
    for kind, job in exported(image=hostile, origin=hostile, shown={hostile: hostile}, arch=hostile).items():
        assert refused(kind, job) == []
        assert hostile in (job["spec"]["trainer"]["image"] if kind == "trainjob" else container("Worker", job)["image"])


def test_the_job_of_pytorchs_launcher_starts_what_the_image_has() -> None:
    trainer = exported()["trainjob"]["spec"]["trainer"]
    assert trainer["command"][0] == launchers.Environment.of(Plan({IMAGE.host.name: IMAGE.host})).interpreter
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert "nvidia.com/gpu" not in exported(gpus=False)["trainjob"]["spec"]["trainer"]["resourcesPerNode"]["limits"]


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_its_pods_are_of_one_image_and_run_as_its_user(role: str) -> None:
    uid = OURS.images().user.uid
    assert container(role)["securityContext"] == {"runAsUser": uid, "runAsGroup": uid, "runAsNonRoot": True}
    assert container(role)["image"] == container("Worker")["image"]
    assert pod(role)["nodeSelector"] == pod("Worker")["nodeSelector"]


def test_a_worker_serves_ssh_as_the_image_does_with_the_jobs_key() -> None:
    worker, ssh = container("Worker"), JOB["spec"]["sshAuthMountPath"]
    files = render.context(IMAGE)
    serves = files["files/opt/provision/bin/serve"].content.decode().splitlines()[-1]
    assert serves == f"exec {' '.join(worker['command'])}"
    configuration = files[f"files{worker['command'][-1]}"].content.decode().splitlines()
    assert f"AuthorizedKeysFile {ssh}/authorized_keys" in configuration
    assert f"Port {worker['ports'][0]['containerPort']}" in configuration
    assert worker["args"] == ["-o", f"HostKey={ssh}/id_rsa", "-o", "StrictModes=no"]
    assert {each["name"] for each in worker["volumeMounts"]} == {each["name"] for each in pod("Worker")["volumes"]}


def test_a_worker_has_a_gpu_for_each_of_its_ranks_and_the_cores_for_their_threads() -> None:
    limits, slots = container("Worker")["resources"]["limits"], JOB["spec"]["slotsPerWorker"]
    assert limits["nvidia.com/gpu"] == slots
    assert {"name": "OMP_NUM_THREADS", "value": str(int(limits["cpu"]) // slots)} in container("Launcher")["env"]


def test_kubernetes_leaves_the_launchers_script_as_it_is() -> None:
    script, variables = container("Launcher")["command"][-1], container("Launcher")["env"]
    assert "$$" not in script
    assert [each["name"] for each in variables if f"$({each['name']})" in script] == []


def test_the_launcher_waits_for_the_workers_and_starts_mpirun_as_on_hosts(tmp_path: Path) -> None:
    """Its script, run here: with this folder as the user's home, and programs that write down how they are called."""
    shell, flag, script = container("Launcher")["command"]
    words = tmp_path / "words"
    for name, body in (
        ("ssh", f'echo "$*" >> {tmp_path}/calls\n[ $(wc -l < {tmp_path}/calls) -gt 1 ] || {{ echo refused >&2; exit 255; }}'),
        ("mpirun", f'printf "%s\\n" "$0" "$@" > {words}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hostfile").write_text("train-worker-0.train.team.svc slots=1\ntrain-worker-1.train.team.svc slots=1\n")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_rsa.pub").write_text("ecdsa-sha2-nistp521 AAAA\n")

    where = launchers.Environment.of(Plan({IMAGE.host.name: IMAGE.host}))
    there = {container_hosts.home(OURS): str(tmp_path), HOSTFILE: str(tmp_path / "hostfile"), where.mpirun: str(tmp_path / "mpirun")}
    for path, instead in there.items():
        assert path in script
        script = script.replace(path, instead)
    variables = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([shell, flag, script], env=variables, check=True, timeout=60)

    assert (tmp_path / "mpi_known_hosts").read_text() == "* ecdsa-sha2-nistp521 AAAA\n"
    logins = [f"-F mpi_ssh_config train-worker-{number}.train.team.svc true" for number in (0, 0, 1)]
    assert (tmp_path / "calls").read_text().splitlines() == logins
    slots = JOB["spec"]["slotsPerWorker"]
    called = words.read_text().splitlines()
    there_only = ["-F " + f"{tmp_path}/mpi_ssh_config", *(each["name"] for each in container("Launcher")["env"])]
    ours = launchers.mpi_job(where, [("train-worker-0", slots), ("train-worker-1", slots)], launchers.RunOptions(("python",))).argv
    assert called[1:5] == ["--prefix", where.mpi_prefix, "--hostfile", there[HOSTFILE]]
    assert called[-3:] == [where.interpreter, "-m", "collective_core.check"]
    assert {*called[5:-3]} <= {*ours, "plm_rsh_args", *there_only}


def test_ssh_of_the_launcher_trusts_the_jobs_key_alone() -> None:
    script = container("Launcher")["command"][-1]
    configuration = script.partition("<<'END'\n")[2].partition("END\n")[0]
    lines = dict(line.split(" ", 1) for line in configuration.splitlines())
    assert lines["StrictHostKeyChecking"] == "yes"
    assert lines["IdentityFile"] == f"{JOB['spec']['sshAuthMountPath']}/id_rsa"
    assert lines["UserKnownHostsFile"] == f"{container_hosts.home(OURS)}/mpi_known_hosts"
    assert lines["Port"] == str(OURS.images().ssh_port)
