"""Lines of a log without what launchers, terminals and loggers add to them: prefixes of ranks, time stamps, colours, JSON."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO, Literal, NamedTuple

from provision.diagnosis.patterns import Pattern, latin1

BLOCK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 13  # bytes; what is longer is cut into parts of this size
NARROWEST, WIDEST = 60, 250  # bytes of lines that a terminal has folded
MAX_FULL = 0.8  # of the lines of a folded log have its full width; where more have it, it is the program's own
PART = b"\r"  # begins what is not a line of the file: an update of a progress bar, the next part of a long line

_TAG = Pattern(r"\[\d{1,9},\d{1,9}\]<std(?:out|err)>:")  # mpirun tags every write: a line of Python's may be several
_ANSI = Pattern(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
# Prefixes: whose line it is, and when it was printed.
_PREFIX = Pattern(
    r"\s*(?:(?:"
    r"\[(?:[\w.-]+@)?\d+,(?P<mpi>\d+)\](?:<\w+>)?:?"  # mpirun --tag-output
    r"|\[(?P<horovod>\d+)\]<\w+>:?"  # Horovod
    r"|\[(?:rank|default)(?P<torch>\d+)\]:?"  # torchrun
    r"|\[Rank (?P<named>\d+)\]:?"
    r"|(?P<srun>\d{1,5}): "  # srun --label
    r"|\(\w*\s?pid=\d+(?:, ip=[\w.:]+)?\)|\(raylet(?:, ip=[\w.:]+)?\)"  # Ray
    r"|[\w.-]+\s+\| |std(?:out|err) [FP] "  # docker compose; CRI
    r"|\[(?:pod/)?[\w.-]+/[\w.-]+(?:/[\w.-]+)?\] "  # kubectl logs --prefix
    r"|#\d{1,4} (?:\d+\.\d+ )?|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\]"  # BuildKit; Hydra
    r"|slurmstepd: error: pyxis:  "  # what enroot printed
    r")|(?:(?:[^\t\n]{1,80}\t){2}\d{4}-[\w:.-]+Z"  # GitHub: job, step
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?:\s\d\d[OE]\+?)?"  # the last one: GitLab
    r"|\[\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\]"
    r"|\[\s*\d+\.\d+\]"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:\d{4} )?\S+ (?:kernel|\S+\[\d+\]):"
    r"|[\w.-]+ (?:kernel|[\w.@/-]+\[\d+\]):"  # journalctl -o short-iso, behind its time
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?)\s"
    r"|(?:[\w./+-]*[./-](?:log|txt|out|err)(?:\.\d+)?:)?\d{1,9}:|[\w./+-]*[./-](?:log|txt|out|err)(?:\.\d+)?:"  # grep -H, -n
    r")"
)
Level = Literal["", "info", "warning", "remark"]
_LEVEL = "(DEBUG|TRACE|INFO|NOTICE|WARN|WARNING|ERROR|ERR|CRITICAL|FATAL)"
# What loggers put in front of a message, the level in one of the groups.
_HEADER = Pattern(
    r"\s*(?:"
    rf"- [\w.-]+ - {_LEVEL} - "  # Python's logging
    rf"|{_LEVEL}:[\w.-]+:"
    rf"|\| {_LEVEL}\s*\| [\w.<>-]+:[\w.<>-]+:\d+ - "  # loguru
    rf"|\[{_LEVEL}\] ?(?:\[[^\]\s]{{1,80}}\] )?(?:- )?"
    rf"|\[[\w./-]+\] ?\[{_LEVEL}\](?: - | )"
    rf"|{_LEVEL} (?:\d\d-\d\d \d\d:\d\d:\d\d )?\[?[\w./-]+\.py:\d+\]?(?: -- |[: ] ?)"  # Ray, vLLM
    r")"
)
# Signs of a level in a message that stay in it.
_WARNING = Pattern(
    r"(?:(?:\S{1,200}:\d+: )?\w*Warning:|(?:\d[\d/:.,-]*[ \t]+){0,2}(?:\[ ?|[|<(])?(?:WARN(?:ING)?|[Ww]arning|[Nn]ote)(?:[^\w\s]|\s\S|$)"
    r"|\S{1,160}: ?(?:[Ww]arning|WARNING|note):|[^\[\n]{1,60}\[WARN(?:ING)?\]|W:|CMake Warning|npm WARN |\[?W(?:\d{4} | )[^\]\n]{1,120}\]"
    r"|[^\n]{0,100}\b(?:(?:level|lvl|severity)=\W?(?i:warn)|UC[CSX]\s+WARN))"
)
_INFO = Pattern(
    r"(?:[\[|]?(?:INFO|NOTICE|NOTE|debug1)\b|[^\[\n]{1,60}\[(?:INFO|NOTICE|DEBUG)\]|I:|\[?[ID](?:\d{4} | )[^\]\n]{1,120}\]"
    r"|[^\n]{0,100}\b(?:level|lvl|severity)=\W?(?i:info|debug|notice|trace))"
)
_DEBUG = Pattern(r"(?:\d[\d/:.,-]*[ \t]+){0,2}[\[|]?(?:DEBUG|TRACE)\b")
_LEVELS: dict[str, Level] = {
    "DEBUG": "remark",
    "TRACE": "remark",
    "INFO": "info",
    "NOTICE": "info",
    "WARN": "warning",
    "WARNING": "warning",
}
_MAX_PREFIXES = 8
_BEFORE_RANKS = frozenset(bytes([letter]) for letter in b"[0123456789")  # what prefixes with a rank begin with
_TASK = Pattern(r"(?:fatal|failed|ok|changed|skipping): \[[^\]\n]{1,200}\][^{\n]{0,200}=> \{")  # a task's result, as Ansible prints it


class Line(NamedTuple):
    """The message, the same in `patterns.latin1`, and the rank that printed it, if the line names one.

    ``level``: what its logger says; at "info" launchers pass on what their children print, "remark" is for debugging. Empty for an error,
    or none.
    """

    text: str
    latin1: bytes
    rank: str | None
    level: Level


def clean(raw: bytes) -> Line:
    """The message in a line. Any bytes are allowed."""
    text = raw[: LONGEST_LINE * 2].decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.replace("", text)
    text = text.replace("\r", " ").replace("\x00", "").strip()
    rank: str | None = None
    level: Level = ""
    for _ in range(_MAX_PREFIXES):
        plain, begin, own = latin1(text), 0, ""
        if found := _PREFIX.at(plain, 0):
            begin = found.end()
            level = "info" if plain.startswith(b"[   ") else level  # the kernel's time: its first 100 seconds, in which drivers probe
            if plain[:1] in _BEFORE_RANKS:
                rank = next((value.decode() for value in found.groups() if value), rank)
        elif found := _HEADER.at(plain, 0):
            word, at = next((value.decode(), found.start(number)) for number, value in enumerate(found.groups(), 1) if value)
            level = _LEVELS.get(word, "")
            if not level:  # an error's level stays
                text = text[at - plain[:at].endswith(b"[") :].strip()
                break
            begin = found.end()
        elif message := _from_json(text):
            own, word = message
            level = _LEVELS.get(word, level)
        else:
            break
        text = (own or text[begin:]).strip()
    text = _TAG.replace("", text).strip() if "]<std" in text else text
    plain = latin1(text)
    said: Level = (
        "warning" if _WARNING.at(plain, 0) else level or ("info" if _INFO.at(plain, 0) else "remark" if _DEBUG.at(plain, 0) else "")
    )
    return Line(text, plain, rank, said)


_LEVEL_KEYS = ("level", "severity", "levelname", "lvl", "log_level")
_TEXT_KEYS = ("message", "msg", "event", "error", "err", "exception", "exc_info", "stderr", "module_stderr", "stdout", "module_stdout")


def _from_json(text: str) -> tuple[str, str] | None:
    """The message in a line of JSON, and its level in capital letters; None if it has no message."""
    if text[:1] == '"' and text.rstrip(",")[-1:] == '"' and len(text) > 2:  # one of Ansible's `stdout_lines`
        value = _parsed(text.rstrip(","))
        return (value, "") if isinstance(value, str) and value.strip() else None
    head = ""
    if task := _TASK.match(text):
        head, text = text[: task.end() - 1].strip(), text[task.end() - 1 :]
    if text[:1] != "{" or text[-1:] != "}":
        return None
    value = _parsed(text)
    if not isinstance(value, dict):
        return None
    if isinstance(line := value.get("log"), str) and "stream" in value:  # Docker
        return (line, "") if line.strip() else None
    level = next((each.upper() for key in _LEVEL_KEYS if isinstance(each := value.get(key), str)), "")
    said = [each.strip() for key in _TEXT_KEYS if isinstance(each := value.get(key), str) and each.strip()]
    if not said:
        return None
    head = head or (f"{level}:" if level and level not in _LEVELS else "")
    return " ".join((head, *said)).strip(), level


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def blocks(stream: BinaryIO) -> Iterator[bytes]:
    """A log in blocks of UTF-8; an empty one ends it. Its lines end in ``\\n``; what begins with `PART` is not a line of its own.

    UTF-16 is known by its mark.
    """
    data = stream.read(BLOCK)
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    decoder = codecs.getincrementaldecoder("utf-16")("replace") if wide else None
    data = data.removeprefix(codecs.BOM_UTF8)
    kept = b""  # whether a line ends there is not known yet
    while data:
        block = kept + (decoder.decode(data).encode("utf-8", "replace") if decoder else data)
        kept = b""
        if b"\r" in block:
            if block.endswith(b"\r"):
                block, kept = block[:-1], b"\r"
            block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n" + PART)
        if block:
            yield block
        data = stream.read(BLOCK)
    yield b""


def _with_folded_words(lines: list[bytes], width: int) -> Iterator[bytes]:
    """The lines, and where a word may have been folded at the width of a terminal, also the line joined with the next one."""
    for line, following in pairwise([*lines, b""]):
        yield line
        if len(line) == width and line[-1:].isalpha() and following[:1].islower():
            yield from (PART + line + following, PART + line)  # the line again: a message may go on in the next one


def with_short_lines(block: bytes) -> tuple[bytes, list[bytes]]:
    """The block and its lines: long ones (of binary files) in parts, cut where a space is if possible, and JSON's texts unfolded."""
    lines = block.split(b"\n")
    lengths = list(map(len, lines))
    longest = max(lengths)
    width = max((len(line) for line in lines if not line.startswith(PART)), default=0) if PART in block else longest
    if NARROWEST <= width <= longest <= WIDEST and lengths.count(width) <= MAX_FULL * len(lines) + 2:
        lines = list(_with_folded_words(lines, width))
        block = b"\n".join(lines)
    is_folded = b"\\n" in block
    if longest <= LONGEST_LINE and not is_folded:
        return block, lines
    parts = (_parts(line) if len(line) > LONGEST_LINE or is_folded else (line,) for line in lines)
    lines = [PART + part if number else part for of_line in parts for number, part in enumerate(of_line)]
    return b"\n".join(lines), lines


def _parts(line: bytes) -> Iterator[bytes]:
    if b'{"' in line and b"\\n" in (text := line.replace(b'\\n"', b'"')):  # a text of several lines in JSON
        for part in text.replace(b'\\"', b'"').split(b"\\n"):
            yield from _cut(part)
    else:
        yield from _cut(line)


def _cut(line: bytes) -> Iterator[bytes]:
    begin = 0
    while len(line) - begin > LONGEST_LINE:
        space = line.rfind(b" ", begin + LONGEST_LINE - 512, begin + LONGEST_LINE)
        end = space if space > 0 else begin + LONGEST_LINE
        yield line[begin:end]
        begin = end
    yield line[begin:]
