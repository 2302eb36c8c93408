"""Known errors as data, one model for each kind of file.

`signatures/LAYER.yaml`: errors that programs print or checks of hosts find. `symptoms.yaml`: what programs print after something else
has failed. `harmless.yaml`: lines that look alarming and mean nothing. `error_shapes.yaml`: how errors look that no signature describes.
`signs.yaml`: how runs look that go well, and where they run: which steps fit there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import ConfigDict, Discriminator, Field, PlainValidator, RootModel, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from provision.base import validation
from provision.base.errors import UsageError
from provision.base.problems import Severity
from provision.base.validation import Form, Model
from provision.diagnosis.patterns import Pattern, latin1

FOLDER = Path(__file__).parent
LAYERS = ("driver", "cuda", "nccl", "mpi", "hwloc", "linker", "build", "python", "torch", "engine", "ssh", "network", "os", "data")


def _pattern(value: Any, *, space: str = r"\s") -> Pattern:
    """A pattern as the files write it: in any case, and a space stands for any white space, line ends included."""
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("form", "must be {what}", {"what": "a pattern in quotes"})
    return Pattern("(?im)" + value.replace(" ?", f"{space}*").replace(" ", f"{space}+"))


_Id = Annotated[str, Form(r"[a-z0-9]+(-[a-z0-9]+)*", "an id: small letters and digits, with hyphens between")]
_Layer = Annotated[str, Form("|".join(LAYERS), "one of " + ", ".join(LAYERS))]
_Text = Annotated[str, Form(r"[\s\S]+", "a text")]
_Url = Annotated[str, Form(r"https://\S+", "an address that begins with https://")]
_Pattern = Annotated[Pattern, PlainValidator(_pattern), WithJsonSchema({"type": "string", "minLength": 1})]
_LinePattern = Annotated[Pattern, PlainValidator(partial(_pattern, space=r"[\x20\t]")), WithJsonSchema({"type": "string", "minLength": 1})]
_Patterns = Annotated[tuple[_Pattern, ...], Field(min_length=1)]
_Entry = TypeVar("_Entry", bound=Model)
_REMARK = "   # "  # between a command and what it does, in a step


class Change(Model):
    """A step of a fix that changes something.

    ``run``: what to paste, one line. ``changes``: what it changes, in a few words. ``needs``: what it takes. ``undo``: how to take it back,
    or that it cannot be taken back.
    """

    run: Annotated[str, Form(r"[^\n]+", "one line to paste")]
    changes: Annotated[str, Form(r"[^\n]+", "a few words on one line")]
    needs: tuple[Literal["root", "no running job", "a restart of the job", "a new login", "a reboot"], ...] = ()
    undo: _Text

    def __str__(self) -> str:
        return f"{self.run}{_REMARK}{self.changes}"


def halves(line: str) -> tuple[str, str]:
    """A step's line as its command and the remark behind it; of a line without one the command is empty: it may be a sentence."""
    command, remark, text = line.partition(_REMARK)
    return (command, text) if remark else ("", line)


# A text is a command that changes nothing, or a sentence where there is no command.
Step = Annotated[
    Annotated[_Text, Tag("look")] | Annotated[Change, Tag("change")],
    Discriminator(lambda step: "look" if isinstance(step, str) else "change"),
]
_Steps = Annotated[tuple[Step, ...], Field(min_length=1, alias="fix")]


class Words(Model):
    """Title and summary of an error on a host, where nothing may have failed yet; the entry's own speak of what a program printed."""

    title: str
    summary: str


class Signature(Model):
    """A known error.

    ``layer``: the file's name, or in a file of several layers. ``summary``: one sentence for people who do not know the field.
    ``on_host``: the same for what checks of hosts find. ``fixed_by``: what `doctor --fix` does: the `installation`, or the tasks in
    playbooks/fix/ID.yml, as `root` or as the login `user`. ``steps`` (in files ``fix``): what helps, in its order. ``patterns``: regular
    expressions for the stable part of the message, in any case, a space for any white space; none where only checks of hosts see it.
    ``probe``: how to see it on a live host. ``sources``: public reports and documentation. ``supersedes``: ids that do not count where
    this one matches the same lines. ``symptom_of``: ids or layers of root causes that explain it in the same log; `any` stands for all.
    """

    model_config = ConfigDict(populate_by_name=True)

    id: _Id
    layer: _Layer = ""
    severity: Severity = "error"
    title: Annotated[str, Form(r".{10,}", "a title of at least 10 letters")]
    summary: Annotated[str, Form(r"[\s\S]*\.", "a sentence that ends with a full stop")]
    on_host: Words | None = None
    cause: Annotated[str, Form(r"[\s\S]{40,}", "a text of at least 40 letters")]
    fixed_by: Literal["installation", "root", "user"] | None = None
    steps: _Steps
    patterns: tuple[_Pattern, ...] = ()
    sources: tuple[_Url, ...] = ()
    probe: str = ""
    supersedes: frozenset[_Id] = frozenset()
    symptom_of: frozenset[_Id] = frozenset()

    @property
    def fix(self) -> tuple[str, ...]:
        """The steps as lines for a finding; `steps` has all that is known about each."""
        return tuple(map(str, self.steps))

    @property
    def may_be_root_cause(self) -> bool:
        """Whether it explains other errors: it is an error itself, and not a symptom of just any other."""
        return self.severity == "error" and "any" not in self.symptom_of


