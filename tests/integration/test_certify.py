"""`provision certify` on real hosts: namespaces with planted faults, and hosts on which the engine is installed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hosts import provision
from invented_hosts import FAULTS
from switched_hosts import Switch


def certified(switch: Switch, *options: str) -> tuple[int, dict[str, object]]:
    done = provision("certify", str(switch.inventory), "--json", *options)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow  # it loads all cores, on which other tests run
def test_three_faults_are_found_and_their_hosts_quarantined(tmp_path: Path) -> None:
    file = tmp_path / "quarantine"
    with Switch(tmp_path, 8) as switch:
        faults = {2: "slow", 5: "port-mtu", 7: "flips"}
        for number, kind in faults.items():
            switch.plant(kind, number)
        code, made = certified(switch, "--quarantine", str(file))
        found = {(each["host"], each["id"]) for each in made["found"]}
        assert (code, found) == (1, {(f"node{number}", FAULTS[kind]) for number, kind in faults.items()})
        assert made["rounds"] <= 3 + 3
        assert file.read_text().split() == ["node2", "node5", "node7"]
        code, made = certified(switch, "--limit", f"!@{file}")
        assert (code, made["found"], len(made["hosts"])) == (0, [], 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_64_hosts(tmp_path: Path, seed: int) -> None:
    """Up to three faults of all kinds; the first run is healthy."""
    chosen = random.Random(seed)
    faults = {number: chosen.choice(list(FAULTS)) for number in chosen.sample(range(1, 65), seed)}
    with Switch(tmp_path, 64) as switch:
        for number, kind in faults.items():
            switch.plant(kind, number)
        code, made = certified(switch)
    found = {(each["host"], each["id"]) for each in made["found"]}
    assert (code, found) == (bool(faults), {(f"node{number}", FAULTS[kind]) for number, kind in faults.items()})
    assert made["rounds"] <= 6 + 3


@pytest.mark.slow
def test_the_installed_engine_adds_groups_of_allreduces(ready_sandbox) -> None:
    """Over real ssh."""
    sandbox = ready_sandbox("certify", 3, 1)
    done = provision("certify", str(sandbox.inventory), "--json")
    made = json.loads(done.stdout)
    assert (done.returncode, made["found"], made["notes"]) == (0, [], []), done.stderr
    assert [each["wrong"] for each in made["groups"]] == [0] * len(made["groups"])
    assert sorted(len(each["hosts"]) for each in made["groups"]) == [2, 2, 3]
