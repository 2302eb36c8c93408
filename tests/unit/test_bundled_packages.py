"""What of a bundle's packages is installed on a host that has moved on since: the module's real code with the real dpkg and apt.

apt only simulates, and goes by the host's record of packages in a folder of the test's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_remove_script import load_module

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt is on Debian and Ubuntu")

HAS = "Package: {0}\nStatus: install ok installed\nVersion: {1}\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: d\n\n"


class Failed(Exception):
    """What a module ends with where it cannot go on."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], str]]:
    """``install(there, *files, check)``: the files that the module has installed, and what apt said it would do."""
    status = tmp_path / "dpkg/status"
    status.parent.mkdir()
    said: list[str] = []

    class Module:
        check_mode = False

        def __init__(self, argument_spec: Mapping[str, Any], supports_check_mode: bool) -> None:
            assert set(argument_spec) == {"files"}
            assert supports_check_mode

        params: Mapping[str, Any] = {}

        def run_command(self, argv: list[str], check_rc: bool = False, environ_update: Mapping[str, str] | None = None) -> Any:
            own = {"dpkg-query": ["--admindir", str(status.parent)], "apt-get": ["--simulate", "-o", f"Dir::State::status={status}"]}
            command = [argv[0], *own.get(argv[0], []), *argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=check_rc, env={**os.environ, **(environ_update or {})})
            if argv[0] == "apt-get":
                said.append(done.stdout)
            return done.returncode, done.stdout, done.stderr

        def exit_json(self, **result: Any) -> None:
            raise SystemExit(json.dumps(result))

        def fail_json(self, msg: str, **_result: Any) -> None:
            raise Failed(msg)

    found = load_module("bundled_packages")
    monkeypatch.setattr(found, "AnsibleModule", Module)

    def call(there: Mapping[str, str], *files: Path, check: bool = False) -> tuple[list[str], str]:
        status.write_text("".join(HAS.format(name, version) for name, version in there.items()))
        Module.params, Module.check_mode = {"files": [str(file) for file in files]}, check
        with pytest.raises(SystemExit) as ended:
            found.main()
        result = json.loads(str(ended.value))
        assert result["changed"] == bool(result["files"])
        return [Path(file).name for file in result["files"]], "".join(said)

    return call


@pytest.fixture
def deb(tmp_path: Path) -> Callable[..., Path]:
    def build(name: str, version: str, depends: str = "") -> Path:
        tree = tmp_path / f"{name}-{version}"
        (tree / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.org>\n"
        (tree / "DEBIAN/control").write_text(control + (f"Depends: {depends}\n" if depends else "") + "Description: d\n")
        path = tmp_path / f"{name}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--build", tree, path], check=True, capture_output=True)
        return path

    return build


def test_what_is_there_in_that_version_or_a_newer_one_stays(install: Any, deb: Any) -> None:
    files = [deb("pvnew", "1.0"), deb("pvsame", "1.0"), deb("pvnewer", "1.9"), deb("pvolder", "1.10")]
    taken, said = install({"pvsame": "1.0", "pvnewer": "1.10", "pvolder": "1.9"}, *files)
    assert taken == ["pvnew_1.0_all.deb", "pvolder_1.10_all.deb"]
    assert {line.split()[1] for line in said.splitlines() if line.startswith("Inst ")} == {"pvnew", "pvolder"}


def test_what_would_be_half_installed_is_refused_as_a_whole(install: Any, deb: Any) -> None:
    files = [deb("pvtop", "1.0", "pvunder (= 1.0)"), deb("pvunder", "1.0")]
    assert install({}, *files)[0] == ["pvtop_1.0_all.deb", "pvunder_1.0_all.deb"]
    with pytest.raises(Failed, match=r"do not fit what is installed here by now; make it again:\n.*pvtop : Depends: pvunder \(= 1\.0\)"):
        install({"pvunder": "1.1"}, *files)


def test_a_dry_run_tells_and_nothing_to_do_is_no_change(install: Any, deb: Any) -> None:
    file = deb("pvnew", "1.0")
    assert install({}, file, check=True) == (["pvnew_1.0_all.deb"], "")
    assert install({"pvnew": "1.0"}, file) == ([], "")
