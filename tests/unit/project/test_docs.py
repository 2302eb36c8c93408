"""The documents: README stays a page, links lead somewhere, every command and option that is named exists, and code blocks work.

What a code block is decides what tests it, in README, the tutorial and the page on NCCL; nothing is left out (`test_every_block_…`).
tests/integration/test_tutorial.py types the tutorial's commands on real hosts and compares what they and README show. Here:

- ```console, on every page: lines after `$` are typed, what follows is printed. Commands that need no host (with `--facts`, say) are run,
  and every line that is shown must be printed. Those that need hosts are parsed by the real parser, up to where they would begin.
- ```sh: commands are parsed in the same way, targets of `make` exist, and other lines are in `TYPED`, each with the test that runs it.
- ```python, on every page: compiled, and names of the engine's API exist. tests/engine/test_examples.py runs the tutorial's on two ranks.
- ```ini: read by the inventory's parser.
- without a language: output or a drawing.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from loading import load
from typer.testing import CliRunner

from provision import inventory
from provision.cli.main import app
from provision.launch.option_table import ELASTIC, HOROVOD, JOB_OPTIONS, TUNING
from provision.sandbox import Sandbox, names

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
REFERENCE = [README, *sorted((ROOT / "docs").glob("*.md"))]
WITH_LINKS = [
    *REFERENCE,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "collective_core/README.md", "ansible/README.md")),
]
COMMANDS: Any = typer.main.get_command(app)
DEFAULTS = {"provision": "up", "doctor": "check"}  # `provision HOSTS`, `provision doctor HOSTS`


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_a_page() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 80
    assert [line for line in lines if len(line) > 140] == []


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


@pytest.mark.parametrize("file", [*REFERENCE, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_cells_of_tables_are_short(file: Path) -> None:
    rows = re.findall(r"^\|.*\|$", prose_of(file.read_text()), re.MULTILINE)
    assert [cell for row in rows for cell in cells_of(row) if len(cell) > 200] == []


def table_of_options(title: str) -> str:
    """The options of `up` in a panel of its help, with their texts."""
    command = COMMANDS.commands["up"]
    context = command.make_context("up", ["localhost"])
    records = [each.get_help_record(context) for each in command.params if getattr(each, "rich_help_panel", None) == title]
    rows = [[cell.replace("|", " or ") for cell in (f"`{names}`", does)] for names, does in records]
    return "| option | does |\n|---|---|\n" + "".join(f"| {names} | {does} |\n" for names, does in rows)


def test_tables_of_options_are_their_declarations(pytestconfig: pytest.Config) -> None:
    page = ROOT / "docs/install.md"
    made = re.sub(r"(<!-- options: (.*) -->\n\n)(\|.*\n)*", lambda found: found[1] + table_of_options(found[2]), page.read_text())
    if pytestconfig.getoption("update"):
        page.write_text(made)
    assert made.count("<!-- options:") == 3
    assert page.read_text() == made


@pytest.mark.parametrize(
    ("page", "mark", "panels"),
    [("horovod.md", "settings of horovodrun", (HOROVOD,)), ("run.md", "options that the help only names", (ELASTIC, TUNING))],
)
def test_the_options_of_run_that_the_help_leaves_out_are_on_a_page(
    page: str, mark: str, panels: tuple[str, ...], pytestconfig: pytest.Config
) -> None:
    file = ROOT / "docs" / page
    settings = [each for each in JOB_OPTIONS if each.panel in panels and each.spelled]
    what = ["" if each.panel == HOROVOD else each.help for each in settings]
    sets = [", ".join(f"`{name}`" for name in (each.horovod, each.engine) if name) for each in settings]
    rows = [f"| `{', '.join(each.names)}` | {does} {variables} |\n" for each, does, variables in zip(settings, what, sets, strict=True)]
    table = f"| option | {'sets' if HOROVOD in panels else 'does, or sets'} |\n|---|---|\n" + "".join(rows)
    made = re.sub(rf"(<!-- {mark} -->\n\n)(\|.*\n)*", lambda found: found[1] + table, file.read_text())
    if pytestconfig.getoption("update"):
        file.write_text(made)
    assert len(rows) > 5
    assert table in file.read_text()


def test_the_quick_start_names_demo_and_test() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert any(re.search(r"^make demo\b", block, re.MULTILINE) and re.search(r"^make test\b", block, re.MULTILINE) for block in blocks)


@pytest.mark.parametrize("file", WITH_LINKS, ids=name_of)
def test_links_lead_somewhere(file: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(file.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path) if path else file
        if not there.exists() or (anchor and anchor not in anchors_of(there.read_text())):
            dead.append(target)
    assert dead == []


def length_of(path: Path, function: str) -> int:
    """Lines of the function that this file defines at its outermost level; 0: it defines none of the name."""
    text = path.read_text()
    if path.suffix == ".py":
        found = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name == function]
        return sum(each.end_lineno - each.lineno + 1 for each in found if each.end_lineno)
    head = rf"^[^\s/#][^\n]*(?<![\w:]){re.escape(function)}\([^;{{}}]*\{{\n"
    bodies = re.findall(head + r"(?:[^}\n][^\n]*\n|\n)*\}$", text, re.MULTILINE)
    return sum(len(body.splitlines()) for body in bodies)


def test_the_life_of_an_allreduce_is_where_its_page_says() -> None:
    page = (ROOT / "docs/life-of-an-allreduce.md").read_text()
    steps = re.findall(r"^\| (\d+) (\w+) \| `(\S+)`: `(\S+)` \|", page, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, 13))
    drawn = re.findall(r">(\w+)</text><text[^>]*monospace[^>]*>([^<]+)<", (ROOT / "docs/life-of-an-allreduce.svg").read_text())
    assert [(name, function) for _, name, _, function in steps] == drawn
    named = re.findall(r"`([\w/-]+\.\w+)`:\s+`([\w:]+)`", page)
    lengths = {name: length_of(ROOT / "collective_core" / name[0], name[1]) for name in named}
    assert len(lengths) > len(steps)
    assert {name: lines for name, lines in lengths.items() if not 0 < lines <= 150} == {}


def calls_in(text: str) -> Iterator[str]:
    """What a reader would type: lines of code blocks, and code in sentences, that begin with ``provision``."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^(?:\$ )?(provision .*)$", block, re.MULTILINE)
    yield from re.findall(r"`(provision [^`]*)`", prose_of(text))


