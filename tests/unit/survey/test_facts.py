"""Facts on the controller: parsed from a survey or a file, completed, and checked for preflight problems."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invented_hosts import stated

from provision.base import engine_source
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.cli import main
from provision.doctor.checks import examine
from provision.inventory import Host
from provision.plan.manifest import UNREADABLE
from provision.plan.requirements import Requirements
from provision.remote import ssh
from provision.resolve import resolve
from provision.survey import Facts, Unsurveyed, collect, gpus
from provision.survey.document import BEGIN, END, load_file, parse_output, parse_survey, sanitized
from provision.survey.model import System
from provision.survey.preflight import cluster_problems, host_problems, unsurveyed_problem

MINIMAL = {
    "os": {"id": "ubuntu", "version": "22.04"},
    "arch": "x86_64",
    "driver": {"version": "535.104.05", "cuda": "12.2"},
    "gpus": [{"name": "NVIDIA A100", "compute_capability": "8.0"}],
}


def host(**changes: Any) -> Facts:
    """A healthy host, changed: `disk__tmp__free_mb=1` reaches into the sections."""
    found = stated({}).model_dump()
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = found
        for section in sections:
            place = place[section]
        place[key] = value
    return Facts.model_validate(found)


def said(found: Facts, **more: Any) -> list[str]:
    problems = host_problems("a", found, OURS, **{"needed_mb": 3000, "prefix": "/opt/provision"} | more)
    return [f"{problem.severity} {problem}" for problem in problems]


# ------------------------------------------------------------------------------------------------------------ answers


def test_banners_before_and_after_the_document_are_ignored() -> None:
    text = f'Welcome to node1!\n{{"not": "this"}}\n{BEGIN}\n{{"arch": "x86_64"}}\n{END}\nlogout\n'
    assert parse_output(text) == {"arch": "x86_64"}


def test_line_ends_of_a_terminal_are_accepted() -> None:
    assert parse_output(f"{BEGIN}\r\n{{}}\r\n{END}\r\n") == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the survey did not run; the host said nothing"),
        ("motd\nbash: python3: command not found\n", "the survey did not run; the host said: bash: python3: command not found"),
        (f"{BEGIN}\n{{", "the survey's answer is incomplete"),
        (f"{BEGIN}\n{{,}}\n{END}\n", "the survey's answer is damaged"),
        (f"{BEGIN}\n[]\n{END}\n", r"the survey: invalid answer \(expected a JSON object\)"),
    ],
)
def test_output_without_a_document_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ProvisionError, match=sentence):
        parse_output(text)


def test_facts_that_nobody_reads_are_kept() -> None:
    known = {"os": {"id": "debian", "version": "12", "kernel": "6.1"}, "arch": "x86_64", "gcc": None, "cpu": {"sockets": 2, "quota": None}}
    found = Facts.model_validate(known).model_dump()
    assert (found["os"]["kernel"], found["gcc"], found["cpu"]["sockets"], found["cpu"]["quota"]) == ("6.1", None, 2, None)


SURVEYED = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64", "packages": {"libnccl2": "2.21.5-1"}}


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"os": {"id": "debian", "version": "$(id)"}}, "`facts.os.version` must be a word"),
        ({"os": "debian"}, "`facts.os` must be an object"),
        ({"os": {"id": "x/../../../../tmp/x", "version": "1"}}, "`facts.os.id` must be a word"),  # it is part of a file's name here
        ({"os": {"id": "x", "version": "/../1"}}, "`facts.os.version` must be a word"),
        ({"arch": "x/../../y"}, "`facts.arch` must be a word"),
        ({"user": {"name": "ann\n    ProxyCommand id"}}, "`facts.user.name` must be a login name"),  # in other hosts' ssh configuration
        ({"user": {"name": "-oProxyCommand=id"}}, "`facts.user.name` must be a login name"),
        ({"hostname": "a'; id; '"}, "`facts.hostname` must be a host name"),
        ({"packages": {"libnccl2": "2.21; id"}}, "`facts.packages.libnccl2` must be a version"),
        ({"network": {"interfaces": [{"name": "eth0", "addresses": ["many"]}]}}, "must be an address"),
        ({"network": {"interfaces": [{"name": "eth0", "speed": float("inf")}]}}, "must be a whole number, not inf"),
        ({"ssh": {"ports": ["22 -o ProxyCommand=id"]}}, "`facts.ssh.ports[0]` must be a whole number"),
        ({"driver": {"version": "new", "cuda": None}}, "`facts.driver.version` must be a version"),
    ],
)
def test_invalid_answers_are_refused(odd: dict[str, Any], said: str) -> None:
    def printed(document: dict[str, Any]) -> str:
        return f"{BEGIN}\n{json.dumps(document)}\n{END}\n"

    assert parse_survey(printed(SURVEYED), OURS) == Facts.model_validate(SURVEYED)
    unknown = parse_survey(printed({"arch": "x86_64", "os": None}), OURS)
    assert isinstance(unknown, Facts)
    assert (unknown.os.id, "os" in unknown.missing, "arch" in unknown.missing) == ("linux", True, False)
    with pytest.raises(ProvisionError) as refused:
        parse_survey(printed({**SURVEYED, **odd}), OURS)
    assert said in refused.value.what


def test_no_text_of_a_host_begins_a_template() -> None:
    for text in map("".join, itertools.product("{%#x", repeat=5)):
        made = str(sanitized(text))
        assert not [each for each in ("{{", "{%", "{#") if each in made], text
        assert made.replace(" ", "") == text


@given(st.text(max_size=80), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.text(max_size=80))
def test_any_banner_is_ignored(before: str, document: dict[str, int], after: str) -> None:
    assert parse_output(f"{before}\n{BEGIN}\n{json.dumps(document)}\n{END}\n{after}") == sanitized(document)


# --------------------------------------------------------------------------------------------------------- completing


def test_a_minimal_document_is_completed() -> None:
    found = Facts.model_validate(MINIMAL)
    assert (found.os.family, found.os.codename) == ("debian", "jammy")
    assert found.gpus[0].model_dump(exclude_defaults=True) == {"name": "NVIDIA A100", "compute_capability": "8.0"}
    assert {"memory", "disk", "python", "network"} <= set(found.missing)
    assert not {"os", "arch", "driver", "gpus"} & set(found.missing)
    assert said(found) == []


def test_unknown_facts_are_named() -> None:
    found = Facts.model_validate(
        {"os": {"id": "rocky", "version": "9.4"}, "arch": "arm64", "driver": {"version": "470.1"}, "gpus": [{"name": "T4"}]}
    )
    assert {"driver.cuda", "gpus[0].compute_capability"} <= set(found.missing)
    assert (found.arch, found.os.family) == ("aarch64", "rhel")


def answered(**sections: Any) -> Facts:
    """The facts of a host whose survey prints this."""
    document = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64", **sections}
    found = parse_survey(f"{BEGIN}\n{json.dumps(document)}\n{END}\n", OURS)
    assert isinstance(found, Facts)
    return found


@pytest.mark.parametrize("name", ["blue onyx", "shamrock pampas cat"])
def test_release_names_of_the_red_hat_family_are_no_codenames(name: str) -> None:
    found = answered(os={"id": "rocky", "version": "9.4", "codename": name})
    assert (found.os.family, found.os.codename) == ("rhel", None)


def test_invalid_notes_of_files_are_dropped() -> None:
    file = {"version": "2.13.0", "url": None, "sha256": "a" * 64, "file": "t.whl"}
    noted = {"venv": {"torch": file, "numpy": {}, "six": "x"}, "nccl": []}
    assert answered(installed={"files": noted}).installed.files == {"venv": {"torch": file}}


@pytest.mark.parametrize("manifest", [[1], "x", {"host": [1]}, {"host": {"nccl": "z"}}, {"host": {"nccl": {"packages": 3}}}])
def test_an_invalid_manifest_prevents_no_plan(manifest: Any) -> None:
    odd = answered(
        driver={"version": "550.54.15", "cuda": "12.4"},
        gpus=[{"name": "A100", "compute_capability": "8.0"}],
        packages={"libnccl2": "2.21.5-1+cuda12.4"},
        installed={"manifest": manifest},
    )
    assert resolve({"a": odd}, Requirements(), {}).hosts
    examine({"a": odd}, catalog=OURS)


@pytest.mark.parametrize("said", ["A" * 200_000 + "\nnode2: installed", "", None])
def test_why_a_manifest_cannot_be_read_is_never_the_hosts_own_words(said: str | None) -> None:
    found = answered(installed={"manifest": None, "manifest_error": said}).installed
    assert (found.model_dump()["manifest_error"], found.was_completed) == ((UNREADABLE, True) if said else (None, False))


def test_names_of_facts_are_harmless(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"schema": 1, "hosts": {"a": {**MINIMAL, "{{ x }}\x1b[31m": 1}}}))
    found = load_file(file, OURS)["a"]
    assert list(found.model_extra or ()) == ["{ { x }} [31m"]


def test_hosts_share_what_they_have_in_common(tmp_path: Path) -> None:
    file, packages = tmp_path / "facts.json", {"g++": "4:12.2.0-3"}
    hosts: dict[str, Any] = {name: {**MINIMAL, "hostname": name, "ssh": {"ports": [22]}, "packages": packages} for name in ("a", "b")}
    file.write_text(json.dumps({"schema": 1, "hosts": hosts}))
    read = load_file(file, OURS)
    a, b = read["a"], read["b"]
    assert isinstance(a, Facts)
    assert isinstance(b, Facts)
    assert a.ssh is b.ssh
    assert (a.hostname, b.hostname, a.packages) == ("a", "b", packages)
    hosts["b"]["ssh"]["ports"] = ["{{ x }}"]
    file.write_text(json.dumps({"schema": 1, "hosts": hosts}, indent=1))
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if "{{ x }}" in text)
    with pytest.raises(UsageError, match=f"facts.json:{line}: .*ports"):
        load_file(file, OURS)


def test_a_deeply_nested_manifest_is_refused() -> None:
    text = "[" * 900 + "]" * 900
    with pytest.raises(ProvisionError, match="nested too deeply"):
        parse_output(f'{BEGIN}\n{{"installed": {text}}}\n{END}\n')


@pytest.mark.parametrize("address", ["UNKNOWN", "/run/ssh.socket", "-oProxyCommand=id"])  # other hosts log in there
def test_unknown_addresses_ports_and_limits_are_accepted(address: str) -> None:
    found = answered(network={"ssh_connection": {"server_address": address, "server_port": 0}}, limits={"nofile": None})
    assert (found.network.ssh_connection.server_address, found.network.ssh_connection.server_port) == (None, None)
    assert found.limits == {}


def test_validating_twice_changes_nothing() -> None:
    given_facts = copy.deepcopy(MINIMAL)
    once = Facts.model_validate(given_facts)
    assert given_facts == MINIMAL
    assert Facts.model_validate(once.model_dump()) == once


def test_candidates_that_are_no_versions_are_dropped_and_named() -> None:
    odd = "2.1\n- hosts: all"
    found = Facts.model_validate({**MINIMAL, "candidates": {"libnccl2": ["2.21.5-1+cuda12.2", odd, "$(id)"]}})
    assert found.candidates == {"libnccl2": ["2.21.5-1+cuda12.2"]}
    assert "$(id)" in found.errors["candidates"]
    assert Facts.model_validate(found.model_dump()) == found


def test_a_section_that_failed_is_missing() -> None:
    found = Facts.model_validate({**MINIMAL, "errors": {"packages": "no answer within 8 s"}})
    assert "packages" in found.missing
    assert found.errors == {"packages": "no answer within 8 s"}


# -------------------------------------------------------------------------------------------------------------- files


def write(folder: Path, document: Any) -> Path:
    path = folder / "facts.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_hand_written_file(tmp_path: Path) -> None:
    found = load_file(write(tmp_path, {"hosts": {"a": MINIMAL, "b": {**MINIMAL, "driver": None, "gpus": []}}}), OURS)
    assert found == {"a": Facts.model_validate(MINIMAL), "b": Facts.model_validate({**MINIMAL, "driver": None, "gpus": []})}


def test_a_saved_survey_is_read(tmp_path: Path) -> None:
    document = {
        "schema": 1,
        "hosts": {"a": host().model_dump(), "b": {"missing_python": True}, "c": {"unreachable": "no route to host"}},
        "problems": [],
    }
    found = load_file(write(tmp_path, document), OURS)
    assert found["a"] == host()
    assert found["b"] == Unsurveyed(missing_python=True)


def changed(**changes: Any) -> dict[str, Any]:
    return {"hosts": {"a": {key: value for key, value in {**MINIMAL, **changes}.items() if value is not ...}}}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "it must be an object"),
        ({}, "`hosts` is missing"),
        ({"hosts": []}, "`hosts` must be an object"),
        ({"hosts": {}}, "`hosts` must be longer: at least 1"),
        ({"schema": 2, "hosts": {"a": MINIMAL}}, "`schema` must be 1, not 2"),
        ({"hosts": {"a": 3}}, "`hosts.a` must be an object"),
        (changed(os=...), "`hosts.a.os` is missing"),
        (changed(os="ubuntu"), "`hosts.a.os` must be an object"),
        (changed(os={"id": "ubuntu"}), "`hosts.a.os.version` is missing"),
        (changed(os={"id": "ubuntu", "version": 22.04}), "`hosts.a.os.version` must be in quotes"),
        (changed(arch=...), "`hosts.a.arch` is missing"),
        (changed(driver="535"), "`hosts.a.driver` must be an object"),
        (changed(driver={"version": "535.1", "cuda": 12.2}), '`hosts.a.driver.cuda` must be in quotes, "12.2"'),
        (changed(driver={"version": "535.1", "cuda": "12"}), '`hosts.a.driver.cuda` must be a version, such as "12.2"'),
        (changed(driver={}), "`hosts.a.driver`: it needs a `version`"),
        (changed(driver={"version": "R535", "cuda": "12.2"}), "`hosts.a.driver.version` must be a version"),
        (changed(gpus={"name": "x"}), "`hosts.a.gpus` must be a list"),
        (changed(gpus=["A100"]), "`hosts.a.gpus[0]` must be an object"),
        (changed(gpus=[{"compute_capability": "sm_80"}]), '`hosts.a.gpus[0].compute_capability` must be like "8.0"'),
        (changed(drivers={}, driver=...), "`hosts.a`: `drivers` is unknown; did you mean `driver`?"),
        (changed(memory=[]), "`hosts.a.memory` must be an object"),
        (changed(python={"version": 3.1}), "`hosts.a.python.version` must be in quotes"),
        (changed(python={"version": "three"}), "`hosts.a.python.version` must be a version in quotes"),
        (changed(python={"others": ["x"]}), "`hosts.a.python.others[0]` must be an object"),
        (changed(packages={"hwloc": 1}), "`hosts.a.packages.hwloc` must be in quotes"),
        (changed(packages={"hwloc": "unknown"}), "`hosts.a.packages.hwloc` must be a version in quotes"),
        (changed(network={"interfaces": "eth0"}), "`hosts.a.network.interfaces` must be a list"),
        (changed(network={"interfaces": ["eth0"]}), "`hosts.a.network.interfaces[0]` must be an object"),
        (
            changed(network={"interfaces": [{"name": "eth0", "addresses": ["banana"]}]}),
            "`hosts.a.network.interfaces[0].addresses[0]` must be an address",
        ),
        (changed(ssh={"ports": [0]}), "`hosts.a.ssh.ports[0]` must be a port"),
        (changed(ssh={"host_keys": [1]}), "`hosts.a.ssh.host_keys[0]` must be in quotes"),
        (changed(missing=5), "`hosts.a.missing` must be a list"),
        (changed(dpkg_interrupted=0), "`hosts.a.dpkg_interrupted` must be true or false"),
        (changed(os={"id": "x", "version": "1", "id_like": "ubuntu debian"}), "`hosts.a.os.id_like` must be a list"),
        ({"hosts": {"": MINIMAL}}, "must be a host name"),
        ({"hosts": {"a,b": MINIMAL}}, "must be a host name"),
        ({"hosts": {"a\n- hosts": MINIMAL}}, "must be a host name"),
        ('{"hosts": {"a": {}, "a": {}}}', "occurs twice"),
        (changed(packages="x"), "`hosts.a.packages` must be an object"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_key(tmp_path: Path, document: Any, sentence: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(UsageError) as caught:
        load_file(path, OURS)
    assert str(caught.value).startswith(f"{path}:")
    assert sentence in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    document = {"hosts": {"a": {"arch": 3}, "b": {**MINIMAL, "gpus": 1}}}
    with pytest.raises(UsageError) as caught:
        load_file(write(tmp_path, document), OURS)
    for key in ("`hosts.a.os` is missing", "`hosts.a.arch` must be in quotes", "`hosts.b.gpus` must be a list"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"), [('{\n  "hosts": {,}\n}', r"facts\.json:2: invalid JSON"), ("", r"facts\.json:1: invalid JSON")]
)
def test_text_that_is_not_json_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_file(write(tmp_path, text), OURS)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope\.json: the facts cannot be read: No such file"):
        load_file(tmp_path / "nope.json", OURS)


INSIDE = sorted(
    {
        "x",
        "id",
        "version",
        "cuda",
        "name",
        *(key for default in stated({}).model_dump().values() if isinstance(default, dict) for key in default),
    }
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INSIDE), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)  # the first of them reads the catalogue
@given(st.dictionaries(st.sampled_from([*Facts.model_fields, "missing_python"]), json_values, max_size=6))
def test_any_document_is_facts_or_an_error(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    path = write(tmp_path_factory.mktemp("facts"), {"hosts": {"a": {**MINIMAL, **document}}})
    try:
        loaded = load_file(path, OURS)
    except UsageError:
        return
    assert set(loaded) == {"a"}
    if not document.get("missing_python"):
        assert resolve(loaded, Requirements(), {})


# ----------------------------------------------------------------------------------------------------------- problems


def test_a_healthy_host_has_no_problems() -> None:
    assert said(host()) == []


def test_no_python() -> None:
    sentence = f"error {unsurveyed_problem('a', Unsurveyed(missing_python=True))}"
    assert sentence.startswith(
        "error a: there is no Python 3, which the survey and Ansible need\n  → install it there (Debian, Ubuntu: apt-get"
    )


def test_the_python_that_the_inventory_names_is_not_there() -> None:
    sentence = f"error {unsurveyed_problem('a', Unsurveyed(missing_python=True), '/nope')}"
    assert sentence.startswith("error a: there is no /nope, which the inventory names (provision_python)\n  → install it there")


def test_an_unreachable_host() -> None:
    problem = unsurveyed_problem("a", Unsurveyed(unreachable="no route to host"))
    assert str(problem) == "a: it cannot be reached: no route to host"


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"arch": "riscv64"}, "error a: its architecture riscv64 is not supported\n  → supported are x86_64, aarch64"),
    (
        {"os": {"id": "ubuntu", "version": "18.04", "name": "Ubuntu 18.04.6 LTS", "libc": "2.27"}, "user": {"can_become": False}},
        "warning a: Ubuntu 18.04.6 LTS is older than what is supported (20.04); everything is installed without root",
    ),
    (
        {"os": {"id": "centos", "version": "6.10", "libc": "2.12"}},
        "error a: centos 6.10 is not supported: its glibc 2.12 is older than 2.17, which wheels need\n  → supported are debian 11",
    ),
    ({"os": {"id": "debian", "version": "14"}}, "warning a: debian 14 is newer than what this was tested with (13)"),
    ({"os": {"id": "ubuntu", "version": "23.10"}}, "warning a: ubuntu 23.10 is not among the supported releases (20.04, 22.04,"),
    ({"os": {"id": "rocky", "version": "11.1"}}, "warning a: rocky 11.1 is newer than what this was tested with (10)"),
    ({"os": {"id": "alpine", "version": "3.20"}}, "error a: alpine 3.20 is not supported"),
    (
        {"os": {"id": "linuxmint", "version": "21", "id_like": ["ubuntu"]}},
        "warning a: linuxmint 21 is not among the supported systems; it is treated like the debian",
    ),
    ({"python__version": "3.6.8"}, "error a: its Python is 3.6.8; 3.8 or later is needed\n  → install a newer one"),
    ({"user__sudo": "password", "user__name": "bob"}, "error a: sudo asks bob for a password\n  → add --ask-become-pass"),
    (
        {"disk__prefix__free_mb": 100},
        "error a: the disk is full: /opt/provision has 100 MB free, 2.9 GB are needed\n  → free some space (df -h /opt",
    ),
    (
        {"disk__tmp__free_mb": 5, "disk__tmp__path": "/tmp"},
        "error a: the disk is full: /tmp (temporary files) has 5 MB free, 100 MB are needed",
    ),
    (
        {"disk__home__free_mb": 5, "disk__home__path": "/home/bob"},
        "error a: the disk is full: /home/bob (the home folder) has 5 MB free, 64 MB are needed",
    ),
    ({"disk__prefix__read_only": True}, "error a: the file system of /opt/provision is mounted read-only"),
    ({"disk__prefix__noexec": True}, "error a: programs may not run from /opt/provision: it is mounted noexec"),
    ({"disk__prefix__free_inodes": 12}, "warning a: the file system of /opt/provision has only 12 inodes free"),
    (
        {"package_manager": {"name": "apt", "lock": {"pid": 42, "command": "apt-get upgrade"}}},
        "warning a: apt is locked by process 42 (apt-get upgrade)\n  → the installation waits for it",
    ),
    (
        {"package_manager": {"name": "apt", "lock": {"pid": None, "command": None}}},
        "warning a: apt is locked by a process that cannot be seen",
    ),
    ({"dpkg_interrupted": True}, "warning a: a package installation is unfinished\n  → it is finished first"),
    ({"broken_packages": ["x", "y"]}, "warning a: packages are half installed: x, y"),
]


@pytest.mark.parametrize(("changes", "sentence"), PROBLEMS)
def test_preflight_problems(changes: dict[str, Any], sentence: str) -> None:
    (only,) = said(host(**changes))
    assert only.startswith(sentence)


def test_a_newer_python_next_to_an_old_one_is_named() -> None:
    others = [{"path": "/usr/bin/python3.11", "version": "3.11"}, {"path": "/usr/bin/python3.7", "version": "3.7"}]
    (only,) = said(host(python__version="3.6.8", python__others=others))
    assert only.endswith("→ name a newer one in the inventory: provision_python=/usr/bin/python3.11")


def test_the_oldest_python_is_that_of_ansible_where_it_needs_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(host(python__version="3.8.10")) == []
    monkeypatch.setattr("importlib.metadata.version", {"ansible-core": "2.20.1"}.get)
    (only,) = said(host(python__version="3.8.10"))
    assert only.startswith("error a: its Python is 3.8.10; 3.9 or later is needed by ansible-core 2.20, which is installed here")


def test_release_8_of_the_red_hat_family_gets_all_without_root() -> None:
    known = Facts.model_validate({"os": {"id": "rocky", "version": "8.10", "libc": "2.28"}, "arch": "x86_64", "user": {"sudo": "root"}})
    assert (known.os.family, known.user.can_become, known.user.sudo) == ("other", False, "unmanaged")
    (only,) = said(known)
    assert only.startswith("warning a: rocky 8.10 is older than what is supported (9); everything is installed without root, and none of")


def test_a_sudo_password_that_will_be_given_is_no_problem() -> None:
    assert said(host(user__sudo="password"), become_password=True) == []


def without_root(**changes: Any) -> Facts:
    """A host whose user cannot be root and that has all that is needed, changed."""
    tools = {"compiler": {"path": "/usr/bin/g++"}, "ssh": {"client": {"path": "/usr/bin/ssh"}}}
    bare = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64", "user": {"name": "bob", "sudo": "none"}}
    return Facts.model_validate({**bare, **tools, **changes})


def test_packages_that_only_root_can_install_must_be_there() -> None:
    assert said(without_root()) == []
    assert (
        said(Facts.model_validate({"os": {"id": "debian", "version": "12"}, "arch": "x86_64", "user": {"sudo": "none"}})) == []
    )  # not known
    assert said(without_root(compiler=None), has_engine=True) == []
    (sentence,) = said(without_root(compiler=None, ssh={"client": None}))
    assert sentence.startswith(
        "error a: bob may not use sudo, and packages that only root can install are missing: g++, openssh-client\n"
        "  → let bob use sudo, log in as root (ansible_user=root); or ask an administrator to run there: apt-get install g++ openssh-client"
    )


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ({"name": "bob", "sudo": "none", "sudo_installed": False}, "there is no sudo and bob is not root"),
        ({"name": "bob", "sudo": "none", "sudo_says": "bob is not in the sudoers file."}, "bob may not use sudo: bob is not in the"),
        ({"name": "bob", "sudo": "unwanted", "can_become": False}, "provision_sudo=no"),
    ],
)
def test_the_reason_for_no_root_is_given(user: dict[str, Any], why: str) -> None:
    (sentence,) = said(without_root(user=user, compiler=None))
    assert sentence.startswith(f"error a: {why}")


def test_a_sudo_that_may_need_a_password_is_mentioned() -> None:
    user = {"name": "bob", "sudo": "password", "sudo_says": "sudo: a password is required (and ...)", "can_become": False}
    (warning,) = said(without_root(user=user))
    (error,) = said(without_root(user=user, compiler=None))  # instead of the warning
    assert warning.startswith("warning a: bob may not use sudo: a password is required (and ...): installed without root\n  → ")
    assert all("--ask-become-pass" in each for each in (warning, error))


def test_a_prefix_that_cannot_be_written_without_root() -> None:
    (sentence,) = said(without_root(disk={"prefix": {"writable": False}}))
    assert (
        "only root can create or write /opt/provision\n  → ask an administrator to create it: install -d -o bob /opt/provision" in sentence
    )


def test_one_prefix_on_a_file_server_for_several_hosts() -> None:
    def on(kind: str) -> Facts:
        return without_root(disk={"prefix": {"path": "/home/bob/provision", "filesystem": kind, "total_mb": 4096}})

    (problem,) = cluster_problems({"a": on("nfs4"), "b": on("nfs4")})
    assert (problem.severity, problem.host) == ("error", "b")
    assert "the same as on `a`" in problem.what
    assert cluster_problems({"a": on("ext4"), "b": on("ext4")}) == []


def test_a_facts_file_shows_what_is_wrong_between_hosts_and_tmp_without_programs(tmp_path: Path) -> None:
    shared = {"path": "/home/bob/provision", "filesystem": "lustre", "total_mb": 4096}
    one = without_root(disk={"prefix": shared, "tmp": {"path": "/tmp", "noexec": True}}, hostname="node1", machine_id="m", boot_id="b")
    two = without_root(disk={"prefix": shared}, hostname="node2", machine_id="n", boot_id="c")
    hosts = {name: each.model_dump(mode="json") for name, each in {"one": one, "again": one, "two": two}.items()}
    (tmp_path / "facts.json").write_text(json.dumps({"schema": 1, "hosts": hosts, "problems": []}))
    _inventory, known, problems = collect.read_file(tmp_path / "facts.json", None, None, OURS)
    found = {(each.severity, each.host, each.what.partition(":")[0]) for each in problems}
    assert list(known) == ["one", "again", "two"]
    assert ("error", "again", "it is the same machine as `one` (node1)") in found
    assert ("error", "two", "/home/bob/provision is on a file server (lustre), the same as on `one`") in found
    assert ("warning", "one", "programs may not run from /tmp (temporary files)") in found


def test_one_full_file_system_is_one_problem() -> None:
    same = {"free_mb": 10, "total_mb": 9000, "filesystem": "ext4"}
    found = host(**{f"disk__{place}__{key}": value for place in ("prefix", "tmp", "home") for key, value in same.items()})
    assert len(said(found)) == 1


@pytest.mark.parametrize("name", [name for listed, each in OURS.os().distributions.items() for name in (listed, *each.alike)])
def test_supported_systems_are_supported_at_both_ends(name: str) -> None:
    entry = OURS.os().distribution(name)
    assert entry
    for version in (entry.oldest, entry.newest):
        known = {
            "os": {"id": name, "version": version},
            "arch": "aarch64",
            "user": {"can_become": entry.family == "debian", "sudo": "none"},
        }
        found = Facts.model_validate(known)
        assert said(found) == []
        assert found.os.family == entry.family


# ------------------------------------------------------------------------------------------------------------- across


def across(times: dict[str, tuple[float, float]] | None = None, **hosts: dict[str, Any]) -> list[str]:
    return [f"{problem.severity} {problem}" for problem in cluster_problems(hosts, times)]


def test_one_machine_under_two_names() -> None:
    machine = {"machine_id": "m", "boot_id": "b", "hostname": "n"}
    assert across(a=host(**machine), b=host(**machine)) == [
        "error b: it is the same machine as `a` (n)\n  → keep one of the two names in the inventory"
    ]


def test_containers_of_one_kernel_are_machines_of_their_own() -> None:
    one, two = ({"machine_id": None, "boot_id": "b", "hostname": name} for name in ("n1", "n2"))
    assert across(a=host(**one), b=host(**two)) == []


def test_clones_and_equal_host_names() -> None:
    one, two = ({"machine_id": "m", "boot_id": boot, "hostname": "ubuntu"} for boot in "xy")
    first, second = across(a=host(**one), b=host(**two))
    assert first.startswith("warning b: it has the same machine id as `a`: one was cloned from the other")
    assert second.startswith(
        "warning b: its host name is `ubuntu`, as that of `a`; MPI tells hosts apart by that name\n  → there: sudo hostnamectl"
    )


def test_clocks_apart() -> None:
    now = 1_700_000_000.0
    hosts = {
        "a": host(time__epoch=now),
        "b": host(time__epoch=now + 47),
        "c": host(time__epoch=now + 1.5),
        "d": host(time__epoch=now - 7000),
    }
    received = {"a": now + 0.2, "b": now + 2, "c": now + 1.5, "d": now}
    first, second = across({name: (at - 0.1, at) for name, at in received.items()}, **hosts)
    assert first.startswith("warning b: its clock is 45 s ahead of that of `")
    assert second.startswith("warning d: its clock is 1 h 56 min behind that of `")
    assert "timedatectl set-ntp true" in first


def test_a_clock_is_not_behind_because_its_answer_came_late() -> None:
    on_time, late = (host(time__epoch=epoch) for epoch in (100.0, 101.0))
    asked, times = {"a": on_time, "b": on_time, "c": late}, {"a": (99.5, 100.0), "b": (99.5, 100.0)}
    assert across({**times, "c": (100.5, 110.0)}, **asked) == []
    (behind,) = across({**times, "c": (107.0, 110.0)}, **asked)
    assert behind.startswith("warning c: its clock is 6 s behind that of `a`")


def test_clocks_that_agree_and_hosts_without_one() -> None:
    assert across({"a": (99.0, 100.0), "b": (103.0, 104.0)}, a=host(time__epoch=100.0), b=host(time__epoch=104.0), c=host()) == []


HOSTILE = """{{ lookup("pipe", "touch /tmp/owned") }} {% raw %} {# note #}"""


def test_text_from_a_host_is_never_a_template() -> None:
    said = parse_output(f"{BEGIN}\n{json.dumps({'hostname': HOSTILE, 'list': [{HOSTILE: HOSTILE}], 'number': 3})}\n{END}")
    text = json.dumps(said)
    for opening in ("{{", "{%", "{#"):
        assert opening not in text
    assert said["number"] == 3


def test_text_from_a_host_cannot_leave_its_line() -> None:
    assert parse_output(f"{BEGIN}\n{json.dumps({'hostname': 'a' + chr(13) + chr(27) + 'b'})}\n{END}")["hostname"] == "a  b"


def test_text_from_a_host_can_be_encoded() -> None:
    said = parse_output(f"{BEGIN}\n{json.dumps({chr(0xDC9B): ['a' + chr(0xD800)], 'b': chr(0x1F600)})}\n{END}")
    assert said == {"?": ["a?"], "b": chr(0x1F600)}


MODULE = {"version": "550.54.15", "cuda": "12.4", "kernel_module": "550.54.15"}
LISTED = [{"name": "A100", "compute_capability": "8.0"}]
ON_THE_BUS = ["0000:41:00.0"]
NONE_FOUND = {"pci_devices": ON_THE_BUS, "smi_error": "No devices were found"}
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
FAILED = {"smi": "/usr/bin/nvidia-smi", "smi_error": "NVIDIA-SMI has failed because …"}
NODE = ["/dev/nvidia0"]


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({}, None),
        ({"driver": MODULE, "gpus": LISTED}, None),
        ({"driver": MODULE}, None),  # written by hand: nobody asked the driver
        ({"driver": MODULE, "gpus": LISTED, "nvidia": {"smi_error": "nvidia-smi: no answer within 20 s"}}, None),  # CUDA answered
        ({"nvidia": {**FAILED}}, None),  # left over: no GPU at all
        ({"nvidia": {"pci_devices": ON_THE_BUS}}, "no-driver"),
        ({"gpus": LISTED}, "no-driver"),
        ({"nvidia": {"pci_devices": ON_THE_BUS, "nouveau": True}}, "nouveau"),
        (
            {"nvidia": {"pci_devices": ON_THE_BUS, **FAILED}},
            "not-loaded",
        ),
        ({"driver": MODULE, "gpus": [], "nvidia": {"smi_error": "Failed to initialize NVML: Unknown Error"}}, "nvml"),
        (
            {"driver": MODULE, "gpus": LISTED, "nvidia": {"smi_error": MISMATCH}},
            "version-mismatch",
        ),
        ({"driver": MODULE, "gpus": [], "nvidia": {"smi_error": "No devices were found"}}, "no-devices"),
        ({"driver": MODULE, "gpus": [], "nvidia": {"smi_error": "No devices were found", "pci_devices": ON_THE_BUS}}, "no-devices"),
        ({"driver": {"version": "580.159.03", "open": False}, "gpus": [], "nvidia": {**NONE_FOUND, "pci_ids": ["2c3a"]}}, "open-modules"),
        ({"driver": {"version": "580.159.03", "open": True}, "gpus": [], "nvidia": {**NONE_FOUND, "pci_ids": ["2c3a"]}}, "no-devices"),
        (
            {"driver": {"version": "570.172.08", "open": True}, "gpus": [], "nvidia": {**NONE_FOUND, "pci_ids": ["1db1"]}},
            "proprietary-modules",
        ),
        ({"driver": {"version": "590.48.01", "open": True}, "gpus": [], "nvidia": {**NONE_FOUND, "pci_ids": ["1b81"]}}, "misfit"),
        ({"driver": MODULE, "gpus": [], "nvidia": {"pci_devices": ON_THE_BUS}}, "silent"),
        ({"driver": MODULE, "gpus": [], "container": "docker", "nvidia": {"pci_devices": ON_THE_BUS}}, None),
        (
            {"driver": MODULE, "gpus": [], "container": "docker", "nvidia": {"pci_devices": ON_THE_BUS, "device_nodes": NODE}},
            "silent",
        ),
    ],
)
def test_why_gpus_cannot_be_used(known: dict[str, Any], cause: str | None) -> None:
    found = gpus.fault(Facts.model_validate({"os": {"id": "debian", "version": "12"}, "arch": "x86_64", **known}), OURS)
    assert (found and found.id) == cause
    assert found is None or "{" not in str(found.hint).format(host="a")


