"""Mistakes in files: all at once, each with its line and one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from provision.base.errors import UsageError
from provision.base.validation import Form, Model, load, parse, refuse, validate

Version = Annotated[str, Form(r"\d+(\.\d+)+", "a version, such as 2.21.5")]


class Gpu(Model):
    name: str
    memory: int = Field(0, ge=0)


class Wheel(Model):
    source: Literal["wheel"]
    version: Version


class Package(Model):
    source: Literal["package"]
    name: str


class Host(Model):
    driver: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    nccl: Annotated[Wheel | Package, Field(discriminator="source")] | None = None
    labels: dict[Version, str] = Field(default_factory=dict)


class Hosts(Model):
    hosts: dict[str, Host]
    schema_: int = Field(1, alias="schema")

    @model_validator(mode="after")
    def check(self) -> Hosts:
        refuse((("hosts", name, "driver"), "it is too old") for name, host in self.hosts.items() if host.driver == "1.0")
        return self


def said(data: Any, kind: Literal["json", "yaml"] = "json") -> list[str]:
    text = data if isinstance(data, str) else json.dumps(data, indent=1)
    with pytest.raises(UsageError) as caught:
        parse(Hosts, text, "f", kind)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ({"driver": 12.1}, 'f:4: `hosts.a.driver` must be in quotes, "12.1": as numbers 12.10 and 12.1 are the same'),
        ({"driver": "x\x1b[2J"}, "f:4: `hosts.a.driver` must be a version, such as 2.21.5, not 'x\\x1b[2J'"),
        ({"driver": "y" * 1000}, f"f:4: `hosts.a.driver` must be a version, such as 2.21.5, not '{'y' * 58}…"),
        ({"diver": "1.2"}, "f:4: `hosts.a.diver` is unknown; did you mean `driver`?"),
        ({"qqq": "1.2"}, "f:4: `hosts.a.qqq` is unknown"),
        ({"gpus": {}}, "f:4: `hosts.a.gpus` must be a list"),
        ({"gpus": [{}]}, "f:5: `hosts.a.gpus[0].name` is missing"),
        ({"gpus": [{"name": "x", "memry": 1}]}, "f:7: `hosts.a.gpus[0].memry` is unknown; did you mean `memory`?"),
        ({"gpus": [{"name": True}]}, "f:6: `hosts.a.gpus[0].name` must be a text in quotes, not True"),
        ({"gpus": [{"name": "x", "memory": 1.5}]}, "f:7: `hosts.a.gpus[0].memory` must be a whole number, not 1.5"),
        ({"gpus": [{"name": "x", "memory": -1}]}, "f:7: `hosts.a.gpus[0].memory` must be at least 0, not -1"),
        ({"labels": {"x": ""}}, "f:5: the key `hosts.a.labels.x` must be a version, such as 2.21.5, not 'x'"),
        ({"labels": {"1.2": None}}, 'f:5: `hosts.a.labels["1.2"]` must be a text in quotes'),
        ({"nccl": {"source": "wheel", "version": "x"}}, "f:6: `hosts.a.nccl.version` must be a version, such as 2.21.5, not 'x'"),
        ({"nccl": {"source": "wheel", "name": "x", "version": "1.1"}}, "f:6: `hosts.a.nccl.name` is unknown"),
        ({"nccl": {"source": "air"}}, "f:4: `hosts.a.nccl` must be a mapping whose 'source' is one of 'wheel', 'package'"),
        ({"driver": "1.0"}, "f:4: `hosts.a.driver`: it is too old"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(host: dict[str, Any], what: str) -> None:
    (found,) = said({"hosts": {"a": host}})
    assert found.startswith(what)


def test_all_mistakes_at_once_in_the_order_of_lines() -> None:
    hosts = {"b": {"driver": 1}, "a": {"gpus": 2, "qqq": 3}, "c\n\x1b": []}
    found = said({"hosts": hosts, "schema": "1"})
    assert [line.split(":")[1] for line in found] == ["4", "7", "8", "10", "12"]
    assert '`hosts["c\\n\\x1b"]` must be an object' in found[3]


def test_yaml_is_read_as_strictly() -> None:
    assert parse(Hosts, "hosts: {a: {driver: '12.10', gpus: [{name: x}]}}", "f", "yaml").hosts["a"].driver == "12.10"
    assert said("hosts:\n  a:\n    driver: 12.10\n    gpus:\n     - {}", "yaml") == [
        'f:3: `hosts.a.driver` must be in quotes, "12.1": as numbers 12.10 and 12.1 are the same',
        "f:5: `hosts.a.gpus[0].name` is missing",
    ]
    assert said("hosts:\n  a:\n    labels:\n      12.10: x", "yaml") == [
        "f:4: the key '12.10' must be in quotes: as numbers 12.10 and 12.1 are the same"
    ]
    assert said("hosts: {a: &x {}, b: *x}", "yaml") == ["f:1: aliases (`*`) are not supported: repeat the value"]


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ('{"hosts": {},\n "hosts": {}}', "json", "f:2: `hosts` occurs twice"),
        ("hosts: {}\nhosts: {}", "yaml", "f:2: `hosts` occurs twice"),
        ('{"hosts":\n {"a" {}}}', "json", "f:2: invalid JSON: Expecting ':' delimiter"),
        ("hosts: {}\na: ]", "yaml", "f:2: invalid YAML"),
        ("éééééé: \x07\n\n\n\n\n", "yaml", "f:1: invalid YAML: the character U+0007 is not allowed"),
        ("[" * 100_000, "json", "f: invalid JSON: "),
        ("[]", "json", "f:1: it must be an object"),
        ("", "yaml", "f: it must be a mapping"),
        ('{"hosts": {"a": {"driver": "\\ud800"}}}', "json", "f"),
    ],
)
def test_an_invalid_document_is_one_error(text: str, kind: Any, what: str) -> None:
    (found,) = said(text, kind)
    assert found.startswith(what)


def test_hundreds_of_mistakes_are_counted() -> None:
    found = said({"hosts": {f"h{number}": 1 for number in range(200)}})
    assert len(found) == 51
    assert found[-1] == "f: and 150 more mistakes"


def test_files_are_read_by_their_ending(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("hosts: {}")
    (tmp_path / "a.json").write_bytes(b'{"hosts":\n"\xff"}')
    assert load(Hosts, tmp_path / "a.yaml") == Hosts(hosts={})  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"a\.json:2: not UTF-8 text\n  → do that"):
        load(Hosts, tmp_path / "a.json", hint="do that")
    with pytest.raises(UsageError, match=r"b\.json: cannot be read: No such file"):
        load(Hosts, tmp_path / "b.json")


def test_a_part_of_a_document_is_checked_with_the_lines_of_the_whole() -> None:
    text = "inventories:\n  hosts.ini:\n    driver: 5"
    with pytest.raises(UsageError, match=r'f:3: `inventories\["hosts.ini"\].driver` must be in quotes'):
        validate(Host, {"driver": 5}, "f", text=text, kind="yaml", at=("inventories", "hosts.ini"))
