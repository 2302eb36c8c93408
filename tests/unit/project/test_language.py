"""The toolkit's language: words that the glossary of CONTRIBUTING.md replaces stay out of its texts, names and comments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXTS = ("provision", "playbooks", "images", "ansible", "docs", "README.md", "SECURITY.md", "collective_core/README.md", "examples/*.md")
#: The left column of the glossary.
REFUSED = {
    "is no": r"(?<!\bthere )\bis no (?!longer\b)",
    "laid to": r"\b(laid to|blame\w*|told as|said by)\b",
    "mend": r"\b(mend(s|ed)?|put right|ways? out|ways_out|taken[ _]off|br(ing|ings|ought|inging))\b",
    "somebody": r"\b(somebody|nobody|whoever|whatever)\b",
    "beside": r"\b(beside|anew|lies in)\b",
    "of yours": r"\bof (yours|theirs)\b|\bof the user's(?=[:;,.)]|$)",
    "a defect of provision": r"\ba defect of provision\b",
    "MOST_X": r"\b_?(MOST|LEAST)_[A-Z]",
}
#: What is not ours to choose: names of the system and of others, and their messages.
ALLOWED = re.compile(r"root to nobody|/dev/|nobody\.read\(\)|as nobody:|bring-up|matrix/")


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name.endswith((".py", ".yml", ".yaml", ".j2", ".sh", ".md"))]


@pytest.mark.parametrize("word", REFUSED)
def test_words_that_the_glossary_replaces_are_not_used(word: str) -> None:
    pattern = re.compile(REFUSED[word], re.IGNORECASE if word != "MOST_X" else 0)
    files = texts()
    assert len(files) > 300
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and not ALLOWED.search(line)
    ]
    assert not found, "\n".join(found)
