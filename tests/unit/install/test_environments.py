"""A project's environment: what its file may say, what is resolved for a host, and what the module installs. uv is real; its index is a
folder of small wheels."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import host, plan_for
from loading import run_ansible_module
from rollouts import host_plan, manifest

from provision import catalog
from provision import inventory as inventories
from provision.base import uv_support
from provision.base.errors import ProvisionError, UsageError
from provision.cli.run_options import run_options
from provision.install import environments, wheels
from provision.launch.launchers import Environment, RunOptions, mpi_job, own_job
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session


def wheel(folder: Path, name: str, version: str, *requires: str) -> str:
    """A real wheel with one module; returns its SHA-256."""
    folder.mkdir(exist_ok=True)
    info, module = f"{name}-{version}.dist-info", f"version = {version!r}\n"
    checksum = base64.urlsafe_b64encode(hashlib.sha256(module.encode()).digest()).decode().rstrip("=")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", module)
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,sha256={checksum},{len(module)}\n{info}/METADATA,,\n{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


#: What a host's environment answers, as hostside/environment.py prints it.
OURS = {
    "python": "3.11.2",
    "arch": "x86_64",
    "glibc": "2.36",
    "packages": {
        "torch": {"version": "2.13.0+cpu", "requires": ["pvtyping>=2"]},
        "collective_core": {"version": "0.1.0", "requires": ["pvarray", "torch>=1.10; extra == 'torch'"]},
        "pvarray": {"version": "2.3.1", "requires": []},
        "pvtyping": {"version": "2.0", "requires": []},
    },
}


def base(**more: Any) -> environments._Base:
    return environments._Base.model_validate({**OURS, **more})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that uv may use."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    wheel(tmp_path / "wheels", "pvdemo", "1.0", "pvarray>=1", "torch>=2")
    wheel(tmp_path / "wheels", "pvold", "1.0", "torch<2")
    for version in ("1.9", "2.9"):
        wheel(tmp_path / "wheels", "pvarray", version)
        wheel(tmp_path / "wheels", "pvtyping", version)
    return tmp_path / "wheels"


def resolved(tmp_path: Path, text: str, name: str = "requirements.txt") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [f"{pin.name}=={pin.version}" for pin in environments.resolve(environments.read(path), base(), "node1", catalog.OURS)]


def test_only_what_is_not_there_is_installed(tmp_path: Path, index: Path) -> None:
    assert resolved(tmp_path, "pvdemo  # ours\n") == ["pvdemo==1.0"]
    assert resolved(tmp_path, "pvdemo\npvarray==2.3.1\ntorch==2.13.0+cu130\n") == ["pvdemo==1.0"], "the plan chooses the build"
    assert resolved(tmp_path, "pvarray==1.9\nnever; sys_platform == 'win32'\n") == ["pvarray==1.9"], "the project's release wins"
    assert resolved(tmp_path, '[project]\nname = "p"\nversion = "1"\ndependencies = ["pvdemo"]\n', "pyproject.toml") == ["pvdemo==1.0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torch==2.5.0\n", r"it needs torch==2\.5\.0, but torch 2\.13\.0\+cpu is installed on node1(.|\n)*--torch 2\.5\.0"),
        ("torch~=2.9.0\n", r"it needs torch~=2\.9\.0(.|\n)*--torch 2\.9\.1$"),
        (
            "torch==2.3.1\n",
            r"it needs torch==2\.3\.1, but torch 2\.13\.0\+cpu is installed(.|\n)*into requirements\.txt$",
        ),  # no --torch 2.3.1
        ("pvold\n", r"pvold(.|\n)*torch==2\.13\.0\+cpu(.|\n)*--torch VERSION"),
        ("pvtyping==1.9\n", r"pvtyping"),
        ("pvnowhere\n", r"found no packages for (.|\n)*pvnowhere"),
        (f"pvdemo==1.0 \\\n    --hash=sha256:{0:064d}\n", r"pvdemo 1\.0: no file of the index has a checksum"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, index: Path, text: str, says: str) -> None:
    with pytest.raises(ProvisionError) as caught:
        resolved(tmp_path, text)
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(("installed", "release"), [("2.4.1+cu118", None), ("2.4.1+cu124", None), ("2.7.1+cu128", "2.8.0")])
def test_a_release_is_offered_where_the_driver_of_the_installed_build_runs_one_of_its_builds(
    tmp_path: Path, index: Path, installed: str, release: str | None
) -> None:
    (tmp_path / "requirements.txt").write_text("torch>=2.8,<2.9\n")
    there = base(packages={"torch": {"version": installed, "requires": []}})
    with pytest.raises(ProvisionError) as caught:
        environments.resolve(environments.read(tmp_path / "requirements.txt"), there, "node1", catalog.OURS)
    offered = re.search(r"--torch (\S+)", str(caught.value))
    assert (offered and offered[1]) == release


def test_lock_is_exported_without_what_is_there_for_pytorch(tmp_path: Path, index: Path) -> None:
    project = '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["pvdemo", "torch"]\n'
    for version in ("2.13.0", "2.5.0"):
        wheel(index, "torch", version, "pvcuda")
    wheel(index, "pvcuda", "1")
    (tmp_path / "pyproject.toml").write_text(project)
    lock = [
        str(Path(sys.executable).with_name("uv")),
        "lock",
        "--quiet",
        "--no-index",
        "--find-links",
        str(index),
        "--python",
        sys.executable,
    ]
    subprocess.run(lock, cwd=tmp_path, check=True)
    assert 'name = "pvcuda"' in (tmp_path / "uv.lock").read_text()
    for name in ("uv.lock", "pyproject.toml"):  # next to its lock the project stands for that
        found = environments.resolve(environments.read(tmp_path / name), base(), "node1", catalog.OURS)
        assert [(pin.name, pin.version) for pin in found] == [("pvarray", "2.9"), ("pvdemo", "1.0")]
    (tmp_path / "uv.lock").write_text((tmp_path / "uv.lock").read_text().replace("2.13.0", "2.5.0"))
    with pytest.raises(ProvisionError, match=r"it needs torch==2\.5\.0"):
        environments.resolve(environments.read(tmp_path / "uv.lock"), base(), "node1", catalog.OURS)
    with pytest.raises(ProvisionError, match=r"it is for Python >=3\.10, and node1 has 3\.9\.2"):
        environments.resolve(environments.read(tmp_path / "uv.lock"), base(python="3.9.2"), "node1", catalog.OURS)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("requirements.txt", "# none\npvdemo @ git+https://host/x\n", r"requirements\.txt:2: pvdemo: it comes from git\+https"),
        ("requirements.txt", "./mine\n", r"txt:1: \./mine: it is not a package of an index"),
        ("requirements.txt", "-e .\n", r"txt:1: -e \.: it is not a package of an index"),
        ("requirements.txt", "-r more.txt\n", r"txt:1: -r: other files are not read"),
        ("requirements.txt", "pvdemo; $(touch x)\n", r"txt:1: pvdemo; \$\(touch x\)"),
        ("requirements.txt", "\xff\n", "invalid file: expected UTF-8"),
        ("poetry.lock", "", "invalid file: expected requirements"),
        ("uv.lock", "", r"there is no pyproject\.toml next to it"),
        ("pyproject.toml", 'requires-python = "new"\n', "requires-python"),
        ("absent", None, "No such file"),
    ],
)
def test_unsupported_file_is_refused_with_its_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=says):
        environments.read(tmp_path / name)


@pytest.mark.parametrize(
    "packages",
    [
        {"a b": {"version": "1", "requires": []}},
        {"../x": {"version": "1", "requires": []}},
        {"a-": {"version": "1", "requires": []}},
        {"a": {"version": "1\n2", "requires": []}},
        {"torch": {"version": "2..1", "requires": []}},
    ],
)
def test_hosts_answer_is_data(packages: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="packages"):
        base(packages=packages)


def test_a_host_adds_no_packages_to_those_of_others(tmp_path: Path, index: Path) -> None:
    """What a host's packages require is there; only extras, which a project asks for, need not be."""
    wheel(index, "pvextra", "1.0")
    wheel(index, "pvevil", "1.0")
    wheel(index, "pvuser", "1.0", "pvarray[more]", "torch")
    hostile = ["pvevil", "pvevil; os_name ~= 'x'", "a; extra == 'x'\nRequires-Dist: pvevil", "pvevil; extra != 'x'", "pvtyping>=2"]
    packages = {
        **OURS["packages"],
        "torch": {"version": "2.13.0+cpu", "requires": [*hostile, "a; extra == 'x\nRequires-Dist: pvevil\n'"]},
        "pvarray": {"version": "2.3.1", "requires": ["pvextra; extra == 'more'", "pvevil; extra == 'less'"]},
    }
    (tmp_path / "requirements.txt").write_text("pvuser\n")
    found = environments.resolve(environments.read(tmp_path / "requirements.txt"), base(packages=packages), "node1", catalog.OURS)
    assert sorted(pin.name for pin in found) == ["pvextra", "pvuser"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"packages": {"torch": {"version": "2.13.0+cpu", "requires": ["pvtyping>=2", "pvdemo"]}}},
            "torch 2.13.0+cpu requires other packages",
        ),
        ({"packages": {"pvarray": {"version": "2.4", "requires": []}}}, "pvarray 2.4 instead of 2.3.1"),
        ({"packages": {"six": {"version": "1.0", "requires": []}}}, "six 1.0 instead of none"),
        ({"python": "3.12.1"}, "Python 3.12 instead of 3.11"),
        ({"python": "3.11.9"}, None),
        ({"python": "three"}, "it did not say what is installed: `python` must be a version of Python, not 'three'"),
    ],
)
def test_hosts_with_the_same_plan_must_have_the_same_environment(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], says: str | None
) -> None:
    """Only the hosts' answers are stated."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / "requirements.txt").write_text("pvdemo\n")
    answers = {"a": OURS, "b": {**OURS, **other, "packages": {**OURS["packages"], **other.get("packages", {})}}}

    def answered(_: Session, scripts: dict[str, str]) -> dict[str, ssh.Answer]:
        return {name: ssh.Answer(0, f"{ssh.ANSWER}\n{json.dumps(answers[name])}", "") for name in scripts}

    monkeypatch.setattr(ssh, "run", answered)
    session = Session(inventories.load("a,b"), Progress(), {})
    plan = plan_for({"a": host(), "b": host("10.0.0.2")})
    if says is None:
        assert "on every host already" in environments.preview(session, plan, tmp_path / "requirements.txt", installed=True)
    else:
        with pytest.raises(ProvisionError) as caught:
            environments.preview(session, plan, tmp_path / "requirements.txt", installed=True)
        assert str(caught.value).startswith("b: ")
        assert says in str(caught.value)
        assert "the same plan" not in str(caught.value) or "that of a," in str(caught.value)


def test_the_cache_of_uv_which_locks_it_for_every_user_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    wheels.run_uv(["cache", "prune"], tmp_path, uv_support.Setup({}), "failed", "hint")
    assert (tmp_path / "cache/uv").stat().st_mode & 0o777 == 0o700


def test_module_installs_over_another_environment_once(tmp_path: Path, index: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    given = {"uv": uv, "python": sys.executable, "find_links": str(index)}
    run_ansible_module("uv_packages", {**given, "venv": str(tmp_path / "venv"), "requirements": ["pvarray==2.9", "pvtyping==2.9"]})
    resolved = [
        {"name": "pvarray", "version": "1.9", "sha256": [hashlib.sha256((index / "pvarray-1.9-py3-none-any.whl").read_bytes()).hexdigest()]}
    ]
    over = {"base": str(tmp_path / "venv"), "resolved": resolved, "note": {"file": "uv.lock"}, **given, "venv": str(tmp_path / "envs/x")}
    assert run_ansible_module("uv_packages", over, check=True)["changed"]
    assert not (tmp_path / "envs").exists()
    assert run_ansible_module("uv_packages", over)["changed"]
    code = "import pvarray, pvtyping; print(pvarray.version, pvtyping.version)"
    printed = subprocess.run([str(tmp_path / "envs/x/bin/python"), "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "1.9 2.9\n"
    assert json.loads((tmp_path / "envs/x" / environments.COMPLETE).read_text()) == {"file": "uv.lock"}
    assert (tmp_path / "envs/x/.lock").stat().st_mode & 0o777 == 0o600, "every user could hold uv's lock"
    assert not run_ansible_module("uv_packages", over)["changed"]
    (tmp_path / "envs/x" / environments.COMPLETE).unlink()  # as an interrupted run leaves it
    assert run_ansible_module("uv_packages", over)["changed"]
    wrong = {**over, "venv": str(tmp_path / "envs/y"), "resolved": [{**resolved[0], "sha256": ["0" * 64]}]}
    assert "uv could not install the packages" in run_ansible_module("uv_packages", wrong)["msg"]
    assert not (tmp_path / "envs/y" / environments.COMPLETE).exists()


def test_jobs_run_in_the_environment_and_find_our_programs() -> None:
    where = Environment("/opt/p/envs/x/bin/python", mpirun="/opt/p/venv/bin/mpirun", programs="/opt/p/venv/bin")
    for job in (mpi_job, own_job):
        made = job(where, [("a", 1)], RunOptions(("python", "train.py")))
        assert list(made.program)[-2:] == ["/opt/p/envs/x/bin/python", "train.py"]
        assert made.environment["PATH"] == "/opt/p/envs/x/bin:/opt/p/venv/bin:{inherited}"


def test_run_finds_what_up_has_created() -> None:
    plan = plan_for({"a": host()})
    recorded = host_plan(manifest(plan, "a")["host"])
    assert environments._kind(recorded) == environments._kind(plan.hosts["a"])


def test_a_dry_run_says_which_hosts_would_get_the_environment(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hosts' answers are stated."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / "requirements.txt").write_text("pvdemo\n")
    plan = plan_for({"a": host(), "b": host("10.0.0.2")})
    asked: list[str] = []

    def answered(_: Session, scripts: dict[str, str]) -> dict[str, ssh.Answer]:
        asked.extend(scripts)
        lacks = {"b": 0, "a": 0} if has_all else {"a": environments._MISSING, "b": 0}
        return {
            name: ssh.Answer(lacks[name] if "exit" in script else 0, f"{ssh.ANSWER}\n{json.dumps(OURS)}", "")
            for name, script in scripts.items()
        }

    monkeypatch.setattr(ssh, "run", answered)
    session = Session(inventories.load("a,b"), Progress(), {})
    file = tmp_path / "requirements.txt"
    said = environments.preview(session, plan, file, installed=False)
    assert said == f"the environment of {file} would be created after the installation, with the packages that this lacks"
    assert asked == [], "what is there now says nothing about then"
    has_all = False
    said = environments.preview(session, plan, file, installed=True)
    assert re.fullmatch(rf"the environment of {file} would be created on a: 1 package in /opt/provision/envs/[0-9a-f]{{16}}", said)
    has_all = True
    assert "is on every host already: /opt/provision/envs/" in environments.preview(session, plan, file, installed=True)


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uv.lock").touch()
    with pytest.raises(UsageError, match="--env non: no such file") as caught:
        run_options(["train"], env=Path("non"))
    assert "--variables known|all|none" in str(caught.value.hint)
    assert run_options(["train"], env=Path("uv.lock")).project == Path("uv.lock")
    with pytest.raises(UsageError, match="--env and --python"):
        run_options(["train"], env=Path("uv.lock"), python="/usr/bin/python3")
    with pytest.raises(UsageError, match="--index-url needs --env"):
        run_options(["train"], index_url="https://host.example/simple")
