"""A run's report: the document that programs read keeps its keys."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from documents import REPORT

from provision.base import paths
from provision.base.problems import Problem
from provision.base.terminal import Console
from provision.catalog import OURS
from provision.install.removal import HostRemoval
from provision.inventory import Host, last_run
from provision.report.model import HostReport, Report, commands_after, show, show_problems, show_removals
from provision.survey.collect import connection_problem

# Key by key, without those that may be left out.


def test_a_report_is_read_and_written_as_it_was() -> None:
    read = Report.model_validate(REPORT)
    assert read.failures == [
        Problem("error", "make: *** [all] Error 1", "read the log", host="a", where="engine / Build it", id="task-failed")
    ]
    assert read.hosts[0].steps == {"linker": "will change"}
    assert read.as_dict() == {**REPORT, "command": "", "began": None, "environment": None, "np": None, "simulated": []}
    assert list(read.as_dict())[:2] == ["schema", "ok"]


def test_a_report_grows_while_a_run_goes_on_and_is_written_whatever_hosts_have_said() -> None:
    report = Report(run_id="r", folder="/f", inventory="hosts.ini")
    assert report.ok
    report.hosts.append(HostReport(host="a", state="blocked"))
    report.failures.append(Problem("error", "bytes that are no text: \udcff", host="a", where="survey", id="x"))
    written = json.loads(json.dumps(report.as_dict()))
    assert not written["ok"]
    failure = {"id": "x", "severity": "error", "host": "a", "where": "survey", "what": "bytes that are no text: \udcff", "hint": None}
    assert written["failures"] == [failure]


def test_the_last_run_is_the_newest_report_that_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    for number, content in enumerate((json.dumps(REPORT), '{"inventory": "/home/me/hosts.ini"}', "[1]", "{")):
        folder = paths.runs() / f"2026112{number}"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(content, encoding="utf-8")
    assert last_run.newest_failed_inventory() == REPORT["inventory"]
    assert last_run.newest_inventory() is None


def shown(report: Report, width: int) -> list[str]:
    stream = io.StringIO()
    show(report, Console(file=stream, width=width, color_system=None), commands_after(report, "my hosts.ini", ["my hosts.ini"]))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "nccl"), [(80, "-"), (80, "2.30.7+cuda12.9"), (120, "2.30.7+cuda12.9")])
@pytest.mark.parametrize("count", [1, 2, 9, 16])
def test_the_closing_table_fits_the_terminal_and_names_stay_whole(width: int, nccl: str, count: int) -> None:
    versions = {"openmpi": "4.1.8", "cmake": "3.31.6", "python": "3.11.2", "torch": "2.13.0+cpu", "nccl": nccl, "engine": "0.1.0"}
    names = [f"worker-{number:03}.lan" for number in range(1, count + 1)]
    report = Report(
        run_id="r",
        folder="/f",
        inventory="hosts.ini",
        np=4,
        smoke={"np": "2; evil", "epochs": [{"test_accuracy_percent": 95.211}]},
        seconds=119,
    )
    report.hosts = [HostReport(host=name, state="ready", changed=20, seconds=92, **versions) for name in names]
    lines = shown(report, width)
    assert max(map(len, lines)) <= width
    assert lines[0] == f"ready: {count} host{'s' * (count > 1)}, 1 min 59 s"
    assert [line.split()[0] for line in lines[2 : count + 2]] == names
    assert "2.13.0+cpu" in "".join(lines)
    assert ("NCCL" in "".join(lines)) == (nccl != "-")
    assert (any(line.startswith("on all hosts: Open MPI 4.1.8, ") for line in lines)) == (width == 80)
    assert lines[-3:] == [
        "all about this run: /f",
        "Next: provision run 'my hosts.ini' -np 4 train.py  (your own program)",
        "      provision runs report --open  (this run as a page)",
    ]


def test_many_hosts_are_a_row_for_those_that_are_alike_and_their_failures_one() -> None:
    names = [f"node{number}" for number in range(1, 31)]
    report = Report(run_id="r", folder="/f", inventory="hosts.ini")
    report.hosts = [HostReport(host=name, state="failed" if at < 2 else "installed", seconds=at) for at, name in enumerate(names)]
    refused = "ssh refused the login (ann@192.0.2.{}: Permission denied)"
    report.failures = [
        Problem("error", refused.format(at), f"try it by hand: ssh 192.0.2.{at}", host=name, where="survey", id="unreachable")
        for at, name in enumerate(names[:2])
    ]
    lines = shown(report, 80)
    assert [line.split() for line in lines[2:4]] == [["node[1-2]", "failed", "0", "1", "s"], ["node[3-30]", "installed", "0", "29", "s"]]
    assert lines[4:6] == ["node[1-2]: survey: ssh refused the login (ann@HOST: Permission denied)", "  → try it by hand: ssh HOST"]


TRAINED = {
    "schema": 1,
    "dataset": "digits",
    "np": 1,
    "hosts": {},
    "participants": [],
    "bar_percent": 90.0,
    "images_per_second": 9.0,
    **dict.fromkeys(("one_rank_images_per_second", "speedup", "efficiency", "without_communication_images_per_second"), None),
    "efficiency_of_communication": None,
    "epochs": [{"epoch": 1, "test_accuracy_percent": 95.211}],
}


@pytest.mark.parametrize("epochs", [[{}], 5, "abc", {"a": 1}, [3], [{"epoch": 1, "test_accuracy_percent": "x"}], []])
def test_the_verdict_names_the_accuracy_of_a_valid_report_alone(epochs: object) -> None:
    """A host may report anything."""
    report = Report(run_id="r", folder="/f", inventory="hosts.ini", smoke=TRAINED, seconds=97)
    assert shown(report, 80)[0] == "ready: 0 hosts, 95.21 %, 1 min 37 s"
    report.smoke = {**TRAINED, "epochs": epochs}
    assert shown(report, 80)[0] == "ready: 0 hosts, 1 min 37 s"


def follows(report: Report, *typed: str, limit: str | None = None, check: bool = False) -> list[str]:
    return [line.split("  ")[0] for line in commands_after(report, "h.ini", typed, limit=limit, check=check)]


def test_what_follows_depends_on_how_the_run_ended() -> None:
    report = Report(run_id="r", folder="/f", inventory="h.ini", hosts=[HostReport(host="a", state="unchanged")])
    dry = follows(report, "h.ini", "--check", "--bundle", "my file", check=True)
    assert dry == ["provision runs report --open", "provision h.ini --bundle 'my file'"]
    assert follows(report, "h.ini") == ["provision smoke h.ini", "provision run h.ini train.py"]
    assert follows(report, "h.ini", "--limit", "a", limit="a") == [
        "provision smoke h.ini --limit a",
        "provision run h.ini --limit a train.py",
    ]
    report.smoke_faults.append(Problem("error", "rank 1 did not take part"))
    assert follows(report, "up", "h.ini", "--cpu") == ["provision doctor h.ini", "provision up h.ini --cpu"]
    report.smoke_faults, report.failures = [], [Problem("error", "it failed", host="a", where="engine")]
    assert follows(report, "h.ini", "--cpu") == ["provision doctor h.ini", "provision h.ini --cpu --limit @failed"]
    assert follows(report, "h.ini", "--limit", "a", limit="a") == ["provision doctor h.ini --limit a", "provision h.ini --limit a"]


def test_hosts_that_failed_are_named_only_where_there_are_any() -> None:
    report = Report(run_id="r", folder="/f", inventory="h.ini", hosts=[HostReport(host="a", state="installed")])
    report.failures = [Problem("error", "no space left", host="controller", where="training")]
    assert follows(report, "h.ini", "--bundle", "x") == ["provision doctor h.ini", "provision h.ini --bundle x"]
    again = follows(report, "h.ini", "--limit", "@failed", limit="@failed")
    assert again == ["provision doctor h.ini --limit a", "provision h.ini --limit a"], "they did not fail now"
    report.failures, report.hosts[0].state = [], "blocked"
    report.failures = [Problem("error", "no route", host="b", where="survey")]
    assert follows(report, "h.ini")[1] == "provision h.ini --limit @failed"


def test_a_removal_that_is_the_same_on_several_hosts_is_told_once() -> None:
    packages = "38 packages: " + " ".join(f"package-{number}" for number in range(38))
    removals = [HostRemoval(f"node{number}", "removed", removed=[packages], left=[{"what": "x", "why": "y"}]) for number in range(1, 17)]
    removals[4].problem = Problem("error", "it failed", id="x")
    for width, is_terminal in ((80, True), (200, False)):
        stream = io.StringIO()
        show_removals(removals, Console(file=stream, width=width, force_terminal=is_terminal, color_system=None))
        lines = [line.rstrip() for line in stream.getvalue().splitlines()]
        assert [line for line in lines if not line.startswith(" ")] == ["node[1-4,6-16]: removed", "node5: removed"]
        assert lines.count("  stays: x: y") == 2
        assert max(map(len, lines)) <= (80 if is_terminal else len(packages) + 4)
        assert "  it failed" in lines


CLOSED = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535"


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (CLOSED, "no connection by way of the jump host ops@192.0.2.9: that, or what is behind it, does not answer"),
        (
            "Connection timed out during banner exchange\r\nConnection to UNKNOWN port 65535 timed out",
            "no connection by way of the jump host",
        ),
        (
            f"ssh: connect to host 192.0.2.9 port 22: Connection refused\r\n{CLOSED}",
            "the jump host 192.0.2.9 cannot be used: Connection refused",
        ),
        (
            f"ssh: Could not resolve hostname bastion: Name or service not known\r\n{CLOSED}",
            "the jump host bastion cannot be used: Name or",
        ),
        (f"ops@192.0.2.9: Permission denied (publickey).\r\n{CLOSED}", "the jump host 192.0.2.9 cannot be used: Permission denied"),
    ],
)
def test_a_jump_host_that_is_down_is_reported_once_for_the_hosts_behind_it(message: str, what: str) -> None:
    jump = {"ansible_ssh_common_args": "-o ProxyJump=ops@192.0.2.9"}
    found = [connection_problem(Host(name, name, variables=jump), message, OURS) for name in ("gpu1", "gpu2", "gpu3")]
    printed = io.StringIO()
    show_problems(found, Console(file=printed, width=200, color_system=None))
    assert printed.getvalue().startswith(f"gpu[1-3]: error: {what}")
    assert printed.getvalue().count("error: ") == 1


def test_a_thousand_hosts_that_do_not_answer_are_one_problem() -> None:
    at = {f"gpu{number}": f"10.0.{number // 250}.{number % 250}" for number in range(1000)}
    said = "ssh: connect to host {} port 22: Connection timed out"
    found = [connection_problem(Host(name, address), said.format(address), OURS) for name, address in at.items()]
    found.append(connection_problem(Host("a", "a"), "Permission denied (publickey,gssapi-with-mic).", OURS))
    printed = io.StringIO()
    show_problems(found, Console(file=printed, width=200, color_system=None))
    lines = printed.getvalue().splitlines()
    assert lines[0] == "gpu[0-999]: error: it does not answer (connect to host HOST: Connection timed out)"
    assert lines[1].endswith("--limit '!HOST'")
    assert lines[2].startswith("a: error: ")
    assert "HOST" not in "".join(lines[2:])


def test_many_problems_are_cut_after_the_errors() -> None:
    found = [Problem("warning", f"its clock is {number} s ahead", id="clock-skew-make", host=f"host{number}") for number in range(500)]
    found.append(Problem("error", "the disk is full", id="disk-full", host="last"))
    names = [f"{number:x}-{number * 7919:x}" for number in range(500)]
    found += [Problem("error", "there is no Python 3", id="python-missing", host=name) for name in names]
    printed = io.StringIO()
    show_problems(found, Console(file=printed, width=200, color_system=None))
    lines = printed.getvalue().splitlines()
    assert lines[0] == "last: error: the disk is full"
    assert lines[1] == f"{names[0]}, {names[1]} and 498 more: error: there is no Python 3"
    assert (len(lines), lines[-1]) == (21, "and 482 more problems: all with provision survey --json")


def test_a_host_that_its_jump_host_does_not_reach_is_reported_itself() -> None:
    message = f"channel 0: open failed: connect failed: Connection refused\r\nstdio forwarding failed\r\n{CLOSED}"
    assert connection_problem(Host("gpu1", "gpu1"), message, OURS).what.startswith("nothing listens on its ssh port")


def test_every_problem_has_an_id() -> None:
    """Programs tell problems apart by it."""
    without = []
    for path in (Path(__file__).parents[3] / "provision").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem"
            if called and "id" not in {each.arg for each in node.keywords}:  # type: ignore[attr-defined]
                without.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]
    assert without == []
