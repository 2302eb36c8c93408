"""Running an image on hosts: what is decided before and between. The engines themselves are in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed, stated

from provision.base.errors import UsageError
from provision.cli import main
from provision.doctor.checks import examine
from provision.image import run, verification
from provision.image.run import Engine
from provision.remote.ssh import Answer


def test_an_engine_is_read_from_what_a_host_prints() -> None:
    found = run.read_engine(f"Welcome!\n{run._MARK}\nsudo -n docker\nyes\n2026-a\n2026-a\n2026-b\n")
    assert found == Engine("sudo -n docker", True, frozenset({"2026-a", "2026-b"}))
    assert run.read_engine(f"{run._MARK}\ndocker\nno\n") == Engine("docker", False)


def test_a_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file") as refused:
        run._attributes_here(str(tmp_path / "image.tar"))
    assert "docker load -i FILE" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("gpus", "nvidia", "ports", "words"),
    [([], True, [], []), ([{}], False, [], []), ([{}], True, [], ["--gpus"]), ([{}], True, [{}], ["--gpus", "--device"])],
)
def test_a_container_gets_what_the_host_has(gpus: list[Any], nvidia: bool, ports: list[Any], words: list[str]) -> None:
    found = stated({"memory": {"total_mb": 8192}, "gpus": gpus, "infiniband": ports})
    given = run.container_options(found, Engine("docker", nvidia))
    assert given[:2] == ["--shm-size", str(4096 << 20)]
    assert [word for word in given[2:] if word.startswith("--")] == words


def test_devices_that_a_container_was_not_given_are_no_fault_of_the_image() -> None:
    seen = {"pci_devices": ["10de:20b0"], "smi_error": None, "nouveau": False, "fabric_manager": False, "peer_memory": False}
    limits = {"memlock": {"soft": 64 << 10, "hard": 64 << 10}}
    driver = {"version": "550.54", "cuda": "12.4"}
    host = stated({"infiniband": [{"state": "active"}], "nvidia": seen, "driver": driver, "gpus": [], "limits": limits})
    faults = [finding.id for finding in examine({"node1": host}, {}, {}) if finding.severity == "error"]
    assert {"libcuda-missing", "rm-init-adapter-failed"} <= set(faults), "doctor says so of a host"
    assert [
        finding.id for finding in examine({"node1": verification.facts_of_container(host)}, {}, {}) if finding.layer in ("driver", "nccl")
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

    message, way = run.engine_problem(Session, "node1", answer)  # type: ignore[arg-type]
    assert what in message
    assert hint in way


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to run"),
        ("--smoke -- python x.py", "exclude each other"),
        ("--epochs 2 -- python x.py", "need --smoke"),
        ("--volume data:/data --smoke", "not a pair of folders"),
        ("--python /usr/bin/python3 -- python x.py", "the image has its own"),
    ],
)
def test_contradicting_options_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main.guarded(lambda: main.app(args=["image", "run", "localhost", "x:1", *words.split()], prog_name="provision"), debug=False)
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("a x:1 -np 2 -- python t.py --keep -np 9", {"np": 2, "keep": False}, "python t.py --keep -np 9"),
        ("a x:1 -np 2 t.py --debug --limit b --smoke", {"np": 2}, "python t.py --debug --limit b --smoke"),
        ("--keep a -np 2 x:1 -v /a:/b t.py -v x", {"np": 2, "keep": True, "volumes": ("/a:/b",)}, "python t.py -v x"),
        ("a x:1 --no-python -- -weird --epochs 2", {"np": None}, "-weird --epochs 2"),
        ("a x:1 sh -c -- true", {}, "sh -c -- true"),
    ],
)
def test_what_follows_the_program_is_the_programs(
    words: str, options: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def started(inventory: Any, image: str, job: Any, *_: Any) -> Any:
        seen.append((inventory.argument, image, {"keep": job.keep, "volumes": job.volumes, **vars(job.program)}))
        return run.Result(0)

    monkeypatch.setattr(run, "run", started)
    monkeypatch.setattr("sys.argv", ["provision", "image", "run", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0, capsys.readouterr().err
    hosts, image, found = seen[0]
    assert (hosts, image, found["command"]) == ("a", "x:1", tuple(command.split()))
    assert {name: found[name] for name in options} == options


def test_options_after_the_image_are_ours_where_no_program_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run, "run", lambda *given: seen.append(given[2]) or run.Result(0))
    assert main.guarded(lambda: main.app(args=["image", "run", "a", "x:1", "--smoke", "--keep"], prog_name="provision"), debug=False) == 0
    assert (seen[0].program, seen[0].keep) == (None, True)
