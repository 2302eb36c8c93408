"""Inventories of every form that Ansible accepts: hosts with addresses, users, ports and slots."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.inventory import Host, Inventory, InventoryError, load, loading
from provision.inventory.model import ENCRYPTED


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
        monkeypatch.delenv(name)
    return tmp_path


def written(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def hosts(inventory: Inventory) -> dict[str, Host]:
    return {host.name: host for host in inventory.hosts}


INI = """\
[gpu]
alpha ansible_host=10.0.0.1 slots=4
beta:2222 ansible_host=10.0.0.2 ansible_user=bob
node[1:3]

[cpu]
gamma

[cluster:children]
gpu
cpu

[gpu:vars]
slots=2
ansible_user=trainer
"""

YAML = """\
cluster:
  children:
    gpu:
      hosts:
        alpha: {ansible_host: 10.0.0.1, slots: 4}
        beta:2222:
          ansible_host: 10.0.0.2
          ansible_user: bob
        node[1:3]:
      vars: {slots: 2, ansible_user: trainer}
    cpu:
      hosts:
        gamma:
"""


@pytest.mark.parametrize(("name", "text"), [("hosts.ini", INI), ("hosts", INI), ("hosts.yml", YAML), ("hosts.yaml", YAML)])
def test_ini_and_yaml_give_the_same_hosts(name: str, text: str) -> None:
    inventory = load(written(name, text))
    found = hosts(inventory)
    assert sorted(found) == ["alpha", "beta", "gamma", "node1", "node2", "node3"]
    assert (found["alpha"].address, found["alpha"].slots, found["alpha"].user) == ("10.0.0.1", 4, "trainer")
    assert (found["beta"].address, found["beta"].port, found["beta"].user, found["beta"].slots) == ("10.0.0.2", 2222, "bob", 2)
    assert (found["node2"].address, found["node2"].port, found["node2"].slots) == ("node2", None, 2)
    assert (found["gamma"].user, found["gamma"].slots) == (None, None)
    assert {host.connection for host in inventory.hosts} == {"ssh"}
    assert inventory.ansible_argument == str(Path(name).absolute())
    assert inventory.source == Path(name).absolute()
    assert inventory.problems == ()


def test_json_inventory() -> None:
    found = hosts(load(written("hosts.json", '{"all": {"hosts": {"a": {"slots": 2}}}}')))
    assert found["a"].slots == 2


def test_a_folder_with_group_and_host_variables() -> None:
    written("site/one.yml", "gpu:\n  hosts:\n    a:\n    b:\n")
    written("site/two", "[cpu]\nc\n")
    written("site/group_vars/gpu.yml", "slots: 4\nansible_user: trainer\n")
    written("site/host_vars/b/main.yml", "ansible_host: 10.0.0.2\nslots: 8\n")
    inventory = load("site")
    found = hosts(inventory)
    assert {name: host.slots for name, host in found.items()} == {"a": 4, "b": 8, "c": None}
    assert (found["b"].address, found["b"].user, found["c"].user) == ("10.0.0.2", "trainer", None)
    assert inventory.where == "site"


def test_group_variables_are_read_next_to_the_file_only() -> None:
    written("site/hosts.ini", "[gpu]\na\n")
    written("site/group_vars/gpu", "slots: 4\n")
    written("group_vars/gpu.yml", "slots: 99\n")
    assert hosts(load("site/hosts.ini"))["a"].slots == 4


def test_a_program_that_prints_an_inventory() -> None:
    script = Path(written("inventory.sh", """#!/bin/sh\necho '{"gpu": {"hosts": ["a"], "vars": {"slots": 2}}}'\n"""))
    script.chmod(0o755)
    only = load("inventory.sh").hosts[0]
    assert (only.name, only.slots) == ("a", 2)


def test_only_variables_that_are_read_are_resolved() -> None:
    variables = """
    domain: lab.example
    ansible_host: "{{ inventory_hostname }}.{{ domain }}"
    motto: "{{ nowhere }}"
"""
    text = f"all:\n  hosts:\n    a:\n  vars:{variables}"
    only = load(written("hosts.yml", text)).hosts[0]
    assert only.address == "a.lab.example"
    assert only.variables["motto"] == "{{ nowhere }}"
    assert only.variables["domain"] == "lab.example"


def test_variables_are_plain_values() -> None:
    text = "all:\n  hosts:\n    a: {colour: blue, sizes: [1, 2], deep: {x: 1.5}, on: true, nothing: null}\n"
    variables = load(written("hosts.yml", text)).hosts[0].variables
    assert yaml.safe_load(yaml.safe_dump(dict(variables))) == dict(variables)
    assert type(variables["colour"]) is str
    assert variables["deep"] == {"x": 1.5}