def options_of(command: Any) -> dict[str, Any]:
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")}


def unknown_in(call: str) -> list[str]:
    """The commands and options of a call that do not exist."""
    words = shlex.split(call, comments=True)[1:]
    command, name = COMMANDS, "provision"
    while words and hasattr(command, "commands"):
        while words and words[0].startswith("-") and words[0] in options_of(command):
            del words[0]  # of the group: flags only
        if words and words[0] in command.commands:
            command, name = command.commands[words[0]], words.pop(0)
        elif words and name in DEFAULTS:
            command = command.commands[DEFAULTS[name]]
        else:
            return words[:1]
    known, unknown = {**options_of(command), "--help": None, "-h": None}, []
    while words:
        option, has_value, _ = words.pop(0).partition("=")
        if not option.startswith("-") or option == "-":
            if name == "run":
                break  # the program's own words
        elif option not in known:
            if option == "--":
                break
            unknown.append(option)
        elif known[option] is not None and not known[option].is_flag and not has_value:
            del words[: known[option].nargs]
    return unknown


@pytest.mark.parametrize("file", REFERENCE, ids=name_of)
def test_commands_that_are_named_exist(file: Path) -> None:
    wrong = {call: unknown for call in calls_in(file.read_text()) if (unknown := unknown_in(call))}
    assert wrong == {}


