"""Text from hosts, files and programs can neither control the terminal nor look like a message of provision."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from provision import inventory
from provision.base import terminal
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.terminal import Console
from provision.bench import page, results
from provision.bench.results import Measurements
from provision.catalog import OURS
from provision.cli.bench import tables
from provision.cli.main import guarded
from provision.doctor import show
from provision.doctor.checks import examine
from provision.image.output import BuildOutput
from provision.install.removal import HostRemoval
from provision.launch.rank_output import RankOutput
from provision.plan import summary
from provision.plan.requirements import Requirements
from provision.remote.ansible import Event, Kind
from provision.remote.progress import LiveProgress, Progress
from provision.remote.stage import Stage
from provision.remote.stage_view import stage_view
from provision.report import model
from provision.resolve import resolve
from provision.survey import collect
from provision.survey.document import BEGIN, END, load_file, parse_survey
from provision.survey.preflight import host_problems

DATA = Path(__file__).parents[2] / "data"
FORGED = "ready: 2 hosts, 99.00 %, 3 s"
ATTACKS = {
    "forged verdict": f"\r\x1b[1A\x1b[32m{FORGED}\x1b[0m",
    "forged line": f"well\n{FORGED}\r\n{FORGED}",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x1b\\",
    "clear screen": "\x1b[2J\x1b[H\x1bc",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "C1": "\x9b2J\x9d0;owned\x9c",
    "order of letters": "\u202egpj.exe\u2066\u200f",
    "backspaces": "error\x08\x08\x08\x08\x08ready",
    "markup": "[bold green]all hosts ready[/] [link=http://evil.example]click[/link] [/nothing]",
    "surrogate": "\udc9b2J",
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)


def plain_console(stream: io.StringIO) -> Console:
    """As on a terminal, but without colours and cursor: every control character in the stream is then the attacker's."""
    return Console(file=stream, width=160, force_terminal=True, color_system=None)


def assert_harmless(shown: str) -> None:
    odd = {letter for letter in shown if not letter.isprintable() and letter != "\n"}
    assert not odd, f"{odd} in {shown!r}"
    assert not [line for line in shown.splitlines() if line.startswith(FORGED)], shown
    shown.encode()


def planted(value: Any, attack: str) -> Any:
    """The value with the attack behind every text in it."""
    if isinstance(value, str):
        return value + attack
    if isinstance(value, dict):
        return {name: planted(each, attack) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(planted(each, attack) for each in value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: planted(getattr(value, name), attack) for name in type(value).model_fields})
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **{name: planted(each, attack) for name, each in given.items()})
    return value


def shown_by(print_it: Callable[[Console], object]) -> str:
    stream = io.StringIO()
    print_it(plain_console(stream))
    return stream.getvalue()


REPORT = model.Report(
    run_id="run", folder="/runs/1", inventory="hosts.ini",
    hosts=[model.HostReport(
        host="a", state="ready", openmpi="4.1.8", cmake="3.31", python="3.12", torch="2.13", nccl="2.26", engine="1.0",
        steps={"linker": "will change"},
    )],
    failures=[Problem("error", "make: *** [all] Error 1", "read the log", host="b", where="engine / Build it")],
    notes=["a: little memory"], smoke={"np": 2}, smoke_summary="MNIST: 2 ranks",
    smoke_faults=[Problem("error", "rank 1 did not take part")],
)  # fmt: skip
REMOVALS = [
    HostRemoval("a", "removed", removed=["the package x"], left=[{"what": "x", "why": "y"}], problem=Problem("error", "it failed", "again"))
]
PROBLEMS = [Problem("error", "its disk is full", "free it", host="a")]


@every_attack
@pytest.mark.parametrize(
    ("print_it", "value"),
    [(lambda value, console: model.show(value, console), REPORT), (model.show_removals, REMOVALS), (model.show_problems, PROBLEMS)],
    ids=["report", "removals", "problems"],
)
def test_reports(print_it: Callable[[Any, Console], object], value: Any, attack: str) -> None:
    clean = shown_by(lambda console: print_it(value, console))
    shown = shown_by(lambda console: print_it(planted(value, attack), console))
    assert_harmless(shown)
    assert len(shown) > len(clean)
    if attack == ATTACKS["markup"]:
        assert "[bold green]all hosts ready[/]" in shown


@every_attack
@pytest.mark.parametrize("make", [Progress, LiveProgress])
def test_events_of_hosts(make: Callable[[Console], Progress], attack: str) -> None:
    def go(console: Console) -> None:
        progress = make(console)
        progress.plan(f"title{attack}", [(f"about{attack}", f"text{attack}")], (f"more{attack}", f"command{attack}"))
        progress.line(f"said: {attack}", "green")
        for kind in ("ok", "changed", "failed", "unreachable", "tolerated", "waiting"):
            result = {"msg": attack, "stderr": attack, "holder": attack}
            progress.event(Event(kind, f"host{attack}", f"role{attack}", f"task{attack}", result))  # type: ignore[arg-type]

    assert_harmless(shown_by(go))


