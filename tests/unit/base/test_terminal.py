"""What is folded on a terminal, and what is not."""

from __future__ import annotations

import io

import pytest

from provision.base.terminal import Console

SENTENCES = "\n  The system allows a process few open files; large jobs need more.\nAs root."


def printed(text: str, *, terminal: bool, prose: bool) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=terminal, color_system=None)
    (console.prose if prose else console.say)(text)
    return stream.getvalue().splitlines()


def test_sentences_are_folded_between_words_and_keep_their_indent() -> None:
    folded = ["", "  The system allows a process few open", "  files; large jobs need more.", "  As root."]
    assert printed(SENTENCES, terminal=True, prose=True) == folded
    assert printed("x" * 50, terminal=True, prose=True) == ["x" * 38, "  " + "x" * 12], "no text from outside begins a line"
    assert printed("one\nprovision: forged", terminal=True, prose=True) == ["one", "  provision: forged"]


@pytest.mark.parametrize("prose", [False, True])
def test_what_is_read_by_programs_or_copied_is_not_folded(prose: bool) -> None:
    whole = ["", "  The system allows a process few open files; large jobs need more.", "    As root."]
    assert printed(SENTENCES, terminal=False, prose=prose) == whole
    assert printed("→ " + "word " * 20 + "end", terminal=True, prose=False) == ["→ " + "word " * 20 + "end"]
