"""Which words must stand in a line for a pattern to have a chance: they are looked for in bulk before any pattern is tried.

A pattern is read with Python's parser of regular expressions, which knows all that RE2 does. The words are in lower case and without
digits, as the lines are that they are looked for in (`prefilter.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from provision.diagnosis.patterns import Pattern

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]
else:  # pragma: no cover
    import sre_parse as parser

SHORTEST = 4
COMMON_LETTERS = frozenset(" etaoinrslcdmp")
# Words that stand in ordinary logs all the time; a pattern that has only these needs two of them side by side.
COMMON = frozenset(
    (Path(__file__).parent / "common_words.txt").read_text(encoding="utf-8").split(),
)

_Words = frozenset[str]


def required(pattern: Pattern) -> list[_Words]:
    """Sets of words: of each, one word stands in every text that matches. The first set tells texts apart best.

    Raises:
        ValueError: the pattern has no part that is literal enough.
    """
    candidates = _candidates(parser.parse(pattern.source))
    best = _best(candidates)
    if best is None:
        raise ValueError(f"the pattern has no literal word of {SHORTEST} letters or more: {pattern.source}")
    return [best, *(words for words in candidates if words != best and not any(" " in word for word in words))]


def _candidates(tree: Iterable[tuple[Any, Any]]) -> list[_Words]:
    """Sets of words, each of which would do."""
    found: list[_Words] = []
    run = ""

    def end_run() -> None:
        nonlocal run
        found.extend(_of_run(run))
        run = ""

    for operation, value in tree:
        name = str(operation)
        if name == "LITERAL":
            run += chr(value)
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1 and _is_space(value[2]):
            run += " "
        else:
            end_run()
            if name == "SUBPATTERN":
                found.extend(_candidates(value[3]))
            elif name == "BRANCH":
                branches = [_best(_candidates(branch)) for branch in value[1]]
                if all(branches):
                    found.append(frozenset().union(*(branch for branch in branches if branch)))
            elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
                found.extend(_candidates(value[2]))
    end_run()
    return found


def _is_space(tree: Sequence[tuple[Any, Any]]) -> bool:
    return len(tree) == 1 and "CATEGORY_SPACE" in str(tree[0])


def _of_run(run: str) -> Iterable[_Words]:
    """A run of literal text: each of its words, and all of it, for text that is one line everywhere."""
    plain = "".join(letter for letter in run.lower() if not letter.isdigit())
    for word in {*plain.split(), plain.strip()}:
        if len(word) >= SHORTEST:
            yield frozenset({word})


def _best(candidates: Sequence[_Words]) -> _Words | None:
    return max(candidates, key=lambda words: min(_weight(word) for word in words), default=None)


def _weight(word: str) -> float:
    """How well a word tells lines apart. Single words are better than several: programs and people fold lines differently."""
    rare = 0.0 if COMMON_LETTERS.issuperset(word[:-2]) else 2.5  # words of common letters stand in more lines
    if " " in word:
        return rare + (6.5 if len(word) > 8 else 3)
    return 1 if word in COMMON else rare + min(len(word), 10)
