"""`provision plan --what-if`: plans after changes of the hosts, what they gain, and the change that is offered unasked."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from golden_facts import PLANS, facts_of
from invented_hosts import remedies
from typer.testing import CliRunner

from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import key
from provision.catalog import OURS
from provision.cli import main
from provision.plan.requirements import Requirements
from provision.resolve import resolve, what_if
from provision.resolve.driver import known_branch

REQUIREMENTS = Requirements(engine_version="0.0.0")


def after(name: str, *changes: str) -> what_if.WhatIf:
    return what_if.what_if(facts_of(name), REQUIREMENTS, {}, what_if.parse(changes, facts_of(name), OURS))


def gains(found: what_if.WhatIf) -> dict[str, tuple[str, str]]:
    return {gain.what: (gain.now, gain.then) for gain in found.gains}


def test_a_newer_driver_lifts_nccl_and_pytorch() -> None:
    found = after("v100-470-cuda-11.4", "driver=580")
    assert found.changes == ("driver=580",)
    assert not found.plan.conflicts
    now, then = gains(found)["PyTorch"]
    assert now.endswith("+cu118")
    assert then.endswith(("+cu124", "+cu126"))
    assert gains(found)["NCCL"][1].endswith("for CUDA 12.9")


def test_notes_are_about_the_driver_after_the_change() -> None:
    name = "full-ubuntu-22.04-a100-535"
    ended = "support for driver branch 535 ended"
    assert any(ended in note for note in resolve(facts_of(name), REQUIREMENTS, {}).notes)
    assert any(ended in note for note in after(name, "python=3.12").plan.notes)
    assert not any(ended in note for note in after(name, "driver=580").plan.notes)


def test_changes_apply_together() -> None:
    python = gains(after("v100-470-cuda-11.4", "python=3.12"))
    both = gains(after("v100-470-cuda-11.4", "driver=580", "python=3.12"))
    assert both["Python"][1].startswith("3.12")
    assert "PyTorch" not in python
    assert key(both["PyTorch"][1]) > key(both["PyTorch"][0])


def test_a_newer_driver_does_not_undo_cpu() -> None:
    hosts = facts_of("full-ubuntu-22.04-h100-550")
    cpu = Requirements(engine_version="0.0.0", cpu=True)
    found = what_if.what_if(hosts, cpu, {}, what_if.parse(["driver=595"], hosts, OURS))
    assert {host.nccl for host in found.plan.hosts.values()} == {None}
    assert {host.torch.version.partition("+")[2] for host in found.plan.hosts.values() if host.torch and host.torch.version} == {"cpu"}
    assert found.gains == ()
    assert what_if.hint(hosts, cpu, {}) is None or "driver" not in what_if.hint(hosts, cpu, {})


def test_what_resolves_a_conflict_gains_a_plan() -> None:
    before = resolve(facts_of("v100-470-and-blackwell-580"), REQUIREMENTS, {})
    assert before.conflicts
    for change in ("driver=580", "old:driver=580", "without=old", "without=new"):
        found = after("v100-470-and-blackwell-580", change)
        assert list(found.plan.hosts) == ([name for name in ("old", "new") if change != f"without={name}"])
        assert [(gain.now, gain.then) for gain in found.gains if gain.what == "conflict"] == [
            (f"{each.host}: {each.what}", "") for each in before.conflicts
        ]


def test_one_host_is_changed_without_the_others_of_its_class() -> None:
    (one,) = facts_of("v100-470-cuda-11.4").values()
    hosts = dict.fromkeys(("a", "b", "c"), one)
    found = what_if.what_if(hosts, REQUIREMENTS, {}, what_if.parse(["b:python=3.10", "b:driver=580"], hosts, OURS))
    versions = {name: host.python.version for name, host in found.plan.hosts.items()}
    assert versions["b"].startswith("3.10")
    assert list(versions) == ["a", "b", "c"]
    assert len({host.nccl.version for host in found.plan.hosts.values() if host.nccl}) == 1


def test_a_change_may_make_it_worse() -> None:
    found = after("blackwell-580", "driver=535")
    (conflict,) = found.plan.conflicts
    assert conflict.what == (
        "driver 535.54.03 does not support its GPUs: GPUs of compute capability 10.0 (Blackwell, such as B200) need 570 or newer"
    )
    assert remedies(conflict)[0] == "update the NVIDIA driver of b200 to 570.26 or newer (CUDA 12.8)"
    assert [gain.then for gain in found.gains if gain.what == "conflict"] == [f"b200: {conflict.what}"]


@pytest.mark.parametrize("newer", ["595", "620"])
def test_a_newer_driver_may_have_dropped_the_gpus(newer: str) -> None:
    (conflict,) = after("v100-470-cuda-11.4", f"driver={newer}").plan.conflicts
    assert "compute capability 7.0 (Volta, such as V100) end with 580" in conflict.what
    assert remedies(conflict)[0] == "install driver branch 580, the last for its GPUs, on dgx1 instead"


def test_the_hint_names_no_driver_that_has_dropped_the_gpus() -> None:
    assert "--what-if driver=580" in (what_if.hint(facts_of("v100-470-cuda-11.4"), REQUIREMENTS, {}) or "")


def test_no_change() -> None:
    assert after("blackwell-580", "driver=580").gains == ()


@pytest.mark.parametrize(
    "value",
    [
        *OURS.driver().branches.of,
        *("470", "550", "590", "615"),  # of NVIDIA's table of CUDA
        *("630", "999", "0", "-1", "5", "5800", "0580", "580.95.05", "580.", "Auto", "580 "),
    ],
)
def test_a_driver_is_the_same_to_both_options(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    words = ["plan", "--facts", str(PLANS / "a100-570-cuda-12.8.json")]
    found = [CliRunner().invoke(main.app, [*words, f"{option}={value}"]).exception for option in ("--driver", "--what-if=driver")]
    refused = [error.what.rpartition(": ")[2] if isinstance(error, UsageError) else None for error in found]
    assert refused == [None if value in OURS.driver().branches.of else "not a branch of NVIDIA's driver whose packages are known"] * 2


def test_only_a_driver_to_install_is_chosen_by_itself() -> None:
    assert known_branch("auto", "--driver auto", OURS, "auto") == "auto"
    with pytest.raises(UsageError, match="driver=auto: not a branch") as refused:
        what_if.parse(["driver=auto"], facts_of("blackwell-580"), OURS)
    assert "580" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", "invalid change"),
        ("driver", "invalid change"),
        ("cuda=13", "invalid change"),
        ("driver=580=1", "invalid change"),
        ("driver=777", "driver=777: not a branch of NVIDIA's driver"),
        ("driver=$(id)", "not a branch"),
        ("python=2.7", r"no Python 2\.7 is known"),
        ("without=olds", "no host olds; did you mean `old`"),
        ("olds:driver=580", "no host olds; did you mean `old`"),
        ("old:without=new", "left out of all"),
        ("without=old,new", "no host is left"),
    ],
)
def test_wrong_changes_are_refused(change: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        what_if.parse([change], facts_of("v100-470-and-blackwell-580"), OURS)
    assert refused.value.hint


def test_a_driver_for_hosts_without_gpus_is_refused() -> None:
    with pytest.raises(UsageError, match="no host has a GPU"):
        what_if.parse(["driver=580"], facts_of("cpu-only"), OURS)


def test_the_hint_is_a_change_that_was_tried() -> None:
    hosts = facts_of("v100-470-cuda-11.4")
    hint = what_if.hint(hosts, REQUIREMENTS, {})
    assert hint is not None
    change = hint.rpartition("--what-if ")[2]
    before = resolve(hosts, REQUIREMENTS, {}).hosts["dgx1"].torch
    lifted = what_if.what_if(hosts, REQUIREMENTS, {}, what_if.parse([change], hosts, OURS)).plan.hosts["dgx1"].torch
    assert before
    assert lifted
    assert f"PyTorch {lifted.version.partition('+')[0]} instead of {before.version.partition('+')[0]}" in hint


def test_the_hint_needs_no_more_than_the_version_of_a_driver() -> None:
    hosts = facts_of("real-b200-570-and-h100-550")  # their reports do not name the driver's CUDA
    assert what_if.hint(hosts, REQUIREMENTS, {}) == (
        "driver 580 on b200 and h100 would give PyTorch 2.14.1 instead of 2.11.0: --what-if driver=580"
    )


@pytest.mark.parametrize("name", ["blackwell-580", "cpu-only", "v100-470-and-blackwell-580"])
def test_there_is_no_hint_where_nothing_lifts_all_hosts(name: str) -> None:
    assert what_if.hint(facts_of(name), REQUIREMENTS, {}) is None


def test_the_command_prints_plan_and_gains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    words = ["plan", "--facts", str(PLANS / "v100-470-cuda-11.4.json")]
    plain = CliRunner().invoke(main.app, words)
    assert "hint: " in plain.output
    shown = CliRunner().invoke(main.app, [*words, "--what-if", "driver=580"])
    assert shown.exit_code == 0
    assert "what if driver=580" in shown.output
    assert "hint: " not in shown.output
    printed = CliRunner().invoke(main.app, [*words, "--what-if", "driver=580", "--json"])
    document = json.loads(printed.stdout)
    assert document["changes"] == ["driver=580"]
    assert {gain["what"] for gain in document["gains"]} >= {"NCCL"}
    jsonschema.validate(document, json.loads(CliRunner().invoke(main.app, ["schema", "what-if"]).stdout))
    refused = CliRunner().invoke(main.app, [*words, "--what-if", "driver=580", "--out", str(tmp_path / "out")])
    assert isinstance(refused.exception, ProvisionError)