@pytest.mark.parametrize(("there", "full"), [(0, True), (1500, False)])
def test_files_of_an_unfinished_run_need_no_space_again(there: int, full: bool) -> None:
    disk = {"prefix": {"path": "/opt/provision", "free_mb": 1100}}
    found = {**MINIMAL, "driver": None, "gpus": [], "disk": disk, "installed": {"exists": True, "partial_mb": there}}
    answer = f"{BEGIN}\n{json.dumps(found)}\n{END}\n"
    problems = collect._read_answer(
        Host("a", "a"), ssh.Answer(0, answer, ""), collect.Survey(), collect._is_installed, OURS, become_password=False
    )
    assert any("the disk is full" in problem.what for problem in problems) == full


@pytest.mark.parametrize(
    ("changes", "wheels", "says"),
    [
        ({"compiler": {"path": "/usr/bin/g++", "version": "7.5.0"}}, False, "a C++ compiler (GCC 8 or newer, not 7.5.0)"),
        ({"compiler": {"path": "/usr/bin/g++", "version": "7.5.0"}}, True, None),
        ({"compiler": {"path": "/usr/bin/g++", "version": "8.5.0"}}, False, None),
        ({"ssh": {"client": None}}, False, "an ssh client"),
    ],
)
def test_a_facts_file_shows_which_programs_are_missing(
    changes: dict[str, Any], wheels: bool, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = {"id": "ubuntu", "version": "18.04", "libc": "2.27"}
    known = without_root(os=system, user={"name": "root", "sudo": "root"}, python={"version": "3.8.0"}, **changes)
    (tmp_path / "facts.json").write_text(json.dumps({"schema": 1, "hosts": {"a": known.model_dump(mode="json")}, "problems": []}))
    engine = engine_source.pack()
    (tmp_path / f"{engine.package}-{engine.version}-{engine.build}-py3-none-manylinux_2_17_x86_64.whl").touch()
    words = ["plan", "--facts", str(tmp_path / "facts.json"), *(["--wheels", str(tmp_path)] if wheels else [])]
    assert main.guarded(lambda: main.app(args=words, prog_name="provision"), debug=False) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert ("provision up would not install this" in err) == (says is not None)
    if says:
        assert f"packages of ubuntu 18.04 are not managed, and packages that only root can install are missing: {says}" in err
        assert "install them there" in err
        assert "use sudo" not in err, "root would change nothing there"


@pytest.mark.parametrize(
    ("system", "family"),
    [
        ({"id": "tencentos", "version": "3.1", "id_like": ["rhel", "fedora", "centos"], "libc": "2.28"}, "other"),
        ({"id": "alinux", "version": "3", "id_like": ["rhel", "fedora", "centos", "anolis"], "libc": "2.32"}, "other"),
        ({"id": "fedora", "version": "33", "libc": "2.32"}, "other"),
        ({"id": "tencentos", "version": "4.2", "id_like": ["rhel", "fedora", "centos"], "libc": "2.38"}, "rhel"),
        ({"id": "fedora", "version": "41", "libc": "2.40"}, "rhel"),
        ({"id": "rocky", "version": "9.4", "libc": "2.34"}, "rhel"),
        ({"id": "amzn", "version": "2023", "libc": "2.34"}, "rhel"),
        ({"id": "linuxmint", "version": "19", "id_like": ["ubuntu", "debian"], "libc": "2.27"}, "other"),
        ({"id": "linuxmint", "version": "20", "id_like": ["ubuntu", "debian"], "libc": "2.31"}, "debian"),
    ],
)
def test_packages_are_managed_where_the_family_has_a_new_enough_glibc(system: dict[str, Any], family: str) -> None:
    assert System.model_validate(system).family == family