def test_own_variables_per_host() -> None:
    text = "a provision_prefix=/data/provision provision_python=/usr/bin/python3.11 provision_interface=ib0\n"
    only = load(written("hosts.ini", text)).hosts[0]
    assert (only.prefix, only.python, only.interface) == ("/data/provision", "/usr/bin/python3.11", "ib0")


def test_repr_contains_no_passwords() -> None:
    inventory = load(written("hosts.ini", "a ansible_password=hunter2 ansible_become_password=hunter3\n"))
    assert "hunter" not in repr(inventory)
    assert inventory.hosts[0].variables["ansible_password"] == "hunter2"  # noqa: S105


def test_ansible_cfg_sets_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as Ansible reads its settings once."""
    written(
        "ansible.cfg",
        "[defaults]\nremote_user = carl\nremote_port = 2200\nprivate_key_file = ~/.ssh/lab\n[ssh_connection]\nssh_args = -J jump\n",
    )
    written("hosts.ini", "a\nb ansible_user=bob ansible_port=22 ansible_ssh_args=-4\n")
    code = (
        "from provision.inventory import load\n"
        "for argument in ('hosts.ini', 'c,d@e'):\n"
        "    for host in load(argument).hosts: print(host.name, host.user, host.port, host.key_file, *host.variables.values())"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}, check=False)
    assert done.stderr == ""
    key = str(Path("~/.ssh/lab").expanduser())
    assert done.stdout.splitlines() == [
        f"a carl 2200 {key} -J jump",
        f"b bob 22 {key} -4 bob 22",
        f"c carl 2200 {key} -J jump",
        f"e d 2200 {key} -J jump",
    ]


# ------------------------------------------------------------------------------------------------------------------ vault


def _encrypt(path: str, password: str) -> None:
    from ansible.constants import DEFAULT_VAULT_ID_MATCH  # noqa: F401 - Ansible wants its settings loaded first
    from ansible.parsing.vault import VaultLib, VaultSecret

    vault = VaultLib([("default", VaultSecret(password.encode()))])
    Path(path).write_bytes(vault.encrypt(Path(path).read_bytes()))


def test_an_encrypted_file_without_its_password_is_named() -> None:
    written("hosts.ini", "a\n")
    written("group_vars/all.yml", "secret: 1\n")
    _encrypt("group_vars/all.yml", "sesame")
    with pytest.raises(InventoryError) as caught:
        load("hosts.ini")
    # before 2.19 Ansible does not say which file it is
    place = r"group_vars/all\.yml: it|hosts\.ini: a file of the inventory"
    assert re.match(f"({place}) is encrypted and cannot be opened: Attempting to decrypt", str(caught.value))
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in str(caught.value)


def test_ansibles_password_file_decrypts() -> None:
    written("hosts.ini", "a\n")
    written("group_vars/all.yml", "slots: 3\n")
    written("password", "sesame\n")
    _encrypt("group_vars/all.yml", "sesame")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "ANSIBLE_VAULT_PASSWORD_FILE": "password"}
    code = "from provision.inventory import load; print(load('hosts.ini').hosts[0].slots)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.parametrize("value", ["!vault |\n{}", "'{{{{ secret }}}}'\n      secret: !vault |\n{}"])
@pytest.mark.parametrize("has_password", [True, False])
def test_an_encrypted_password_is_decrypted_for_ssh_and_sudo_alone(value: str, has_password: bool) -> None:
    from ansible.parsing.vault import VaultLib, VaultSecret

    secret = VaultLib([("default", VaultSecret(b"sesame"))]).encrypt(b"hunter2").decode()
    lines = "".join(f"        {line}\n" for line in secret.splitlines())
    words = value.format(lines)
    written("hosts.yml", f"all:\n  hosts:\n    a:\n      ansible_become_password: {words}      other: !vault |\n{lines}")
    written("password", "sesame\n")
    environment = (
        os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | ({"ANSIBLE_VAULT_PASSWORD_FILE": "password"} if has_password else {})
    )
    code = """if True:
        from provision.inventory import load
        found = load('hosts.yml')
        only = found.hosts[0]
        assert "hunter2" not in repr((only, only.variables, found.as_ansible_yaml()))
        print(only.sudo_password, only.password, only.variables["other"], len(found.problems))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    expected = f"hunter2 None {ENCRYPTED} 0\n" if has_password else f"{ENCRYPTED} None {ENCRYPTED} 1\n"
    assert (done.stdout, done.stderr) == (expected, "")


# -------------------------------------------------------------------------------------------------------- without a file