class Symptom(Signature):
    """What programs print after anything else has failed (symptoms.yaml)."""

    severity: Severity = "note"
    cause: str = ""
    steps: _Steps = ("Read what is above it in the log",)


class Harmless(Model):
    """Lines that look alarming and mean nothing (harmless.yaml). ``why``: for who reads the file."""

    why: _Text
    patterns: _Patterns


class ErrorShape(Model):
    """How errors look that no signature describes (error_shapes.yaml). A line has the shape of the last entry that matches it.

    ``says``: how much such a line says, see `SAYS`. ``is_certain``: it is only where something went wrong; others need a second sign of it,
    which is the end of the log where at most ``behind`` ordinary lines follow: loggers and shells' commands go on, tools report their end.
    ``patterns``: a space stands for white space within a line; of one with a group, the line in which the group is gets quoted.
    ``unless``: patterns of lines that do not count. ``at_any_level``: whether it counts where the line's logger says INFO or WARNING.
    """

    id: _Id
    says: Literal["exception", "reason", "sentence", "status", "word"]
    is_certain: bool = False
    behind: int = 2
    patterns: Annotated[tuple[_LinePattern, ...], Field(min_length=1)]
    unless: tuple[_LinePattern, ...] = ()
    at_any_level: bool = True


SAYS = get_args(ErrorShape.model_fields["says"].annotation)  # the best first; a word is a sign only where something else says failure


class Sign(Model):
    """What a log tells about its run (signs.yaml): where it ran, or how it went: (``kind`` outcome) at its end, (remark) in a line.

    ``unless``: patterns of lines that do not count. ``steps``: words of steps that fit where it ran and in no other world of the kind.
    ``is_default``: the world of its kind where a log shows none.
    """

    id: _Id
    kind: Literal["outcome", "remark", "vendor", "framework", "place", "rights"]
    is_default: bool = False
    patterns: _Patterns
    unless: tuple[_Pattern, ...] = ()
    steps: tuple[_Pattern, ...] = ()


class Signatures(RootModel[tuple[Signature, ...]]):
    """A file of known errors of one layer, which the file's name says: signatures/LAYER.yaml."""


@cache
def all_signatures() -> dict[str, Signature]:
    """id → signature, in the order of layers and files. Raises UsageError as `provision.base.validation.load`."""
    found: dict[str, Signature] = {}
    for file in sorted((FOLDER / "signatures").glob("*.yaml"), key=lambda path: LAYERS.index(path.stem)):
        found |= {each.id: each.model_copy(update={"layer": file.stem}) for each in validation.load(Signatures, file).root}
    return found | {each.id: each.model_copy(update={"cause": each.summary}) for each in _entries(Symptom, "symptoms")}


@cache
def _entries(model: type[_Entry], name: str) -> tuple[_Entry, ...]:
    """What a file holds. Raises UsageError as `provision.base.validation.load`."""
    return validation.load(RootModel[tuple[model, ...]], FOLDER / f"{name}.yaml").root  # type: ignore[valid-type]


harmless = partial(_entries, Harmless, "harmless")
error_shapes = partial(_entries, ErrorShape, "error_shapes")
signs = partial(_entries, Sign, "signs")


def is_remark(text: bytes, *ids: str) -> bool:
    """Whether a line is a remark of one of these kinds."""
    return any(sign.id in ids and shows(sign.patterns, text) and not shows(sign.unless, text) for sign in signs())


def shows(patterns: tuple[Pattern, ...], text: bytes) -> bool:
    """Whether one of the patterns is in a text in `latin1`."""
    return any(pattern.first(text) for pattern in patterns)


def fitting(steps: Iterable[str], shown: Container[str]) -> tuple[str, ...]:
    """The steps that fit where a job ran. ``shown``: ids of signs; of a kind without any of them, the default counts."""
    kinds = {sign.kind for sign in signs() if sign.id in shown}
    here = [sign for sign in signs() if sign.id in shown or (sign.is_default and sign.kind not in kinds)]

    def fits(step: str) -> bool:
        claims = [sign for sign in signs() if shows(sign.steps, latin1(step))]
        return {sign.kind for sign in claims} == {sign.kind for sign in claims if sign in here}

    return tuple(filter(fits, steps))


def is_known(name: str) -> bool:
    """Whether there is a known error of that id."""
    return name in all_signatures()


def known_error(name: str) -> Signature:
    """The known error of that id. Raises UsageError with the nearest id if there is none."""
    if name not in (known := all_signatures()):
        raise UsageError(f"no known error has the id {name}{validation.did_you_mean(name, known)}", hint="provision doctor list names them")
    return known[name]
