"""The documents: README stays a page, links lead somewhere, and every command and option that is named exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from provision.cli.main import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
REFERENCE = [README, *sorted((ROOT / "docs").glob("*.md"))]
WITH_LINKS = [*REFERENCE, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "collective_core/README.md"))]
COMMANDS: Any = typer.main.get_command(app)
DEFAULTS = {"provision": "up", "doctor": "check"}  # `provision HOSTS`, `provision doctor HOSTS`


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_a_page() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 80
    assert [line for line in lines if len(line) > 140] == []


def test_the_quick_start_names_demo_and_test() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert any(re.search(r"^make demo\b", block, re.MULTILINE) and re.search(r"^make test\b", block, re.MULTILINE) for block in blocks)


@pytest.mark.parametrize("file", WITH_LINKS, ids=name_of)
def test_links_lead_somewhere(file: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(file.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path) if path else file
        if not there.exists() or (anchor and anchor not in anchors_of(there.read_text())):
            dead.append(target)
    assert dead == []


def calls_in(text: str) -> Iterator[str]:
    """What a reader would type: lines of code blocks, and code in sentences, that begin with ``provision``."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^(?:\$ )?(provision .*)$", block, re.MULTILINE)
    yield from re.findall(r"`(provision [^`]*)`", prose_of(text))


def options_of(command: Any) -> dict[str, Any]:
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")}


def unknown_in(call: str) -> list[str]:
    """The commands and options of a call that do not exist."""
    words = shlex.split(call, comments=True)[1:]
    command, name = COMMANDS, "provision"
    while words and hasattr(command, "commands"):
        while words and words[0].startswith("-") and words[0] in options_of(command):
            del words[0]  # of the group: flags only
        if words and words[0] in command.commands:
            command, name = command.commands[words[0]], words.pop(0)
        elif words and name in DEFAULTS:
            command = command.commands[DEFAULTS[name]]
        else:
            return words[:1]
    known, unknown = {**options_of(command), "--help": None, "-h": None}, []
    while words:
        option, has_value, _ = words.pop(0).partition("=")
        if not option.startswith("-") or option == "-":
            if name == "run":
                break  # the program's own words
        elif option not in known:
            if option == "--":
                break
            unknown.append(option)
        elif known[option] is not None and not known[option].is_flag and not has_value:
            del words[: known[option].nargs]
    return unknown


@pytest.mark.parametrize("file", REFERENCE, ids=name_of)
def test_commands_that_are_named_exist(file: Path) -> None:
    wrong = {call: unknown for call in calls_in(file.read_text()) if (unknown := unknown_in(call))}
    assert wrong == {}


@pytest.mark.parametrize("file", REFERENCE, ids=name_of)
def test_options_that_are_named_exist(file: Path) -> None:
    def leaves(command: Any) -> Iterator[Any]:
        yield command
        for each in getattr(command, "commands", {}).values():
            yield from leaves(each)

    known = {option for command in leaves(COMMANDS) for option in options_of(command)}
    named = set(re.findall(r"`(--?[a-z][\w-]*)", prose_of(file.read_text())))
    assert named - known - {"--help", "-h"} == set()


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ("provision hosts.ini --check  # a comment", []),
        ("provision --debug up hosts.ini", []),
        ("provision hosts.ini --chekc", ["--chekc"]),
        ("provision plan hosts.ini --yes", ["--yes"]),
        ("provision doctor hosts.ini --fix", []),
        ("provision image bild hosts.ini", ["bild"]),
        ("provision run -np 4 --config-file x.yaml python train.py --lr 1", []),
        ("provision run --np 4 python train.py", ["--np"]),
        ("provision image run hosts.ini mine:1 -- python train.py --lr 1", []),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(call: str, unknown: list[str]) -> None:
    assert unknown_in(call) == unknown
