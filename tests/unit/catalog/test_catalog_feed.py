"""The feed: what is taken and used in place of our catalogue, and what is refused, with nothing changed. Keys are made here."""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from minisign_keys import Key
from typer.testing import CliRunner

from provision import catalog
from provision.base import minisign
from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import key
from provision.catalog import OURS, Catalog, feed, overlay, update
from provision.catalog.models import FILES
from provision.catalog.update.sources import Sources
from provision.cli.main import app

ROOT = Path(__file__).parents[3]
FACTS = ROOT / "tests/data/plans/a100-570-cuda-12.8.json"
KEY = Key()
CREATED = datetime.datetime(2027, 3, 1, 3, 17, tzinfo=datetime.timezone.utc)
NOW = CREATED + datetime.timedelta(days=2)
HEAD = "schema: 1\nsource: the test\ndate: 2027-03-02\n"
OLD_DEFAULTS = [{"version": "2.11.0", "why": "the test", "source": "the test", "date": "2026-03-01"}]


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "public_keys", lambda: Key().public_text + KEY.public_text)
    monkeypatch.setattr(catalog, "now", lambda: NOW)


@functools.cache
def as_json(content: bytes) -> str:
    return json.dumps(yaml.safe_load(content), default=str)


def plain(name: str) -> Any:
    return json.loads(as_json(catalog.content(name)))


def document(created: datetime.datetime = CREATED, **changes: dict[str, Any]) -> bytes:
    """Our catalogue as a feed."""
    files = {name: plain(name) | changes.get(name, {}) for name in FILES}
    return json.dumps({"schema": 1, "created": created.isoformat(), "files": files}).encode()


def published(folder: Path, content: bytes, key: Key = KEY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "catalog-feed.json").write_bytes(content)
    (folder / "catalog-feed.json.minisig").write_text(key.signature(content), encoding="utf-8")
    return folder / "catalog-feed.json"


