"""What the site is made of, and what is noticed when it is built."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from loading import load

ROOT = Path(__file__).parents[3]


@pytest.fixture
def documentation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook of MkDocs, which only the site's environment has."""
    names = {"mkdocs.config.defaults": ("MkDocsConfig",), "mkdocs.structure.files": ("File", "Files")}
    for module, classes in names.items():
        made = ModuleType(module)
        for name in classes:
            setattr(made, name, object)
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as MkDocs does
    return load("documentation", ROOT / "scripts/documentation.py")


@pytest.mark.parametrize(
    ("link", "dead"),
    [
        ("page.html", False),
        ("page.html#part", False),
        ("page.html?a=b#part", False),
        ("#top", False),
        ("..#top", False),
        ("/below/page.html", False),
        ("a%20b.txt", False),
        ("https://elsewhere/gone.html", False),
        ("mailto:a@b", False),
        ("gone.yml", True),
        ("page.html#gone", True),
        ("#gone", True),
        ("/gone.html", True),
        ("https.html", True),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(link: str, dead: bool, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top"></h1>')
    (tmp_path / "below/page.html").write_text('<h2 id="part"></h2>')
    (tmp_path / "below/a b.txt").touch()
    (tmp_path / "below/from.html").write_text(f'<h1 id="top"></h1><a href="{link}">x</a>')
    check = load("check_site", ROOT / "scripts/check_site.py")
    assert list(check.dead_links(tmp_path)) == ([f"below/from.html: {link}"] if dead else [])


def test_a_bar_ends_no_cell_and_shows_no_backslash(documentation: ModuleType) -> None:
    """Python-Markdown keeps a bar in code together, and shows a backslash before it."""
    assert list(documentation._table(("a", "b"), [("`x|y`", "this | that, `p|q`")]))[1] == r"| `x|y` | this \| that, `p|q` |"
    rows = [line for line in documentation._commands() if line.startswith("| `--")]
    assert any("`--driver auto|BRANCH`" in row for row in rows)
    assert [row for row in rows if re.search(r"`[^`]*\\\|[^`]*`", row)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_no_table_has_a_bar_in_code(page: Path) -> None:
    """GitHub wants a backslash before it, which the site would show."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [row for row in rows if any("\\|" in code for code in re.findall(r"`[^`]*`", row))] == []


def test_the_python_reference_leads_to_the_settings(documentation: ModuleType) -> None:
    assert "](../docs/engine-settings.md)" in "\n".join(documentation._python())
    neutral = (ROOT / "collective_core/src/collective_core/__init__.py").read_text(encoding="utf-8")
    assert "runtime.config" not in neutral.split('"""')[1], "which the reference does not describe"
