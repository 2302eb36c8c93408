"""Files that models describe: read, checked, and all their mistakes said at once, each with its line, in our words.

The only place that knows pydantic's errors. What a file holds is data: long values are shortened, control characters spelled out.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import json
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, RootModel, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from provision.base.errors import UsageError
from provision.base.terminal import neutral

Kind = Literal["json", "yaml"]
KeyPath = tuple[str | int, ...]  # keys of mappings and indexes of lists, from the top of a document

_MOST = 50  # mistakes that are said of one file
_MOST_PLACES = 1_000_000  # of a document that are looked at for lines
_LONGEST = 60  # letters of a value, or of a key, that are shown


class Model(BaseModel):
    """What a file holds: nothing but its fields, of exactly their kinds, and never changed. It is compiled when it is first used.

    What a validator in mode "before" returns is no JSON any more, so that below it a strict tuple refuses a list: check in mode "after".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Form:
    """The form of a text, for ``Annotated[str, Form(...)]``: the whole of it matches ``pattern``; ``what`` says it in words: ``a version,
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
    """For a model's validator that finds several mistakes, or mistakes in its parts: raise all of them, each (key path below the model,
    sentence), if there are any. A validator that finds one may as well raise ValueError with the sentence."""
    errors = [InitErrorDetails(type=PydanticCustomError("cross_check", "{said}", {"said": said}), loc=at, input=None) for at, said in wrong]
    if errors:
        raise ValidationError.from_exception_data("", errors)


def load(model: type[M], path: str | Path, hint: str | None = None) -> M:
    """The model that a file holds: YAML where its name ends in .yaml, .yml or .lock, else JSON.

    Raises:
        UsageError: it cannot be read or is something else; all its mistakes, each with ``file:line``, and ``hint``.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error
    return parse(model, content, str(path), "yaml" if Path(path).suffix in (".yaml", ".yml", ".lock") else "json", hint)


def parse(model: type[M], content: str | bytes, where: str, kind: Kind = "json", hint: str | None = None) -> M:
    """The model that a text holds; ``where`` is the file's name for messages. Raises UsageError as `load` does."""
    text = decoded(content, where, hint)
    data = read(text, where, kind, hint)
    return validate(model, data, where, text=text, kind=kind, hint=hint)


def validate(model: type[M], data: Any, where: str, *, text: str = "", kind: Kind = "json", at: KeyPath = (), hint: str | None = None) -> M:
    """The model that plain data holds. ``text`` is the document that it stands in, ``at`` where in it; without a text no line is said.

    Raises:
        UsageError: as from `load`.
    """
    try:
        # As JSON, where a list may be a tuple and a text a date: strict models refuse both in Python's data.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise _usage_error(problems(error, text, kind, model, at), where, hint) from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"it is nested too deeply, or in itself: {error}", where=where, hint=hint) from error


def problems(
    error: ValidationError, text: str = "", kind: Kind = "json", model: type[BaseModel] | None = None, at: KeyPath = ()
) -> list[tuple[int | None, str]]:
    """What pydantic found, as (line from 1, sentence), in the order of lines.

    Args:
        text: the document, for lines; where it is empty there are none.
        model: what the document should be, for the keys that a misspelt one may mean.
        at: where in the document that is.
    """
    lines = _lines(text, kind)
    errors = error.errors(include_url=False)
    there = {_path(each["loc"], each["type"], lines, at) for each in errors if each["type"] == "missing"}
    found: dict[str, int | None] = {}
    for each in errors:
        path = _path(each["loc"], each["type"], lines, at)
        if each["type"] == "extra_forbidden":
            known = sorted(_keys(model, each["loc"][:-1]))
            meant = did_you_mean(str(path[-1]), known)
            there -= {(*path[:-1], name) for name in known if meant == did_you_mean(name, [name])}
            said = f"{_name(path)} is unknown{meant or ('; known are ' + ', '.join(known) if known else '')}"
            found[said] = _line(lines, path)
    for each in errors:
        path = _path(each["loc"], each["type"], lines, at)
        if each["type"] == "extra_forbidden" or (each["type"] == "missing" and path not in there):  # the misspelt key is the missing one
            continue
        key = "the key " if each["loc"][-1:] == ("[key]",) else ""
        found.setdefault(key + _said(_name(path), each, kind), _line(lines, path))
    return sorted(((line, said) for said, line in found.items()), key=lambda one: one[0] or 0)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean `word`?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean `{close[0]}`?" if close else ""


