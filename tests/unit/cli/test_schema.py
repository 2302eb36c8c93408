"""`provision schema`: it prints JSON Schemas that real documents match and broken ones do not."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from documents import FILES, REPORT
from rollouts import lint_plan
from typer.testing import CliRunner

from provision.base.errors import UsageError
from provision.cli.main import app
from provision.cli.schema import documents
from provision.inventory import load
from provision.plan import lock_file
from provision.plan.lock import Lock


def printed(*name: str) -> Any:
    result = CliRunner().invoke(app, ["schema", *name])
    if result.exception:
        raise result.exception
    return result.output


def schema_of(*name: str) -> Any:
    found = json.loads(printed(*name))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


@pytest.mark.parametrize("name", documents())
def test_every_document_that_is_listed_has_a_schema(name: str) -> None:
    assert name in printed().splitlines()
    assert schema_of(*name.split())["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("name", [name.removeprefix("catalogue ") for name in documents() if name.startswith("catalogue ")])
def test_the_catalogue_matches_its_schema(name: str) -> None:
    text = resources.files("provision.catalog").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    data = json.loads(json.dumps(yaml.safe_load(text), default=str))
    schema = schema_of("catalogue", name)
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError, match="unheard_of"):
        jsonschema.validate({**data, "unheard_of": 1}, schema)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["repository", "builds", "2.21.5-1"], {"12": "N"}),
        (["repository", "builds", "2.21.5-1", "12.2"], 12.2),
        (["known_bad", 0, "below"], "lately"),
        (["tarball", "sha256", "2.21.5"], "0" * 63),
    ],
)
def test_what_the_model_refuses_the_schema_refuses(path: list[Any], value: Any) -> None:
    text = resources.files("provision.catalog").joinpath("nccl.yaml").read_text(encoding="utf-8")
    data = part = json.loads(json.dumps(yaml.safe_load(text), default=str))
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema_of("catalogue", "nccl"))


def test_a_report_matches_its_schema() -> None:
    schema = schema_of("report")
    jsonschema.validate(REPORT, schema)
    with pytest.raises(jsonschema.ValidationError, match="'run_id' is a required property"):
        jsonschema.validate({key: value for key, value in REPORT.items() if key != "run_id"}, schema)


@pytest.mark.parametrize(("name", "meant"), [("reprot", "`report`"), ("catalogue ncll", "`catalogue nccl`")])
def test_a_misspelt_name_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"no such document `{name}`; did you mean {meant}") as caught:
        printed(*name.split())
    assert caught.value.hint == "provision schema lists them"


DATA = Path(__file__).parents[2] / "data"


def test_facts_and_plans_match_their_schemas() -> None:
    facts = DATA / "lint-facts.json"
    jsonschema.validate(json.loads(facts.read_text(encoding="utf-8")), schema_of("facts"))
    with pytest.raises(jsonschema.ValidationError, match="os"):
        jsonschema.validate({"hosts": {"a": {"arch": "x86_64"}}}, schema_of("facts"))
    made = CliRunner().invoke(app, ["plan", "--facts", str(facts), "--json"])
    document = json.loads(made.stdout)
    jsonschema.validate(document, schema_of("plan"))
    document["hosts"]["gpu1"]["nccl"]["source"] = "somewhere"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema_of("plan"))


def test_a_lock_matches_its_schema(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text((DATA / "lint.ini").read_text(encoding="utf-8"), encoding="utf-8")
    inventory = load(str(tmp_path / "hosts.ini"))
    path = lock_file.update(inventory, lambda: Lock.from_plan(lint_plan(), FILES, None, inventory))
    assert path is not None
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema_of("lock"))
