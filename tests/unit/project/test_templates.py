"""Nothing that comes from outside is a template on the controller: not what files say, not what hosts answer. By real Ansible, with the
playbooks that users run.

Nobody lists where a text could go: all of a document are replaced by templates that would leave a mark, one after the other or at once.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from invented_hosts import changed
from rendered import variables_in

from provision.base import engine_source, resources
from provision.base.errors import ProvisionError
from provision.catalog import OURS
from provision.commands import planning
from provision.install import installer
from provision.install.bundle import archive
from provision.inventory import Host, Inventory, load
from provision.plan import lock, lock_file
from provision.plan.options import Options
from provision.plan.request import Request
from provision.survey import Facts
from provision.survey.document import BEGIN, END, load_file, parse_survey

DATA = Path(__file__).parents[2] / "data"
Place = tuple[Any, ...]
Render = Callable[[Path], None]


def templates(mark: Path) -> list[str]:
    """Texts that make ``mark`` when Ansible renders them; the second brings delimiters of its own."""
    call = f"lookup('pipe', 'touch {mark}')"
    return [f"{{{{ {call} }}}}", f"#jinja2:variable_start_string:'[%', variable_end_string:'%]'\n[% {call} %]"]


def texts(document: Any, at: Place = ()) -> Iterator[Place]:
    """Where in a document texts stand; in a list of nothing but texts, the first one stands for all."""
    if isinstance(document, str):
        yield at
    elif isinstance(document, Mapping):
        for key, value in document.items():
            yield from texts(value, (*at, key))
    elif isinstance(document, list):
        for index, value in enumerate(document[:1] if all(isinstance(each, str) for each in document) else document):
            yield from texts(value, (*at, index))


def holds(document: Any, text: str) -> bool:
    """Whether ``text`` stands somewhere in a document, alone or in another text."""
    return any(text in reduce(getitem, at, document) for at in texts(document))


def planted(document: Any, at: Place, text: str) -> Any:
    """The document with ``text`` in one place."""
    made = copy.deepcopy(document)
    reduce(getitem, at[:-1], made)[at[-1]] = text
    return made


def ansible(folder: Path, *words: str, **environment: str) -> str:
    """Run ansible-playbook in ``folder``; what it says."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), *words],
        cwd=folder,
        env={**os.environ, "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"), "ANSIBLE_PIPELINING": "1", "ANSIBLE_NOCOLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout + done.stderr


def book(tasks: list[dict[str, Any]]) -> str:
    return json.dumps([{"name": "Test", "hosts": "localhost", "gather_facts": False, "tasks": tasks}])


# --- what files say ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_source, "pack", cache(engine_source.pack))


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    (tmp_path / "hosts.ini").write_text((DATA / "lint.ini").read_text())
    return load(str(tmp_path / "hosts.ini"))


def known() -> dict[str, Facts]:
    return load_file(DATA / "lint-facts.json", OURS)