def planned(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", "--facts", str(FACTS), "--json", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def torch_of(plan: dict[str, Any]) -> str:
    (host,) = plan["hosts"].values()
    return str(host["torch"]["version"]).partition("+")[0]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's catalogue folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "provision" / "catalog"


def test_an_old_catalogue_with_a_feed_plans_the_new_default(tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, content, ours = torch_of(planned()), document(), catalog.content
    old = yaml.safe_dump(plain("pytorch") | {"defaults": OLD_DEFAULTS}).encode()
    monkeypatch.setattr(catalog, "content", lambda name: old if name == "pytorch" else ours(name))
    monkeypatch.setattr(catalog, "_of_ours", catalog._of_ours.__wrapped__)
    monkeypatch.setattr(overlay, "OURS", Catalog())
    before, file = planned(), published(tmp_path, content)
    assert torch_of(before) == "2.11.0" != default
    said = commanded("update", "--feed", str(file))
    assert f"feed of 2027-03-01 03:17 UTC, signed with the key {KEY.shown}: {mine / feed.NAME}" in said
    assert torch_of(planned()) == default
    assert planned()["knowledge"]["date"] == "2027-03-01"
    assert json.loads(commanded("show", "--json"))["feed"] == {
        "file": str(mine / feed.NAME),
        "created": CREATED.isoformat(),
        "key": KEY.shown,
    }
    assert f"in use: feed of 2027-03-01 03:17 UTC, signed with the key {KEY.shown}" in commanded("show", "pytorch")
    mine.joinpath("cuda.yaml").write_text(HEAD + 'toolkits: {of: {"13.9": "640.10"}}\n', encoding="utf-8")
    assert (torch_of(planned()), planned()["knowledge"]["cuda"]) == (default, "13.9"), "files of the user's own are merged over it"
    monkeypatch.setattr(catalog, "date_of_ours", lambda: "2027-03-01")
    assert torch_of(planned()) == torch_of(before), "a release of provision of that day or later is taken instead"
    assert json.loads(commanded("show", "--json"))["feed"] is None


def test_what_an_update_found_before_a_feed_counts_only_where_the_feed_lacks_it(tmp_path: Path, mine: Path) -> None:
    ours = plain("pytorch")
    newest = max(ours["releases"], key=key)
    release = ours["releases"].pop(newest)
    weak = {cuda: {**build, "weak": "the index"} for cuda, build in release["builds"].items()}
    head = {"schema": 1, "source": "an index", "date": "2027-02-20", "only_gaps": True}
    found = {"releases": {newest: {**release, "builds": weak}, "2.99.0": release}}
    mine.mkdir(parents=True)
    (mine / "pytorch.yaml").write_text(json.dumps({**head, **found}), encoding="utf-8")

    def evidence() -> dict[str, str | None]:
        return {cuda: build.weak for cuda, build in overlay.own().pytorch().releases[newest].builds.items()}

    of_index, of_feed = dict.fromkeys(weak, "the index"), {cuda: build.get("weak") for cuda, build in release["builds"].items()}
    assert evidence() == of_index
    feed.take(published(tmp_path, document()), mine)
    assert evidence() == of_feed
    assert "2.99.0" in overlay.own().pytorch().releases
    made = update.update(Sources.of_folder(given(tmp_path / "given"), overlay.own()), mine, NOW.date(), lambda _line: None)
    assert any("pytorch" in path for path in made.written)
    assert evidence() == of_feed, "a later update does not bring them back"
    own = json.dumps({**head, "only_gaps": False, **found})
    (mine / "pytorch.yaml").write_text(own, encoding="utf-8")
    assert evidence() == of_index, "a file of the user's own counts"
    update.update(Sources.of_folder(given(tmp_path / "given again"), overlay.own()), mine, NOW.date(), lambda _line: None)
    assert evidence() == of_index, "also after an update has added to it"


def test_bad_lists_of_a_feed_count(tmp_path: Path, mine: Path) -> None:
    chosen = torch_of(planned())
    bad = {"versions": [chosen], "why": "hangs", "source": "a test", "date": "2027-03-01"}
    feed.take(published(tmp_path, document(pytorch={"known_bad": [bad, *plain("pytorch")["known_bad"]]})), mine)
    assert torch_of(planned()) != chosen


def commanded(*words: str) -> str:
    done = CliRunner().invoke(app, ["catalog", *words], env={"COLUMNS": "300"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(place: str | Path, mine: Path, error: type[ProvisionError] = UsageError) -> ProvisionError:
    """What is said of a feed that is not taken, whereby nothing changes."""
    before = {path: path.read_bytes() for path in mine.iterdir()} if mine.exists() else None
    with pytest.raises(error) as caught:
        feed.take(place, mine)
    assert caught.value.where
    assert caught.value.hint
    assert before == ({path: path.read_bytes() for path in mine.iterdir()} if mine.exists() else None)
    return caught.value


def test_a_forged_feed_is_refused(tmp_path: Path, mine: Path) -> None:
    file = published(tmp_path, document())
    file.write_bytes(file.read_bytes().replace(b"2027-03-01T", b"2027-03-02T"))
    assert "file or signature was changed" in refused(file, mine).what
    stranger = Key()
    assert f"it is signed with the key {stranger.shown}; trusted:" in refused(published(tmp_path, document(), stranger), mine).what
    named_alike = Key(id=KEY.id)
    assert "file or signature was changed" in refused(published(tmp_path, document(), named_alike), mine).what


def test_a_feed_without_a_whole_signature_is_refused(tmp_path: Path, mine: Path) -> None:
    file = published(tmp_path, document())
    signature = Path(f"{file}.minisig")
    text = signature.read_text(encoding="utf-8")
    for cut in (text[: len(text) // 2], text[:-9], ""):
        signature.write_text(cut, encoding="utf-8")
        assert refused(file, mine).what.startswith("the feed is not used: its signature")
    signature.unlink()
    error = refused(file, mine, ProvisionError)
    assert (error.what.rpartition(": ")[2], error.where) == ("No such file or directory", str(signature))
    assert "the signature without which it is not used" in error.what


def test_an_older_feed_is_refused(tmp_path: Path, mine: Path) -> None:
    feed.take(published(tmp_path, document()), mine)
    older = published(tmp_path / "older", document(CREATED - datetime.timedelta(minutes=1)))
    assert "the older one is not used" in refused(older, mine).what
    ours = datetime.datetime.fromisoformat(f"{catalog.date_of_ours()}T23:59:59+00:00")
    assert "and provision's own catalogue of" in refused(published(tmp_path / "ours", document(ours)), mine).what
    feed.take(published(tmp_path, document()), mine)  # the same again
    newer = published(tmp_path / "newer", document(CREATED + datetime.timedelta(minutes=1)))
    assert feed.take(newer, mine).created == CREATED + datetime.timedelta(minutes=1)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(document())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "it must be an object"),
        (b"\xff", "not UTF-8"),
        (document()[:-100], "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (changed(lambda it: it.update(schema=2)), "`schema` must be 1"),
        (changed(lambda it: it.update(created="2027-03-01T00:00:00")), "`created`"),
        (changed(lambda it: it.update(more=1)), "`more` is unknown"),
        (changed(lambda it: it["files"].pop("nccl")), "the file 'nccl' is missing"),
        (changed(lambda it: it["files"].update(own={})), "the file 'own' is unknown"),
        (changed(lambda it: it["files"]["nccl"].update(known_bat=[])), "`files.nccl.known_bat` is unknown; did you mean `known_bad`?"),
        (
            changed(lambda it: it["files"]["pytorch"]["defaults"][0].update(version=2)),
            'files.pytorch.defaults[0].version` must be in quotes, "2"',
        ),
    ],
)
def test_a_malformed_feed_is_refused(tmp_path: Path, mine: Path, content: bytes, said: str) -> None:
    assert said in str(refused(published(tmp_path, content), mine))


@pytest.mark.parametrize(
    "text", ["{{ lookup('pipe', 'id') }}", "{% raw %}", "{#", "{cuda.__class__}", "{0[x]}", "a/../../etc", "..", "\x1b[2J"]
)
def test_a_text_that_could_be_more_than_data_is_refused(tmp_path: Path, mine: Path, text: str) -> None:
    error = refused(published(tmp_path, changed(lambda it: it["files"]["nccl"].update(source=text))), mine)
    assert "a template, a detour of a path or a control character in `files.nccl`" in error.what
    assert "\x1b" not in str(error)


def test_files_that_are_none_or_too_large(tmp_path: Path, mine: Path) -> None:
    file = published(tmp_path, document())
    with file.open("r+b") as large:
        large.truncate(50 << 30)
    assert "larger than 4,194,304 bytes" in refused(file, mine, ProvisionError).what
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in refused(file, mine, ProvisionError).what
    assert "No such file" in refused(tmp_path / "missing", mine, ProvisionError).what


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = tmp_path / self.path.lstrip("/")
            if self.path.startswith("/endless"):
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):  # likewise
                    while True:
                        self.wfile.write(b" " * (1 << 16))
            elif self.path == "/trickle":
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):  # it is left in the middle
                    while True:
                        self.wfile.write(b" ")
                        time.sleep(0.02)
            elif path.is_file():
                self.send_response(200)
                self.end_headers()
                self.wfile.write(path.read_bytes())
            else:
                self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


def test_a_feed_from_a_server(tmp_path: Path, mine: Path, server: str) -> None:
    published(tmp_path, document())
    assert "4,194,304 bytes" in refused(f"{server}/endless", mine, ProvisionError).what
    (tmp_path / "alone.json").write_bytes(document())
    missing = refused(f"{server}/alone.json", mine, ProvisionError)
    assert (missing.what.rpartition(": ")[2], missing.where) == ("HTTP 404 Not Found", f"{server}/alone.json.minisig")
    address = f"{server}/catalog-feed.json"
    commanded("update", "--feed", address)
    (mine / feed.NAME).unlink()
    mine.joinpath("cuda.yaml").write_text(HEAD + f"lists: {{feed: '{address}'}}\n", encoding="utf-8")
    assert KEY.shown in commanded("update"), "an address in the user's own cuda.yaml needs no option"
    with pytest.raises(UsageError, match="--from and --feed exclude each other"):
        commanded("update", "--feed", address, "--from", str(tmp_path))
    with pytest.raises(UsageError, match="invalid --feed ftp"):
        commanded("update", "--feed", "ftp://host/catalog-feed.json")


def test_a_server_that_trickles_is_given_up(mine: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_SECONDS", 0.2)
    assert "bytes after 0.2 s" in refused(f"{server}/trickle", mine, ProvisionError).what


def test_a_stored_feed_is_verified_whenever_it_is_used(tmp_path: Path, mine: Path) -> None:
    feed.take(published(tmp_path, document()), mine)
    stored = mine / feed.NAME
    whole = stored.read_bytes()
    for damaged in (whole.replace(b'"schema": 1', b'"schema":  1', 1), whole[:-1], whole[10:], b"", whole[:100], b"\xff" * 10):
        stored.write_bytes(damaged)
        with pytest.raises(UsageError) as caught:
            planned()
        assert str(caught.value.where).startswith(str(stored))
        assert "catalog update --feed" in str(caught.value.hint)
    with pytest.raises(UsageError, match="not UTF-8 text") as shown:
        commanded("show")
    assert "catalog update --feed" in str(shown.value.hint)
    stored.write_bytes(whole.replace(b"\ntrusted comment: ", b"\ntrusted comment: x", 1))
    with pytest.raises(UsageError, match="the feed is not used"):
        planned()
    feed.take(tmp_path / "catalog-feed.json", mine)
    assert stored.read_bytes() == whole
    stored.unlink()
    stored.mkdir()
    with pytest.raises(UsageError, match="the feed cannot be read"):
        planned()


def test_a_stored_feed_that_is_not_newer_needs_no_key(tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed.take(published(tmp_path, document()), mine)
    monkeypatch.setattr(feed, "public_keys", lambda: Key().public_text)
    with pytest.raises(UsageError, match="the feed is not used"):
        planned()
    monkeypatch.setattr(catalog, "date_of_ours", lambda: "2027-03-01")
    planned()


def test_a_feed_that_is_still_to_come_is_refused(tmp_path: Path, mine: Path) -> None:
    assert "still to come" in refused(published(tmp_path, document(NOW + datetime.timedelta(days=2))), mine).what
    content = document().replace(CREATED.isoformat().encode(), b"9999-12-31T23:59:59-12:00")
    assert "`created`" in str(refused(published(tmp_path, content), mine))


def test_of_two_updates_at_once_the_newer_feed_stays_whole(tmp_path: Path, mine: Path) -> None:
    files = [published(tmp_path / str(hour), document(CREATED + datetime.timedelta(hours=hour))) for hour in range(6)]

    def take(file: Path) -> str:
        try:
            feed.take(file, mine)
        except UsageError as error:
            return error.what.rpartition(": ")[2]
        return "taken"

    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(take, files))
    assert taken[-1] == "taken"
    assert set(taken) <= {"taken", "the older one is not used"}
    found = feed.stored(mine)
    assert found is not None
    assert found.created == CREATED + datetime.timedelta(hours=5)
    assert {path.name for path in mine.iterdir()} == {feed.NAME, f".{feed.NAME}.lock"}


def test_a_folder_that_cannot_be_used(tmp_path: Path, mine: Path) -> None:
    file = published(tmp_path, document())
    mine.parent.mkdir(parents=True)
    mine.write_text("a file", encoding="utf-8")
    with pytest.raises(ProvisionError) as caught:
        feed.take(file, mine)
    assert (caught.value.where, caught.value.hint) == (str(mine), "name another folder: --out DIR")
    assert mine.read_text(encoding="utf-8") == "a file"
    mine.unlink()
    mine.symlink_to(mine)  # root could read a folder without permissions
    with pytest.raises(UsageError, match="the feed cannot be read: Too many levels of symbolic links") as caught_at_use:
        planned()
    assert caught_at_use.value.where == str(mine / feed.NAME)
    with pytest.raises(ProvisionError, match="the feed cannot be stored"):
        feed.take(file, mine)


def test_a_feed_in_a_folder_of_its_own(tmp_path: Path, mine: Path) -> None:
    file, default = published(tmp_path, document(pytorch={"defaults": OLD_DEFAULTS})), torch_of(planned())
    commanded("update", "--feed", str(file), "--out", str(tmp_path / "shared"))
    assert torch_of(planned()) == default
    assert torch_of(planned("--catalog", str(tmp_path / "shared"))) == "2.11.0" != default


def given(folder: Path) -> Path:
    """A folder with something of all that is looked at, of which one driver branch and one image are new."""
    folder.mkdir()
    for package, known in {"torch": OURS.pytorch().releases, **OURS.nccl().wheels.builds}.items():
        tags = "cp312-cp312" if package == "torch" else "py3-none"
        (folder / f"{package.replace('-', '_')}-{max(known, key=key)}-{tags}-manylinux_2_28_x86_64.whl").touch()
    (folder / "redistrib_12.4.0.json").touch()
    branches = {name: {"type": "lts branch", "driver_info": [{"release_version": f"{name}.1.2"}]} for name in ("535", "840")}
    (folder / "releases.json").write_text(json.dumps(branches), encoding="utf-8")
    images = [
        "99.4.1-base-ubuntu24.04",
        "99.4.1-cudnn-devel-rockylinux9",
        "12.4.1-base-ubuntu26.04",
        "12.4.1-base-ubi9",
        "../1.2.3-base-ubuntu1",
    ]
    (folder / "supported-tags.md").write_text("".join(f"- [`{tag}` (*x*)](https://x)\n" for tag in images), encoding="utf-8")
    return folder


def test_a_feed_that_was_made_counts_once_it_is_signed(tmp_path: Path, mine: Path) -> None:
    places, out = given(tmp_path / "given"), tmp_path / "catalog-feed.json"
    said = commanded("build", "--out", str(out), "--from", str(places))
    assert "driver branch 840: long-term" in said
    published(tmp_path, out.read_bytes())
    commanded("update", "--feed", str(out))
    used = Catalog(overlay.read([mine]))
    assert used.driver().branches.of["840"] == "long-term"
    images = used.cuda_images().tags
    assert (images["ubuntu"].of["99.4.1"], images["rocky"].of["99.4.1"]) == (("24.04",), ("9",))
    known = OURS.cuda_images().tags["ubuntu"].of["12.4.1"]
    assert used.cuda_images().tags["ubuntu"].of["12.4.1"] == tuple(sorted({*known, "26.04"}))
    assert used.pytorch().defaults[0].version == plain("pytorch")["defaults"][0]["version"]
    assert used.reach().date == NOW.date().isoformat()
    assert f"minisign -S -s KEY -m {out}" in commanded("build", "--out", str(out), "--from", str(places))
    assert not Path(f"{out}.minisig").exists(), "the signature of an earlier feed is gone"
    refused(out, mine, ProvisionError)


def test_no_feed_is_made_without_a_look_at_everything(tmp_path: Path, mine: Path) -> None:
    places = given(tmp_path / "given")
    (places / "supported-tags.md").unlink()
    with pytest.raises(ProvisionError, match="nothing was to be seen of what belongs in cuda_images"):
        update.build(Sources.of_folder(places, OURS), NOW, lambda _line: None)
    with pytest.raises(ProvisionError, match="cannot be written: No such file") as caught:
        commanded("build", "--out", str(tmp_path / "absent" / "feed.json"), "--from", str(given(tmp_path / "whole")))
    assert caught.value.where == str(tmp_path / "absent" / "feed.json")


def test_the_keys_in_the_package_are_of_minisign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lines = feed.public_keys().splitlines()
    assert lines
    assert len(lines) % 2 == 0
    with pytest.raises(ValueError, match=f"trusted: {lines[0].split()[-1]}"):
        minisign.verify(b"", KEY.signature(b""), feed.public_keys())


def test_the_weekly_job_signs_with_nothing_but_minisign() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/catalog.yml").read_text(encoding="utf-8"))
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))

    def actions(of: dict[str, Any]) -> set[str]:
        return {step["uses"] for job in of["jobs"].values() for step in job["steps"] if "uses" in step}

    assert actions(workflow) <= actions(ci)
    commands = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in workflow["jobs"].items()}
    (line,) = [line.strip() for line in commands["feed"].splitlines() if "provision catalog" in line]
    assert line.split()[1:] == ["catalog", "build", "--out", "catalog-feed.json"]
    help_ = CliRunner().invoke(app, ["catalog", "build", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in help_ for option in ("--out", "--from"))
    assert ("--constraint constraints.txt" in commands["feed"], "secrets" in str(workflow["jobs"]["feed"])) == (True, False)
    with_key = [name for name, job in workflow["jobs"].items() if "secrets" in str(job) or job.get("permissions")]
    assert with_key == ["sign"]
    assert "umask 077" in commands["sign"]
    assert not any(word in commands["sign"] for word in ("pip", "provision ", "python"))