@pytest.mark.parametrize("file", REFERENCE, ids=name_of)
def test_options_that_are_named_exist(file: Path) -> None:
    def leaves(command: Any) -> Iterator[Any]:
        yield command
        for each in getattr(command, "commands", {}).values():
            yield from leaves(each)

    known = {option for command in leaves(COMMANDS) for option in options_of(command)}
    named = set(re.findall(r"`(--?[a-z][\w-]*)", prose_of(file.read_text())))
    assert named - known - {"--help", "-h"} == set()


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ("provision hosts.ini --check  # a comment", []),
        ("provision --debug up hosts.ini", []),
        ("provision hosts.ini --chekc", ["--chekc"]),
        ("provision plan hosts.ini --yes", ["--yes"]),
        ("provision doctor hosts.ini --fix", []),
        ("provision image bild hosts.ini", ["bild"]),
        ("provision run -np 4 --config-file x.yaml python train.py --lr 1", []),
        ("provision run --npp 4 python train.py", ["--npp"]),
        ("provision run hosts.ini --image mine:1 python train.py --lr 1", []),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(call: str, unknown: list[str]) -> None:
    assert unknown_in(call) == unknown


# --- code blocks -------------------------------------------------------------------------------------------------------------------------

WITH_BLOCKS = [README, ROOT / "docs/tutorial.md", ROOT / "docs/nccl.md"]
_TUTORIAL = "tests/integration/test_tutorial.py::test_the_tutorial_is_true"
# What is typed besides `provision` and `make` → the test that types it, or its like.
TYPED = {
    "python3 -m venv .venv-provision": _TUTORIAL,
    ".venv-provision/bin/pip install .": _TUTORIAL,
    ". .venv-provision/bin/activate": _TUTORIAL,
    "cp ~/.local/state/provision/sandbox/tutorial/hosts.ini .": (
        "tests/unit/project/test_docs.py::test_a_sandbox_is_where_the_tutorial_says"
    ),
}


