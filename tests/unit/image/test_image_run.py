"""Running an image on hosts: what is decided before and between. The engines themselves are in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed, stated

from provision.base.errors import UsageError
from provision.catalog import OURS
from provision.cli import main
from provision.doctor.checks import examine
from provision.image import containers, verification
from provision.image.containers import Engine
from provision.launch import program
from provision.remote.ssh import Answer


def test_an_engine_is_read_from_what_a_host_prints() -> None:
    found = containers.read_engine(f"Welcome!\n{containers._MARK}\nsudo -n docker\nyes\n2026-a\n2026-a\n2026-b\n")
    assert found == Engine("sudo -n docker", True, frozenset({"2026-a", "2026-b"}))
    assert containers.read_engine(f"{containers._MARK}\ndocker\nno\n") == Engine("docker", False)


def test_a_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="expected a name, not a file") as refused:
        containers._attributes_here(str(tmp_path / "image.tar"))
    assert "docker load -i FILE" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("gpus", "nvidia", "ports", "words"),
    [([], True, [], []), ([{}], False, [], []), ([{}], True, [], ["--gpus"]), ([{}], True, [{}], ["--gpus", "--device"])],
)
def test_a_container_gets_what_the_host_has(gpus: list[Any], nvidia: bool, ports: list[Any], words: list[str]) -> None:
    found = stated({"memory": {"total_mb": 8192}, "gpus": gpus, "infiniband": ports})
    given = containers.container_options(found, Engine("docker", nvidia))
    assert given[:2] == ["--shm-size", str(4096 << 20)]
    assert [word for word in given[2:] if word.startswith("--")] == words


def test_devices_that_a_container_was_not_given_are_no_fault_of_the_image() -> None:
    seen = {"pci_devices": ["10de:20b0"], "smi_error": None, "nouveau": False, "fabric_manager": False, "peer_memory": False}
    limits = {"memlock": {"soft": 64 << 10, "hard": 64 << 10}}
    driver = {"version": "550.54", "cuda": "12.4"}
    host = stated({"infiniband": [{"state": "active"}], "nvidia": seen, "driver": driver, "gpus": [], "limits": limits})
    faults = [finding.id for finding in examine({"node1": host}, {}, {}, catalog=OURS) if finding.severity == "error"]
    assert {"libcuda-missing", "rm-init-adapter-failed"} <= set(faults), "doctor says so of a host"
    assert [
        finding.id
        for finding in examine({"node1": verification.facts_of_container(host)}, {}, {}, catalog=OURS)
        if finding.layer in ("driver", "nccl")
    ] == []
    given = changed(host, gpus=[{"name": "A100"}])
    assert verification.facts_of_container(given).driver == host.driver


@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        (Answer(71, "", ""), "no container engine", "docker.io"),
        (Answer(72, "", "permission denied while trying to connect"), "may not use", "usermod -aG docker me"),
        (Answer(72, "", "Cannot connect to the Docker daemon"), "does not answer", "systemctl start docker"),
        (Answer(None, "", ""), "did not end in time", "docker info"),
    ],
)
def test_an_unusable_engine_gives_a_hint(answer: Answer, what: str, hint: str) -> None:
    class Session:
        class inventory:
            @staticmethod
            def host(_name: str) -> Any:
                return type("Host", (), {"user": "me"})

    message, way = containers.engine_problem(Session, "node1", answer)  # type: ignore[arg-type]
    assert what in message
    assert hint in way


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image x:1", "no program to run"),
        ("--image x:1 --volume data:/data -- python x.py", "expected a pair of folders"),
        ("--image x:1 --python /usr/bin/python3 -- python x.py", "the image has its own"),
        ("--volume /data:/data -- python x.py", "need --image"),
        ("--keep-image -- python x.py", "need --image"),
    ],
)
def test_contradicting_options_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main.guarded(lambda: main.app(args=["run", "--hosts", "localhost", *words.split()], prog_name="provision"), debug=False)
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("--hosts a --image x:1 -np 2 -- python t.py --keep-image -np 9", {"np": 2, "keep": False}, "python t.py --keep-image -np 9"),
        ("a,b --image x:1 --keep-image t.py --image y", {"np": None, "keep": True}, "python t.py --image y"),
        ("-H a:2 --image x:1 --volume /a:/b --no-python -- -weird", {"volumes": ("/a:/b",)}, "-weird"),
    ],
)
def test_a_programs_containers_are_started_on_the_hosts_of_the_run(
    words: str, options: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def launched(inventory: Any, program: Any, *_: Any, containers: Any, **_options: Any) -> int:
        seen.append((inventory.argument, {**containers.keywords, "np": program.np}, program.command))
        return 7

    monkeypatch.setattr(program, "run", launched)
    monkeypatch.setattr("sys.argv", ["provision", "run", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 7
    ((_, given, started),) = seen
    assert given["image"] == "x:1"
    assert {name: given[name] for name in options} == options
    assert started == tuple(command.split())
