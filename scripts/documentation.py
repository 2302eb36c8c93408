"""Hook of MkDocs: which pages the site has, and those of its reference that are made from code. `make docs` runs it.

A page has the path that it has in the repository, so that a link leads to the same place on the site and where files are looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import known_errors
import typer
from markdown_text import outside_code, plain
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from provision.catalog import content
from provision.catalog.models import FILES
from provision.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/*.svg",
    "docs/*.png",
    "docs/*.css",
    "examples/**/*",
    "collective_core/README.md",
    "ansible/README.md",
    "provision/catalog/feed.pub",
)
CATALOGUE = "provision/catalog/"
PYTHON = {  # module → what it is for
    "collective_core": "NumPy arrays; the API that needs no framework",
    "collective_core.torch.mpi_ops": "PyTorch, as `import collective_core.torch as hvd`",
    "collective_core.torch.elastic": "elastic jobs, as `hvd.elastic`",
    "collective_core.extensions.sparse": "sharded embeddings and their optimizers, as `hvd.nn`",
    "collective_core.extensions.slow_networks": "slow networks, as `hvd.DiLoCo` and so on",
    "collective_core.extensions.ps": "parameter servers, as `hvd.ps`",
    "collective_core.extensions.streaming": "streams of records, as `hvd.data`",
    "collective_core.launch": "jobs from Python",
    "collective_core.tensorflow": "TensorFlow",
    "collective_core.tensorflow.elastic": "elastic jobs with TensorFlow, as `hvd.elastic`",
    "collective_core.keras": "Keras 3",
    "collective_core.keras.callbacks": "`model.fit`, as `hvd.callbacks`",
    "collective_core.keras.elastic": "elastic jobs with Keras, as `hvd.elastic`",
    "collective_core.jax": "JAX",
    "collective_core.jax.elastic": "elastic jobs with JAX, as `hvd.elastic`",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's pages at their paths, the generated ones, and what the theme brings."""
    found = sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file() and "__pycache__" not in path.parts})
    pages = Files([file for file in files if file.src_dir != config.docs_dir])  # what it found there has a path without docs/
    for path in found:
        pages.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path, text in generated().items():
        pages.append(File.generated(config, path, content=text))
    return pages


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link to the catalogue's folder leads to its page."""
    return markdown.replace(f"](../{CATALOGUE})", "](../reference/catalogue.md)")


def generated() -> dict[str, str]:
    """Path of each generated file → its content."""
    schemas = {name: _output("schema", *name.split()) for name in _output("schema").splitlines()}
    return {
        "reference/commands.md": "\n".join(_commands()),
        "reference/python.md": "\n".join(_python()),
        "reference/documents.md": "\n".join(_documents({name: json.loads(text) for name, text in schemas.items()})),
        **{_schema_file(name): text for name, text in schemas.items()},
        "reference/catalogue.md": "\n".join(_catalogue()),
        **{f"reference/{path}": text for path, text in known_errors.pages().items()},
        **{f"{CATALOGUE}{name}.yaml": content(name).decode() for name in FILES},
    }


def _output(*words: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, words)
    if result.exit_code != 0:
        raise RuntimeError(f"provision {' '.join(words)}: {result.output}") from result.exception
    return result.output


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(_cell(each) for each in row)} |" for row in rows)
    yield ""


def _cell(text: str) -> str:
    """One line, in which a bar ends no cell; in code Python-Markdown takes it as it is, and would show the backslash."""
    return outside_code(" ".join(text.split()), lambda part: part.replace("|", r"\|"))


# --- commands ----------------------------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield "# Commands\n\nMade from the program. `provision COMMAND --help` prints the same."
    yield from _command(typer.main.get_command(app), "provision", None)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    """A command and those below it."""
    context = typer.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    yield f"\n## {name}\n\n{_paragraphs(command.help)}\n\n```text\n{usage}\n```"
    panels: dict[str, list[tuple[str, ...]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)  # None: it is hidden
        if record is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append((f"`{record[0]}`", plain(record[1])))
    for title in sorted(panels, key=lambda title: title != "Arguments"):
        yield from _table((title, "meaning"), panels[title])
    for word, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from _command(below, f"{name} {word}", None)


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(plain(" ".join(part.split())) for part in (text or "").split("\n\n"))


# --- documents ---------------------------------------------------------------------------------------------------------------------------


def _schema_file(name: str) -> str:
    return f"reference/schemas/{name.replace(' ', '-')}.json"


def _documents(schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "# Documents\n\nWhat `provision` reads and writes, made from its models. `provision schema NAME` prints the JSON Schema.\n"
    for name, schema in schemas.items():
        yield f"\n## {name}\n\n[JSON Schema]({_schema_file(name).removeprefix('reference/')})\n"
        yield from _object(schema)
        for part, each in schema.get("$defs", {}).items():
            if each.get("type") == "object" and "properties" in each:
                yield f"\n**{part}**\n"
                yield from _object(each)


def _object(schema: Mapping[str, Any]) -> Iterator[str]:
    """An object's description, and a row per key."""
    text, _, attributes = schema.get("description", "").partition("Attributes:")
    meanings = {each[1]: each[2] for each in re.finditer(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE)}
    yield _paragraphs(text)
    rows = [
        (f"`{key}`" + ("" if key in schema.get("required", ()) else " (optional)"), _type(each), plain(meanings.get(key, "")))
        for key, each in schema.get("properties", {}).items()
    ]
    if any(meaning for _key, _value, meaning in rows):
        yield from _table(("key", "value", "meaning"), rows)
    elif rows:
        yield from _table(("key", "value"), [row[:2] for row in rows])


def _type(schema: Mapping[str, Any]) -> str:
    """What a value is, in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), None)
        return f"mapping to {_type(values)}" if isinstance(values, dict) else "object"
    return plain(str(schema.get("description") or schema.get("format") or schema.get("type", "anything")))


# --- catalogue and Python ----------------------------------------------------------------------------------------------------------------


def _catalogue() -> Iterator[str]:
    found = json.loads(_output("catalog", "show", "--json"))
    yield (
        f"# Catalogue\n\nThe facts of this release, made from `{CATALOGUE}`: it knows "
        "PyTorch up to {pytorch}, CUDA up to {cuda} and NCCL up to {nccl}, as of {date}. "
        "How to add newer ones: [The catalogue](../docs/catalog.md)."
    ).format(**found["reach"])
    groups: dict[str, list[tuple[str, ...]]] = {}
    for each in found["groups"]:
        file, _, part = each["facts"].partition(".")
        weak = f" *Weak: {plain(each['weak'])}.*" if each["weak"] else ""
        groups.setdefault(file, []).append((part or "all", each["date"], plain(each["source"]) + weak))
    for file in FILES:
        yield f"\n## {file}\n\n[{file}.yaml](../{CATALOGUE}{file}.yaml)"
        yield from _table(("facts", "read on", "source"), groups.get(file, []))


def _python() -> Iterator[str]:
    yield "# Python API\n\nMade from the sources of `collective_core`, which is not imported for that."
    yield "Timeouts and other environment variables: [Settings of the engine](../docs/engine-settings.md)."
    for module, purpose in PYTHON.items():
        yield f"\n## {module}\n\nFor {purpose}.\n\n::: {module}\n    options:\n      heading_level: 3"
