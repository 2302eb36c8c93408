"""The job for Kubernetes: held against the operator's schema, and against the hosts that it is made for."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from provision import cli
from provision.image import manifest

DATA = Path(__file__).parents[1] / "data"
SCHEMA = yaml.safe_load((DATA / "mpijob-v2beta1.yaml").read_text(encoding="utf-8"))


def called(*words: str) -> int:
    facts = ["--facts", str(DATA / "lint-facts.json")]
    return cli.guarded(
        lambda: cli.app(args=["image", "manifest", str(DATA / "lint.ini"), *facts, *words], prog_name="provision"), debug=False
    )


def made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert called(*words) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    return found


def test_a_worker_per_host_with_what_the_host_has(capsys: pytest.CaptureFixture[str]) -> None:
    job = made(capsys, "--limit", "gpu1", "--image", "registry.example/gpu:1", "--", "python", "train.py", "--lr", "1")
    assert job["spec"]["slotsPerWorker"] == 4
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 1
    (container,) = worker["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/gpu:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["securityContext"]["runAsUser"] == 10001
    script = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "-np 4 " in script
    assert script.endswith("/opt/provision/venv/bin/python train.py --lr 1\n")
    assert "StrictHostKeyChecking yes" in script


def test_kubernetes_hands_the_program_on_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    job = made(capsys, "--limit", "node1", "--", "sh", "-c", "echo $$ $(HOSTNAME) ${HOME}")
    script = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"][-1]
    expanded = re.sub(r"\$(\$|\([A-Za-z_.-]+\))", lambda found: "$" if found[1] == "$" else "expanded", script)
    assert "expanded" not in expanded
    assert "sh -c 'echo $$ $(HOSTNAME) ${HOME}'" in expanded


def test_without_gpus_none_are_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = made(capsys, "--limit", "node1")
    text = str(job["spec"]["mpiReplicaSpecs"]["Worker"])
    assert "nvidia.com/gpu" not in text
    assert "collective_core.check" in str(job)
    assert called("--limit", "node1", "-o", str(tmp_path / "job.yaml")) == 0
    assert yaml.safe_load((tmp_path / "job.yaml").read_text()) == job


def test_the_schema_refuses_what_kubernetes_would_drop(capsys: pytest.CaptureFixture[str]) -> None:
    job = made(capsys, "--limit", "node1")
    for path, value in (("slotsPerWorkers", 1), ("slotsPerWorker", 0), ("mpiImplementation", "MPICH")):
        wrong = copy.deepcopy(job)
        wrong["spec"][path] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "these hosts need 2 images"),
        ("--limit node1 --name Job_1", "Kubernetes does not take it"),
        ("--limit node1 --image a:b:c", "a:b:c"),
        ("--limit node1 -o /nowhere/job.yaml", "cannot be written"),
    ],
)
def test_what_cannot_be_made_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*words.split()) == 2
    assert said in capsys.readouterr().err


def test_what_all_hosts_have_decides() -> None:
    large = {"cpu": {"cores": 8}, "memory": {"total_mb": 8192}, "gpus": [1, 2]}
    small = {"cpu": {"cores": 4}, "memory": {"total_mb": 4096}, "gpus": [1]}
    assert manifest._share([large, small]) == ({"cpu": "3", "memory": "3072Mi", "nvidia.com/gpu": 1}, "1536Mi")
