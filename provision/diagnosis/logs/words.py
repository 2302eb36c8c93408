"""The words without which a pattern cannot match, by which the prefilter finds lines. Logs are never seen here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from provision.diagnosis.patterns import Pattern

SHORTEST_WORD = 4
COMMON_LETTERS = frozenset(" etaoinrslcdmp")
# Words of ordinary log lines; a pattern that has no other literal text needs two of them next to each other.
COMMON_WORDS = frozenset((Path(__file__).parent / "common_words.txt").read_text(encoding="utf-8").split())

# The parts of a pattern, and how often each may be there.
_PART = re.compile(
    r"(\\x..|\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\((?:\?[\w-]*[:)]|\?P<\w+>)?|[^\\[(){}|*+?.^$]+(?![*+?{])|.)([*+?]\??|\{[\d,]*\}\??)?"
)
_SPACES, _A_DIGIT, _CLASSES = (r"\s", r"[\x20\t]"), (r"\d", r"[\d]"), frozenset("sSdDwWbBntx")
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")

_Words = frozenset[str]


def required_words(pattern: Pattern) -> list[_Words]:
    """Sets of words: of each set, one word is in every text that matches. The first set is in the fewest texts that do not.

    Raises:
        ValueError: the pattern has no part that is literal enough.
    """
    candidates = _candidates(iter(_PART.findall(pattern.source)))
    if (best := _best(candidates)) is None:
        raise ValueError(f"the pattern has no literal word of {SHORTEST_WORD} letters or more: {pattern.source}")
    return [best, *(words for words in candidates if words != best and not any(" " in word for word in words))]


def _candidates(parts: Iterator[tuple[str, str]]) -> list[_Words]:
    """All such sets of words in the parts of a pattern, or of a group of it, in their order."""
    branches: list[list[_Words]] = [[]]
    literal = ""
    for part, times in parts:
        may_be_left_out = times.startswith(("?", "*", "{0", "{,"))
        if part in _A_DIGIT or (part[:2] == "(?" and part[-1] == ")"):  # reduced lines have none; flags
            continue
        if part in _SPACES and times and not may_be_left_out:
            literal += " "
        elif not times and (part[1] not in _CLASSES if part[0] == "\\" else part[0] not in "[(){}|*+?.^$"):
            literal += part.removeprefix("\\")
        else:
            branches[-1] += _words_of(literal)
            literal = ""
            if part[0] == "(":
                branches[-1] += _candidates(parts)
            elif part == "|":
                branches.append([])
            elif part == ")":
                if may_be_left_out:
                    return []
                break
    branches[-1] += _words_of(literal)
    if len(branches) == 1:
        return branches[0]
    best = [words for branch in branches if (words := _best(branch))]
    return [frozenset().union(*best)] if len(best) == len(branches) else []


def _words_of(literal: str) -> list[_Words]:
    """Each word of a literal text, and the whole text, for logs that do not break it into lines."""
    plain = literal.lower().translate(_WITHOUT_DIGITS)
    return [frozenset({word}) for word in dict.fromkeys((*plain.split(), plain.strip())) if len(word) >= SHORTEST_WORD]


def _best(candidates: Sequence[_Words]) -> _Words | None:
    """The set that is in the fewest texts; of equal ones the last: messages begin with more general words."""
    return max(reversed(candidates), key=lambda words: min(map(_rarity, words)), default=None)


@cache
def _rarity(word: str) -> float:
    """How few lines contain the word. One word is better than several: programs and people break lines differently."""
    rare = 0.0 if COMMON_LETTERS.issuperset(word[:-2]) else 2.5
    if " " in word:
        return rare + (5.2 if len(word) > 8 else 3)  # never as much as one word has: sets have no order
    return 1 if word in COMMON_WORDS else rare + min(len(word), 10)
