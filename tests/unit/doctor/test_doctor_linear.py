"""Logs written against the doctor's patterns take linear time: every pattern is RE2's, and is searched once for many lines."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest
import re2

from provision.catalog import OURS
from provision.diagnosis.logs import Scanner, prefilter
from provision.diagnosis.logs import scanner as scanner_module
from provision.diagnosis.logs.prefilter import WordSearch
from provision.diagnosis.logs.scanner import AT_ONCE, KEPT_MATCHES
from provision.diagnosis.logs.words import required_words
from provision.diagnosis.patterns import Pattern
from provision.diagnosis.signatures import FOLDER, all_signatures, error_shapes, harmless, signs

HANG_S = 300  # for a busy machine; Python's own engine takes hours


def test_every_pattern_is_one_of_re2() -> None:
    known = [pattern for each in all_signatures().values() for pattern in each.patterns]
    known += [pattern for each in (*harmless(), *error_shapes()) for pattern in each.patterns]
    known += [pattern for sign in signs() for pattern in (*sign.patterns, *sign.unless, *sign.steps)]
    known += [pattern for shape in error_shapes() for pattern in shape.unless]
    assert len(known) > 300
    for pattern in known:
        assert isinstance(pattern, Pattern)
        assert type(pattern._latin1) is type(pattern._unicode) is re2._Regexp
        assert pattern.source.isascii()
        assert pattern.source.startswith("(?im)")
        assert not re.search(r"\\[AzZ]", pattern.source)  # a part of a log is searched as if it were a text of its own


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.stem)
def test_modules_that_read_logs_do_not_use_pythons_engine(file: Path) -> None:
    """`words` takes our own patterns apart with it, and never sees a log."""
    imports = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert "re" not in modules | {node.module for node in imports if isinstance(node, ast.ImportFrom)} or file.stem == "words"


@pytest.mark.parametrize("source", ["(?=a)b", r"(a)\1", "(?<!a)b", "a{0,1500}"])
def test_patterns_beyond_linear_time_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="invalid"):
        Pattern(source).first(b"")


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
    in_vain: list[Pattern] = []
    real = Pattern.first

    def first(self: Pattern, *where: Any) -> Any:
        found = real(self, *where)
        if found is None and len(where) > 1:  # not in a single line
            in_vain.append(self)
        return found

    monkeypatch.setattr(Pattern, "first", first)
    needed = []
    for count in (100, AT_ONCE):
        names = ["".join(letters) for letters in islice(product("ghijk", repeat=5), count)]
        scanner = Scanner(OURS)
        in_vain.clear()
        scanner.read(io.BytesIO("".join(f"call to {name} failed\n" for name in names).encode()), "log")
        assert scanner.unknown["alarming-word"].is_full
        needed.append(len(in_vain))
    assert needed[1] <= needed[0] < 100


def test_what_is_found_often_is_no_longer_looked_for() -> None:
    scanner = Scanner(OURS)
    for _ in range(3):
        scanner.read(
            io.BytesIO("".join(f"Host key verification failed. {name}\n" for name in combinations("abcdefghijk", 4)).encode()), "log"
        )
    assert len(scanner.known["ssh-host-key-verification"].first) == KEPT_MATCHES
    assert all(rule.id != "ssh-host-key-verification" for rules in scanner._of_word.values() for rule in rules)
    scanner.read(io.BytesIO(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"), "other")
    assert "cuda-oom" in scanner.known


def test_a_word_that_is_in_very_many_lines_is_no_longer_looked_for(monkeypatch) -> None:
    """Lines that hold a word of patterns and match none, all different: only so many are examined."""
    monkeypatch.setattr(scanner_module, "LINES_OF_A_WORD", 50)
    scanner = Scanner(OURS)
    lines = (f"a relocation of {''.join(name)}\n" for name in product("ghijk", repeat=6))
    scanner.read(io.BytesIO("".join(lines).encode() + b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"), "log")
    assert b"relocation" not in scanner._of_word
    assert not scanner.is_complete
    assert "cuda-oom" in scanner.known


def test_all_words_of_dense_lines_are_found() -> None:
    known = sorted(
        {word.encode() for each in harmless() for pattern in each.patterns for group in required_words(pattern) for word in group}
    )
    search = WordSearch(known)
    for text in (b"", b"nothing", b"\xff" + b"".join(known), *(one + other[1:] for one in known for other in known if one[-1] == other[0])):
        assert search.all(text) == tuple(word for word in known if word in text)


@pytest.mark.parametrize(
    "line",
    [
        "[1,0]<stdout>:epoch 1 step 3 loss 0.1 lr 0.1 grad norm 2.0 time 3 s data batch images/s memory 3 GiB val accuracy 0.3",
        "n1:71:88 [1] NCCL INFO ncclCommInitRank comm 0xabc rank 1 nranks 8 cudaDev 1 busId c000 commId 0xfe - Init COMPLETE",
        "n1:71:88 [1] NCCL INFO AllReduce: opCount a sendbuff 0xab recvbuff 0xcd count 10 datatype 7 op 0 root 0 comm 0xef",
        "n1:71:88 [1] NCCL INFO Channel 01/24 : 0[1] -> 1[2] via P2P/IPC",
    ],
)
def test_ordinary_lines_of_training_have_no_word_of_a_pattern(line: str) -> None:
    assert scanner_module._rules().search.all(prefilter.reduced(line.encode())) == ()
