"""What the three distributions say of themselves: one version number, and every import of what they ship."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import provision
from provision.base import engine_source, resources
from provision.cli.main import app
from provision.launch.smoke import mnist

tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 reads no TOML")

ROOT = Path(__file__).parents[3]
TOOLKIT, ENGINE, HOROVOD_NAMES = ROOT, ROOT / "collective_core", ROOT / "collective_core/horovod"
#: Modules of ours.
OWN = {"provision", "collective_core", "collective_core_autoload", "horovod"}


def pyproject(place: Path) -> dict[str, Any]:
    return tomllib.loads((place / "pyproject.toml").read_text(encoding="utf-8"))


def declared(place: Path, *, extras: bool) -> set[str]:
    project = pyproject(place)["project"]
    optional = [each for group in project.get("optional-dependencies", {}).values() for each in group] if extras else []
    return {canonicalize_name(Requirement(each).name) for each in [*project["dependencies"], *optional]}


def imported(*sources: Path) -> dict[str, str]:
    """Distribution → a file that imports it. One that is not installed here is called as its module."""
    known = metadata.packages_distributions()
    found = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            else:
                continue
            for top in {module.partition(".")[0] for module in modules} - OWN - sys.stdlib_module_names:
                found[canonicalize_name(known.get(top, [top])[0])] = path.relative_to(ROOT).as_posix()
    return found


def undeclared(names: set[str], *sources: Path) -> dict[str, str]:
    assert sources
    return {name: path for name, path in imported(*sources).items() if name not in names}


def test_the_toolkit_declares_what_it_imports() -> None:
    # Scripts in hostside and in files of roles run in the hosts' own environments.
    ours = [path for path in (ROOT / "provision").rglob("*.py") if ROOT / "provision/hostside" not in path.parents]
    ours += [path for path in (ROOT / "playbooks").rglob("*.py") if path.parent.name != "files"]
    assert not undeclared(declared(TOOLKIT, extras=False), *ours)


def test_the_engine_and_horovods_names_declare_what_they_import() -> None:
    names = declared(ENGINE, extras=True)
    assert not undeclared(names, *(ENGINE / "src").rglob("*.py"))
    assert declared(HOROVOD_NAMES, extras=False) == {pyproject(ENGINE)["project"]["name"]}
    assert not undeclared(names, *(HOROVOD_NAMES / "src").rglob("*.py"))


def test_there_is_one_version_number() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    said = CliRunner().invoke(app, ["--version"]).output
    assert newest.group(1) == provision.__version__
    assert said == f"provision {provision.__version__}\n"
    assert engine_source.pack().version == provision.__version__
    assert engine_source.pack_horovod_names().version == pyproject(HOROVOD_NAMES)["project"]["version"] == provision.__version__


def test_builds_read_versions_where_python_does() -> None:
    toolkit, engine = pyproject(TOOLKIT), pyproject(ENGINE)
    assert "version" not in {**toolkit["project"], **engine["project"]}
    assert ROOT / toolkit["tool"]["hatch"]["version"]["path"] == Path(provision.__file__)
    read = ENGINE / engine["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert f'__version__ = "{engine_source.pack().version}"' in read.read_text(encoding="utf-8").splitlines()


def test_a_tag_makes_every_file_of_a_release() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = {name: " ".join(step["run"] for step in job["steps"] if "run" in step) for name, job in jobs.items()}
    assert (commands["sbom"], commands["packages"]) == ("make sbom", "make dist")
    assert "collective_core.check" in commands["wheels"]
    assert set(jobs["release"]["needs"]) == set(jobs) - {"release"}
    assert "sha256sum" in commands["release"]
    assert all("refs/tags/v" in jobs[name]["if"] for name in ("sbom", "packages", "wheels"))
    recipe = re.search(r"^dist:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    built = ("-m build --sdist --wheel --outdir dist .", "-m build --sdist --outdir dist collective_core", "ansible/build.py dist")
    for made in (*built, "cp provision/_bundled/wheels/*.whl dist/", "cp constraints.txt dist/"):
        assert f"{made}\n" in recipe[1]
    assert "collection" in (ROOT / "docs/releasing.md").read_text(encoding="utf-8")


def test_the_wheel_holds_the_engines_wheels_though_git_ignores_them_and_the_sources_do_not() -> None:
    targets = pyproject(TOOLKIT)["tool"]["hatch"]["build"]["targets"]
    made = resources.ENGINE_WHEELS.relative_to(ROOT).as_posix()
    assert targets["wheel"]["artifacts"] == [f"{made}/*.whl"]
    assert "sdist" not in targets
    assert "provision/_bundled/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    script = (ROOT / "scripts/engine_wheels.sh").read_text(encoding="utf-8")
    assert f"target={made}\n" in script


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_everything_in_the_package_is_shipped_the_digits_too(kind: str) -> None:
    builder = importlib.import_module(f"hatchling.builders.{kind}")
    files = getattr(builder, f"{kind.capitalize()}Builder")(str(ROOT)).recurse_included_files()
    shipped = {file.distribution_path for file in files}
    names = (path.relative_to(ROOT) for path in (ROOT / "provision").rglob("*") if path.is_file())
    ours = {name.as_posix() for name in names if not any(part.startswith((".", "__pycache__", "_bundled")) for part in name.parts)}
    assert f"{mnist.DIGITS.relative_to(ROOT).as_posix()}/train-images-idx3-ubyte.gz" in ours
    assert ours <= shipped


def _requirements() -> dict[str, Requirement]:
    return {canonicalize_name(each.name): each for each in map(Requirement, pyproject(TOOLKIT)["project"]["dependencies"])}


@pytest.mark.parametrize(("name", "flawed"), [("jinja2", "3.1.5"), ("requests", "2.32.3"), ("ansible-core", "2.17.6")])
def test_versions_with_known_flaws_are_not_accepted(name: str, flawed: str) -> None:
    """They are in the advisories of CVE-2025-27516, CVE-2024-47081 and CVE-2024-11079."""
    assert not _requirements()[name].specifier.contains(flawed)


def test_every_place_says_the_same_of_ansible() -> None:
    (least,) = [each.version for each in _requirements()["ansible-core"].specifier]
    runtime = yaml.safe_load((ROOT / "ansible/meta/runtime.yml").read_text(encoding="utf-8"))
    assert runtime["requires_ansible"] == f">={least}"
    for page in ("ansible/README.md", "docs/install.md"):
        assert f"ansible-core {least} or newer" in (ROOT / page).read_text(encoding="utf-8")


def test_the_constraints_of_a_release_pin_what_the_toolkit_needs() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pinned = [Requirement(line) for line in lines]  # no option, and no address of an index
    assert all(each.url is None and [part.operator for part in each.specifier] == ["=="] for each in pinned)
    for name, needed in _requirements().items():
        versions = [part.version for each in pinned if canonicalize_name(each.name) == name for part in each.specifier]
        assert versions, name
        assert all(needed.specifier.contains(version) for version in versions), (name, versions)
