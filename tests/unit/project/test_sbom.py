"""Bills of materials say what depends on what."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loading import load

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sbom(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, without the generator, which only the site's environment has."""
    for module, name in {"cyclonedx.schema": "SchemaVersion", "cyclonedx.validation.json": "JsonStrictValidator"}.items():
        made = ModuleType(module)
        setattr(made, name, object)
        monkeypatch.setitem(sys.modules, module, made)
    return load("sbom", ROOT / "scripts/sbom.py")


def generated() -> dict[str, Any]:
    """As cyclonedx-py writes it: an extra's package that something else needs is among the root's."""
    components = [{"bom-ref": f"{name}==1", "name": name} for name in ("Jinja2", "ansible-runner", "pexpect")]
    return {
        "metadata": {"component": {"bom-ref": "root-component", "name": "provision-cluster"}},
        "components": components,
        "dependencies": [
            {"ref": "Jinja2==1"},
            {"ref": "ansible-runner==1", "dependsOn": ["pexpect==1"]},
            {"ref": "pexpect==1"},
            {"ref": "root-component", "dependsOn": ["Jinja2==1", "ansible-runner==1", "pexpect==1"]},
        ],
    }


def test_a_bill_knows_what_depends_on_what(sbom: ModuleType) -> None:
    document = sbom.completed(generated(), ["jinja2", "ansible_runner"], [sbom.ENGINE, sbom.FP16])
    graph = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    assert graph == {
        "Jinja2==1": [],
        "ansible-runner==1": ["pexpect==1"],
        "pexpect==1": [],
        "root-component": ["Jinja2==1", "ansible-runner==1", "engine"],
        "engine": ["FP16"],
        "FP16": [],
    }
    assert set(graph) == {each["bom-ref"] for each in document["components"]} | {"root-component"}
    assert document["metadata"]["component"]["version"] == sbom.VERSION
    assert all(each["purl"].startswith("pkg:") for each in (sbom.ENGINE, sbom.FP16))
