"""Reader of files that models describe. It reports all mistakes of a file at once, each with its line, without pydantic's jargon.

The content of a file is data: long values are shortened, control characters escaped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from provision.base.errors import UsageError
from provision.base.terminal import neutral

Kind = Literal["json", "yaml"]
KeyPath = tuple[str | int, ...]  # keys of mappings and indexes of lists, from the top of a document

#: Ranks, slots, hosts, rounds and seconds: more is a mistake, and some would be read as infinite or overflow where they are used.
MAX_COUNT, MAX_SECONDS = 1_000_000, 31_536_000
_MAX_PER_CORE = 8
_MOST = 50  # mistakes of one file that are reported
_LONGEST = 60  # characters of a value, or of a key, that are shown
_LARGEST = 20_000_000  # characters of a document in which lines are looked up


class Model(BaseModel):
    """The content of a file: its fields and no others, of exactly their types, immutable. It is compiled when it is first used.

    What a validator in mode "before" returns is not JSON any more, so that below it a strict tuple refuses a list: check in mode "after".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Answer(BaseModel):
    """A part of a host's answer: what we do not know is left out, what is of another type is an error."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, defer_build=True)


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Form:
    """The form of a text, for ``Annotated[str, Form(...)]``: all of it matches ``pattern``, which ``what`` describes, such as ``a version,
    such as 2.21.5``."""

    pattern: str
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        matches = re.compile(self.pattern).fullmatch

        def check(value: str) -> str:
            if not matches(value):
                raise PydanticCustomError("form", "must be {what}", {"what": self.what})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$", "description": self.what}


def refuse(wrong: Iterable[tuple[KeyPath, str]]) -> None:
    """Raise all mistakes that a model's validator finds, if there are any, each as (key path below the model, sentence).

    A validator that finds only one can raise ValueError with the sentence instead.
    """
    errors = [InitErrorDetails(type=PydanticCustomError("cross_check", "{what}", {"what": what}), loc=at, input=None) for at, what in wrong]
    if errors:
        raise ValidationError.from_exception_data("", errors)


def load(model: type[M], path: str | Path, hint: str | None = None) -> M:
    """Read a file as a model: YAML where its name ends in .yaml, .yml or .lock, else JSON.

    Raises:
        UsageError: it cannot be read or is something else; all its mistakes, each with ``file:line``, and ``hint``.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error
    return parse(model, content, str(path), "yaml" if Path(path).suffix in (".yaml", ".yml", ".lock") else "json", hint)


def parse(model: type[M], content: str | bytes, where: str, kind: Kind = "json", hint: str | None = None) -> M:
    """Read a text as a model; ``where`` is the file's name for messages. Raises UsageError as `load` does."""
    text = decoded(content, where, hint)
    data = read(text, where, kind, hint)
    return validate(model, data, where, text=text, kind=kind, hint=hint)


def validate(
    model: type[M], data: object, where: str, *, text: str = "", kind: Kind = "json", at: KeyPath = (), hint: str | None = None
) -> M:
    """Turn plain data into a model. ``text`` is the document that contains it, ``at`` the place in it; without a text there are no lines.

    Raises:
        UsageError: as from `load`.
    """
    try:
        # As JSON, where a list may be a tuple and a text a date: strict models refuse both in Python's data.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise usage_error(problems(error, text, kind, model, at), where, hint) from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"it is nested too deeply, or contains itself: {error}", where=where, hint=hint) from error


def problems(
    error: ValidationError, text: str = "", kind: Kind = "json", model: type[BaseModel] | None = None, at: KeyPath = ()
) -> list[tuple[int | None, str]]:
    """What pydantic found, as (line from 1, sentence), in the order of lines.

    Args:
        text: the document, for lines; where it is empty there are none.
        model: the document's model, whose keys are suggested for misspelt ones.
        at: where in the document the model begins.
    """
    lines = _lines(text)
    found: dict[str, int | None] = {}
    for each in error.errors(include_url=False):
        path = _path(each["loc"], each["type"], lines, at)
        if each["type"] == "extra_forbidden":
            sentence = f"{_name(path)} is unknown{did_you_mean(str(path[-1]), _keys(model))}"
        else:
            sentence = ("the key " if each["loc"][-1:] == ("[key]",) else "") + _sentence(_name(path), each, kind)
        found.setdefault(sentence, _line(lines, path))
    return sorted(((line, sentence) for sentence, line in found.items()), key=lambda one: one[0] or 0)


def count(text: str) -> int | None:
    """A text as a whole number from 1 to `MAX_COUNT`, if it is one."""
    return int(text) if re.fullmatch("0{0,9}[1-9][0-9]{0,6}", text) and int(text) <= MAX_COUNT else None


def max_here() -> int:
    """Ranks, or hosts in containers, that this machine takes where nothing gives it slots: more would stop it."""
    return _MAX_PER_CORE * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean `word`?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean `{close[0]}`?" if close else ""


def decoded(content: str | bytes, where: str, hint: str | None = None) -> str:
    """The text of a file's bytes. Raises UsageError, naming the line, where they are not UTF-8."""
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError("not UTF-8 text", where=f"{where}:{line}", hint=hint) from error


