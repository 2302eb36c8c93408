"""Runs of the main job one after the other, some of them on some hosts or failing on some: all hosts go on fitting together.

The real plan and lock; hosts are invented: what would be installed there is written into their facts.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from invented_hosts import changed
from rollouts import as_json
from typer.testing import CliRunner

from provision.base import run_folders
from provision.base.errors import Interrupted, ProvisionError
from provision.base.problems import Problem
from provision.catalog import OURS
from provision.cli import main
from provision.cli.options import inventory_of
from provision.commands import planning, up
from provision.doctor import fixes
from provision.doctor.host_checks import Examination
from provision.install import installer
from provision.install.rollout import Rollout
from provision.inventory import Inventory, last_run
from provision.plan import lock, lock_file
from provision.plan.model import Plan
from provision.plan.options import Options
from provision.plan.request import Request
from provision.remote.ansible import Event, HostResult, Outcome, Step
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.report import entries
from provision.report.model import HostReport, Report
from provision.survey import Facts
from provision.survey.collect import Survey

WITHOUT_TORCH = Options(torch=False, smoke=None)
M40 = {"name": "Tesla M40", "compute_capability": "5.2"}
A100 = {"name": "A100", "compute_capability": "8.0"}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIexample"


class Hosts:
    """Two hosts, of which ``b`` has the newer GPU: alone it would get a newer NCCL than next to ``a``."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "hosts.ini"
        self.file.write_text("a ansible_host=10.0.0.1\nb ansible_host=10.0.0.2\n")
        self.facts = {name: self._facts(f"10.0.0.{number}", gpu) for number, (name, gpu) in enumerate((("a", M40), ("b", A100)), 1)}
        self.failing: set[str] = set()
        self.steps: dict[str, Step] = {}
        self.unavailable = False
        self.interrupted = False
        self.installed: list[str] = []
        self.ends: Callable[[], object] | None = None

    @staticmethod
    def _facts(address: str, gpu: dict[str, str]) -> Facts:
        return Facts.model_validate(
            {
                "os": {"id": "ubuntu", "version": "22.04"},
                "arch": "x86_64",
                "driver": {"version": "580.95.05", "cuda": "13.0"},
                "gpus": [gpu],
                "python": {"version": "3.10.12", "executable": "/usr/bin/python3"},
                "network": {
                    "interfaces": [{"name": "eth0", "addresses": [f"{address}/24"], "up": True}],
                    "default_route_interface": "eth0",
                },
                "ssh": {"mesh_key": KEY},
                "user": {"name": "trainer", "can_become": True},
            }
        )

    def change(self, name: str, **sections: Any) -> None:
        self.facts[name] = changed(self.facts[name], **sections)

    def look(self, session: Session, *_: Any, **__: Any) -> Survey:
        return Survey({host.name: self.facts[host.name] for host in session.inventory.hosts})

    def install(self, session: Session, rollout: Rollout, on_complete: Callable[..., None], *, check: bool) -> installer.Installed:
        plan = rollout.plan
        if self.ends is not None:
            self.ends()
        if self.unavailable:
            raise ProvisionError("a file answers 404")
        results = {name: HostResult(steps=self.steps) for name in plan.hosts}
        for name in self.failing & set(plan.hosts):
            results[name].failure = Event("failed", name, "nccl", "Install it", {"msg": "out of plumbus"})
        for name in [name for name in plan.hosts if name not in self.failing and not check]:
            self.installed.append(name)
            on_complete(name, {})
            venv = {"path": "/opt/provision/venv", "python_version": "3.10.12", "works": True}
            self.change(name, installed={"manifest": as_json(rollout.manifests[name]), "venv": venv}, drift=[])
        if self.interrupted:
            raise Interrupted("on a")
        outcome = Outcome(2 if self.failing else 0, results, session.folder / "log")
        return installer.Installed(outcome, {}, [])

    def up(self, options: Options = WITHOUT_TORCH, limit: str | None = None) -> Report:
        self.installed.clear()
        return up.make_ready(self.inventory(limit), options, Progress(), {})

    def inventory(self, limit: str | None = None) -> Inventory:
        return inventory_of(str(self.file), limit)

    def nccl(self) -> dict[str, str | None]:
        """The NCCL that hosts hold."""
        held = {name: each.installed.plan for name, each in self.facts.items()}
        return {name: lock.release(host.nccl.version) if host and host.nccl else None for name, host in held.items()}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    made = Hosts(tmp_path)
    monkeypatch.setattr("provision.survey.collect.survey_hosts", made.look)
    monkeypatch.setattr("provision.install.installer.install", made.install)
    return made


