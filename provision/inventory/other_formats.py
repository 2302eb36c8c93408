"""Host lists in other programs' formats, which Ansible's parser misreads or refuses without saying what they are."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from provision.base.problems import Problem

_LARGEST = 1 << 20  # bytes that are read
_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HOST = r"(?P<host>\w[\w.-]*(?:\[[^\]\n]*\][\w.-]*)*|\[[^\]\n]+\])"
_END = r"[ \t]*(?:#.*)?$"
# A line of a file → what the file looks like, and what to do. `NAME:8` means slots, but no sshd listens below port 200, save on 22.
_FORMATS = (
    (
        r"^(?i:Host|Match)[ \t=]+[^\s=]+(?:[ \t]+[^\s=]+)*[ \t]*$",  # but not `host ansible_host=…`
        "ssh's configuration",
        "name its hosts as NAME,NAME: ssh reads ~/.ssh/config for them",
    ),
    (r"^(?i:NodeName|PartitionName|SlurmctldHost)=", "slurm.conf", "one host per line: scontrol show hostnames NODES > hosts.ini"),
    (
        rf"^(?P<address>\d+(?:\.\d+){{3}}|[0-9a-fA-F]*:[0-9a-fA-F:.]+)[ \t]+(?P<host>[A-Za-z][\w.-]*)(?:[ \t]+[\w.-]+)*{_END}",
        "/etc/hosts",
        "write each host as `{host} ansible_host={address}`",
    ),
    (
        rf"^{_HOST}(?:[ \t]+|:(?!22\b)(?=1?\d?\d\b))(?P<slots>\d{{1,6}}){_END}",
        "a list of hosts and their slots",
        "write `{host} slots={slots}`; for ssh on another port `{host} ansible_port=PORT`",
    ),
)


def problems(source: Path, origin: str) -> Iterator[Problem]:
    """Why a file is not an inventory but another list of hosts, or says something else than it seems to."""
    if not source.is_file():
        return
    with source.open("rb") as file:
        content = file.read(_LARGEST)
    text = content.decode(errors="replace").replace("\r\n", "\n")
    if content.startswith(_BOMS):
        hint = r"save it as UTF-8 without BOM; if it is UTF-8 already: sed -i '1s/^\xEF\xBB\xBF//' FILE"
        yield Problem(
            "error", "it begins with a byte order mark, as editors on Windows write it", hint, where=f"{origin}:1", id="byte-order-mark"
        )
    elif re.match(r"\s*\{", text) and re.search(r'"_meta"\s*:', text):
        hint = "write it in the form of an inventory: ansible-inventory --list --yaml -i SOURCE > hosts.yml"
        yield Problem("error", "it is the output of ansible-inventory --list", hint, where=origin, id="other-format")
    elif not text.startswith(("#!", "---", "{")) and not re.search(r":\s*$", text, re.MULTILINE):  # no program, YAML or JSON
        yield from _in_lines(text, origin)


def _in_lines(text: str, origin: str) -> Iterator[Problem]:
    of_groups = re.compile(r"^\[[^\]\n]*:(?:vars|children)\][\s\S]*?(?=^\[|\Z)", re.MULTILINE)
    text = of_groups.sub(lambda found: "\n" * found[0].count("\n"), text)
    for pattern, what, hint in _FORMATS:
        if found := re.search(pattern, text, re.MULTILINE):
            where = f"{origin}:{text.count(chr(10), 0, found.start()) + 1}"
            hint = hint.format(**found.groupdict())
            yield Problem("error", f"it looks like {what}, and not like an inventory", hint, where=where, id="other-format")
            return
    for group in re.split(r"^\[.*\]", text, flags=re.MULTILINE):
        for host, count in Counter(re.findall(rf"^(\w[\w.-]*){_END}", group, re.MULTILINE)).items():
            if count > 1:
                what = f"host `{host}` is named {count} times in its group, which is how Open MPI's hostfiles count slots"
                yield Problem("error", what, f"name it once: `{host} slots={count}`", where=origin, id="host-named-twice")
