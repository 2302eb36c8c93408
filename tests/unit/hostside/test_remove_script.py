"""What `provision remove` does to files on a host, by a record as the installing modules keep it. Packages need a real host."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import removal_order, write_record
from loading import load_ansible_module, load_script

from provision.survey.document import parse_output

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def owned() -> Any:
    return load_ansible_module("owned_file")


@pytest.fixture(scope="module")
def prefix_record() -> Any:
    return load_ansible_module("host_record")


@pytest.fixture(scope="module")
def remover() -> Any:
    return load_script("remove.py")


def removal(remover: Any, record: Path, prefix: str | None = None, dry_run: bool = False) -> Any:
    found = remover.Removal(str(record), prefix, dry_run)
    found.run()
    return found


def test_a_block_goes_in_and_out_of_a_shared_file_without_a_trace(owned: Any, remover: Any, tmp_path: Path) -> None:
    shared = tmp_path / "authorized_keys"
    for before in ("", "own key\n", "own key without newline", "# BEGIN provision b\nother cluster\n# END provision b\n"):
        record: dict[str, Any] = {"files": {}}
        text = owned.with_block(before, "# {mark} provision a", "ours\n")
        assert "# BEGIN provision a\nours\n# END provision a\n" in text
        owned.host_record.note(record, str(shared), "ours\n", "# {mark} provision a", exists=True)
        shared.write_text(text)
        removal(remover, write_record(tmp_path, record))
        assert shared.read_text() == (before if before.endswith("\n") or not before else before + "\n")


@pytest.mark.parametrize("dry_run", [True, False])
def test_programs_of_run_stay_and_are_named(remover: Any, tmp_path: Path, dry_run: bool) -> None:
    assert removal(remover, write_record(tmp_path, {}), dry_run=dry_run).left == []
    program = tmp_path / "provision-run/project/train.py"
    program.parent.mkdir(parents=True)
    program.touch()
    done = removal(remover, write_record(tmp_path, {}), dry_run=dry_run)
    assert [entry["what"] for entry in done.left] == ["~/provision-run"]
    assert program.exists()


def test_what_killed_jobs_have_left_is_removed_where_nothing_is_installed(
    remover: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PLACE", "SHARED"):
        monkeypatch.setattr(remover, name, str(tmp_path))
    monkeypatch.setattr(remover.tempfile, "gettempdir", lambda: str(tmp_path))
    left, running = tmp_path / "provision-job-1", tmp_path / "provision-job-2"
    left.mkdir()
    running.mkdir()
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        for dry_run in (True, False, False):
            was_there = left.exists()
            order = removal_order(tmp_path / "lock", str(tmp_path / "record.json"), dry_run=dry_run)
            monkeypatch.setattr("sys.stdin", io.StringIO(order))
            remover.main()
            answer = parse_output(capsys.readouterr().out, remover.BEGIN, "the removal")
            assert (answer["nothing"], answer["removed"]) == (not was_there, [str(left)] * was_there)
            assert left.exists() == (dry_run and was_there)
        assert running.exists()
    finally:
        os.close(lock)


@pytest.mark.parametrize("others", ["", "digits", "provision/mnist"])
def test_what_was_noted_of_libraries_goes_and_other_caches_stay(
    others: str, remover: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert remover.remove_cache(dry_run=False) == []
    noted = tmp_path / "caches/provision/gpu-code-2.json"
    for path in filter(None, ("provision/gpu-code-2.json", others)):
        (tmp_path / "caches" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "caches" / path).touch()
    assert remover.remove_cache(dry_run=True) == [str(noted)]
    assert noted.exists()
    assert remover.remove_cache(dry_run=False) == [str(noted)]
    left = [path for path in (tmp_path / "caches").rglob("*") if path.is_file()] if others else [(tmp_path / "caches").exists()]
    assert left == ([tmp_path / "caches" / others] if others else [False])


def test_a_block_is_replaced_where_it_stands(owned: Any) -> None:
    text = owned.with_block("a\n", "# {mark}", "one\n") + "z\n"
    assert owned.with_block(text, "# {mark}", "two\n") == "a\n# BEGIN\ntwo\n# END\nz\n"


def test_a_changed_file_stays_and_is_named(owned: Any, remover: Any, tmp_path: Path) -> None:
    ours, changed = tmp_path / "ours", tmp_path / "changed"
    record: dict[str, Any] = {"files": {}}
    for path in (ours, changed):
        path.write_text("written\n")
        owned.host_record.note(record, str(path), "written\n", None, exists=False)
    changed.write_text("changed\n")
    done = removal(remover, write_record(tmp_path, record))
    assert not ours.exists()
    assert changed.read_text() == "changed\n"
    assert [entry["what"] for entry in done.left] == [str(changed)]


def test_a_write_that_did_not_happen_leaves_the_file_before_it_removable(owned: Any, remover: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("first\n")
    record: dict[str, Any] = {"files": {}}
    owned.host_record.note(record, str(path), "first\n", None, exists=False)
    owned.host_record.note(record, str(path), "second\n", None, exists=True)  # noted, and then the host died
    removal(remover, write_record(tmp_path, record))
    assert not path.exists()


def test_the_prefix_loses_what_is_ours_and_keeps_the_rest(owned: Any, remover: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "opt" / "provision"
    (prefix / "venv" / "etc").mkdir(parents=True)
    (prefix / "venv" / "link").symlink_to(tmp_path)
    settings = prefix / "venv" / "etc" / "params.conf"
    settings.write_text("mine now\n")
    record: dict[str, Any] = {"files": {}, "contents": ["venv", "src"], "claimed": [str(prefix), str(tmp_path / "opt")]}
    owned.host_record.note(record, str(settings), "written\n", None, exists=False)
    path = prefix / "record.json"
    write_record(prefix, record)
    (prefix / "checkpoint.pt").write_text("mine")
    done = removal(remover, path, str(prefix))
    assert sorted(entry.name for entry in prefix.iterdir()) == ["checkpoint.pt", "venv"]
    assert [entry.name for entry in (prefix / "venv").iterdir()] == ["etc"]
    assert settings.read_text() == "mine now\n"
    assert tmp_path.exists()
    assert {Path(entry["what"]).name for entry in done.left} >= {"checkpoint.pt", "params.conf"}


def test_a_dry_run_tells_and_changes_nothing(owned: Any, remover: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("written\n")
    record: dict[str, Any] = {"files": {}}
    owned.host_record.note(record, str(path), "written\n", None, exists=False)
    done = removal(remover, write_record(tmp_path, record), dry_run=True)
    assert path.exists()
    assert (tmp_path / "record.json").exists()
    assert done.removed == [str(path)]


@pytest.mark.parametrize("others", [None, "opt/provision/checkpoint.pt", "home/.ansible/tmp/mine"])
def test_a_dry_run_names_just_what_a_removal_removes(owned: Any, remover: Any, tmp_path: Path, others: str | None) -> None:
    prefix, folders = tmp_path / "opt/provision", [tmp_path / "home/.ansible", tmp_path / "home/.ansible/tmp"]
    (prefix / "venv" / "bin").mkdir(parents=True)
    folders[1].mkdir(parents=True)
    written = folders[1] / "written"
    written.write_text("ours\n")
    claimed = [str(each) for each in (*folders, prefix)]
    record: dict[str, Any] = {"files": {}, "contents": ["venv"], "claimed": claimed}
    owned.host_record.note(record, str(written), "ours\n", None, exists=False)
    path = write_record(prefix, record)
    if others:
        (tmp_path / others).write_text("mine")
    seen = removal(remover, path, str(prefix), dry_run=True)
    assert prefix.exists()
    done = removal(remover, path, str(prefix))
    assert seen.removed == done.removed
    kept = {each for each in claimed if others and str(tmp_path / others).startswith(each)}
    assert {*claimed} - {*done.removed} == kept


def test_a_dry_run_keeps_the_folder_of_a_changed_file(owned: Any, remover: Any, tmp_path: Path) -> None:
    changed = tmp_path / "opt/provision/venv/params.conf"
    changed.parent.mkdir(parents=True)
    changed.write_text("mine now\n")
    prefix = str(tmp_path / "opt/provision")
    record: dict[str, Any] = {"files": {}, "contents": ["venv"], "claimed": [prefix]}
    owned.host_record.note(record, str(changed), "written\n", None, exists=False)
    path = write_record(Path(prefix), record)
    assert removal(remover, path, prefix, dry_run=True).removed == removal(remover, path, prefix).removed == [f"{prefix}/venv"]


def test_only_what_was_not_there_before_is_claimed(owned: Any, tmp_path: Path) -> None:
    record: dict[str, Any] = {"claimed": []}
    owned.host_record.claim(record, str(tmp_path / "new" / "deep"))
    owned.host_record.claim(record, str(tmp_path))
    assert record["claimed"] == [str(tmp_path / "new" / "deep"), str(tmp_path / "new")]


def test_folders_in_the_prefix_that_the_record_does_not_name_stay(remover: Any, tmp_path: Path) -> None:
    for name in ("src", "wheels", "openmpi", "venv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("mine")
    done = removal(remover, write_record(tmp_path, {"contents": ["venv"]}), str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["openmpi", "src", "wheels"]
    assert {Path(entry["what"]).name for entry in done.left} == {"openmpi", "src", "wheels"}


def test_a_prefix_of_somebody_elses_is_refused(prefix_record: Any, tmp_path: Path) -> None:
    names = ["src", "venv"]
    assert prefix_record.refusal(str(tmp_path / "new"), names) is None
    assert prefix_record.refusal(str(tmp_path), names) is None
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".provision-x1y2").write_text("half a record of a run that died")
    assert prefix_record.refusal(str(tmp_path), names) is None
    (tmp_path / "letters").mkdir()
    assert "holds letters, which provision did not make" in prefix_record.refusal(str(tmp_path), names)
    (tmp_path / "record.json").write_text('{"album": 1}')
    assert "record.json is not a record of provision" in prefix_record.refusal(str(tmp_path), names)


def test_a_prefix_of_ours_is_taken_again_but_for_what_others_made_there(prefix_record: Any, tmp_path: Path) -> None:
    write_record(tmp_path, {"contents": ["venv"]})
    (tmp_path / "venv").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert prefix_record.refusal(str(tmp_path), ["venv", "src"]) is None
    (tmp_path / "src").mkdir()
    assert "holds src, which provision did not make" in prefix_record.refusal(str(tmp_path), ["venv", "src"])


def test_every_folder_that_a_role_makes_in_the_prefix_is_noted_first() -> None:
    guard = yaml.safe_load((ROOT / "playbooks/roles/guard/tasks/main.yml").read_text())
    noted = {name for task in guard for name in task.get("host_record", {}).get("contents", ())}
    books = [*(ROOT / "playbooks/roles").rglob("*.yml"), ROOT / "playbooks/site.yml.j2"]
    made = {name for book in books for name in re.findall(r"host_plan\.prefix (?:\}\}|~ ')/([a-z-]+(?:\.sh)?)", book.read_text())}
    assert made - {"record"} <= noted | {"manifest"}
    assert "venv" in made


def test_a_file_that_was_there_before_us_is_not_emptied(owned: Any, remover: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("written\n")
    record: dict[str, Any] = {"files": {}}
    owned.host_record.note(record, str(path), "written\n", None, exists=True)
    done = removal(remover, write_record(tmp_path, record))
    assert path.read_text() == "written\n"
    assert [entry["what"] for entry in done.left] == [str(path)]


def test_a_key_goes_only_as_we_have_put_it_there(owned: Any, remover: Any, tmp_path: Path) -> None:
    ours, replaced = tmp_path / "ours.gpg", tmp_path / "replaced.gpg"
    record: dict[str, Any] = {"files": {}}
    for path in (ours, replaced):
        owned.host_record.note(record, str(path), b"\x99\xff key", None, exists=False)
    ours.write_bytes(b"\x99\xff key")
    replaced.write_bytes(b"\x99\xfe another key")
    done = removal(remover, write_record(tmp_path, record))
    assert not ours.exists()
    assert replaced.read_bytes() == b"\x99\xfe another key"
    assert [entry["what"] for entry in done.left] == [str(replaced)]


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs dpkg-query; the integration tests cover packages too")
def test_what_belongs_to_a_package_by_now_stays(owned: Any, remover: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "dpkg"
    (database / "info").mkdir(parents=True)
    written, claimed = tmp_path / "written", tmp_path / "claimed"
    stanza = "Package: own\nStatus: install ok installed\nVersion: 2\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: b\n"
    (database / "status").write_text(stanza)
    (database / "info/own.list").write_text(f"{written}\n{claimed}\n")
    (database / "info/format").write_text("1\n")
    monkeypatch.setenv("DPKG_ADMINDIR", str(database))
    record: dict[str, Any] = {"files": {}, "claimed": [str(claimed)], "replaced": {"own": "1"}}
    owned.host_record.note(record, str(written), "text\n", None, exists=False)
    for path in (written, claimed):
        path.write_text("text\n")
    done = removal(remover, write_record(tmp_path, record))
    assert written.exists()
    assert claimed.exists()
    assert [(entry["what"], "package own now" in entry["why"]) for entry in done.left][1:] == [(str(written), True), (str(claimed), True)]
    assert done.left[0]["what"] == "package own"
    assert "in version 1, which is not restored" in done.left[0]["why"]


def test_files_of_others_are_told_from_ours(tmp_path: Path) -> None:
    repository = load_ansible_module("owned_repository")
    theirs, ours = tmp_path / "theirs.gpg", tmp_path / "ours.gpg"
    record = {"files": {str(ours): {}}, "claimed": []}
    assert not repository.not_ours(record, str(theirs))
    for path in (theirs, ours):
        path.write_text("key")
    assert repository.not_ours(record, str(theirs))
    assert not repository.not_ours(record, str(ours))


def test_repositories_that_the_plan_does_without_go_and_what_stays_is_not_missed(tmp_path: Path, monkeypatch: Any) -> None:
    module = load_ansible_module("owned_repository")
    lists, keys = tmp_path / "lists", tmp_path / "keys"
    monkeypatch.setattr(module, "LISTS", (f"{lists}/",))
    monkeypatch.setattr(module, "KEYS", (f"{keys}/",))
    texts = {
        keys / "old.gpg": "old key",
        keys / "shared.gpg": "key that a list of somebody else's names",
        keys / "wanted.gpg": "key",
        lists / "old.list": f"deb [signed-by={keys}/old.gpg] http://old/ /",
        lists / "wanted.list": f"deb [signed-by={keys}/wanted.gpg] http://wanted/ /",
        lists / "changed.list": "ours",
        lists / "gone.list": "ours",
        lists / "packaged.list": "ours",
        tmp_path / "elsewhere.conf": "no repository",
    }
    record: dict[str, Any] = {"files": {}}
    for path, text in texts.items():
        module.host_record.note(record, str(path), text, None, exists=False)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (lists / "changed.list").write_text("somebody else's by now")
    (lists / "gone.list").unlink()
    (lists / "disabled").mkdir()  # as administrators do
    (lists / "theirs.list").write_text(f"deb [signed-by={keys}/shared.gpg] http://theirs/ /")
    wanted = [str(keys / "wanted.gpg"), str(lists / "wanted.list")]
    gone, left = module.sort_out(record, wanted, lambda path: path.endswith("packaged.list"))
    assert gone == [str(lists / "old.list"), str(keys / "old.gpg")]
    assert left == [str(lists / name) for name in ("changed.list", "gone.list", "packaged.list")]


def test_an_unwanted_file_that_is_wanted_again_is_guarded_again(owned: Any) -> None:
    record: dict[str, Any] = {"files": {"/x": {"path": "/x", "marker": None, "sha256": [], "made": True, "unwanted": True}}}
    owned.host_record.note(record, "/x", "text", None, exists=False)
    assert "unwanted" not in record["files"]["/x"]


def with_packages(remover: Any, tmp_path: Path, outputs: dict[str, tuple[int, str]], **options: Any) -> tuple[Any, list[str]]:
    """A removal whose commands are not run: each gets the exit code and the text of the first of ``outputs`` that its line contains."""
    removal = remover.Removal(str(write_record(tmp_path, {})), **options)
    calls: list[str] = []

    def call(argv: list[str], check: bool = True) -> tuple[int, str]:
        calls.append(" ".join(argv))
        return next((output for part, output in outputs.items() if part in calls[-1]), (0, ""))

    removal.call = call
    return removal, calls


def test_apt_is_not_needed_where_we_have_installed_no_package(remover: Any, tmp_path: Path) -> None:
    removal, calls = with_packages(remover, tmp_path, {}, prefix=None, dry_run=False)
    assert removal.plan_with_apt(set(), set(), None) == set()
    assert calls == []


INTERRUPTED = "installed ok hello\nhalf-installed reinstreq gcc:amd64\n"


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs a host with dpkg")
def test_a_dry_run_names_what_an_interrupted_installation_left(remover: Any, tmp_path: Path) -> None:
    removal, _ = with_packages(remover, tmp_path, {"dpkg-query": (0, INTERRUPTED)}, prefix=None, dry_run=True)
    assert removal.plan_with_apt({"hello"}, {"gcc:amd64"}, ["base"]) == {"hello", "gcc:amd64"}


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs a host with dpkg")
def test_an_interrupted_installation_is_finished_with_the_bundles_archives(
    remover: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, downloads = tmp_path / "bundle/debs", tmp_path / "archives"
    monkeypatch.setattr(remover, "APT_ARCHIVES", str(downloads))
    for archive in (bundle / "gcc_4%3a12_amd64.deb", downloads / "gcc_4%3a11_amd64.deb", downloads / "gcc-12_12_amd64.deb"):
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.touch()
    removal, calls = with_packages(remover, tmp_path, {"dpkg-query": (0, "installed ok gcc:amd64\n")}, prefix=str(tmp_path), dry_run=False)
    removal.finish_installation(["gcc:amd64"])
    assert calls[:2] == [f"dpkg --unpack {bundle}/gcc_4%3a12_amd64.deb", "dpkg --configure --pending"]
    assert not [call for call in calls if call.startswith("apt-get")]
    shutil.rmtree(bundle)
    shutil.rmtree(downloads)
    outputs = {"dpkg-query": (0, INTERRUPTED), "apt-get": (100, "E: no index")}
    removal, calls = with_packages(remover, tmp_path, outputs, prefix=str(tmp_path), dry_run=False)
    with pytest.raises(RuntimeError, match=r"run `provision up` again .*--bundle FILE.* E: no index"):
        removal.finish_installation(["gcc:amd64"])
    assert calls[-1].endswith("--reinstall install gcc:amd64")


def test_rpms_reason_is_named(remover: Any, tmp_path: Path) -> None:
    said = "error: Failed dependencies:\n\tgcc is needed by (installed) theirs-1-1.x86_64\n"
    removal, _ = with_packages(remover, tmp_path, {"rpm --test": (1, said)}, prefix=None, dry_run=False)
    going, why = removal.plan_with_rpm({"gcc", "make"})
    assert (going, why) == (set(), "one of these is needed by others: gcc is needed by (installed) theirs-1-1.x86_64")