def read(text: str, where: str, kind: Kind = "json", hint: str | None = None) -> object:
    """The plain data in a text, each key of a mapping once.

    Raises:
        UsageError: it is not JSON or YAML, or has a key twice; the first mistake, as it decides what the rest means.
    """
    try:
        if kind == "json":
            with contextlib.suppress(_DuplicateKeyError):  # then it is read as YAML, for the line
                return json.loads(text, object_pairs_hook=_unique)
        # A tab, which JSON allows between values only, is an error in YAML.
        return yaml.load(text.replace("\t", " ") if kind == "json" else text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, text.find(chr(error.character))) + 1  # its position counts letters or bytes
        raise UsageError(
            f"invalid YAML: the character U+{error.character:04X} is not allowed", where=_at(where, line), hint=hint
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = str(error.problem) if isinstance(error, _Refused) else f"invalid YAML: {neutral(str(error.problem))}"
        raise UsageError(what, where=_at(where, mark.line + 1 if mark else None), hint=hint) from error
    except (ValueError, RecursionError) as error:
        what = f"invalid {kind.upper()}: {getattr(error, 'msg', None) or error}"
        raise UsageError(what, where=_at(where, getattr(error, "lineno", None)), hint=hint) from error


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that occurs twice, Python would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _DuplicateKeyError
    return found


class _Refused(yaml.constructor.ConstructorError):
    """What YAML allows and these files do not; ``problem`` is the sentence for the user."""


if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML has it, is five times as fast


class _Loader(_SafeLoader):
    """YAML within the limits of JSON: keys are texts, each once; no aliases."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        if isinstance(node, yaml.CollectionNode) and node in self.constructed_objects:  # a few aliases can stand for gigabytes
            raise _Refused(None, None, "aliases (`*`) are not supported: repeat the value", node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                written = _shortened(repr(getattr(key_node, "value", key)))
                raise _Refused(None, None, f"the key {written} must be in quotes: {_NUMBERS}", key_node.start_mark)
            if key in seen:
                raise _Refused(None, None, f"`{_shortened(key)}` occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_NUMBERS = "as numbers 12.10 and 12.1 are the same"
_MAPPING = {"json": "an object", "yaml": "a mapping"}
# Where pydantic would speak of Python: its error → what the value must be.
_KINDS = {
    "string_type": "a text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "date_type": "a date, such as 2026-11-21",
    "date_parsing": "a date, such as 2026-11-21",
    "too_short": "longer: at least {min_length}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "form": "{what}",
    "union_tag_invalid": "a mapping whose {discriminator} is one of {expected_tags}",
    "union_tag_not_found": "a mapping with {discriminator}",
}


def _sentence(name: str, error: Any, kind: Kind) -> str:
    """One of pydantic's errors as a sentence about ``name``."""
    what, value, context = error["type"], error["input"], error.get("ctx", {})
    if what == "missing":
        return f"{name} is missing"
    if what == "string_type" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'{name} must be in quotes, "{_shortened(repr(value))}": {_NUMBERS}'
    if what in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
        return f"{name} must be {_MAPPING[kind]}"
    if what in _KINDS:
        shown = "" if isinstance(value, (dict, list)) or value is None else f", not {_shortened(repr(value))}"
        return f"{name} must be {_KINDS[what].format(**context)}{shown}"
    return f"{name}: {neutral(str(context['error'] if what == 'value_error' else error['msg']))}"


def _shortened(text: str) -> str:
    text = neutral(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _name(path: KeyPath) -> str:
    """``hosts.a.gpus[0].name``, in backquotes; a key that is not a plain word is in brackets, too: ``builds["2.21.5-1"]``."""
    named = ""
    for step in path:
        if isinstance(step, int):
            named += f"[{step}]"
        elif re.fullmatch(r"[\w-]+", step) and len(step) <= _LONGEST:
            named += f".{step}" if named else step
        else:
            named += f'["{_shortened(step)}"]'
    return f"`{named}`" if named else "it"


def _path(loc: KeyPath, what: str, lines: dict[KeyPath, int], at: KeyPath) -> KeyPath:
    """Where in the document an error is: pydantic's location also has ``[key]`` and the members of unions that it tried."""
    path = at
    for place, step in enumerate(loc):
        last = place == len(loc) - 1
        if step != "[key]" and (not lines or (*path, step) in lines or (last and what == "missing")):
            path = (*path, step)
    return path


def _keys(model: type[BaseModel] | None) -> set[str]:
    """All keys that a model knows, at any depth."""
    schema = model.model_json_schema() if model else {}
    return {key for part in (schema, *schema.get("$defs", {}).values()) for key in part.get("properties", ())}


def usage_error(wrong: list[tuple[int | None, str]], where: str, hint: str | None) -> UsageError:
    if len(wrong) == 1:
        return UsageError(wrong[0][1], where=_at(where, wrong[0][0]), hint=hint)
    lines = [f"{_at(where, line)}: {what}" for line, what in wrong[:_MOST]]
    more = [f"{where}: and {len(wrong) - _MOST} more mistakes"] if len(wrong) > _MOST else []
    return UsageError("\n".join(lines + more), hint=hint)


def _at(where: str, line: int | None) -> str:
    return f"{where}:{line}" if line else where


def _line(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of a place, or of the nearest place above it."""
    return next((lines[path[:length]] for length in range(len(path), -1, -1) if path[:length] in lines), None)


def _lines(text: str) -> dict[KeyPath, int]:
    """Key path → line of each key and entry of a document that was read; empty where they cannot be found."""
    try:
        return dict(_places(yaml.compose(text.replace("\t", " "), _Loader), ())) if 0 < len(text) < _LARGEST else {}
    except (RecursionError, ValueError, yaml.YAMLError):
        return {}


def _places(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if not path and node is not None:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _places(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _places(value, (*path, index))
