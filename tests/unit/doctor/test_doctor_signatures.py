"""The data files: their form, and that of two entries for one line one supersedes the other."""

import json
from itertools import combinations
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from provision.base import validation
from provision.base.errors import UsageError
from provision.cli.main import app
from provision.diagnosis.logs.prefilter import required_words
from provision.diagnosis.patterns import latin1
from provision.diagnosis.signatures import FOLDER, LAYERS, Signatures, Symptom, all_signatures, error_shapes, harmless, known_error

FILES = sorted((FOLDER / "signatures").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_signatures_keeps_to_the_printed_schema(file: Path) -> None:
    jsonschema.validate(
        yaml.safe_load(file.read_text(encoding="utf-8")), json.loads(CliRunner().invoke(app, ["schema", "signatures"]).output)
    )
    assert file.stem in LAYERS


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("  severity: error", "  severity: bad", "`[0].severity` must be 'error', 'warning' or 'note', not 'bad'"),
        ("  probe:", "  prope:", "`[0].prope` is unknown; did you mean `probe`?"),
        ("'failed to extend", "'(?<=failed to extend", "`[0].patterns[0]`: invalid perl operator: (?<"),
        ("supersedes: [disk-full]", "fix: []", "`fix` occurs twice"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(right: str, wrong: str, said: str) -> None:
    text = (FOLDER / "signatures/nccl.yaml").read_text(encoding="utf-8")
    line = text[: text.index(right)].count("\n") + 1
    with pytest.raises(UsageError) as caught:
        validation.parse(Signatures, text.replace(right, wrong, 1), "nccl.yaml", "yaml")
    assert str(caught.value).startswith(f"nccl.yaml:{line}: {said}")


def test_ids_are_unique_and_what_entries_name_exists() -> None:
    ids = [entry["id"] for file in FILES for entry in yaml.safe_load(file.read_text(encoding="utf-8"))]
    assert len(ids) == len(set(ids)) >= 180
    for each in all_signatures().values():
        assert each.supersedes <= set(ids), each.id
        assert each.symptom_of <= {*ids, *LAYERS, "any"}, each.id


def test_every_pattern_has_required_words() -> None:
    patterns = [pattern for each in all_signatures().values() for pattern in (*each.patterns, *each.recovered_by)]
    patterns += [*harmless(), *(pattern for shape in error_shapes() for pattern in shape.patterns)]
    assert all(required_words(pattern) for pattern in patterns)


def test_of_two_entries_for_one_line_one_supersedes(load) -> None:
    texts = [text for logs in load("samples.yaml").values() for text in logs] + list(load("variants.yaml").values())
    lines = [line for text in texts for line in (*text.splitlines(), " ".join(text.split()))]
    known = [each for each in all_signatures().values() if not isinstance(each, Symptom)]
    quarrels = set()
    for line in lines:
        claims = [each for each in known if len(line) < 400 and any(pattern.first(latin1(line)) for pattern in each.patterns)]
        for one, other in combinations(claims, 2):
            related = {other.id, other.layer, "any"} & one.symptom_of or {one.id, one.layer, "any"} & other.symptom_of
            if not (related or one.id in other.supersedes or other.id in one.supersedes):
                quarrels.add((one.id, other.id, line))
    assert not quarrels


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no known error") as caught:
        known_error("libopen-missing")
    assert "libopen-rte-missing" in str(caught.value)
