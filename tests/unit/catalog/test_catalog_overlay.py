"""The user's own catalogue files over ours: what is merged, what is refused, and what a plan says of it."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
from invented_hosts import changed, host, plan_for, remedies
from typer.testing import CliRunner

from provision import catalog, inventory
from provision.base.errors import UsageError
from provision.catalog import OURS, Catalog, overlay
from provision.cli.main import app
from provision.inventory import Inventory
from provision.plan import lock_file
from provision.plan.lock import Lock
from provision.plan.model import Plan, PlanDocument
from provision.plan.requirements import Requirements
from provision.resolve import resolve
from provision.resolve.host_classes import host_class_of
from provision.survey import Facts

PLANS = Path(__file__).parents[2] / "data" / "plans"
HEAD = "schema: 1\nsource: the test\ndate: 2027-03-01\n"
NEWER_CUDA = HEAD + 'toolkits: {of: {"13.9": "640.10"}}\n'


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def test_rows_are_added_and_replaced(tmp_path: Path) -> None:
    before, known = OURS.cuda().toolkits.of, OURS.reach().date
    text = HEAD + 'toolkits: {of: {"13.9": "640.10", "13.4": "615.1"}}\ndriver_branches: {of: {"640": "2030-01"}}\n'
    used = Catalog(overlay.read([written(tmp_path, cuda=text)]))
    assert used.cuda().toolkits.of == {**before, "13.9": "640.10", "13.4": "615.1"}
    assert used.cuda().driver_branches.of["640"] == "2030-01"
    assert (used.reach().cuda, used.reach().date) == ("13.9", known), "PyTorch and NCCL were not looked for"
    head_only = dict.fromkeys(("pytorch", "nccl"), HEAD)
    used = Catalog(overlay.read([written(tmp_path, cuda=text, **head_only)]))
    assert used.reach().date == "2027-03-01"
    assert OURS.cuda().toolkits.of == before


def test_entries_of_lists_are_added_and_lists_of_words_replaced(tmp_path: Path) -> None:
    ours = OURS.nccl()
    bad = '{versions: ["2.40.1"], why: hangs, source: the test, date: 2027-03-01}'
    wheels = (
        'wheels: {builds: {nvidia-nccl-cu13: {"2.40.1": "13.9"}}, code: [{has: ["9.0"], wheels: {nvidia-nccl-cu13: ["2.40.1", "2.32.3"]}}]}'
    )
    files = written(
        tmp_path / "a", nccl=f"{HEAD}known_bad: [{bad}]\n{wheels}\n", pytorch=HEAD + 'releases: {"2.13.0": {pythons: ["3.12"]}}\n'
    )
    used = Catalog(overlay.read([files]))
    assert [each.why for each in used.nccl().known_bad] == ["hangs", *(each.why for each in ours.known_bad)]
    for wheel in ("2.40.1", "2.32.3"):  # of a wheel that ours knows, too, theirs counts
        assert next(each.has for each in used.nccl().wheels.code if wheel in each.wheels.get("nvidia-nccl-cu13", ())) == ("9.0",)
    assert used.pytorch().releases["2.13.0"].pythons == ("3.12",)
    assert used.pytorch().releases["2.13.0"].builds


def test_a_later_folder_is_over_an_earlier_one(tmp_path: Path) -> None:
    first = written(tmp_path / "a", cuda=NEWER_CUDA, os=HEAD)
    second = written(tmp_path / "b", cuda=HEAD + 'toolkits: {of: {"13.9": "641.1", "13.8": "630.1"}}\n')
    both = overlay.read([first, second, tmp_path / "missing"])
    assert both is not None
    used = Catalog(both)
    drivers = used.cuda().toolkits.of
    assert (drivers["13.9"], drivers["13.8"]) == ("641.1", "630.1")
    alone = overlay.read([first])
    assert alone is not None
    assert both.digest != alone.digest
    assert overlay.read([tmp_path / "missing"]) is None


def use_and_load(*folders: Path) -> None:
    found = overlay.read(folders)
    for name in found.files if found else ():
        Catalog(found).load(name)


def refused(*folders: Path) -> str:
    with pytest.raises(UsageError) as caught:
        use_and_load(*folders)
    assert caught.value.hint
    return f"{caught.value.where}: {caught.value}"


@pytest.mark.parametrize(
    ("name", "text", "at", "said"),
    [
        ("cuda", HEAD + 'toolkits:\n  ofs: {"13.9": "640.10"}\n', ":5", "`toolkits.ofs` is unknown; did you mean `of`?"),
        ("cuda", HEAD + "toolkits:\n  of:\n    13.9: x\n", ":6", "the key '13.9' must be in quotes"),
        ("cuda", HEAD + 'toolkits:\n  of:\n    "13.9": newest\n', ":6", "must be a number"),
        ("cuda", 'schema: 1\ntoolkits: {of: {"13.9": "640.10"}}\n', ":1", "`source` is missing"),
        ("cuda", "schema: 2\nsource: a\ndate: 2027-01-01\n", ":1", "`schema` must be 1"),
        ("cuda", "a: &x [1]\nb: *x\n", ":1", "aliases"),
        ("cuda", "- 1\n", "", "it must be a mapping"),
        ("cuda", "[" * 5000, ":1", "nesting"),
        ("cuda", HEAD + "toolkits: {of: !!python/object/apply:os.system [exit]}\n", ":4", "python/object"),
        ("nccl", HEAD + 'repository: {builds: {"2.40.1-1": {"13.9": "Q"}}}\n', ":4", "there is no evidence 'Q'"),
        ("ncl", HEAD, "", "did you mean `nccl`?"),
    ],
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, name: str, text: str, at: str, said: str) -> None:
    found = refused(written(tmp_path, **{name: text}))
    assert f"{tmp_path / name}.yaml{at}" in found
    assert said in found


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    large = written(tmp_path / "large")
    with (large / "cuda.yaml").open("wb") as file:
        file.truncate(50 << 30)  # a sparse file, as /dev/zero behind a name would be
    assert "larger than" in refused(large)
    (written(tmp_path / "folder") / "cuda.yaml").mkdir()
    assert "not a regular file" in refused(tmp_path / "folder")
    (written(tmp_path / "bytes") / "cuda.yaml").write_bytes(b"schema: \xff")
    assert "not UTF-8" in refused(tmp_path / "bytes")
    os.mkfifo(written(tmp_path / "pipe") / "cuda.yaml")
    assert "not a regular file" in refused(tmp_path / "pipe")


def facts_of(name: str, **driver: str) -> dict[str, Facts]:
    found = json.loads((PLANS / f"{name}.json").read_text(encoding="utf-8"))
    for each in found["hosts"].values():
        each["driver"].update(driver)
    return {name: Facts.model_validate(each) for name, each in found["hosts"].items()}


def plan_of(known: dict[str, Facts], used: Catalog = OURS) -> Plan:
    return resolve(known, Requirements(engine_version="0.0.0", catalog=used), {})


def test_a_plan_says_how_far_its_knowledge_reaches(tmp_path: Path) -> None:
    newer = facts_of("a100-570-cuda-12.8", version="640.10", cuda="13.9")
    known = plan_of(newer).knowledge
    assert known is not None
    assert known.newer_drivers == tuple(newer)
    assert known.overlay is None
    used = Catalog(overlay.read([written(tmp_path, cuda=NEWER_CUDA)]))
    made = plan_of(newer, used)
    assert made.knowledge is not None
    assert (made.knowledge.cuda, made.knowledge.newer_drivers) == ("13.9", ())
    read = PlanDocument.model_validate_json("".join(made.json()))
    assert read.knowledge == made.knowledge


@pytest.mark.parametrize(("days", "said"), [(30, False), (31, True)])
def test_a_plan_by_an_old_catalogue_says_so(monkeypatch: pytest.MonkeyPatch, days: int, said: bool) -> None:
    read = datetime.date.fromisoformat(OURS.reach().date)
    monkeypatch.setattr(
        catalog, "now", lambda: datetime.datetime.combine(read, datetime.time(), datetime.timezone.utc) + datetime.timedelta(days)
    )
    facts = str(PLANS / "a100-570-cuda-12.8.json")
    note = f"the catalogue is of {read}, {days} days old: newer releases and faults found since are not in it"
    assert [each.startswith(note) for each in json.loads(shown("plan", "--facts", facts, "--json"))["notes"]][:1] == [said]
    assert (f"note: {note}"[:80] in shown("plan", "--facts", facts)) == said
    assert (f"note: {note}"[:80] in shown("plan", "--facts", facts, "--what-if", "driver=580")) == said


def test_a_driver_branch_without_support_is_named(tmp_path: Path) -> None:
    old = facts_of("a100-570-cuda-12.8", version="535.104.05", cuda="12.2")
    assert sum("driver branch 535 ended in 2026-06" in note for note in plan_of(old).notes) == 1
    assert not any("driver branch" in note for note in plan_of(facts_of("a100-570-cuda-12.8", version="580.65.06", cuda="13.0")).notes)


def test_the_lock_records_which_files_were_merged(tmp_path: Path) -> None:
    known = facts_of("a100-570-cuda-12.8")
    plain = Lock.from_plan(plan_of(known), {}, None, _inventory(tmp_path)).as_dict()
    assert "catalogue" not in plain
    mine = overlay.read([written(tmp_path / "c", cuda=NEWER_CUDA)])
    section = Lock.from_plan(plan_of(known, Catalog(mine)), {}, None, _inventory(tmp_path)).as_dict()
    assert mine is not None
    assert section["catalogue"] == mine.digest
    assert lock_file.parse(section).catalogue == mine.digest
    with pytest.raises(ValueError, match="edited"):
        lock_file.parse({**section, "catalogue": "0" * 64})


def _inventory(folder: Path) -> Inventory:
    (folder / "hosts.ini").write_text("a ansible_host=10.0.0.1\n", encoding="utf-8")
    return inventory.load(str(folder / "hosts.ini"))


def shown(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_line_uses_the_users_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert "knows PyTorch" in shown("catalog", "show", "cuda")
    written(tmp_path / "provision" / "catalog", cuda=NEWER_CUDA)
    document = json.loads(shown("catalog", "show", "cuda", "--json"))
    assert document["reach"]["cuda"] == "13.9"
    origin = {group["facts"]: group["from"] for group in document["groups"]}
    assert origin["cuda.toolkits"] == str(tmp_path / "provision/catalog/cuda.yaml")
    assert origin["cuda.gpu_floors"] == "provision"
    more = written(tmp_path / "more", cuda=HEAD + 'toolkits: {of: {"14.0": "650.10"}}\n')
    known = str(PLANS / "a100-570-cuda-12.8.json")
    plan = json.loads(shown("plan", "--facts", known, "--json", "--catalog", str(more)))
    assert plan["knowledge"]["cuda"] == "14.0"
    assert "CUDA ≤ 14.0" in shown("plan", "--facts", known, "--catalog", str(more))


def test_an_invalid_file_stops_no_command_that_helps_to_correct_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    texts = {"cuda": NEWER_CUDA, "driver": "schema: 1\nsource: ]\n", "nccl": HEAD + "wheels: {builds: 7}\n"}
    mine = written(tmp_path / "provision" / "catalog", **texts)
    others = (["doctor"], ["run", "-np", "1", "true"])
    for words in (["survey", "localhost"], ["plan", "--facts", str(PLANS / "a100-570-cuda-12.8.json")], *others):
        with pytest.raises(UsageError) as caught:
            CliRunner().invoke(app, words, catch_exceptions=False)
        assert str(caught.value.where or caught.value).startswith(f"{mine / 'driver.yaml'}:2")
        assert "provision catalog update" in str(caught.value.hint)
    done = CliRunner().invoke(app, ["catalog", "show", "--json"])
    assert isinstance(done.exception, UsageError)
    document = json.loads(done.stdout)
    assert document["reach"]["cuda"] == "13.9"
    assert {Path(each["file"]).name for each in document["invalid"]} == {"driver.yaml", "nccl.yaml"}
    assert f"{mine / 'nccl.yaml'}:4" in str(done.exception)
    assert "provision" in shown("--version")
    assert "provision" in shown("run", "--version")
    assert "nvml-driver-mismatch" in shown("doctor", "list")
    assert "toolkits" in shown("schema", "catalogue", "cuda")


def test_a_distribution_that_a_user_lists_is_not_taken_for_one_like_it(tmp_path: Path) -> None:
    mine = 'distributions: {rhel: {family: rhel, oldest: "9", newest: "9", pythons: {"9": ["3.13"]}}}\n'
    systems = 'systems: {rhel: "mine{major}"}\n'
    used = Catalog(overlay.read([written(tmp_path, os=HEAD + mine, cuda_repositories=HEAD + systems)]))
    assert used.os().pythons("rhel", "9.4") == ("3.13",)
    assert used.os().pythons("almalinux", "9.4") == OURS.os().pythons("rocky", "9.4")
    named = {system: changed(host(system=(system, "9.4"))) for system in ("rhel", "almalinux")}
    assert {system: host_class_of(facts, used).nvidia_system for system, facts in named.items()} == {"rhel": "mine9", "almalinux": "rhel9"}


def test_without_any_branch_for_production_the_newest_that_a_system_has_is_named(tmp_path: Path) -> None:
    ended = ", ".join(f'"{branch}": "2020-01"' for branch in OURS.production_branches())
    used = Catalog(overlay.read([written(tmp_path, cuda=f"{HEAD}driver_branches: {{of: {{{ended}}}}}\n")]))
    assert used.production_branches() == []
    unknown = changed(host(), os={"id": "debian", "version": "12", "kernel": "6.1.0-37-amd64"}, nvidia={"pci_devices": ["0000:41:00.0"]})
    (conflict,) = plan_for({"a": unknown}, Requirements(torch=False, driver="auto", catalog=used)).conflicts
    assert remedies(conflict)[0].startswith("name a branch that supports them: --driver ")