def decoded(content: str | bytes, where: str, hint: str | None = None) -> str:
    """The text that a file's bytes are. Raises UsageError, naming the line, where they are no UTF-8."""
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError("this is no UTF-8", where=f"{where}:{line}", hint=hint) from error


def read(text: str, where: str, kind: Kind = "json", hint: str | None = None) -> Any:
    """The plain data in a text, each key of a mapping once.

    Raises:
        UsageError: it is no JSON or YAML, or has a key twice; the first mistake, as what follows it cannot be told.
    """
    try:
        return json.loads(text, object_pairs_hook=_once) if kind == "json" else yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except _Twice as error:
        again: list[tuple[int, KeyPath]] = []
        lines = _lines(text, kind, again)
        line, path = again[0] if again else (_line(lines, ()), (error.key,))
        raise UsageError(f"{_name(path)} stands there twice", where=_at(where, line), hint=hint) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, text.find(chr(error.character))) + 1  # its position counts letters or bytes
        raise UsageError(f"this is no YAML: it has no character U+{error.character:04X}", where=_at(where, line), hint=hint) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"this is no YAML: {neutral(str(error.problem))}" if not isinstance(error, _Refused) else str(error.problem)
        raise UsageError(what, where=_at(where, mark.line + 1 if mark else None), hint=hint) from error
    except (ValueError, RecursionError) as error:
        what = f"this is no {kind.upper()}: {getattr(error, 'msg', None) or error}"
        raise UsageError(what, where=_at(where, getattr(error, "lineno", None)), hint=hint) from error


