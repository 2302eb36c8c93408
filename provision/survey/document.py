"""Documents with facts: the survey's output, and facts files as `provision survey --json` or a person writes them."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from provision.base import validation
from provision.base.documents import Document, Json
from provision.base.errors import ProvisionError, UsageError
from provision.base.validation import Form
from provision.catalog import Catalog
from provision.inventory.checks import HOST_NAME
from provision.survey.model import Facts, Interpreter, Unsurveyed

T = TypeVar("T")
BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="
_DEEPEST = 100  # a manifest has about ten levels

_SMALLEST = (
    'the least a host needs: {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", '
    '"driver": {"version": "535.104.05", "cuda": "12.2"}, "gpus": [{"name": "…", "compute_capability": "8.0"}]}'
)


def _kind(host: object) -> str:
    """The tag of what a document has of a host."""
    if isinstance(host, Mapping):
        return "none" if host.get("missing_python") or host.get("unreachable") else "facts"
    return "none" if isinstance(host, Unsurveyed) else "facts"


Host = Annotated[Annotated[Facts, Tag("facts")] | Annotated[Unsurveyed, Tag("none")], Discriminator(_kind)]
HostName = Annotated[str, Form(HOST_NAME.pattern, "a host name: letters, digits, `_`, `-`, `.` and `:`")]


class FactsFile(BaseModel):
    """What `provision survey --json` writes and ``--facts`` reads."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, defer_build=True)

    schema_: Literal[1] = Field(1, alias="schema")
    hosts: Annotated[dict[HostName, Host], Field(min_length=1)]
    problems: list[dict[str, JsonValue]] = []