def only(report: Report) -> str:
    (failure,) = report.failures
    return f"{failure.host}: {failure.what} → {failure.hint}"


def test_alone_the_host_with_the_newer_gpu_would_get_a_newer_nccl(hosts: Hosts) -> None:
    assert hosts.up(limit="b").ok
    alone = hosts.nccl()["b"]
    hosts.change("b", installed={})
    assert hosts.up(replace(WITHOUT_TORCH, upgrade=True)).ok
    assert hosts.nccl()["a"] == hosts.nccl()["b"] != alone


def test_the_hosts_that_failed_get_what_the_others_have(hosts: Hosts) -> None:
    hosts.failing = {"b"}
    assert "--limit @failed" in str(hosts.up().failures[0].hint)
    locked = lock_file.read(hosts.inventory())
    assert locked is not None
    assert locked.components["openmpi"][0].hosts == ("a",), "of b nothing is known"
    hosts.failing = set()
    again = hosts.up(limit="@failed")
    assert again.ok
    assert hosts.installed == ["b"]
    assert hosts.nccl()["a"] == hosts.nccl()["b"] is not None
    locked = lock_file.read(hosts.inventory())
    assert locked is not None
    assert locked.components["openmpi"][0].hosts == ("a", "b")
    before = hosts.nccl()
    assert hosts.up().ok
    assert hosts.nccl() == before


def test_where_all_have_failed_nothing_is_decided(hosts: Hosts) -> None:
    hosts.failing = {"a", "b"}
    hosts.up()
    assert not lock_file.path_of(hosts.inventory()).exists()
    hosts.failing = set()
    assert hosts.up(limit="b").ok
    assert "--upgrade" in only(hosts.up())
    assert hosts.up(replace(WITHOUT_TORCH, upgrade=True)).ok
    assert hosts.nccl()["a"] == hosts.nccl()["b"]


def test_the_lock_is_written_once_and_not_by_a_dry_run(hosts: Hosts) -> None:
    assert hosts.up(replace(WITHOUT_TORCH, check=True)).ok
    path = lock_file.path_of(hosts.inventory())
    assert not path.exists()
    assert hosts.up().ok
    old = path.read_text().replace("# Written by provision after every run", "# Written by an earlier provision")
    path.write_text(old)
    assert hosts.up().ok
    assert hosts.up(replace(WITHOUT_TORCH, full=True), limit="a").ok
    assert path.read_text() == old


def test_what_an_earlier_version_noted_of_a_run_is_left_alone(hosts: Hosts, tmp_path: Path) -> None:
    hosts.failing = {"b"}
    hosts.up()
    note = {"inventory": str(hosts.file), "lock": None, "components": {"nccl": [{"version": "2.99.0"}]}}
    (run,) = (tmp_path / "state/runs").glob("2*")
    (run / "decided.json").write_text(json.dumps(note))
    hosts.failing = set()
    assert hosts.up(limit="@failed").ok
    assert hosts.nccl()["a"] == hosts.nccl()["b"] != "2.99.0"


def test_hosts_from_the_command_line_fit_together_too(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "file", "a,b")
    assert hosts.up().ok
    assert len(list((tmp_path / "state/plans").glob("*/provision.lock"))) == 1
    hosts.change("b", installed={})
    assert hosts.up(limit="b").ok
    assert hosts.nccl()["a"] == hosts.nccl()["b"] is not None


