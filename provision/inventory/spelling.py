"""Which name was meant by a name nobody knows. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from provision.inventory.names import CONFUSED, OTHER_WORDS, OUR_PREFIX, OURS

# Of difflib's 0 to 1. `solts` and `slots` reach 0.8; below that, words that merely look alike begin.
CLOSE = 0.8


def meant(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is a misspelling of; None when it is known itself or a word of its own.

    Args:
        known: Ansible's names and ours.
    """
    if name in known or name in OURS or name.lower() in OTHER_WORDS:
        return None
    plain = name.lower().replace("-", "_").strip("_")
    if plain in OURS or plain in known:
        return plain
    if plain in CONFUSED:
        return CONFUSED[plain]
    if ours := difflib.get_close_matches(plain, OURS, n=1, cutoff=CLOSE):
        return ours[0]
    return _closest_of_ansible(plain, known)


def is_stray(name: str) -> bool:
    """Whether a name lies in our own name space without being ours."""
    return name.lower().replace("-", "_").startswith(OUR_PREFIX) and name not in OURS


def _closest_of_ansible(plain: str, known: Collection[str]) -> str | None:
    """Only names that begin like `ansible_`, rightly or wrongly spelt, are held against Ansible's: people have variables of their own."""
    beginning = plain.partition("_")[0]
    if beginning != "ansible" and difflib.SequenceMatcher(None, beginning, "ansible").ratio() < CLOSE:
        return None
    if beginning != "ansible":
        repaired = "ansible_" + plain.partition("_")[2]
        if repaired in known:
            return repaired
        plain = repaired
    rest = plain[len("ansible_") :]
    candidates = {each[len("ansible_") :]: each for each in known if each.startswith("ansible_")}
    close = difflib.get_close_matches(rest, candidates, n=1, cutoff=CLOSE if len(rest) > 4 else 0.75)
    return candidates[close[0]] if close else None