def load_file(path: str | Path, catalog: Catalog) -> dict[str, Facts | Unsurveyed]:
    """Host → its facts, or why there are none.

    Raises:
        UsageError: the file cannot be read or used; all that is wrong with it at once, with its lines.
    """
    name = str(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the facts cannot be read: {error.strerror or error}", where=name) from error
    text = validation.decoded(content, name)
    gc.disable()  # nothing of this is garbage, and to look for it again and again takes as long as all the rest
    try:
        if (hosts := _shared(validation.read(text, name, "json"), catalog)) is not None:
            return hosts
        harmless = sanitized(validation.read(text, name, "json"))
    except RecursionError as error:
        raise UsageError(f"the facts cannot be read: {error}", where=name) from error
    finally:
        gc.freeze()
        gc.enable()
    try:
        return dict(FactsFile.model_validate_json(json.dumps(harmless), context=catalog).hosts)
    except ValidationError as error:
        raise validation.usage_error(validation.problems(error, text, model=FactsFile), name, _SMALLEST) from error


def _shared(document: object, catalog: Catalog) -> dict[str, Facts | Unsurveyed] | None:
    """The hosts of a valid document, which is emptied; None for an invalid one.

    Sections that hosts have in common, as those that are alike do, are validated once and are one object: ten thousand hosts take seconds.
    """
    if not isinstance(document, dict):
        return None
    hosts = document.pop("hosts", None)
    if not isinstance(hosts, dict) or not all(isinstance(host, dict) for host in hosts.values()):
        return None
    sections: dict[bytes, object] = {}
    adapters = {name: _adapter(field) for name, field in Facts.model_fields.items()}

    def section(name: str, value: Json) -> object:
        if not isinstance(value, dict | list) or name not in adapters:
            return sanitized(value)
        text = json.dumps(value)
        digest = hashlib.blake2b(f"{name} {text}".encode(), digest_size=16).digest()
        if digest not in sections:
            sections[digest] = adapters[name].validate_json(json.dumps(sanitized(value)), strict=True, context=catalog)
        return sections[digest]

    found: dict[str, Facts | Unsurveyed] = {}
    try:
        for name in list(hosts):
            host = hosts.pop(name)
            is_surveyed = _kind(host) == "facts"
            parts = {_harmless(key): section(key, value) if is_surveyed else sanitized(value) for key, value in host.items()}
            found[_harmless(name)] = Facts.model_validate(parts, context=catalog) if is_surveyed else Unsurveyed.model_validate(parts)
        others = {_harmless(key): sanitized(value, 1) for key, value in document.items()}
        FactsFile.model_validate({**others, "hosts": dict.fromkeys(found, Unsurveyed())})
    except ValidationError:
        return None
    return found


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    kind: Any = field.annotation
    return TypeAdapter(Annotated[(kind, *field.metadata)] if field.metadata else kind)


def parse_output(stdout: str, mark: str = BEGIN, what: str = "the survey") -> Document:
    """The document in the output of one of our scripts on a host, which may have a banner before and after it.

    Args:
        mark: the line before the document.
        what: the script, for messages.

    Raises:
        ProvisionError: there is no document, or it is incomplete.
    """
    _, begin, rest = stdout.rpartition(mark)
    if not begin:
        last = next((line.strip() for line in reversed(stdout.splitlines()) if line.strip()), "")
        raise ProvisionError(f"{what} did not run; the host said" + (f": {last[:300]}" if last else " nothing"))
    body, end, _ = rest.partition(END)
    if not end:
        raise ProvisionError(f"{what}'s answer is incomplete", hint="run it again; if it happens again, check the connection")
    try:
        document = sanitized(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ProvisionError(
            f"{what}'s answer is damaged: {error}", hint="run it again; if it happens again, check the connection"
        ) from error
    if not isinstance(document, dict):
        raise ProvisionError(f"{what}: invalid answer (expected a JSON object)")
    return document


def parse_answer(model: type[T], stdout: str, mark: str, what: str) -> T:
    """That document as a model. Raises ProvisionError as `parse_output` does, and where it is something else."""
    try:
        # As JSON, where a list may be a tuple: strict models refuse that in Python's data.
        return TypeAdapter(model).validate_json(json.dumps(parse_output(stdout, mark, what)))
    except ValidationError as error:
        raise ProvisionError(f"{what} gave an invalid answer") from error


def sanitized(value: object, depth: int = 0) -> object:
    """The document with every text made harmless: it comes from another machine and gets into Ansible's variables.

    Ansible would run the content of ``{{ … }}`` on the controller; a control character could break out of a line of a rendered file; a lone
    surrogate cannot be encoded.
    """
    if isinstance(value, str):
        return _harmless(value)
    if depth > _DEEPEST:
        raise RecursionError("it is nested too deeply")
    if isinstance(value, list):
        return [sanitized(entry, depth + 1) for entry in value]
    if isinstance(value, dict):
        return {_harmless(key): sanitized(entry, depth + 1) for key, entry in value.items()}
    return value


def _harmless(text: str) -> str:
    if "{" not in text and text.isprintable():  # nearly all of them
        return text
    text = re.sub(r"\{(?=[{%#])", "{ ", text)  # also in `{{{`, in which pairs overlap
    harmless = "".join(letter if letter >= " " or letter in "\n\t" else " " for letter in text)
    return harmless.encode(errors="replace").decode()  # lone surrogates, which JSON can have and UTF-8 cannot


def parse_survey(stdout: str, catalog: Catalog) -> Facts | Unsurveyed:
    """The facts in the survey's output on a host, or that there is no Python.

    Raises:
        ProvisionError: there is no such document, or it has no facts.
    """
    document = parse_output(stdout)
    # The survey leaves out what it could not find out. Without these there are no facts.
    unknown: Document = {"os": {"id": "linux", "version": ""}, "arch": ""}
    missing = [name for name in unknown if document.get(name) is None]
    try:
        if _kind(document) == "none":
            return Unsurveyed.model_validate(document)
        return Facts.model_validate({**document, **{name: unknown[name] for name in missing}, "missing": missing}, context=catalog)
    except ValidationError as error:
        wrong = [what for _line, what in validation.problems(error, model=Facts, at=("facts",))]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ProvisionError(
            f"the survey's answer is invalid: {wrong[0]}{more}", hint="check this host: its own Python printed that"
        ) from error


def with_python(facts: Facts, path: str | None, where: str) -> Facts:
    """The facts of a host whose inventory names a Python (``provision_python``), as a survey would have found them.

    Raises:
        UsageError: its version is unknown; ``where`` is the place in the inventory.
    """
    if path is None:
        return facts
    python = facts.python
    full = path if path.startswith("/") else f"/usr/bin/{path}"
    known = {each.path: each.version for each in (*python.others, *([python.asked_for] if python.asked_for else ()))}
    known[python.executable or "/usr/bin/python3"] = python.version
    named = re.search(r"/python(3\.\d+)$", full)
    version = known.get(full) or (named[1] if named else None)
    if version is None:
        hint = "make the facts again with this inventory: provision survey HOSTS --json"
        raise UsageError(f"provision_python={path}: the facts do not say which Python that is", where=where, hint=hint)
    asked_for = Interpreter(path=full, version=version)
    return facts.model_copy(update={"python": python.model_copy(update={"asked_for": asked_for})})