def blocks_of(file: Path) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", file.read_text(), re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[Any]:
    for file in REFERENCE:
        for number, (language, text) in enumerate(blocks_of(file), 1):
            if file in WITH_BLOCKS or language == "console":
                yield pytest.param(language, text, id=f"{file.stem}-{number}-{language or 'text'}")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that a reader of the pages has, and `tests` of the clone."""
    (tmp_path / "hosts.ini").write_text("node1 ansible_host=10.0.0.11 slots=2\nnode2 ansible_host=10.0.0.12 slots=2\n")
    (tmp_path / "train.py").write_text("print()\n")
    lacking = "libopen-pal.so.40: cannot open shared object file: No such file or directory"
    (tmp_path / "train.log").write_text(f"mpirun: error while loading shared libraries: {lacking}\n")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def parsed(line: str) -> tuple[str, Any]:
    """The command that a line names, with the context of the real parser, which refuses what the command would."""
    words = shlex.split(line, comments=True)[1:]
    command, context, name = COMMANDS, None, "provision"
    while hasattr(command, "commands"):
        context = command.make_context(name, words, parent=context, resilient_parsing=False)
        name, command, words = command.resolve_command(context, [*getattr(context, "_protected_args", ()), *context.args])
    return name, command.make_context(name, words, parent=context)


def typed(line: str) -> None:
    """Whether a line of a shell works as far as no host is needed."""
    command = line.partition("  #")[0].strip()
    if command.startswith("provision "):
        parsed(command)
    elif command.startswith("make "):
        target = re.escape(command.split()[1])
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no such target: {command}"
    elif command:
        file, _, test = TYPED[command].partition("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(), f"no such test: {TYPED[command]}"


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("language", "text"), list(blocks()))
def test_every_block_works(language: str, text: str, reader: Path) -> None:
    if language == "console":
        for line, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if "--facts" not in line and "--log" not in line:
                typed(line)
                continue
            printed = flat(CliRunner().invoke(app, shlex.split(line)[1:]).output)
            for part in filter(None, map(flat, re.split(r"^…$", shown, flags=re.MULTILINE))):
                begin = printed.find(part)
                assert begin >= 0, f"not printed (any more): {part}"
                printed = printed[begin + len(part) :]
    elif language == "sh":
        for line in text.splitlines():
            typed(line)
    elif language == "python":
        compile(text, "the page", "exec")  # its names: test_python_blocks_use_what_the_engine_has
    elif language == "ini":
        (reader / "page.ini").write_text(text)
        assert [host.name for host in inventory.load("page.ini").hosts] == ["node1", "node2"]
    else:
        assert language == "", f"nothing tests a block of `{language}`"


@pytest.mark.parametrize("line", ["provision up", "provision plann x", "provision run -np many train.py", "provision survey a --yes"])
def test_what_the_parser_refuses_is_noticed(line: str, reader: Path) -> None:
    with pytest.raises(Exception, match=r"(?i)missing|no such|no command|valid integer"):
        typed(line)


@pytest.mark.parametrize("line", ["make demonstration", "rm -r everything"])
def test_a_line_that_nothing_tests_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        typed(line)


def test_a_sandbox_is_where_the_tutorial_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROVISION_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    (copied,) = re.findall(r"^cp (~/.*) \.$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    assert Sandbox("tutorial", [], names.folder("tutorial")).inventory == Path(copied).expanduser()


def test_the_forges_workflow_runs_what_exists() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = {step["run"].partition("  #")[0].strip() for job in workflow["jobs"].values() for step in job["steps"] if "run" in step}
    assert {"sudo .ci/run", "make docs", "make sbom"} < commands
    for command in commands - {"sudo .ci/run"}:
        if command.startswith("make "):
            typed(command)
    assert workflow["permissions"] == {"contents": "read"}


# --- names of the engine in blocks of Python: looked up in its sources, because PyTorch and other frameworks are not here -----------------

ENGINE = ROOT / "collective_core/src"


def exported(module: str) -> set[str]:
    """Functions and classes of a module of the engine, and what it lists by name, as in `__all__`; nothing for no such module."""
    place = ENGINE / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names: set[str] = set()
    for statement in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List | ast.Tuple):
            names |= {each.value for each in statement.value.elts if isinstance(each, ast.Constant)}
        elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            names |= exported(statement.module or "")
    return names


def imported(module: str) -> dict[str, str]:
    """What a package of the engine has imported from others, by its name there."""
    file = ENGINE / module.replace(".", "/") / "__init__.py"
    froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)] if file.exists() else []
    return {each.asname or each.name: f"{node.module}.{each.name}" for node in froms for each in node.names}


def is_in_the_engine(module: str, name: str) -> bool:
    """Whether `module` has `a` of a name `a.b`, and `b` too where `a` is one of the engine's modules, this framework's or of all."""
    first, _, rest = name.partition(".")
    if first not in exported(module):
        return False
    within = exported(f"{module}.{first}") | exported(imported(module).get(first, ""))
    return not (rest and within) or rest.partition(".")[0] in within


def unknown_to_the_engine(code: str, hvd: str = "collective_core.torch") -> tuple[list[str], str]:
    """Names of the engine that a block of Python uses and that do not exist, and the module that it, or the block before it, calls hvd."""
    unknown, tree = [], ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("collective_core"):
                    hvd = each.name
                    unknown += [] if exported(each.name) else [each.name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("collective_core"):
            unknown += [f"{node.module}.{each.name}" for each in node.names if each.name not in exported(node.module or "")]
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = sorted(found[1] for each in used if (found := re.fullmatch(r"hvd\.([\w.]+)", each)))
    return unknown + [f"hvd.{name}" for name in names if not is_in_the_engine(hvd, name)], hvd


PYTHON_PAGES = [*REFERENCE, *(ROOT / name for name in ("collective_core/README.md", "examples/README.md", "ansible/README.md"))]


@pytest.mark.parametrize("file", [file for file in PYTHON_PAGES if "```python" in file.read_text()], ids=name_of)
def test_python_blocks_use_what_the_engine_has(file: Path) -> None:
    hvd = "collective_core.torch"
    for language, text in blocks_of(file):
        if language == "python":
            compile(text, name_of(file), "exec")
            unknown, hvd = unknown_to_the_engine(text, hvd)
            assert unknown == []


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("hvd.init()\nhvd.nn.SGD(lr=hvd.size())\nhvd.elastic.run\nhvd.Compression.int8", []),
        ("hvd.initialise()", ["hvd.initialise"]),
        ("hvd.nn.Sgd()", ["hvd.nn.Sgd"]),
        ("import collective_core.keras as hvd\nhvd.callbacks.MetricAverage()", ["hvd.callbacks.MetricAverage"]),
        ("import collective_core.jax as hvd\nhvd.data.Stream, hvd.ps.serve", ["hvd.ps", "hvd.ps.serve"]),
        ("import collective_core.mxnet as hvd", ["collective_core.mxnet"]),
        ("from collective_core import Runner, Walker", ["collective_core.Walker"]),
    ],
)
def test_a_name_that_the_engine_lacks_is_noticed(code: str, unknown: list[str]) -> None:
    assert unknown_to_the_engine(code)[0] == unknown


# --- the site ----------------------------------------------------------------------------------------------------------------------------


def pages_in(nav: Any) -> Iterator[str]:
    for each in nav if isinstance(nav, list) else nav.values():
        if isinstance(each, str):
            yield each
        else:
            yield from pages_in(each)


def test_the_site_lists_every_page_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Mkdocs)  # noqa: S506  a safe one
    listed = sorted(pages_in(settings["nav"]))
    written = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    assert listed == sorted(set(listed))
    assert written - set(listed) == set()
    assert {page for page in set(listed) - written if not page.startswith("reference/")} == {
        "ansible/README.md",
        "collective_core/README.md",
        "examples/README.md",
        "examples/ctr/README.md",
    }


class _Mkdocs(yaml.SafeLoader):
    """Names of Python objects, which MkDocs loads, are left alone."""


_Mkdocs.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        ('<link rel="canonical" href="https://here/"><img src="here.png"><a href="https://elsewhere/">x</a>', []),
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/css">', ["//fonts.example/css"]),
        ('<img src="gone.png">', ["gone.png"]),
    ],
)
def test_what_the_site_would_fetch_is_noticed(page: str, missing: list[str], tmp_path: Path) -> None:
    (tmp_path / "here.png").touch()
    (tmp_path / "page.html").write_text(page)
    done = subprocess.run([sys.executable, str(ROOT / "scripts/check_site.py"), str(tmp_path)], capture_output=True, text=True)
    assert re.findall(r"page.html: (.*)", done.stderr) == missing
    assert done.returncode == bool(missing)


def test_a_name_that_the_python_reference_lacks_is_noticed() -> None:
    check = load("check_site", ROOT / "scripts/check_site.py")
    exported = [f"collective_core.jax.{name}" for name in check._exported("collective_core.jax")]
    assert {"init", "Sum", "elastic", "data"} <= {name.rpartition(".")[2] for name in exported}
    modules = ("collective_core.jax", "collective_core.jax.elastic", "collective_core.extensions.streaming")
    page = "".join(f'<h2 id="{name}">{name}</h2>' for name in modules) + "".join(
        f'<h3 id="{name}"></h3>' for name in exported if not name.endswith((".init", ".elastic", ".data"))
    )
    assert [name for name in check.undescribed(page) if name.rpartition(".")[0] == modules[0]] == ["collective_core.jax.init"]
