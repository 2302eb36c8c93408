"""The tutorial is true: all its commands are typed, in order, into one shell on a terminal, and what it and the README show is printed.

What doctor shows depends on the container engine, too: its hosts get the engine's limit of open files.
"""

from __future__ import annotations

import os
import re
import shutil
from itertools import groupby
from pathlib import Path

import pexpect
import pytest

from provision import sandbox as sandboxes

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(.*?)^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)  # with the text before it
NAME = f"it{os.getpid()}-tutorial"
LONGEST_S = 900
PROMPT = "<exit $?> "

#: What differs by machine or from run to run, as the pages show it → what may be printed instead. White space is one space here.
VARYING = {
    r"\d+ …": r"\d+ .*?",  # as "changed" and "time" of a host
    "…": ".*?",
    # Where the cores allow all, nothing is said of them; and a busy machine may show more than is possible, which is not told.
    r"speed-up [\d.]+ with \d+ ranks, parallel efficiency \d+ % \(the cores allow \d+ %\)": (
        r"(?:speed-up [\d.]+ with \d+ ranks, parallel efficiency \d+ %(?: \(the cores allow \d+ %\))?"
        r"|the speed-up cannot be told from this run: a measurement was disturbed)"
    ),
    r"communication leaves \d+ % of it": (
        r"(?:communication leaves \d+ % of it|what communication leaves cannot be told from this run: a measurement was disturbed)"
    ),
    # MNIST where it can be downloaded.
    r"digits \(UCI, 1,797 images of 8×8, (?:in place of MNIST|…)\)": r"(?:digits \(UCI, 1,797 images of 8×8, in place of MNIST\)|MNIST)",
} | {
    each: each
    for each in (
        r"\d+:\d\d",
        r"\d+ (?:\d+ min(?: \d+ s)?|[\d.]+ s)\b",  # a host's changes, of which the one that builds the engine has more, and its time
        r"(?:\d+ min(?: \d+ s)?|[\d.,]+ s)\b",
        r"\d+ [\d.]+ GiB",  # cores and memory
        r"[\d,]+ images/s",
        r"alone [\d,]+",
        r"\d+(?:\.\d+)? %",
        r"epoch \d+ of \d+",
        r"\d+ epochs?",
        r"\d+\.\d{4}\b",  # losses and parameters
        r"rank \d on node\d failed first",
        r"ranks? [\d, and]+: the same error as that of rank \d",
    )
}

#: What Open MPI may say between other lines, on a busy machine: a child was faster than its parent, which harms nothing.
BETWEEN = re.compile(r" *\[\w+:\d+\] plm:rsh: Warning: setpgid")


def screen(output: str) -> list[str]:
    """What a terminal finally shows of an output that moves the cursor up and erases lines."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
    return lines


def rank_of(line: str) -> str:
    """What stands in front of a rank's line; nothing in front of others."""
    found = re.match(r"\[\d+\] ", line)
    return found[0] if found else ""


def flat(lines: list[str]) -> str:
    """The text without its folds. Lines of ranks, which come in any order, are sorted by rank."""
    in_order = [line for _, group in groupby(lines, key=lambda line: bool(rank_of(line))) for line in sorted(group, key=rank_of)]
    return " ".join(" ".join(in_order).split())


def pattern(shown: str) -> str:
    """Matches what may be printed where this is shown."""
    made, end = "", 0
    for found in re.finditer("|".join(f"({each})" for each in VARYING), shown):
        made += re.escape(shown[end : found.start()]) + [*VARYING.values()][(found.lastindex or 0) - 1]
        end = found.end()
    return made + re.escape(shown[end:])


def not_printed(shown: str, printed: list[str]) -> str:
    """The first lines of a page, between two lines of `…`, that are not printed, in this order; nothing if all are."""
    text, at = flat([line for line in printed if not BETWEEN.match(line)]), 0
    for part in re.split(r"^…$", shown, flags=re.MULTILINE):
        found = re.compile(pattern(flat(part.splitlines()))).search(text, at)
        if not found:
            return part
        at = found.end()
    return ""


