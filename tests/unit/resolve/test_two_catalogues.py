"""Plans of one process by different catalogues: the catalogue is an argument of the resolver, and nothing else says which one is used."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import provision.resolve
from provision.catalog import OURS, Catalog, overlay
from provision.plan.model import Plan
from provision.plan.requirements import Requirements
from provision.resolve import resolve, what_if
from provision.survey import Facts
from provision.survey.document import load_file

FACTS = Path(__file__).parents[2] / "data/plans/a100-570-cuda-12.8.json"
HEAD = "schema: 1\nsource: the test\ndate: 2027-03-01\n"
BUILT = sorted(Path(provision.resolve.__file__).parent.glob("*.py"))


@pytest.fixture
def facts() -> dict[str, Facts]:
    return {name: host for name, host in load_file(FACTS, OURS).items() if isinstance(host, Facts)}


def planned(facts: dict[str, Facts], catalog: Catalog) -> Plan:
    return resolve(facts, Requirements(engine_version="0.0.0", catalog=catalog), {})


def versions(plan: Plan) -> tuple[str, str]:
    """(NCCL, PyTorch)"""
    (host,) = plan.hosts.values()
    assert host.nccl
    assert host.torch
    return host.nccl.version, host.torch.version.partition("+")[0]


@pytest.fixture
def other(tmp_path: Path, facts: dict[str, Facts]) -> Catalog:
    """In which the chosen releases are known to be bad."""
    nccl, torch = versions(planned(facts, OURS))
    for name, version in (("nccl", nccl), ("pytorch", torch)):
        bad = f'known_bad: [{{versions: ["{version}"], why: hangs, source: the test, date: 2027-03-01}}]\n'
        (tmp_path / f"{name}.yaml").write_text(HEAD + bad, encoding="utf-8")
    return Catalog(overlay.read([tmp_path]))


def test_plans_by_two_catalogues_alternate(facts: dict[str, Facts], other: Catalog) -> None:
    catalogues = (OURS, other) * 3
    found = [versions(planned(facts, catalog)) for catalog in catalogues]
    assert found == found[:2] * 3
    assert all(one != another for one, another in zip(*found[:2], strict=True)), "of NCCL and of PyTorch another release"
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda catalog: versions(planned(facts, catalog)), catalogues)) == found


def test_a_plan_after_changes_is_by_its_catalogue(facts: dict[str, Facts], other: Catalog) -> None:
    for catalog in (OURS, other, OURS):
        requirements = Requirements(engine_version="0.0.0", catalog=catalog)
        after = what_if.what_if(facts, requirements, {}, what_if.parse(["python=3.12"], facts, catalog)).plan
        assert versions(after) == versions(planned(facts, catalog))
        assert (after.knowledge is not None and after.knowledge.overlay) == (catalog.overlay.digest if catalog.overlay else None)


def test_facts_are_completed_by_the_catalogue_that_they_are_read_with(tmp_path: Path) -> None:
    file, stated = tmp_path / "facts.json", '{"schema": 1, "hosts": {"a": {"os": {"id": "newos", "version": "1"}, "arch": "x86_64"}}}'
    file.write_text(stated, encoding="utf-8")
    text = 'distributions: {newos: {family: rhel, oldest: "1", newest: "1", pythons: {"1": ["3.12"]}}}\n'
    (tmp_path / "os.yaml").write_text(HEAD + text, encoding="utf-8")
    mine = Catalog(overlay.read([tmp_path]))
    families = []
    for catalog in (OURS, mine, OURS):
        host = load_file(file, catalog)["a"]
        assert isinstance(host, Facts)
        families.append(host.os.family)
    assert families == ["other", "rhel", "other"]


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_the_resolver_imports_no_catalogue(path: Path) -> None:
    """Neither the package, whose functions read our files, nor the catalogue of them: a module can only use the one that it is given."""
    imported = {
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    of_catalogue = {name for name in imported if name == "provision.catalog" or name.startswith("provision.catalog.")}
    allowed = {"provision.catalog.Catalog", "provision.catalog.troubles"}
    assert {name for name in of_catalogue - allowed if not name.startswith("provision.catalog.models.")} == set()


def test_the_catalogue_has_no_function_that_reads_a_file_of_the_process() -> None:
    from provision import catalog

    assert not [name for name in Catalog.__annotations__ if hasattr(catalog, name) and callable(getattr(catalog, name))]
