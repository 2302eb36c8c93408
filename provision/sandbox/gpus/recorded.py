"""nvidia-smi where no archive has it: a script that prints recorded outputs. Pure.

The outputs (``nvidia-smi.txt``) are those of the real program, made into templates by the test that compares them. ``= WHEN CODE
ARGUMENTS`` begins one; each of its lines is ``LEVEL WHEN|TEXT``. LEVEL: ``g`` is repeated for each GPU, ``l`` for each of its NVLinks.
WHEN: names of which the host has one, or with ``!`` none; without a name: always. ``{words}`` are replaced (``host.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby

Words = Mapping[str, object]


def script(has: Collection[str], host: Words, gpus: Sequence[Words]) -> str:
    """The program. ``has``: features of the host's GPUs, the profile's name, and the driver's state; ``host``, ``gpus``: words of the host
    and of each GPU, of which ``links`` counts its NVLinks. Other arguments than the recorded ones are refused."""
    said = ["#!/bin/sh", "# Recorded outputs of a simulated host: nvidia-smi itself could not be had from an archive.", 'case "$*" in']
    for output in resources.files(__package__).joinpath("nvidia-smi.txt").read_text(encoding="utf-8").split("\n= ")[1:]:
        head, *lines = output.removesuffix("\n").split("\n")
        when, code, arguments = head.split(" ", 2)
        if _holds(when.strip("-"), has):
            parts = [(*line.partition("|")[0].partition(" ")[::2], line.partition("|")[2]) for line in lines]
            fitting = [(level, text) for level, when, text in parts if _holds(when, has)]
            pattern = arguments if arguments == "*" else f"'{arguments}'"
            said += [f"{pattern}) cat <<'END'", *_rendered(fitting, host, gpus), "END", f"exit {code} ;;"]
    return "\n".join([*said, '*) echo "not recorded: nvidia-smi $*" >&2; exit 1 ;;', "esac", ""])


def _holds(when: str, has: Collection[str]) -> bool:
    return not when or when.startswith("!") != any(name in has for name in when.strip("!").split(","))


def _rendered(lines: Sequence[tuple[str, str]], host: Words, gpus: Sequence[Words]) -> Iterator[str]:
    for once, block in groupby(lines, key=lambda line: not line[0]):
        parts = [(level, [text for _, text in part]) for level, part in groupby(block, key=lambda line: line[0])]
        for words in [host] if once else gpus:
            for level, texts in parts:
                for link in range(int(str(words["links"])) if level == "l" else 1):
                    yield from (text.format(**words, link=link) for text in texts)