class Reader:
    """Types into one shell and says yes to every question."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "PS1": PROMPT, "VIRTUAL_ENV_DISABLE_PROMPT": "1", "TERM": "xterm"}
        env.pop("PYTHONPATH", None)  # the toolkit is the one that is installed there
        shape = (50, 120)
        self.shell = pexpect.spawn(
            "bash", ["--norc", "--noediting"], cwd=folder, env=env, dimensions=shape, echo=False, encoding="utf-8", timeout=LONGEST_S
        )
        self.shell.expect("<exit 0> ")

    def type(self, command: str) -> tuple[int, list[str]]:
        """The exit code, and what is left on the terminal."""
        # The tests' own sandbox and state folder: a sandbox called `tutorial` may be a reader's, or another test's.
        typed = command.replace("~/.local/state/provision", "$PROVISION_HOME").replace("tutorial", NAME)
        self.shell.sendline(typed)
        output = ""
        while self.shell.expect([r"<exit (\d+)> ", r"\[y/N\]: "]):
            output += self.shell.before + self.shell.after
            self.shell.sendline("y")
        return int(self.shell.match[1]), screen(output + self.shell.before)


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A folder with what a clone has."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    without = shutil.ignore_patterns(".*", "__pycache__", "build")
    return Path(shutil.copytree(ROOT, tmp_path / "provision", symlinks=True, ignore=without))


@pytest.mark.slow
def test_the_tutorial_is_true(engine, clone):
    printed: dict[str, list[str]] = {}
    reader = Reader(clone)
    try:
        for prose, language, text in BLOCK.findall((ROOT / "docs/tutorial.md").read_text()):
            for line, said in re.findall(r"Let line (\d+) say `(.*?)`", prose):
                program = (clone / "train.py").read_text().splitlines(keepends=True)
                changed = program[int(line) - 1].replace("3 * x + 2", said)
                assert said in changed, f"line {line} of train.py is another one"
                (clone / "train.py").write_text("".join([*program[: int(line) - 1], changed, *program[int(line) :]]))
            if language == "python":
                assert "`train.py`, on your machine:" in prose
                (clone / "train.py").write_text(text)
            elif language == "console":
                for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                    code, printed[command] = reader.type(command)
                    everything = "\n".join(printed[command])
                    assert code == ("failed first" in shown), f"{command}: exit code {code}\n{everything}"
                    missing = not_printed(shown, printed[command])
                    assert not missing, f"{command}: not printed (any more):\n{missing}\nbut:\n{everything}"
            elif language == "sh":
                for command in text.splitlines():
                    code, lines = reader.type(command)
                    assert code == 0, "\n".join([command, *lines])
            else:
                assert language == "ini", f"nothing tests a block of `{language}`"  # hosts of the reader's own; read by a unit test
        assert sandboxes.status(NAME) is None
    finally:
        reader.shell.close(force=True)
        sandboxes.down(NAME, say=lambda _line: None)

    (shown,) = (text for _, _, text in BLOCK.findall((ROOT / "README.md").read_text()) if text.startswith("Survey"))
    missing = not_printed(shown.replace("\n", "\n…\n"), printed["provision hosts.ini"])  # it is shortened anywhere
    everything = "\n".join(printed["provision hosts.ini"])
    assert not missing, f"README: not printed (any more): {missing}\nbut:\n{everything}"


@pytest.mark.parametrize(
    ("shown", "is_printed"),
    [
        ("…\nnode1  ready  0.1.0   15       6 min 25 s\n", True),
        ("node1  ready  0.1.0   15       385 s\n…\ndone\n", False),
        ("node1  ready  0.2.0   15       385 s\n", False),
        ("[1] a\n[0] b\n[0] c\n", True),
        ("[0] c\n[0] b\n[1] a\n", False),
        ("ready in 56 s; everything: …\nNext: this\n", True),
        ("ready in 56 s; everything: …\nNext: that\n", False),
        ("Next: this\n…\nready in 56 s\n", False),
        ("[1] a\nready in 1 min 16 s\n", True),
    ],
)
def test_what_is_not_printed_is_noticed(shown, is_printed):
    output = "\x1b[1mnode1\x1b[0m  gone\r\n\x1b[1A\r\x1b[2Knode1  ready  0.1.0   3  1 s\r\n[0] b\r\n[1] a\r\n[0] c\r\n"
    output += "    [node1:02500] plm:rsh: Warning: setpgid(2504,2504) failed in parent with errno=Permission denied(13)\r\n"
    output += "ready in 7 s; everything: /x\r\nNext: this\r\n"
    assert (not not_printed(shown, screen(output))) == is_printed