@pytest.mark.parametrize(
    ("asked", "said", "way"),
    [
        (
            {"upgrade": True},
            r"b: .*NCCL must be the same on all hosts; outside --limit, a keep 2\.21\.5 .provision\.lock.*b would get",
            "leave --upgrade out, to keep 2.21.5",
        ),
        ({"nccl_version": "2.24.3"}, "a keep 2.21.5 .* b would get 2.24.3", "--nccl 2.21.5"),
        (
            {"openmpi": "source", "openmpi_version": "4.1.6"},
            "Open MPI must be the same .* a keep 4.1.8 .* b would get 4.1.6",
            "--openmpi 4.1.8",
        ),
    ],
)
def test_a_run_on_some_hosts_never_takes_another_release_than_the_others_have(
    hosts: Hosts, asked: dict[str, Any], said: str, way: str
) -> None:
    assert hosts.up(replace(WITHOUT_TORCH, nccl_version="2.21.5")).ok
    refused = hosts.up(replace(WITHOUT_TORCH, **asked), limit="b")
    assert hosts.installed == []
    assert re.search(said, only(refused))
    assert way in only(refused)
    assert "leave --limit out" in only(refused)
    assert hosts.up(replace(WITHOUT_TORCH, **asked)).ok, "for all hosts it may be had"


def test_pytorch_is_one_release_for_all_too(hosts: Hosts) -> None:
    assert hosts.up(Options(torch_version="2.7.1", smoke=None)).ok
    assert "PyTorch must be the same on all hosts" in only(hosts.up(Options(torch_version="2.13.0", smoke=None), limit="b"))
    assert hosts.up(Options(torch_version="2.7.1", smoke=None), limit="b").ok


def test_after_an_interrupt_hosts_fit_together_too(hosts: Hosts) -> None:
    hosts.interrupted = True
    with pytest.raises(Interrupted):
        hosts.up()
    hosts.interrupted = False
    hosts.change("b", installed={})
    assert hosts.up(limit="b").ok
    assert hosts.nccl()["a"] == hosts.nccl()["b"] is not None


def _defect() -> None:
    raise KeyError("openmpi")


def _of_ours() -> None:
    raise ProvisionError("a file answers 404", where="b", hint="name another one")


def _of_a_file() -> None:
    raise ProvisionError("cannot be read", where="/home/ann/hosts.tar")