@every_attack
@pytest.mark.parametrize("kind", ["failed", "waiting"])
def test_the_live_view(kind: Kind, attack: str) -> None:
    def go(console: Console) -> None:
        stage = Stage.of(f"title{attack}", [f"host{attack}"], 0.0, [f"role{attack}"])
        stage.event(Event(kind, f"host{attack}", f"role{attack}", f"task{attack}", {"msg": attack, "stdout": attack}), 1.0)
        console.print(stage_view(stage, 2.0, console.width, 20))

    assert_harmless(shown_by(go))


@every_attack
def test_the_output_of_image_builds(attack: str) -> None:
    def go(console: Console) -> None:
        output = BuildOutput(io.StringIO(), Progress(console))
        for line in (f"#5 [system 2/2] RUN {attack}", f"#5 0.1 {attack}", attack):
            output.note(line)
        output.doing(attack)

    assert_harmless(shown_by(go))


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every text in a document."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from texts(each, (*path, key))


def with_text(value: Any, path: tuple[Any, ...], attack: str) -> Any:
    if not path:
        return value + attack
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_text(value[path[0]], path[1:], attack)
    return copy


def surveyed() -> dict[str, dict[str, Any]]:
    found = {"new": load_file(DATA / "plans" / "blackwell-580.json", OURS)["b200"].model_dump()}
    for host in found.values():
        host["nvidia"] = {**host["nvidia"], "smi_error": "Failed to initialize NVML: Driver/library version mismatch"}
        host["packages"] = {"libnccl2": "2.21.5-1+cuda12.4", "libnccl-dev": "2.20.5-1+cuda12.4"}
        host["signs"] = {**host["signs"], "kernel_log": ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."]}
        host["environment"] = {**host["environment"], "variables": {"NCCL_SOCKET_IFNAME": "eth7"}}
    return found


def test_every_fact_on_the_ways_of_survey_plan_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """Each text of the facts in turn: whatever comes of it, a table, a plan, a finding or an error, is harmless."""
    attack = "".join(ATTACKS.values())
    clean = surveyed()
    places = list(texts(clean))
    assert len(places) > 20
    for place in places:
        hosts = with_text(clean, place, attack)

        def views(console: Console, answered: dict[str, Any] = hosts) -> None:
            hosts = {name: parse_survey(f"{BEGIN}\n{json.dumps(each)}\n{END}", OURS) for name, each in answered.items()}
            console.print(terminal.table(collect.summary(hosts)))
            problems = [one for name, each in hosts.items() for one in host_problems(name, each, OURS, needed_mb=0, prefix="/opt")]
            model.show_problems(problems, console)
            found = examine(hosts, problems, catalog=OURS)
            show.overview(found, list(hosts), console)
            show.findings(found, console, examined="on 2 hosts", searched="60 checks")
            summary.show(resolve(hosts, Requirements(engine_version="1.0"), {}), console)

        stream = io.StringIO()
        guarded(lambda views=views, stream=stream: views(plain_console(stream)), debug=False)
        said = capsys.readouterr()
        assert "internal error" not in said.err, f"{place}: {said.err}"
        assert_harmless(stream.getvalue() + said.out + said.err)


@every_attack
@pytest.mark.parametrize("debug", [False, True])
def test_errors(attack: str, debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ProvisionError(attack, where=attack, hint=attack), ValueError(attack)):

        def fail(error: Exception = error) -> None:
            raise error

        assert guarded(fail, debug=debug) == 1
        said = capsys.readouterr()
        assert_harmless(said.err)
        assert said.err.startswith("Traceback" if debug else "provision: ")


@every_attack
def test_names_of_hosts_in_an_inventory(attack: str, tmp_path: Path) -> None:
    if "\udc9b" in attack:
        pytest.skip("no YAML")
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": {f"node1{attack}": {"ansible_host": "192.0.2.1"}}}}))
    with pytest.raises(inventory.InventoryError) as refused:
        inventory.load(str(tmp_path / "hosts.yml"))
    about_it = [each for each in refused.value.problems if "is not a host name" in each.what]
    assert len(about_it) == (0 if "[" in attack else 1), "once each; to Ansible itself, what is in brackets is a range"
    assert not refused.value.where or refused.value.where.isprintable()


def test_control_characters_in_the_name_or_address_of_a_host_are_refused(tmp_path: Path) -> None:
    for name, address in (("node1\x07", "192.0.2.1"), ("node1\u202e", "192.0.2.1"), ("node1", "192.0.2.1\x9b2J")):
        (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": {name: {"ansible_host": address}}}}))
        with pytest.raises(inventory.InventoryError, match=r"is not a host name|must be a host name or an address"):
            inventory.load(str(tmp_path / "hosts.yml"))


@every_attack
def test_a_document_for_programs_loses_nothing(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"said": attack})
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert json.loads(shown) == {"said": attack}


@every_attack
def test_the_page_of_a_benchmark(attack: str) -> None:
    sums = [
        {"bytes": 4096, "latency_us": {"median": 50.0}, "busbw_gbs": 0.1},
        {"bytes": 16 << 20, "latency_us": {"median": 9000.0}, "busbw_gbs": 1.0},
    ]
    names = [f"a{attack}<script>", "b"]
    document = {
        "when": f"today{attack}",
        "hosts": [{"name": name, "slots": 2} for name in names],
        "pairs": [{"hosts": names, "results": sums, "limit_gbs": 2.5}],
        "ranks": [{"np": 2, "hosts": names, "results": sums, "limit_gbs": 3.0}],
        "training": [
            {"np": 2, "hosts": names, "samples_per_second": {"median": 900.0}, "alone": {"median": 1000.0}, "efficiency": {"median": 0.9}}
        ],
    }
    measurements = Measurements.model_validate(document)
    made = page.render(measurements, results.compare(measurements, measurements))
    assert_harmless(made)
    assert "<script" not in made
    assert "<polyline" in made, "what the page draws itself is no text"
    for _, rows in tables(measurements):
        assert_harmless(shown_by(lambda console, rows=rows: console.print(terminal.table(rows))))


# ------------------------------------------------------------------------------------- what programs of the user's print


def on_a_terminal(print_it: Callable[[Console], object]) -> str:
    """What reaches a real terminal."""
    controller, terminal_ = pty.openpty()
    try:
        with os.fdopen(terminal_, "w") as stream:
            print_it(Console(file=stream, width=160, color_system="standard"))
            stream.flush()
            return os.read(controller, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(controller)


@every_attack
def test_a_program_cannot_control_the_terminal(attack: str) -> None:
    if "\n" in attack:
        pytest.skip("its lines come one by one")
    shown = on_a_terminal(lambda console: console.program(attack, "cyan", tag="[0] "))
    assert shown.startswith("\x1b[36m[0] "), shown
    assert_harmless(re.sub(r"\x1b\[[0-9;]*m", "", shown))
    assert_harmless(re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(lambda console: console.content(attack))))


def test_a_program_keeps_its_colours_and_the_last_state_of_its_progress_bar() -> None:
    assert on_a_terminal(lambda console: console.program("\x1b[31mloss\x1b[0m 0.5", tag="[0] ")) == "[0] \x1b[31mloss\x1b[0m 0.5\n"
    assert on_a_terminal(lambda console: console.program("  0%|   |\r 50%|#  |\r100%|###|\r", tag="[0] ")) == "[0] 100%|###|\n"
    assert on_a_terminal(lambda console: console.program("\x1b]0;title\x07\x1b[2J\x1b[?25lstep 1 größer ✓")) == "step 1 größer ✓\n"
    assert on_a_terminal(lambda console: console.program("\x1b\x1b[2J[2Jx")) == "[2Jx\n", "what is left makes no new sequence"


@every_attack
def test_output_into_a_pipe_and_files_of_ranks_is_unchanged(attack: str, tmp_path: Path) -> None:
    stream = io.StringIO(newline="")
    console = Console(file=stream)
    console.program(attack)
    console.content(attack)
    assert stream.getvalue() == f"{attack}\n{attack}"
    if "\udc9b" not in attack:
        output = RankOutput(Progress(), folder=tmp_path)
        output(f"[1,0]<stdout>:{attack}")
        output.close()
        assert (tmp_path / "rank.0" / "stdout").read_bytes() == f"{attack}\n".encode()


def test_a_log_that_the_doctor_quotes_on_a_real_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"RuntimeError: CUDA out of memory \x1b]0;owned\x07\x9b2J \u202e[link=x]y[/link]\r{FORGED}\n")
    controller, terminal_ = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "provision", "doctor", "--log", str(tmp_path / "job.log")],
        stdin=terminal_, stdout=terminal_, stderr=terminal_, env={**os.environ, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(terminal_)
        shown = b""
        while data := read_pty(controller):
            shown += data
    os.close(controller)
    assert process.returncode == 1
    text = shown.decode().replace("\r\n", "\n")
    assert "CUDA out of memory" in text
    assert_harmless(re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert "[link=x]y[/link]" in text


def read_pty(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # so Linux says that the other side is closed
        return b""


# -------------------------------------------------------------------------------------------------- nothing goes past it


def test_lint_forbids_other_ways_to_print() -> None:
    code = [
        "import sys, click, typer",
        "from sys import stderr",
        "from rich.console import Console",
        "from rich import print as say",
        "print('x')",
        "typer.echo('x')",
        "typer.confirm('x')",
        "sys.stdout.write('x')",
    ]

    def refused(name: str) -> list[int]:
        command = [sys.executable, "-m", "ruff", "check", "--select=T20,TID251", "--output-format=json", f"--stdin-filename={name}", "-"]
        done = subprocess.run(command, input="\n".join(code), capture_output=True, text=True, cwd=DATA.parents[1], timeout=60, check=False)
        return sorted({each["location"]["row"] for each in json.loads(done.stdout)})

    assert refused("provision/doctor/new.py") == list(range(1, len(code) + 1))
    assert refused("benchmarks/new.py") == []
