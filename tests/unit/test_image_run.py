"""Running an image on hosts: what is decided before and between. The engines themselves are in the integration tests."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed, stated

from provision.base.errors import UsageError
from provision.cli import main
from provision.doctor.checks import examine
from provision.image import archive, job_containers, labels, remote_engines, verification
from provision.image.remote_engines import Engine
from provision.remote.ssh import Answer

LAYERS = [b"first" * 1000, b"second", b"first" * 1000]


def saved(path: Path, images: int = 1) -> Path:
    """A file as `docker save` writes it: a layer that comes twice is a link to the first."""
    config = {
        "architecture": "amd64",
        "config": {"Labels": {"org.provision.image": "x"}},
        "rootfs": {"diff_ids": ["sha256:a", "sha256:b", "sha256:a"]},
    }
    manifest = [{"Config": "c.json", "RepoTags": ["mine:1"], "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"]}] * images
    with tarfile.open(path, "w") as tar:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))

        for number, layer in enumerate(LAYERS[:2], 1):
            add(f"{number}/layer.tar", layer)
        link = tarfile.TarInfo("3/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../1/layer.tar"
        tar.addfile(link)
        add("c.json", json.dumps(config).encode())
        add("manifest.json", json.dumps(manifest).encode())
    return path


def test_an_archive_tells_what_the_engine_would(tmp_path: Path) -> None:
    found = archive.read(saved(tmp_path / "image.tar"))
    assert labels.read("x", found.attributes).labels["org.provision.image"] == "x"
    assert found.name == "mine:1"
    assert found.sizes == tuple(map(len, LAYERS))


def test_an_archive_is_written_under_the_runs_name_alone(tmp_path: Path) -> None:
    out = io.BytesIO()
    archive.read(saved(tmp_path / "image.tar")).write(out, "run:1")
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        (manifest,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        assert manifest["RepoTags"] == ["run:1"]
        assert [tar.extractfile(name).read() for name in manifest["Layers"]] == LAYERS  # type: ignore[union-attr]


def test_what_is_no_archive_of_one_image_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "image.tar").read_bytes()
    for content, said in ((whole[:3000], "damaged"), (b"", "damaged"), (saved(tmp_path / "two.tar", 2).read_bytes(), "holds 2 images")):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UsageError, match=said):
            archive.read(tmp_path / "bad")


@pytest.mark.parametrize(
    ("lines", "nvidia"),
    [
        (['runtimes {"runc":{}}'], False),
        (['runtimes {"nvidia":{"path":"x"},"runc":{}}'], True),
        (['runtimes {"runc":{}}', "/usr/bin/nvidia-container-cli"], True),
    ],
)
def test_what_an_engine_says_of_itself(lines: list[str], nvidia: bool) -> None:
    told = ["sudo -n docker", "container 2026-a 1234", "image 2026-a provision-run:2026-a", *lines]
    found = remote_engines._read(told)
    assert found.docker == "sudo -n docker"
    assert found.nvidia is nvidia
    assert [run for run, _line in found.left] == ["2026-a", "2026-a"]
    assert "sudo -n docker" in remote_engines._calling(found, "docker ps")


@pytest.mark.parametrize(
    ("gpus", "nvidia", "ports", "words"),
    [([], True, [], []), ([{}], False, [], []), ([{}], True, [], ["--gpus"]), ([{}], True, [{}], ["--gpus", "--device"])],
)
def test_a_container_gets_what_the_host_has(gpus: list[Any], nvidia: bool, ports: list[Any], words: list[str]) -> None:
    found = stated({"memory": {"total_mb": 8192}, "gpus": gpus, "infiniband": ports})
    given = job_containers._resources(found, Engine("docker", nvidia, ()))
    assert given[:2] == ["--shm-size", str(4096 << 20)]
    assert [word for word in given[2:] if word.startswith("--")] == words


def test_what_a_container_cannot_use_of_its_host_is_no_fault_of_the_image() -> None:
    seen = {"pci_devices": ["10de:20b0"], "smi_error": None, "nouveau": False, "fabric_manager": False, "peer_memory": False}
    limits = {"memlock": {"soft": 64 << 10, "hard": 64 << 10}}
    driver = {"version": "550.54", "cuda": "12.4"}
    host = stated({"infiniband": [{"state": "active"}], "nvidia": seen, "driver": driver, "gpus": [], "limits": limits})
    faults = [finding.id for finding in examine({"node1": host}, {}, {}) if finding.severity == "error"]
    assert {"libcuda-missing", "rm-init-adapter-failed"} <= set(faults), "doctor says so of a host"
    assert [
        finding.id for finding in examine({"node1": verification.of_container(host)}, {}, {}) if finding.layer in ("driver", "nccl")
    ] == []
    given = changed(host, gpus=[{"name": "A100"}])
    assert verification.of_container(given).driver == host.driver


@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        (Answer(71, "", ""), "no container engine", "docker.io"),
        (Answer(72, "", "permission denied while trying to connect"), "may not use", "usermod -aG docker me"),
        (Answer(72, "", "Cannot connect to the Docker daemon"), "does not answer", "systemctl start docker"),
        (Answer(None, "", ""), "in time", "docker info"),
    ],
)
def test_a_host_whose_engine_cannot_be_used_gets_a_way_out(answer: Answer, what: str, hint: str) -> None:
    class Session:
        class inventory:
            @staticmethod
            def host(_name: str) -> Any:
                return type("Host", (), {"user": "me"})

    said, way = remote_engines._trouble(Session, "node1", answer)  # type: ignore[arg-type]
    assert what in said
    assert hint in way


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to run"),
        ("--smoke -- python x.py", "exclude each other"),
        ("--epochs 2 -- python x.py", "about --smoke"),
        ("--volume data:/data --smoke", "no folder of hosts"),
        ("--python /usr/bin/python3 -- python x.py", "the image has its own"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main.guarded(lambda: main.app(args=["image", "run", "localhost", "x:1", *words.split()], prog_name="provision"), debug=False)
    assert code == 2
    assert said in capsys.readouterr().err