class _Twice(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands in it twice would silently be the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


class _Refused(yaml.constructor.ConstructorError):
    """What YAML allows and our files may not hold; ``problem`` is our sentence."""


if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML has it, is five times as fast


class _Loader(_SafeLoader):
    """YAML as JSON would have it: keys are texts, each once; nothing stands for something else in the file."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.CollectionNode) and node in self.constructed_objects:  # a few aliases can stand for gigabytes
            raise _Refused(None, None, "write it out wherever it is meant: `*` is not read here", node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                written = _shown(getattr(key_node, "value", key))
                raise _Refused(None, None, f"the key {written} must be in quotes: {_NUMBERS}", key_node.start_mark)
            if key in seen:
                raise _Refused(None, None, f"`{_step(key)}` stands there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_NUMBERS = "as numbers 12.10 and 12.1 are the same"
_MAPPING = {"json": "an object", "yaml": "a mapping"}
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
    "none_required": "null",
    "date_type": "a date, such as 2026-11-21",
    "date_parsing": "a date, such as 2026-11-21",
    "date_from_datetime_parsing": "a date, such as 2026-11-21",
    "date_from_datetime_inexact": "a date, such as 2026-11-21",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "form": "{what}",
    "union_tag_invalid": "a mapping whose {discriminator} is one of {expected_tags}",
    "union_tag_not_found": "a mapping with {discriminator}",
    "too_short": "longer: at least {min_length}",
    "too_long": "shorter: at most {max_length}",
    "string_too_short": "a text of at least {min_length} letters",
    "string_too_long": "a text of at most {max_length} letters",
    "string_pattern_mismatch": "a text like {pattern}",
}


def _said(name: str, error: Any, kind: Kind) -> str:
    """One of pydantic's errors as a sentence about ``name``."""
    what, value, context = error["type"], error["input"], error.get("ctx", {})
    if what == "missing":
        return f"{name} is missing"
    if what == "string_type" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'{name} must be in quotes, "{_shown(value)}": {_NUMBERS}'
    if what in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
        return f"{name} must be {_MAPPING[kind]}"
    if what in _KINDS:
        shown = "" if isinstance(value, (dict, list)) or value is None else f", not {_shown(value)}"
        return f"{name} must be {_KINDS[what].format(**context)}{shown}"
    if what == "value_error":
        return f"{name}: {neutral(str(context['error']))}"
    return f"{name}: {neutral(str(error['msg']))}"


def _shown(value: Any) -> str:
    text = neutral(repr(value))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _step(step: str | int) -> str:
    text = neutral(str(step))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _name(path: KeyPath) -> str:
    """``hosts.a.gpus[0].name``, in marks; a key that is no plain word stands in brackets, too: ``builds["2.21.5-1"]``."""
    named = ""
    for step in path:
        if isinstance(step, int):
            named += f"[{step}]"
        elif re.fullmatch(r"[\w-]+", step) and len(step) <= _LONGEST:
            named += f".{step}" if named else step
        else:
            named += f'["{_step(step)}"]'
    return f"`{named}`" if named else "it"


def _path(loc: KeyPath, what: str, lines: dict[KeyPath, int], at: KeyPath) -> KeyPath:
    """Where in the document an error is: pydantic also names the members of unions that it tried, and says ``[key]``."""
    path = at
    for place, step in enumerate(loc):
        last = place == len(loc) - 1
        if step != "[key]" and (not lines or (*path, step) in lines or (last and what == "missing")):
            path = (*path, step)
    return path


def _keys(model: type[BaseModel] | None, loc: KeyPath) -> set[str]:
    """The keys that a model knows at a place: those of all members where it is a union."""
    models = set(_models_in(model))
    for step in loc:
        fields = [(name, field) for each in models for name, field in each.model_fields.items()]
        below = [field for name, field in fields if step in (name, field.alias)]
        if below:  # else the step is an index, a key of a mapping, or the tag of a union
            models = {found for field in below for found in _models_in(field.annotation)}
    return {field.alias or name for each in models for name, field in each.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of; a file that is a list is a RootModel of it."""
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        yield from _models_in(annotation.model_fields["root"].annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _usage_error(wrong: list[tuple[int | None, str]], where: str, hint: str | None) -> UsageError:
    if len(wrong) == 1:
        return UsageError(wrong[0][1], where=_at(where, wrong[0][0]), hint=hint)
    said = [f"{_at(where, line)}: {what}" for line, what in wrong[:_MOST]]
    more = [f"{where}: and {len(wrong) - _MOST} more mistakes"] if len(wrong) > _MOST else []
    return UsageError("\n".join(said + more), hint=hint)


def _at(where: str, line: int | None) -> str:
    return f"{where}:{line}" if line else where


def _line(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of a place, or of what it is missing in."""
    return next((lines[path[:length]] for length in range(len(path), -1, -1) if path[:length] in lines), None)


def _lines(text: str, kind: Kind, twice: list[tuple[int, KeyPath]] | None = None) -> dict[KeyPath, int]:
    """Key path → line of each key and entry of a document that was read; ``twice`` collects the keys that stand there again."""
    found: dict[KeyPath, int] = {}
    try:
        places = _json_places(text) if kind == "json" else _yaml_places(yaml.compose(text, _Loader), ())
        for path, line in itertools.islice(places, _MOST_PLACES) if text else ():
            if path in found and twice is not None:
                twice.append((line, path))
            found.setdefault(path, line)
    except (RecursionError, ValueError, IndexError, yaml.YAMLError):
        return {}
    return found


def _yaml_places(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if not path and node is not None:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _yaml_places(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _yaml_places(value, (*path, index))


_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


def _json_places(text: str) -> Iterator[tuple[KeyPath, int]]:
    """As `_yaml_places`, for a text that is JSON."""
    ends = [place.start() for place in re.finditer("\n", text)]
    end = 0

    def skip(at: int) -> int:
        return _SPACE.match(text, at).end()  # type: ignore[union-attr]

    def walk(at: int, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        """The places below a value; the place after it is left in ``end``."""
        nonlocal end
        if text[at] in "{[":
            is_object, at = text[at] == "{", skip(at + 1)
            index = 0
            while text[at] not in "}]":
                begin = at
                step: str | int = index
                if is_object:
                    step, at = scanstring(text, at + 1, True)
                    at = skip(skip(at) + 1)
                yield (*path, step), bisect.bisect_left(ends, begin) + 1
                yield from walk(at, (*path, step))
                at = skip(end)
                at, index = skip(at + 1) if text[at] == "," else at, index + 1
            end = at + 1
        elif text[at] == '"':
            end = scanstring(text, at + 1, True)[1]
        else:
            end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]

    start = end = skip(0)
    yield (), bisect.bisect_left(ends, start) + 1
    yield from walk(start, ())
