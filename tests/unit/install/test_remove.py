"""What `provision remove` says of installations under other prefixes, and of invalid answers. The rest needs real hosts."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from invented_hosts import stated
from rollouts import manifest_with

from provision.base.problems import Problem
from provision.install import removal
from provision.install.removal import HostRemoval, add_other_prefixes
from provision.inventory import Host
from provision.remote import ssh
from provision.survey import Facts
from provision.survey.document import END

PREFIX = "/opt/provision"


def seen(*elsewhere: str, can_become: bool, manifest: Any = None) -> Facts:
    installed = {"elsewhere": list(elsewhere), "manifest": manifest}
    return stated({"installed": installed, "user": {"name": "ann", "sudo": "unwanted", "can_become": can_become}})


def judged(removal: HostRemoval, found: Facts, prefix: str | None = None, *, dry_run: bool = False) -> HostRemoval:
    add_other_prefixes(removal, Host("node1", "node1", prefix=prefix), found, dry_run=dry_run)
    return removal


@pytest.mark.parametrize(
    ("before", "dry_run", "after"),
    [
        ("removed", False, "failed"),  # the keys in the home are gone, what root has installed is not
        ("nothing to do", False, "failed"),
        ("would remove", True, "would remove"),
        ("nothing to do", True, "failed"),
    ],
)
def test_what_stays_for_lack_of_root_is_an_error_with_the_way_out(before: Any, dry_run: bool, after: str) -> None:
    found = judged(HostRemoval("node1", before), seen(PREFIX, can_become=False), dry_run=dry_run)
    assert (found.state, found.bad) == (after, True)
    assert found.problem
    assert (
        found.problem.what == "/opt/provision, and all that was installed with it, stays, because its removal needs root: provision_sudo=no"
    )
    assert "--ask-become-pass" in str(found.problem.hint)


@pytest.mark.parametrize(("prefix", "can_become"), [("/data/p", False), ("/data/p", True), (None, True)])
def test_an_installation_of_its_own_stays_and_is_named(prefix: str | None, can_become: bool) -> None:
    found = judged(HostRemoval("node1", "removed"), seen("/home/ann/provision", can_become=can_become), prefix)
    assert (found.state, found.bad) == ("removed", False)
    assert [(one["what"], "provision_prefix=/home/ann/provision" in one["why"]) for one in found.left] == [("/home/ann/provision", True)]


def test_beside_an_installation_of_the_users_own_that_of_root_is_somebody_elses() -> None:
    found = seen(PREFIX, can_become=False, manifest=manifest_with())
    removal = judged(HostRemoval("node1", "removed"), found)
    assert (removal.state, removal.bad, [one["what"] for one in removal.left]) == ("removed", False, [PREFIX])


def test_a_host_that_could_not_be_used_keeps_its_own_error() -> None:
    found = judged(
        HostRemoval("node1", "unreachable", problem=Problem("error", "no route", id="unreachable")), seen(PREFIX, can_become=False)
    )
    assert (found.state, str(found.problem), found.left) == ("unreachable", "no route", [])


def test_nothing_elsewhere_is_nothing_to_say() -> None:
    assert vars(judged(HostRemoval("node1", "removed"), seen(can_become=False))) == vars(HostRemoval("node1", "removed"))


@pytest.mark.parametrize("answer", [{"nothing": False}, {"nothing": False, "removed": ["x"], "left": 3, "error": None}])
def test_an_invalid_answer_fails_its_host(answer: Any) -> None:
    said = ssh.Answer(0, f"{removal.BEGIN}\n{json.dumps(answer)}\n{END}\n", "")
    found = removal._host(cast(Any, None), "node1", said, dry_run=False)
    assert (found.state, str(found.problem)) == ("failed", "remove: the removal gave an invalid answer")