def rich_facts() -> dict[str, Any]:
    """Facts of one host with something in every section that plans read."""
    return {
        **json.loads((DATA / "lint-facts.json").read_text())["hosts"]["gpu1"],
        "os": {"id": "ubuntu", "version": "22.04", "id_like": ["debian"], "family": "debian", "codename": "jammy", "libc": "2.35"},
        "gpus": [{"name": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0"}],
        "cuda": {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2", "nvcc": True, "headers": True, "found": "there"}]},
        "packages": {"libnccl2": "2.18.3-1+cuda12.2", "libhwloc5": "1.11.9-1"},
        "candidates": {"libnccl2": ["2.18.3-1+cuda12.2"], "openmpi-bin": ["4.1.2-2ubuntu1"]},
        "user": {"name": "ann", "home": "/home/ann", "sudo": "nopasswd", "can_become": True},
        "ssh": {"ports": [22], "host_keys": ["ssh-ed25519 AAAA"], "mesh_key": "ssh-ed25519 AAAA"},
        "python": {
            "version": "3.10.12",
            "executable": "/usr/bin/python3",
            "others": [{"version": "3.12.1", "path": "/usr/bin/python3.12"}],
        },
    }


def rendered(place: Path, inventory: Inventory, found: dict[str, Any], locked: lock.Lock | None = None, **sources: Any) -> None:
    """Leave in ``place`` what `provision plan --out` leaves there, without what is fetched."""
    rollout = planning.make_plan(Request(inventory, Options(), locked), found)
    rollout.plan.refuse_conflicts()
    installer.render(replace(rollout, sources=replace(rollout.sources, **sources)), place, fetch=False)


def from_facts(folder: Path, inventory: Inventory, text: str) -> Iterator[Render]:
    """What a file says, and what a host does."""

    def of_a_file(document: Any, place: Path) -> None:
        (folder / "facts.json").write_text(json.dumps({"hosts": {"gpu1": document}}))
        rendered(place, inventory, load_file(folder / "facts.json", OURS))

    def of_a_host(document: Any, place: Path) -> None:
        said = parse_survey(f"{BEGIN}\n{json.dumps(document)}\n{END}\n", OURS)
        rendered(place, inventory, {"gpu1": Facts.model_validate(said)})

    for at in texts(rich_facts()):
        yield partial(of_a_file, planted(rich_facts(), at, text))
        yield partial(of_a_host, planted(rich_facts(), at, text))


def a_lock(inventory: Inventory) -> dict[str, Any]:
    """A lock of hosts, with all that one can hold."""
    file = {"version": "1.0", "file": "f.whl", "url": "https://index.example/f.whl", "sha256": "a" * 64}
    plan = planning.make_plan(Request(inventory, Options()), known()).plan
    files = {name: {folder: {"filelock": file} for folder in ("venv", "nccl")} for name in plan.hosts}
    found: dict[str, Any] = json.loads(json.dumps(lock.Lock.from_plan(plan, files, None, inventory).as_dict()))
    return {part: found[part] for part in ("components", "environments")}


def from_a_lock(_folder: Path, inventory: Inventory, text: str) -> Iterator[Render]:
    def one(changed: Any, place: Path) -> None:
        section = {**changed, "digest": lock.digest(changed)}
        lock_file.path_of(inventory).write_text(yaml.safe_dump({"schema": 1, "inventories": {"hosts.ini": section}}))
        rendered(place, inventory, known(), lock_file.read(inventory))

    for at in texts(document := a_lock(inventory)):
        yield partial(one, planted(document, at, text))


def from_a_bundle(folder: Path, inventory: Inventory, text: str) -> Iterator[Render]:
    plan = planning.make_plan(Request(inventory, Options()), known()).plan
    names = {"wheels": "kind/demo-1.0-py3-none-any.whl", "debs": "make_4.3_amd64.deb", "supplies": "openmpi/openmpi-4.1.8.tar.gz"}
    hosts = {
        name: {
            "machine": archive.machine_of(host),
            "requirements": archive.requirements_of(host),
            "relies_on": ["libc6"],
            **{f"{nccl}{kind}": [names[kind]] for kind in ("wheels", "debs") for nccl in ("", "nccl_")},
        }
        for name, host in plan.hosts.items()
    }
    listing = {"hosts": hosts, "data": "digits", "supplies": {"openmpi_sources": names["supplies"]}}

    def one(changed: dict[str, Any], files: Mapping[str, str], place: Path) -> None:
        content = place.with_name(place.name + ".content")
        for kind, name in files.items():
            (content / kind / name).parent.mkdir(parents=True)
            (content / kind / name).write_bytes(b"content")
        archive.pack(content, {**changed, "lock": {**changed["lock"], "digest": lock.digest(changed["lock"])}}, folder / "hosts.bundle")
        shutil.rmtree(content)
        bundle = archive.unpack(folder / "hosts.bundle", place.with_name(place.name + ".unpacked"))
        rendered(place, inventory, known(), bundle.lock, bundle=bundle)

    listing["lock"] = a_lock(inventory)
    for at in texts(listing):
        yield partial(one, planted(listing, at, text), names)
    for kind, name in names.items():  # a file of that name, and the lists that have it
        plain = text.replace("/", "")
        yield partial(one, json.loads(json.dumps(listing).replace(name, json.dumps(plain)[1:-1])), {**names, kind: plain})


def read_and_rendered(folder: Path, places: list[str], file: str) -> str:
    """Have Ansible read the variables of several folders, and render all of them in the ways in which roles use theirs."""
    tasks: list[dict[str, Any]] = [
        {"name": "Read", "ansible.builtin.include_vars": {"file": "{{ item }}/" + file, "name": "said"}},
        {"name": "Show", "ansible.builtin.debug": {"var": "said"}},
        {"name": "Keep", "ansible.builtin.set_fact": {"kept": "{{ said.provision_plan.hosts.values() | list }}"}},
        {"name": "Show what was kept", "ansible.builtin.debug": {"msg": "{{ kept }} {{ said | to_json | from_json }}"}},
    ]
    (folder / "one.yml").write_text(json.dumps(tasks))
    (folder / "render.yml").write_text(book([{"name": "Each", "ansible.builtin.include_tasks": "one.yml", "loop": places}]))
    return ansible(folder, "render.yml", "-i", "localhost,", "-c", "local")


@pytest.mark.parametrize("source", [from_facts, *(pytest.param(each, marks=pytest.mark.slow) for each in (from_a_lock, from_a_bundle))])
def test_no_text_of_a_file_is_rendered(tmp_path: Path, inventory: Inventory, source: Callable[..., Iterator[Render]]) -> None:
    mark, places = tmp_path / "MARK", []
    # In facts the usual delimiters are taken apart where they are read.
    for text in templates(mark)[1:] if source is from_facts else templates(mark)[:1]:
        for render in source(tmp_path, inventory, text):
            place = tmp_path / f"book{len(places)}"
            try:
                render(place)
            except ProvisionError:
                continue  # refused
            if holds(json.loads((place / "vars.json").read_text()), text):
                places.append(place.name)
                assert not holds(yaml.safe_load((place / "site.yml").read_text()), text)
    assert places
    said = read_and_rendered(tmp_path, places, "vars.json")
    assert f"ok={5 * len(places)} " in said, said[-2000:]
    assert not mark.exists()
    (tmp_path / places[0] / "plain.json").write_text(json.dumps(variables_in(tmp_path / places[0] / "vars.json")))
    read_and_rendered(tmp_path, places[:1], "plain.json")
    assert mark.exists()  # what is not marked is rendered


def test_no_text_of_a_written_inventory_is_rendered(tmp_path: Path) -> None:
    """What is a template in an inventory of Ansible's own is one: whoever writes it runs as its user."""
    mark = tmp_path / "MARK"
    said = {"ansible_python_interpreter": "/usr/bin/python3", "mine": ["a", {"b": "c"}]}
    host = Host("h", "10.0.0.1", user="ann", variables=said)
    spoilt = [{each.name: text} for text in templates(mark) for each in fields(host) if isinstance(getattr(host, each.name), str)]
    spoilt += [{"variables": planted(said, at, text)} for text in templates(mark) for at in texts(said)]
    hosts = [replace(host, **{"name": f"h{number}", **change}) for number, change in enumerate(spoilt)]
    show = {"name": "Show", "ansible.builtin.debug": {"msg": "{{ hostvars[item] }}"}, "loop": "{{ groups.all }}"}
    (tmp_path / "show.yml").write_text(book([show]))
    (tmp_path / "hosts.yml").write_text(Inventory("", None, None, tuple(hosts)).as_ansible_yaml())
    shown = ansible(tmp_path, "show.yml", "-i", "hosts.yml", "-i", "localhost,", "-c", "local")
    assert "ok=1 " in shown, shown[-2000:]
    assert not mark.exists()
    (tmp_path / "hosts.yml").write_text((tmp_path / "hosts.yml").read_text().replace("!unsafe ", ""))
    ansible(tmp_path, "show.yml", "-i", "hosts.yml", "-i", "localhost,", "-c", "local")
    assert mark.exists()


# --- what hosts answer ------------------------------------------------------------------------------------------------------------


def answers(text: str) -> dict[str, Any]:
    """One answer for every task: what any module of ours or of Ansible's returns, with ``text`` wherever a text can be."""
    kinds = {"str": text, "path": text, "list": [text], "dict": {text: text, "a": text}, "bool": True, "int": 1, "float": 1.0}
    said: dict[str, Any] = {}
    for module in (resources.folder("playbooks") / "library").glob("*.py"):
        documented = re.search(r'^RETURN = r"""(.*?)"""', module.read_text(), re.DOTALL | re.MULTILINE)
        for name, entry in (yaml.safe_load(documented[1] if documented else "") or {}).items():
            said[name] = kinds[entry["type"]]
    content = base64.b64encode(f"{text}\n".encode()).decode()
    return {
        **said,
        "changed": True,
        "rc": 0,
        "ansible_job_id": text,
        "finished": True,
        "stdout": f"installed {text}\nreinstreq {text}\nlibmpi.so.40 (x) => {text}\n{text}",
        "stderr": text,
        "msg": text,
        "content": content,
        "encoding": "base64",
        "source": text,
        "path": text,
        "files": [{"path": text}],
        "stat": {"exists": True, "path": text, "checksum": text, "isdir": False, "pw_name": text},
        "ansible_facts": {"planted": text, "ansible_python_version": text},
        "warnings": [text],
    }


def test_nothing_that_a_host_answers_is_rendered(tmp_path: Path, inventory: Inventory) -> None:
    """All roles run to their end on hosts whose Python, whatever it is given, answers with templates."""
    mark = tmp_path / "MARK"
    hosts = dict(zip(("node1", "gpu1"), templates(mark), strict=True))
    found = {}
    for name, text in hosts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(answers(text)))
        python = tmp_path / f"python-of-{name}"
        python.write_text(f"#!/bin/sh\ncat > /dev/null\nexec cat {tmp_path}/{name}.json\n")
        python.chmod(0o755)
        each = known()[name]
        own = {"python": {**each.python.model_dump(), "executable": str(python)}, "user": {"can_become": os.geteuid() == 0}}
        found[name] = changed(each, {**own})
    (tmp_path / "hosts.ini").write_text("".join(f"{name} ansible_connection=local\n" for name in hosts))
    rendered(tmp_path / "book", inventory, found)
    plays = yaml.safe_load((tmp_path / "book/site.yml").read_text())
    for play in plays:
        play["ignore_errors"] = True  # what makes no sense to one task must not spare the next ones
    (tmp_path / "book/site.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    (tmp_path / "home").mkdir()
    said = ansible(tmp_path / "book", "site.yml", "-i", str(tmp_path / "hosts.ini"), "-e", "@vars.json", HOME=str(tmp_path / "home"))
    assert not mark.exists()
    for host, text in hosts.items():
        ran = re.search(rf"^{host} .*ok=(\d+) .*unreachable=0 .*failed=0", said, re.MULTILINE)
        assert ran, said[-3000:]
        assert int(ran[1]) > 30, said[-3000:]
        assert json.dumps(text)[1:-1] in said  # it has got that far