def test_localhost_is_this_machine_without_ssh() -> None:
    inventory = load("localhost")
    (only,) = inventory.hosts
    assert (only.name, only.connection, inventory.source) == ("localhost", "local", None)
    assert inventory.ansible_argument is None
    body = yaml.safe_load(inventory.as_ansible_yaml().replace("!unsafe ", ""))["all"]["hosts"]["localhost"]
    assert body["ansible_connection"] == "local"
    assert Path(body["ansible_python_interpreter"]).exists()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a,b", [("a", None, None), ("b", None, None)]),
        ("a,", [("a", None, None)]),
        (" a , b ", [("a", None, None), ("b", None, None)]),
        ("node7", [("node7", None, None)]),
        ("bob@a:2222,b", [("a", "bob", 2222), ("b", None, None)]),
        ("10.0.0.1,10.0.0.2:2200", [("10.0.0.1", None, None), ("10.0.0.2", None, 2200)]),
        ("node[1:3]", [("node1", None, None), ("node2", None, None), ("node3", None, None)]),
        ("node[08:10],x", [("node08", None, None), ("node09", None, None), ("node10", None, None), ("x", None, None)]),
        ("fe80::1,root@[2001:db8::2]:2222", [("fe80::1", None, None), ("2001:db8::2", "root", 2222)]),
        ("gpu-1.lab.example,gpu_2", [("gpu-1.lab.example", None, None), ("gpu_2", None, None)]),
    ],
)
def test_hosts_as_a_list(argument: str, expected: list[tuple[str, Any, Any]]) -> None:
    assert [(host.name, host.user, host.port) for host in load(argument).hosts] == expected


def test_a_plain_list_is_ansibles_own_argument() -> None:
    assert load("node[1:2],x").ansible_argument == "node1,node2,x,"


@pytest.mark.parametrize("argument", ["bob@a:2222,b", "localhost,b", "[2001:db8::2]:2222"])
def test_a_list_with_users_or_ports_becomes_an_inventory_file(argument: str) -> None:
    inventory = load(argument)
    assert inventory.ansible_argument is None
    again = load(written("written.yml", inventory.as_ansible_yaml()))
    said = [(host.name, host.address, host.user, host.port, host.connection) for host in inventory.hosts]
    assert [(host.name, host.address, host.user, host.port, host.connection) for host in again.hosts] == said


# ------------------------------------------------------------------------------------------------------------------ limit


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("alpha", ["alpha"]),
        ("gpu:!alpha", ["beta", "node1", "node2", "node3"]),
        ("node*", ["node1", "node2", "node3"]),
        ("a*", ["alpha"]),  # not the group `all`, which every inventory has
        ("~^al", ["alpha"]),
        ("!a*", ["beta", "gamma", "node1", "node2", "node3"]),
        ("*", ["alpha", "beta", "gamma", "node1", "node2", "node3"]),
        ("all:!node*", ["alpha", "beta", "gamma"]),
        ("alpha,", ["alpha"]),
        ("alpha,gamma", ["alpha", "gamma"]),
        (["alpha", "gamma"], ["alpha", "gamma"]),
        ("@retry", ["beta", "node2"]),
        (None, ["alpha", "beta", "gamma", "node1", "node2", "node3"]),
    ],
)
def test_limit(limit: Any, left: list[str]) -> None:
    written("retry", "beta\nnode2\n")
    assert sorted(host.name for host in load(written("hosts.ini", INI), limit=limit).hosts) == left


def test_limit_works_on_a_list_too() -> None:
    for empty in ("", ",", "!", "["):
        with pytest.raises(InventoryError, match="invalid pattern: expected"):
            load("a,b,c", limit=empty)
        with pytest.raises(InventoryError, match="invalid pattern: expected"):
            loading.by_name("facts.json", ["a", "b"], empty)
        with pytest.raises(InventoryError, match="invalid pattern: expected"):
            loading.limited(load("a,b,c"), empty)
    assert [host.name for host in load("a,b,c", limit="b,c").hosts] == ["b", "c"]


# ------------------------------------------------------------------------------------------------------------------ quiet


def test_ansible_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (("bad.ini", "a b c\n"), ("bad.yml", "all: [\n"), ("good.ini", "[a-b]\nx\n")):
        written(name, text)
        try:
            load(name)
        except InventoryError:
            assert name.startswith("bad")
    assert capfd.readouterr() == ("", "")


def test_loading_twice_reports_the_same_twice() -> None:
    """Ansible says each thing once per process; we say it each time."""
    written("bad.ini", "a b\n")
    said = []
    for _ in range(2):
        with pytest.raises(InventoryError) as caught:
            load("bad.ini")
        said.append(str(caught.value))
    assert said[0] == said[1]
