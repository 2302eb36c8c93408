"""The known errors, as data: signatures/LAYER.yaml, what follows from other errors (consequences.yaml), and what is harmless."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, RootModel, WithJsonSchema
from pydantic_core import PydanticCustomError

from provision.base import validation
from provision.base.errors import UsageError
from provision.base.validation import Form, Model
from provision.diagnosis.findings import Severity
from provision.diagnosis.patterns import Pattern

FOLDER = Path(__file__).parent
LAYERS = ("driver", "cuda", "nccl", "mpi", "hwloc", "linker", "build", "python", "torch", "engine", "ssh", "network", "os", "data")


def compiled(pattern: str) -> Pattern:
    """A pattern as the data files write it: any case, a space stands for any white space, line ends included."""
    return Pattern("(?im)" + pattern.replace(" ?", r"\s*").replace(" ", r"\s+"))


def _pattern(value: Any) -> Pattern:
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("form", "must be {what}", {"what": "a pattern in quotes"})
    return compiled(value)


_Id = Annotated[str, Form(r"[a-z0-9]+(-[a-z0-9]+)*", "an id: small letters and digits, with hyphens between")]
_Layer = Annotated[str, Form("|".join(LAYERS), "one of " + ", ".join(LAYERS))]
_Text = Annotated[str, Form(r"[\s\S]+", "a text")]
_Texts = Annotated[tuple[_Text, ...], Field(min_length=1)]
_Pattern = Annotated[Pattern, PlainValidator(_pattern), WithJsonSchema({"type": "string", "minLength": 1})]


class Signature(Model):
    """A known error.

    ``layer`` is the file's name; files of several layers say it. ``plain``: for people who do not know the field. ``fix``: commands to
    paste, or sentences where there is no command. ``patterns``: regular expressions for the stable part of the message, in any case; a
    space stands for any white space. ``probe``: how the condition is seen on a live host. ``over``: ids that do not count where this one
    matches the same lines. ``consequence_of``: ids, layers or `any`: what explains this error when it is in the same log.
    ``recovered_by``: a later line that says that it went well after all.
    """

    id: _Id
    layer: _Layer = ""
    severity: Severity
    title: Annotated[str, Form(r".{10,}", "a title of at least 10 letters")]
    plain: Annotated[str, Form(r"[\s\S]*\.", "a sentence that ends with a full stop")]
    cause: Annotated[str, Form(r"[\s\S]{40,}", "a text of at least 40 letters")]
    fix: _Texts
    patterns: Annotated[tuple[_Pattern, ...], Field(min_length=1)]
    probe: str = ""
    over: frozenset[_Id] = frozenset()
    consequence_of: frozenset[_Id] = frozenset()
    recovered_by: tuple[_Pattern, ...] = ()

    @property
    def generic(self) -> bool:
        """Whether it names no cause at all and only ever follows from another error (consequences.yaml)."""
        return False

    @property
    def quoted_alone(self) -> bool:
        """Whether it is, alone in a log, quoted as an unknown error; only generic ones are."""
        return False


class Consequence(Signature):
    """What programs print after something else has failed (consequences.yaml)."""

    severity: Severity = "note"
    cause: str = ""
    fix: _Texts = ("Read what stands above it in the log",)
    alone: Literal["unknown"] | None = None

    @property
    def generic(self) -> bool:
        return True

    @property
    def quoted_alone(self) -> bool:
        return self.alone == "unknown"


class Condition(Signature):
    """What hosts can suffer from and no program prints in a known form (conditions.yaml)."""

    patterns: tuple[_Pattern, ...] = ()


class Harmless(Model):
    """Lines that look alarming and mean nothing (harmless.yaml)."""

    id: _Id
    why: _Text
    patterns: Annotated[tuple[_Pattern, ...], Field(min_length=1)]


class Signatures(RootModel[tuple[Signature, ...]]):
    """A file of known errors of one layer, which the file's name says: signatures/LAYER.yaml."""


@cache
def all_signatures() -> dict[str, Signature]:
    """id → signature, in the order of layers and files. Raises UsageError as `provision.base.validation.load`."""
    found: dict[str, Signature] = {}
    for file in sorted((FOLDER / "signatures").glob("*.yaml"), key=lambda path: LAYERS.index(path.stem)):
        found |= {each.id: each.model_copy(update={"layer": file.stem}) for each in validation.load(Signatures, file).root}
    for each in validation.load(RootModel[tuple[Consequence, ...]], FOLDER / "consequences.yaml").root:
        found[each.id] = each.model_copy(update={"cause": each.plain})
    return found


@cache
def conditions() -> dict[str, Signature]:
    """id → what hosts can suffer from and no program prints in a known form."""
    return {each.id: each for each in validation.load(RootModel[tuple[Condition, ...]], FOLDER / "conditions.yaml").root}


@cache
def harmless() -> tuple[Pattern, ...]:
    """Patterns of lines that look alarming and mean nothing."""
    entries = validation.load(RootModel[tuple[Harmless, ...]], FOLDER / "harmless.yaml").root
    return tuple(pattern for entry in entries for pattern in entry.patterns)


def named(name: str) -> Signature:
    """The signature of that id; UsageError with the nearest ids if there is none."""
    import difflib

    known = {**all_signatures(), **conditions()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise UsageError(f"no known error has the id {name}", hint=("perhaps " + ", ".join(near)) if near else "provision doctor list")
