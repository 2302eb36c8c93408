"""Logs written against the doctor's patterns take linear time: every pattern is RE2's, and is searched once for many lines."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from itertools import islice, product
from pathlib import Path

import pytest
import re2

from provision.diagnosis.logs import Scanner, lines, prefilter
from provision.diagnosis.logs.prefilter import WordSearch, required_words
from provision.diagnosis.patterns import Pattern
from provision.diagnosis.signatures import all_signatures, error_shapes, harmless
from provision.doctor import support_bundle

HANG_S = 300  # for a busy machine; Python's own engine takes hours


def test_every_pattern_is_one_of_re2() -> None:
    known = [pattern for each in all_signatures().values() for pattern in (*each.patterns, *each.recovered_by)]
    known += [*harmless(), *(pattern for shape in error_shapes() for pattern in shape.patterns)]
    assert len(known) > 300
    for pattern in known:
        assert isinstance(pattern, Pattern)
        assert type(pattern._latin1) is type(pattern._unicode) is re2._Regexp
        assert pattern.source.isascii()
        assert pattern.source.startswith("(?im)")
        assert not re.search(r"\\[AzZ]", pattern.source)  # a part of a log is searched as if it were a text of its own


@pytest.mark.parametrize("module", [support_bundle, lines, prefilter])
def test_modules_that_read_logs_have_no_pattern_of_pythons_engine(module) -> None:
    values = [each for value in vars(module).values() for each in (value if isinstance(value, tuple) else (value,))]
    assert not [value for value in values if isinstance(value, re.Pattern)]


@pytest.mark.parametrize("source", ["(?=a)b", r"(a)\1", "(?<!a)b", "a{0,1500}"])
def test_patterns_beyond_linear_time_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="invalid"):
        Pattern(source)


def test_logs_written_against_the_patterns_are_read(tmp_path: Path) -> None:
    """The beginning of a pattern over and over, all the space that it allows, and lines of a megabyte."""
    logs = {
        "spaces": "Ignore above cud\nCould not load dynamic library " + " " * 4000 + "x\n",
        "again": "Ignore above cud\n" + "Could not load dynamic library " * 130 + "\n",
        "long": "/dev/shm/nccl-" * (1 << 16) + "\n" + "RmInitAdapter: " * (1 << 16) + "\n",
        "cause": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
    }
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "provision", "doctor", *(word for name in logs for word in ("--log", str(tmp_path / name)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "cuda-oom" in done.stdout


def test_a_pattern_is_searched_once_for_many_candidates(monkeypatch) -> None:
    """Lines that are all different and hold words of patterns: more of them cost no more searches."""
    searches: list[Pattern] = []
    real = Pattern.matches
    monkeypatch.setattr(Pattern, "matches", lambda self, *where: searches.append(self) or real(self, *where))
    needed = []
    for count in (100, 1000):
        names = ["".join(letters) for letters in islice(product("ghijk", repeat=5), count)]
        scanner = Scanner()
        searches.clear()
        scanner.read(io.BytesIO("".join(f"NCCL WARN call to {name} failed: an error\n" for name in names).encode()), "log")
        assert scanner.unknown["alarming-word"].is_full
        needed.append(len(searches))
    assert needed[1] <= needed[0] < 100


def test_all_words_of_dense_lines_are_found() -> None:
    known = sorted({word.encode() for pattern in harmless() for group in required_words(pattern) for word in group})
    search = WordSearch(known)
    for text in (b"", b"nothing", b"\xff" + b"".join(known), *(one + other[1:] for one in known for other in known if one[-1] == other[0])):
        assert search.all(text) == tuple(word for word in known if word in text)
