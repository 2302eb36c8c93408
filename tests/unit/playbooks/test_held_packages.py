"""Exact versions of system packages, held: what is asked of the package manager, and what is told of its answer."""

from __future__ import annotations

from typing import Any

import pytest
from loading import load_ansible_module


@pytest.fixture(scope="module")
def held() -> Any:
    return load_ansible_module("held_packages")


class Host:
    """Stands in for the host: takes the package manager's command line and refuses it."""

    said = (
        "Reading package lists...\n"
        "The following packages will be REMOVED:\n  cuda-samples* libnccl-own\n  trainer\n"
        "The following packages will be DOWNGRADED:\n  libnccl2\n"
    )

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run_command(self, argv: list[str], **_options: Any) -> tuple[int, str, str]:
        self.commands.append(argv)
        return 100, self.said, "E: Packages need to be removed but remove is disabled.\n"


@pytest.mark.parametrize("manager", ["Apt", "Dnf"])
def test_packages_of_others_do_not_go(held: Any, manager: str) -> None:
    host = Host()
    getattr(held, manager)(host, None).install(["libnccl2=2.21.5-1+cuda12.4"])
    assert ("--no-remove" in host.commands[0]) == (manager == "Apt")
    assert "--allowerasing" not in host.commands[0]  # dnf removes nothing without


def test_what_would_have_to_go_is_named(held: Any) -> None:
    assert held.would_be_removed(Host.said) == ["cuda-samples", "libnccl-own", "trainer"]
    assert held.would_be_removed("The following packages will be DOWNGRADED:\n  libnccl2\n") == []
    conflict = "Error: \n Problem: problem with installed package own-1\n  - package own-1 requires libnccl = 2.20, but none\nplain\n"
    assert held.excerpt(conflict).splitlines()[1:] == [
        "Problem: problem with installed package own-1",
        "- package own-1 requires libnccl = 2.20, but none",
    ]