def _by_its_reader() -> None:
    """As rich's console does when it writes into a pipe that nobody reads."""
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("ends", "host", "said"),
    [
        (_defect, "controller", "internal error (please report it): KeyError: 'openmpi'"),
        (_of_ours, "b", "a file answers 404"),
        (_of_a_file, "controller", "/home/ann/hosts.tar: cannot be read"),
        (lambda: signal.raise_signal(signal.SIGINT), "controller", "interrupted"),
        (lambda: signal.raise_signal(signal.SIGTERM), "controller", "interrupted"),
        (_by_its_reader, "controller", "interrupted: its output is not read any more"),
    ],
)
def test_what_ends_a_run_stands_in_its_report(
    hosts: Hosts, ends: Callable[[], object], host: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.ends = ends
    with pytest.raises((KeyError, ProvisionError, SystemExit)):
        hosts.up()
    (report,) = [json.loads((folder / "report.json").read_text()) for folder in run_folders.newest_first()]
    assert not report["ok"]
    (failure,) = report["failures"]
    assert (failure["host"], failure["where"], failure["what"]) == (host, "install", said)
    assert {each["host"]: each["state"] for each in report["hosts"]} == {"a": "not finished", "b": "not finished"}
    assert f"all about this run: {report['folder']}" in capsys.readouterr().err
    assert last_run.failed_hosts(hosts.inventory()) == ["a", "b"]


def test_a_host_that_the_survey_kept_out_is_named_before_the_plan_and_blocked_however_the_run_ended(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Survey({"a": hosts.facts["a"]}, [Problem("error", "no route to host", host="b")])
    monkeypatch.setattr("provision.survey.collect.survey_hosts", lambda *_, **__: seen)
    hosts.ends = _defect
    with pytest.raises(KeyError):
        hosts.up()
    (report,) = [json.loads((folder / "report.json").read_text()) for folder in run_folders.newest_first()]
    assert {each["host"]: each["state"] for each in report["hosts"]} == {"a": "not finished", "b": "blocked"}
    assert "left out: b\n  b: no route to host\nPlan for 1 host in " in capsys.readouterr().err


@pytest.mark.parametrize("ends", [_defect, _of_ours])
def test_a_run_that_ended_while_hosts_may_be_locked_is_known_to_be_over(hosts: Hosts, tmp_path: Path, ends: Callable[[], object]) -> None:
    hosts.ends = ends
    with pytest.raises((KeyError, ProvisionError, SystemExit)):
        hosts.up()
    (folder,) = (tmp_path / "state/runs").glob("2*")
    assert Session(hosts.inventory(), Progress()).dead_runs() == [folder.name]


def test_hosts_that_lag_behind_several_others_must_come_along(hosts: Hosts) -> None:
    hosts.file.write_text(hosts.file.read_text() + "c ansible_host=10.0.0.3\n")
    hosts.facts["c"] = hosts._facts("10.0.0.3", A100)
    assert hosts.up(replace(WITHOUT_TORCH, nccl_version="2.21.5")).ok
    hosts.failing = {"b", "c"}
    hosts.up(replace(WITHOUT_TORCH, upgrade=True))
    hosts.failing = set()
    refused = only(hosts.up(limit="b"))
    assert re.search(r"add the hosts without [0-9.]+ to --limit: c\b", refused)
    assert "--nccl" not in refused
    assert hosts.up(limit="b,c").ok


def test_what_a_later_step_alone_would_have_needed_is_not_in_the_lock(hosts: Hosts) -> None:
    assert hosts.up(replace(WITHOUT_TORCH, nccl_version="2.21.5")).ok
    assert hosts.up(replace(WITHOUT_TORCH, first_step="engine", nccl_version="2.24.3")).ok
    hosts.change("b", installed={})
    assert hosts.up(limit="b").ok
    assert hosts.nccl()["b"] == "2.21.5"


def test_after_an_upgrade_that_failed_on_a_host_that_host_follows_the_others(hosts: Hosts) -> None:
    assert hosts.up(replace(WITHOUT_TORCH, nccl_version="2.21.5")).ok
    hosts.failing = {"b"}
    hosts.up(replace(WITHOUT_TORCH, upgrade=True))
    new = hosts.nccl()["a"]
    assert new != hosts.nccl()["b"] == "2.21.5"
    hosts.failing = set()
    refused = only(hosts.up(replace(WITHOUT_TORCH, upgrade=True), limit="@failed"))
    assert f"leave --upgrade out, to keep {new}" in refused
    assert hosts.up(limit="@failed").ok
    assert hosts.nccl() == {"a": new, "b": new}
    locked = lock_file.read(hosts.inventory())
    assert locked is not None
    assert locked.releases("nccl") == {new: ["a", "b"]}


def test_a_run_that_ended_before_it_touched_a_host_decides_nothing(hosts: Hosts) -> None:
    assert hosts.up(replace(WITHOUT_TORCH, nccl_version="2.21.5")).ok
    hosts.unavailable = True
    with pytest.raises(ProvisionError, match="404"):
        hosts.up(replace(WITHOUT_TORCH, nccl_version="2.24.3"))
    hosts.unavailable = False
    assert hosts.up(limit="b").ok
    assert hosts.nccl() == {"a": "2.21.5", "b": "2.21.5"}


def test_a_lock_that_came_from_elsewhere_since_counts(hosts: Hosts) -> None:
    """A colleague's, by way of version control."""
    hosts.failing = {"b"}
    hosts.up(replace(WITHOUT_TORCH, nccl_version="2.24.3"))
    asked = replace(WITHOUT_TORCH, upgrade=True, nccl_version="2.21.5")
    theirs = planning.make_plan(Request(hosts.inventory(), asked), hosts.facts).plan
    lock_file.update(hosts.inventory(), lambda: lock.Lock.from_plan(theirs, {}, None, hosts.inventory()))
    hosts.failing = set()
    assert hosts.up(limit="b").ok
    assert hosts.nccl()["b"] == "2.21.5"


def test_what_hosts_have_in_several_releases_is_told(hosts: Hosts) -> None:
    plans = [
        planning.make_plan(Request(hosts.inventory(), replace(WITHOUT_TORCH, nccl_version=version)), hosts.facts).plan
        for version in ("2.21.5", "2.24.3")
    ]
    both = Plan({"a": plans[0].hosts["a"], "b": plans[1].hosts["b"]})
    lock_file.update(hosts.inventory(), lambda: lock.Lock.from_plan(both, {}, None, hosts.inventory()))
    told = "provision.lock has NCCL 2.21.5 on a, 2.24.3 on b: all of these hosts get one release, resolved again"
    assert told in hosts.up().notes
    assert hosts.nccl()["a"] == hosts.nccl()["b"]
    assert not any("resolved again" in note for note in hosts.up().notes)


def test_what_the_others_have_and_does_not_fit_is_given_up_for_all_or_not_at_all(hosts: Hosts) -> None:
    hosts.change("a", gpus=[A100])
    assert hosts.up(limit="b").ok
    hosts.change("a", gpus=[M40])
    assert "--upgrade without --limit, which resolves again" in only(hosts.up(limit="a"))
    assert hosts.up(replace(WITHOUT_TORCH, upgrade=True)).ok


# --- --from -------------------------------------------------------------------------------------------------------------------------


def test_a_later_step_does_not_begin_on_a_bare_host(hosts: Hosts) -> None:
    refused = hosts.up(replace(WITHOUT_TORCH, first_step="engine"))
    assert [failure.host for failure in refused.failures] == ["a", "b"]
    assert "earlier steps have not run here" in refused.failures[0].what
    assert refused.failures[0].hint == "leave --from out"
    assert hosts.installed == []
    assert hosts.up(replace(WITHOUT_TORCH, first_step="python")).ok, "which makes what later steps need"


def test_a_later_step_alone_writes_nothing_down_and_says_so(hosts: Hosts) -> None:
    assert hosts.up().ok
    path = lock_file.path_of(hosts.inventory())
    path.unlink()
    later = hosts.up(replace(WITHOUT_TORCH, first_step="engine"))
    assert later.ok
    assert any(
        "--from engine: earlier steps were left out, so neither these hosts nor provision.lock record" in note for note in later.notes
    )
    assert not path.exists()


def test_steps_that_are_left_out_still_get_what_a_closed_network_cannot_reach(hosts: Hosts, tmp_path: Path) -> None:
    request = Request(hosts.inventory(), replace(WITHOUT_TORCH, first_step="engine"))
    book, *_ = installer.render(planning.make_plan(request, hosts.facts), tmp_path / "book", fetch=False)
    roles = [role["role"] for play in yaml.safe_load(book.read_text()) for role in play.get("roles", ())]
    assert roles == ["guard", "engine", "mpi_network", "ssh_mesh", "manifest"]


# --- --check ------------------------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_that_the_manifest_will_say_something_else(hosts: Hosts) -> None:
    hosts.steps = {"packages": Step(ran=2), "manifest": Step(ran=1)}
    check = replace(WITHOUT_TORCH, check=True)
    bare = hosts.up(check).hosts[0]
    assert (bare.state, bare.steps["manifest"]) == ("would change", "will change")
    assert hosts.up().ok
    hosts.file.write_text(hosts.file.read_text().replace("ansible_host=10.0.0.2", "ansible_host=10.0.0.2 slots=7"))
    told = {host.host: host for host in hosts.up(check).hosts}
    assert (told["b"].state, dict(told["b"].steps)) == ("would change", {"packages": "will not change", "manifest": "will change"})
    assert hosts.installed == []


@pytest.mark.parametrize(
    ("steps", "drifted", "said"),
    [
        ({"linker": Step()}, False, "will not change"),
        ({"linker": Step()}, True, "cannot know yet"),
        ({"packages": Step(ran=1, changed=1), "linker": Step()}, False, "cannot know yet"),
        ({"packages": Step(ran=1), "linker": Step(ran=1)}, True, "will not change"),
    ],
)
def test_what_could_not_be_looked_at_is_unknown_where_something_is_amiss(steps: dict[str, Step], drifted: bool, said: str) -> None:
    report = HostReport(host="a", state="installed")
    changed = sum(step.changed for step in steps.values())
    entries.set_prospects(report, HostResult(steps=steps, changed=changed), {"linker"}, rewritten=False, drifted=drifted)
    assert report.steps["linker"] == said
    assert report.state == ("would change" if drifted or changed else "unchanged")


@pytest.mark.parametrize("check", [False, True])
def test_no_driver_is_installed_on_the_machine_that_a_run_is_on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    begun: list[list[str]] = []
    planned: list[Request] = []
    make_plan = planning.make_plan

    def install_drivers(_session: Session, rollout: Rollout) -> Outcome:
        begun.append(rollout.drivers)
        return Outcome(2, {}, hosts.file)

    def counted(request: Request, facts: Mapping[str, Facts]) -> Rollout:
        planned.append(request)
        return make_plan(request, facts)

    monkeypatch.setattr("provision.install.installer.install_drivers", install_drivers)
    monkeypatch.setattr(planning, "make_plan", counted)
    with_driver = replace(WITHOUT_TORCH, driver="580", check=check)
    for name in hosts.facts:
        bare = {"os": {"id": "debian", "version": "12", "kernel": "6.1.0-37-amd64"}, "driver": None, "gpus": []}
        hosts.change(name, **bare, nvidia={"pci_devices": ["0000:41:00.0"], "pci_ids": ["2330"]}, boot_id="another")
    hosts.up(with_driver)
    assert begun == ([] if check else [["a", "b"]])
    assert len(planned) == (1 if check else 2)  # the hosts are other ones only after their driver
    begun.clear()
    refused = "a new driver needs a reboot, and this run is on that machine; nothing was changed → run provision from another machine"
    hosts.change("b", boot_id=installer.BOOT_ID.read_text().strip())  # over ssh to this machine
    assert only(hosts.up(with_driver)).startswith(f"b: {refused}")
    hosts.change("b", boot_id="another")
    hosts.file.write_text("a ansible_connection=local\nb ansible_host=10.0.0.2\n")
    assert only(hosts.up(with_driver)).startswith(f"a: {refused}")
    assert (begun, hosts.installed) == ([], [])


def test_a_host_that_is_down_does_not_keep_others_from_what_comes_after_their_driver(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    working = hosts.facts["a"]

    def install_drivers(_session: Session, _plan: Plan, *_more: Any) -> Outcome:
        hosts.facts["a"] = working
        return Outcome(0, {}, hosts.file)

    def look(_session: Session, *_: Any, **__: Any) -> Survey:
        return Survey({"a": hosts.facts["a"]}, [Problem("error", "no answer", host="b")])

    monkeypatch.setattr("provision.install.installer.install_drivers", install_drivers)
    monkeypatch.setattr("provision.survey.collect.survey_hosts", look)
    bare = {"os": {"id": "debian", "version": "12", "kernel": "6.1.0-37-amd64"}, "driver": None, "gpus": []}
    hosts.change("a", **bare, nvidia={"pci_devices": ["0000:41:00.0"], "pci_ids": ["2330"]}, boot_id="another")
    report = hosts.up(replace(WITHOUT_TORCH, driver="580"))
    assert "a: NVIDIA's driver was installed and the host rebooted; nvidia-smi answers" in report.notes
    assert hosts.installed == ["a"]
    assert only(report).startswith("b: no answer")


NEWER_NCCL = {"libnccl2": "2.27.7-1+cuda12.9", "libnccl-dev": "2.27.7-1+cuda12.9"}
OLDER_NCCL = replace(WITHOUT_TORCH, nccl_version="2.21.5", nccl_source="repository")


def test_a_downgrade_is_announced_and_asked_for(hosts: Hosts) -> None:
    hosts.change("a", packages=NEWER_NCCL)
    asked: list[list[str]] = []

    def run(options: Options, answer: bool) -> Report:
        def agreed(lines: list[str]) -> bool:
            asked.append(lines)
            return answer

        return up.make_ready(hosts.inventory("a"), options, Progress(), {}, agreed)

    assert "libnccl2 2.27.7-1+cuda12.9 is installed there, which is newer" in only(run(OLDER_NCCL, answer=False))
    assert hosts.installed == []
    assert asked[0][0].startswith("a: libnccl2 2.27.7-1+cuda12.9 would be replaced by the older 2.21.5-1+cuda12.")
    assert run(OLDER_NCCL, answer=True).ok
    assert hosts.nccl()["a"] == "2.21.5"
    assert len(asked) == 2


def test_nobody_is_asked_where_nothing_older_was_requested(hosts: Hosts) -> None:
    def agreed(lines: list[str]) -> bool:
        raise AssertionError(lines)

    hosts.change("a", packages=NEWER_NCCL)
    for options in (WITHOUT_TORCH, replace(OLDER_NCCL, allow_downgrade=True), replace(WITHOUT_TORCH, nccl_version="2.99.1")):
        up.make_ready(hosts.inventory("a"), replace(options, upgrade=True), Progress(), {}, agreed)


def test_without_a_terminal_a_downgrade_needs_allow_downgrade(hosts: Hosts) -> None:
    hosts.change("a", packages=NEWER_NCCL)
    words = ["up", str(hosts.file), "--limit", "a", "--torch", "none", "--no-smoke", "--nccl", "2.21.5", "--nccl", "repository"]
    refused = CliRunner().invoke(main.app, words)
    assert refused.exit_code == 1
    assert "would be replaced by the older" in refused.output
    assert hosts.installed == []
    assert CliRunner().invoke(main.app, [*words, "--allow-downgrade"]).exit_code == 0
    assert hosts.nccl()["a"] == "2.21.5"


def test_doctor_installs_again_from_the_sources_of_the_installation(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = hosts.file.parent / "wheels"
    wheels.mkdir()
    index, mirror = "https://index.example/simple", "http://mirror.example/debian"
    hosts.up(replace(WITHOUT_TORCH, index_url=index.replace("://", "://user:secret@"), apt_mirror=mirror, wheels=wheels))
    hosts.up(replace(WITHOUT_TORCH, check=True))
    used: list[Options] = []

    def make_ready(_inventory: Inventory, options: Options, *_: Any) -> Report:
        used.append(options)
        return Report(run_id="r", folder="/f", inventory="hosts.ini")

    monkeypatch.setattr(fixes, "make_ready", make_ready)

    def fixed() -> list[fixes.FixResult]:
        session = SimpleNamespace(progress=Progress(), catalog=OURS)
        return fixes.apply(fixes.FixPlan(installation=["torch-differs"]), Examination(hosts.facts, [], []), hosts.inventory(), session, {})  # type: ignore[arg-type]

    assert [each.state for each in fixed()] == ["done"]
    assert [(each.index_url, each.apt_mirror, each.wheels) for each in used] == [(index, mirror, wheels)]
    wheels.rmdir()
    assert [(each.state, str(wheels) in each.reason) for each in fixed()] == [("failed", True)]
    assert len(used) == 1
