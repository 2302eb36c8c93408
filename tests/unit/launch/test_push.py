"""`provision push`: real relays on hosts that are folders, with a script in place of ssh, here and between them."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import removal_order
from loading import load_script
from push_hosts import Hosts

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.launch import program_files
from provision.launch import push as module
from provision.launch.push import Data, Push
from provision.remote.progress import Progress
from provision.remote.session import Session

SMALL = 1 << 15  # bytes of a piece


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "PIECE", SMALL)
    return Hosts(tmp_path, 5, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """35 pieces."""
    folder = tmp_path / "data"
    (folder / "train/a b").mkdir(parents=True)
    (folder / "model.bin").write_bytes(random.Random(1).randbytes(30 * SMALL + 5))
    (folder / "train/a b/1.txt").write_bytes(random.Random(2).randbytes(2 * SMALL))
    (folder / "empty").touch()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Path → content, and whether it can be executed; of all files but the toolkit's records."""
    files = (path for path in folder.rglob("*") if path.is_file() and not {".records", ".ssh"} & {*path.parts})
    return {str(path.relative_to(folder)): (path.read_bytes(), os.access(path, os.X_OK)) for path in files}


def failures(made: Push) -> dict[str, str]:
    return {each.host.name: each.failed for each in made.targets if each.failed}


def when(is_so: Callable[[Push], bool], act: Callable[[], object]) -> Callable[[Push], None]:
    def during(made: Push) -> None:
        deadline = time.monotonic() + 60
        while not is_so(made) and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    return during


def kill(hosts: Hosts, name: str, number: int = signal.SIGKILL) -> None:
    """What takes there, and what gives."""
    for pid in hosts.processes(name) + hosts.processes(name, b"give"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def cut_off(hosts: Hosts, at: int) -> Callable[[Push], None]:
    """End all, once a host has some of it."""

    def during(made: Push) -> None:
        when(lambda made: made.targets[at].have > 9 * SMALL, lambda: None)(made)
        while not all(each.is_over for each in made.targets):
            for name in hosts.names:
                kill(hosts, name)

    return during


def test_every_host_has_it_and_this_machine_sends_it_once(hosts: Hosts, data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = hosts.push(data)
    assert failures(made) == {}
    for name in hosts.names:
        assert tree(hosts.home(name) / "provision-data/data") == tree(data)
        assert list((hosts.home(name) / "provision-data").glob(".provision-push-*")) == []
    assert [each.served for each in made.targets] == [made._data.pieces + 1, 0, 0, 0, 0]
    assert "goes on with" not in capfd.readouterr().err
    again = hosts.push(data)
    assert [each.came for each in again.targets] == [len(made._data.manifest)] * 5


def test_a_file_is_pushed_as_one_to_the_path_that_is_named(hosts: Hosts, data: Path, tmp_path: Path) -> None:
    assert failures(hosts.push(data / "model.bin", to="models/new/m.bin")) == {}
    assert [(hosts.home(name) / "models/new/m.bin").read_bytes() for name in hosts.names] == [(data / "model.bin").read_bytes()] * 5
    assert not (hosts.home("n1") / "provision-data/model.bin").exists()


NAMES = [b"caf\xc3\xa9", b"not-utf-8-\xff\xfe", b"new\nline", b"-rf", b"a'b\"$(touch x)`", b"{{ 1 }}", b"\x1b[31m", b"~", b" "]


def test_names_are_carried_as_they_are(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():  # a host's locale is any
        monkeypatch.setenv(variable, value)
    folder = tmp_path / "odd"
    for name in NAMES:
        path = os.path.join(os.fsencode(folder), name, name)
        os.makedirs(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(name)
    assert failures(hosts.push(folder)) == {}
    for host in hosts.names:
        there = os.fsencode(hosts.home(host) / "provision-data/odd")
        assert sorted(os.listdir(there)) == sorted(NAMES)
        for name in NAMES:
            with open(os.path.join(there, name, name), "rb") as file:
                assert file.read() == name
    assert removed(hosts.home("n1"))["left"] == []
    assert not (hosts.home("n1") / "provision-data").exists()


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_at_any_moment_the_others_have_it(hosts: Hosts, data: Path, seed: int) -> None:
    chance = random.Random(seed)
    victim, part = chance.choice(hosts.names), chance.uniform(0, 0.9)
    at = hosts.names.index(victim)
    made = hosts.push(
        data, rate=2e6, during=when(lambda made: made.targets[at].have >= part * made._data.bytes, lambda: kill(hosts, victim))
    )
    assert set(failures(made)) <= {victim}
    for name in {*hosts.names} - {*failures(made)}:
        assert tree(hosts.home(name) / "provision-data/data") == tree(data)
    assert hosts.end_soon()
    assert failures(hosts.push(data)) == {}
    assert tree(hosts.home(victim) / "provision-data/data") == tree(data)


def test_hosts_that_cannot_be_reached_are_named(hosts: Hosts, data: Path) -> None:
    for name in ("n1", "n3"):
        (hosts.home(name) / "down").touch()
    made = hosts.push(data)
    assert set(failures(made)) == {"n1", "n3"}
    assert all("No route to host" in why for why in failures(made).values())
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in ("n2", "n4", "n5"))


LIES = {
    "zeros": ("for line in sys.stdin: say(bytes(1 << 20))", "not what the manifest says"),
    "half of it": ("say(b'abc')", "the connection has ended"),
    "nothing": ("", "the connection has ended"),
    "a reason": ("sys.exit('Permission denied')", "Permission denied"),
    "silence": ("time.sleep(600)", "nothing has come for 6 s"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_changes_nothing_and_is_named(
    hosts: Hosts, data: Path, lie: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S", 5.0 if lie == "silence" else 60.0)
    program, why = LIES[lie]
    head = "import json, sys, time\ndef say(data): sys.stdout.buffer.write(data); sys.stdout.buffer.flush()\n"
    head += f"say(b'\\n{module.ssh.ANSWER}\\n')\n"
    (hosts.home("n2") / "liar").write_text(head + program)
    made = hosts.push(data)
    assert failures(made) == {}
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names)
    assert re.search(f"n3: n2: .*{why}; goes on with n1", capfd.readouterr().err)


@pytest.mark.slow
def test_a_host_that_hangs_is_passed_over(hosts: Hosts, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 5.0)
    stopped = when(lambda made: made.targets[1].have > 5 * SMALL, lambda: kill(hosts, "n2", signal.SIGSTOP))
    made = hosts.push(data, rate=4e5, during=stopped)
    assert {*failures(made)} <= {"n2"}  # a new connection may do
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names if name != "n2")
    assert hosts.end_soon()


def test_what_a_host_has_is_not_sent_again(hosts: Hosts, data: Path) -> None:
    made = hosts.push(data, rate=4e5, during=cut_off(hosts, 4))
    assert "n5" in failures(made)
    assert all(tree(hosts.home(name) / "provision-data/data") == {} for name in failures(made))
    (hosts.home("n5") / "provision-data/data/train/a b").mkdir(parents=True)
    shutil.copy(data / "train/a b/1.txt", hosts.home("n5") / "provision-data/data/train/a b")
    made = hosts.push(data)
    assert failures(made) == {}
    assert all(each.came is not None and each.came < made._data.bytes - 9 * SMALL for each in made.targets)
    assert (made.targets[4].came or 0) < made._data.bytes - 11 * SMALL
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names)


def test_a_damaged_part_of_an_earlier_push_is_taken_again(hosts: Hosts, data: Path) -> None:
    hosts.push(data, rate=4e5, during=cut_off(hosts, 4))
    drafts = list(hosts.homes.glob("*/provision-data/.provision-push-*/1"))
    assert drafts
    for draft in drafts:
        with draft.open("r+b") as file:
            file.write(b"damaged")
    assert failures(hosts.push(data)) == {}
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names)


@pytest.mark.parametrize("kind", ["file", "changed", "link", "folder in place of a file", "link on the way", "file on the way"])
def test_what_is_the_users_is_never_replaced(hosts: Hosts, data: Path, kind: str, tmp_path: Path) -> None:
    there = hosts.home("n2") / "provision-data/data"
    if kind == "changed":
        hosts.push(data)
        (there / "model.bin").write_text("mine")
    elif kind == "link on the way":
        there.mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        (there / "train").symlink_to(tmp_path / "elsewhere")
    elif kind == "folder in place of a file":
        (there / "model.bin/mine").mkdir(parents=True)
    else:
        there.mkdir(parents=True)
        (there / ("train" if kind == "file on the way" else "model.bin")).write_text("mine")
        if kind == "link":
            (there / "model.bin").rename(tmp_path / "mine")
            (there / "model.bin").symlink_to(tmp_path / "mine")
    before = sorted(str(path) for path in there.parent.rglob("*") if ".records" not in path.parts), tree(there)
    (data / "more").write_text("more")
    made = hosts.push(data)
    assert list(failures(made)) == ["n2"]
    assert "is in the way" in failures(made)["n2"]
    assert (sorted(str(path) for path in there.parent.rglob("*") if ".records" not in path.parts), tree(there)) == before
    assert list((tmp_path / "elsewhere").glob("*")) == [] if kind == "link on the way" else True
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names if name != "n2")


def test_what_is_there_stays_ours_however_many_pushes_are_cut_off(hosts: Hosts, data: Path) -> None:
    hosts.push(data)
    for seed in (1, 2):
        (data / "model.bin").write_bytes(random.Random(seed).randbytes(30 * SMALL))
        hosts.push(data, rate=4e5, during=cut_off(hosts, 4))
    assert failures(hosts.push(data)) == {}
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names)


def test_a_folder_of_a_push_that_others_may_write_is_refused(hosts: Hosts, data: Path, tmp_path: Path) -> None:
    digest = module.Data(data, "data").digest
    planted = hosts.home("n5") / f"provision-data/.provision-push-{digest[:16]}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    (planted / "have").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("mine")
    found = failures(hosts.push(data))
    assert list(found) == ["n5"]
    assert "another user could write it" in found["n5"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_program_of_another_user_is_replaced_by_ours_even_if_it_is_the_same(hosts: Hosts, data: Path) -> None:
    planted = hosts.home("n2") / "shared/m.bin"
    planted.parent.mkdir()
    planted.write_bytes((data / "model.bin").read_bytes())
    os.chown(planted, 12345, 12345)
    with Progress() as shown, Session(hosts.inventory, shown) as session:
        made = Push(session, module.Data(data / "model.bin", "m.bin"), "shared/m.bin", program_on=hosts.names)
        made.run()
    assert failures(made) == {}
    assert (planted.stat().st_uid, planted.read_bytes()) == (os.geteuid(), (data / "model.bin").read_bytes())


def test_what_an_earlier_push_has_put_there_is_replaced_and_the_rest_stays(hosts: Hosts, data: Path) -> None:
    hosts.push(data)
    (data / "model.bin").write_bytes(random.Random(1).randbytes(30 * SMALL) + b"new")
    (hosts.home("n3") / "provision-data/data/notes").write_text("mine")
    made = hosts.push(data)
    assert failures(made) == {}
    assert tree(hosts.home("n1") / "provision-data/data") == tree(data)
    assert tree(hosts.home("n3") / "provision-data/data") == {**tree(data), "notes": (b"mine", False)}


def test_a_lost_login_is_tried_again_and_what_is_missing_is_named(hosts: Hosts, data: Path) -> None:
    (hosts.home("n1") / "flaky").touch()
    (hosts.home("n5") / ".provision-record.json").unlink()
    made = hosts.push(data)
    assert failures(made) == {"n5": "nothing is installed here yet: provision up n1,n2,n3,n4,n5"}
    assert not (hosts.home("n1") / "flaky").exists()


def test_two_pushes_to_one_place_both_end_well(hosts: Hosts, data: Path) -> None:
    others: list[Push] = []
    one = hosts.push(data, rate=2e6, during=when(lambda made: made.targets[1].have > 0, lambda: others.append(hosts.push(data))))
    assert (failures(one), [failures(each) for each in others]) == ({}, [{}])
    for name in hosts.names:
        assert tree(hosts.home(name) / "provision-data/data") == tree(data)
        assert list((hosts.home(name) / "provision-data").glob(".provision-push-*")) == []


def relay_at(home: Path, monkeypatch: pytest.MonkeyPatch, dest: str = "provision-data/d", run: str = "run") -> Any:
    script = load_script("relay.py")
    monkeypatch.setattr(script, "HOME", str(home))
    found = script.Relay({"dest": dest, "digest": "0" * 64, "sources": [], "patience": 1, "hosts": "", "run": run})
    found.manifest = SimpleNamespace(piece=SMALL)
    return found


def test_a_record_is_written_by_one_at_a_time(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    relays = [relay_at(hosts.home("n1"), monkeypatch) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda at: [relays[at].note({f"/{at}/{number}": ["1"]}, []) for number in range(10)], range(8)):
            pass
    assert len(json.loads(Path(relays[0].record_path).read_text())["files"]) == 80


def test_a_push_does_not_remove_what_another_has_locked(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (relay_at(hosts.home("n1"), monkeypatch, run=f"run-{number}") for number in (1, 2, 3))
    one.lock()
    assert one.is_waste
    fcntl.flock(one.journal, fcntl.LOCK_UN)  # as at its end
    two.lock()
    with pytest.raises(SystemExit):
        one.leave()
    journal = Path(two.state, "have")
    assert journal.exists()
    fcntl.flock(two.journal, fcntl.LOCK_UN)
    with pytest.raises(SystemExit):
        one.leave()
    assert journal.exists()
    fcntl.flock(one.journal, fcntl.LOCK_UN)
    fcntl.flock(two.journal, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(three.lock)
        while not three.read:
            time.sleep(0.01)
        two.is_waste = True
        with pytest.raises(SystemExit):
            two.leave()
        os.close(two.journal)
        waiting.result()
    assert journal.read_text() == three.order["run"]


def test_what_is_there_stays_known_among_the_latest(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = relay_at(hosts.home("n1"), monkeypatch)
    for number in range(20):
        relay.note({"/f": ["there", str(number)]}, [])
    assert relay.record["files"]["/f"].split() == ["there", "19", "18", "17", "16", "15", "14", "13"]


@pytest.mark.parametrize("dest", ["provision-data", "provision-data/.records/d", "{home}/provision-data/.records", "{home}"])
def test_data_never_gets_among_the_records(hosts: Hosts, dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = hosts.home("n1")
    with pytest.raises(ValueError, match="invalid path"):
        relay_at(home, monkeypatch, dest.replace("{home}", str(home)))


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
@pytest.mark.parametrize("megabytes", [1, 66])
def test_a_full_disk_stops_its_host_alone(hosts: Hosts, data: Path, megabytes: int) -> None:
    """At first, or in the middle."""
    place = hosts.home("n2") / "provision-data"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", place], check=True)
    try:

        def fill() -> None:
            with contextlib.suppress(OSError), (place / "others").open("wb") as file:
                file.write(bytes(megabytes << 20))

        made = hosts.push(data, rate=4e5, during=when(lambda made: made.targets[1].have > 2 * SMALL or made.targets[1].is_over, fill))
        assert list(failures(made)) == ["n2"]
        assert ("MiB are needed" if megabytes == 1 else "No space left on device") in failures(made)["n2"]
        assert tree(place / "data") == {}
    finally:
        subprocess.run(["umount", place], check=True)
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names if name != "n2")


@pytest.mark.parametrize(
    "files",
    [
        [["/etc/passwd", False, 0, ""]],
        [["d/../../x", False, 0, ""]],
        [["d//x", False, 0, ""]],
        [["d/x", False, 0, ""], ["e/x", False, 0, ""]],
        [["d/x", False, 0, ""], ["d/x", False, 0, ""]],
        [["d/x", False, 0, ""], ["d/x/y", False, 0, ""]],
        [["d/x\0", False, 0, ""]],
        [["..", False, 0, ""]],
        [["d/x", False, 9, ""]],
        [["d/x", False, 9, "0" * 128]],
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(files: list[list[Any]]) -> None:
    relay = load_script("relay.py")
    with pytest.raises(ValueError, match="invalid manifest"):
        relay.Manifest(zlib.compress(json.dumps({"piece": 10, "files": files}).encode()))


@pytest.mark.parametrize(
    "answer",
    [
        '{"want": [999]}',
        *(pytest.param(each, marks=pytest.mark.slow) for each in ('{"want": [-2]}', '{"have": -1}', '{"lost": 5}')),
        "[]",
        '{"want": [0, 1, 2, 3, 4, 5]}\n' * 9,
    ],
)
def test_what_a_host_says_is_checked(hosts: Hosts, data: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own push fails, the others' does not."""
    monkeypatch.setattr(module, "STALL_S", 3.0)
    (hosts.homes.parent / "bin/ssh").write_text(
        (hosts.homes.parent / "bin/ssh")
        .read_text()
        .replace("echo Welcome", "[ $host != n2 ] || case $command in *' take'*) command=\"sh -c 'cat \\$HOME/says; sleep 9'\";; esac")
    )
    (hosts.home("n2") / "says").write_text("".join(f"{module.ssh.ANSWER} {line}\n" for line in answer.splitlines()))
    made = hosts.push(data)
    assert list(failures(made)) == ["n2"]
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names if name != "n2")


def test_no_host_keeps_a_push_alive_for_ever(hosts: Hosts, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter(range(1 << 20)).__next__))
    with Progress() as shown, Session(hosts.inventory, shown) as session:
        made = Push(session, Data(data, "data"), "x")
        for read in range(5000):
            made._hear(made.targets[0], json.dumps({"read": read, "have": 2 * read}))
        grew = made.targets[0].grew
        made._hear(made.targets[0], json.dumps({"read": 1 << 50, "have": 1 << 50}))
        assert made.targets[0].grew < grew + 100
        grew = made.targets[0].grew
        made._hear(made.targets[0], json.dumps({"read": 1 << 51, "have": 1 << 51}))
        assert made.targets[0].grew == grew
        for _ in range(4):
            made._hear(made.targets[1], json.dumps({"lost": "again"}))
        made._hear(made.targets[2], json.dumps({"error": "x" * 9999}))
    assert (made.targets[1].failed, made.targets[2].failed) == ("invalid answer", "x" * 500)


def test_old_pythons_can_read_what_runs_on_hosts() -> None:
    ast.parse(resources.script("relay.py"), feature_version=(3, 8))


def test_hosts_with_one_home_take_it_once(hosts: Hosts, data: Path) -> None:
    for name in ("n2", "n4"):
        shutil.rmtree(hosts.home(name))
        hosts.home(name).symlink_to("n1")
    made = hosts.push(data)
    assert failures(made) == {}
    assert all(tree(hosts.home(name) / "provision-data/data") == tree(data) for name in hosts.names)
    assert sum(each.came or 0 for each in made.targets) < 4 * made._data.bytes


def test_a_rate_is_kept(hosts: Hosts, data: Path) -> None:
    began = time.monotonic()
    made = hosts.push(data, rate=5e5)
    assert failures(made) == {}
    assert time.monotonic() - began >= made._data.bytes / 5e5 * 0.95


def test_links_are_followed_within_the_folder_alone(tmp_path: Path, data: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (data / "inside").symlink_to("run.sh")
    (data / "outside").symlink_to(tmp_path / "secret")
    (data / "folder").symlink_to("train")
    (data / "gone").symlink_to("nowhere")
    os.mkfifo(data / "pipe")
    found = Data(data, "data")
    names = {path for path, *_ in json.loads(zlib.decompress(found.manifest))["files"]}
    assert names == {"data/empty", "data/inside", "data/model.bin", "data/run.sh", "data/train/a b/1.txt"}
    assert [line.split()[2].rpartition("/")[2] for line in found.left_out] == ["folder", "gone", "outside", "pipe"]


def test_a_snapshot_of_a_model_is_pushed_with_the_files_that_it_links_to(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs/abc").write_text("weights")
    (model / "snapshots/1").mkdir(parents=True)
    (model / "snapshots/1/model.safetensors").symlink_to("../../blobs/abc")
    found = Data(model / "snapshots/1", "m")
    assert (found.files, found.left_out, found.read(0)) == (1, [], b"weights")


def test_data_without_a_file_or_that_cannot_be_read_is_refused(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file in it"):
        Data(tmp_path / "none", "none")
    found = when(lambda made: made.targets[0].have > 3 * SMALL, lambda: (data / "model.bin").write_bytes(bytes(31 * SMALL)))
    with pytest.raises(ProvisionError, match="has changed while it was pushed"):
        hosts.push(data, rate=4e5, during=found)
    assert hosts.end_soon()


def provision(hosts: Hosts, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "provision", "push", ",".join(hosts.names), *map(str, words)]


def test_the_command_says_what_it_did(hosts: Hosts, data: Path) -> None:
    done = subprocess.run(provision(hosts, data), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"pushed 4 files, 1 MiB to 5 hosts in [\d.]+ s: ~/provision-data/data\n", done.stdout)
    (hosts.home("n4") / "down").touch()
    done = subprocess.run(provision(hosts, data, "--json"), capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"], [each["host"] for each in document["hosts"] if each["problem"]]) == (1, False, ["n4"])
    assert "n4: ssh: connect to host n4 port 22: No route to host" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "5"],
        ["--rate", "1kB/s"],
        ["--to", "~bob/x"],
        ["--to", "/"],
        ["--to", "~"],
        ["--to", "~/../x"],
        ["--to", "~/provision-data/.records"],
        ["--to", "~/provision-data"],
        ["nowhere"],
        ["/"],
    ],
)
def test_wrong_usage_is_refused(hosts: Hosts, data: Path, words: list[str]) -> None:
    done = subprocess.run(provision(hosts, *([data, *words] if words[1:] else words)), capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert list(hosts.homes.rglob("*provision-*/*")) == []


def test_ctrl_c_ends_all_and_says_how_to_go_on(hosts: Hosts, data: Path) -> None:
    process = subprocess.Popen(provision(hosts, data, "--rate", "1MB/s"), stderr=subprocess.PIPE, text=True)
    while len(hosts.processes()) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; nothing of it is left running\n  → the same command goes on where it stopped" in said
    assert hosts.end_soon()
    assert tree(hosts.home("n1") / "provision-data/data") == {}


def removed(home: Path, dry_run: bool = False) -> dict[str, Any]:
    """What `provision remove` does there, with a record as the toolkit has it."""
    record = {"schema": 1, "files": {}, "claimed": [], "packages": {"added": [], "before": None}, "held": [], "removed": []}
    (home / ".provision-record.json").write_text(json.dumps(record))
    order = removal_order(home.with_name("lock"), "~/.provision-record.json", dry_run=dry_run)
    environment = {**os.environ, "HOME": str(home), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", resources.script("remove.py")]
    done = subprocess.run(command, input=order, capture_output=True, text=True, check=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[2])
    return answer


def test_remove_leaves_nothing_of_it_but_what_was_changed(hosts: Hosts, data: Path) -> None:
    hosts.push(data)
    hosts.push(data / "model.bin", to="models/new/m.bin")
    home = hosts.home("n1")
    listed = removed(home, dry_run=True)
    assert tree(home / "provision-data/data") == tree(data)
    assert removed(home) == listed
    assert listed["left"] == []
    assert {"4 files in ~/provision-data/data", "~/models/new/m.bin"} <= {*listed["removed"]}
    assert sorted(path.name for path in home.iterdir()) == [".ssh"]
    changed = hosts.home("n2") / "provision-data/data/model.bin"
    changed.write_text("mine")
    (hosts.home("n2") / "provision-data/data/train/mine").write_text("mine")
    answer = removed(hosts.home("n2"))
    assert {"what": str(changed), "why": "it was changed since provision wrote it"} in answer["left"]
    assert set(tree(hosts.home("n2"))) == {"provision-data/data/model.bin", "provision-data/data/train/mine"}


def test_remove_takes_an_interrupted_push_and_leaves_what_was_there(hosts: Hosts, data: Path) -> None:
    home = hosts.home("n5")
    (home / "provision-data/data").mkdir(parents=True)
    shutil.copy(data / "model.bin", home / "provision-data/data")  # the user's own
    hosts.push(data, rate=4e5, during=cut_off(hosts, 3))
    assert removed(home)["left"] == []
    assert {*tree(home)} == {"provision-data/data/model.bin"}
    hosts.push(data)
    assert removed(home)["left"] == []
    assert {*tree(home)} == {"provision-data/data/model.bin"}


def test_of_many_files_that_were_changed_remove_names_the_folder(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / f"many/{number}").write_text("1")
    hosts.push(tmp_path / "many")
    for number in range(25):
        (hosts.home("n1") / f"provision-data/many/{number}").write_text("mine")
    answer = removed(hosts.home("n1"))
    assert "5 files in ~/provision-data/many" in answer["removed"]
    assert {"what": "25 files in ~/provision-data/many", "why": "they were changed since"} in answer["left"]
    assert len(tree(hosts.home("n1") / "provision-data/many")) == 25


def test_a_large_program_is_handed_on_and_nothing_of_an_earlier_run_is_left(
    hosts: Hosts, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_files, "MAX_NEIGHBOURS", SMALL)
    pushes, run = list[Push](), Push.run
    monkeypatch.setattr(Push, "run", lambda made: (pushes.append(made), run(made)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "ignored.py").write_text("")
    (tmp_path / ".provisionignore").write_text("ignored.py\n")
    (data / "none").mkdir()
    (data / "link").symlink_to("run.sh")

    def copied(names: list[str]) -> Path:
        with Progress() as shown, Session(hosts.inventory, shown) as session:
            archive = program_files.pack(["python", "train.py"], [data])
            program_files.copy(session, archive, dict.fromkeys(names, archive.unpack), on_hosts=True)
        return hosts.home("n2") / archive.folder

    folder = copied(hosts.names)
    assert {"train.py", "helper.py", "data"} == {path.name for path in folder.iterdir()}
    assert tree(folder / "data") == tree(data)
    assert (os.readlink(folder / "data/link"), (folder / "data/none").is_dir()) == ("run.sh", True)
    assert [each.served > 0 for each in pushes[0].targets] == [True, False, False, False, False]
    assert [path.stat().st_mode & 0o077 for path in (folder, folder / "train.py")] == [0, 0]
    (folder / "checkpoint").write_text("mine")
    (folder / "helper.py").write_text("mine")
    (folder / "data/run.sh").write_text("mine")
    (tmp_path / "helper.py").unlink()
    (data / "model.bin").rename(data / "new.bin")
    copied(["n2", "n3"])
    assert [each.host.name for each in pushes[1].targets] == ["n2", "n3"]
    assert tree(folder / "data") == tree(data)
    assert {"train.py", "helper.py", "checkpoint", "data"} == {path.name for path in folder.iterdir()}  # as it is, helper.py is the user's
    answer = removed(hosts.home("n2"))
    assert answer["removed"][0] == f"5 files in ~/{folder.relative_to(hosts.home('n2'))}"
    assert {*tree(folder)} == {"checkpoint", "helper.py"}
    (hosts.home("n4") / ".ssh/provision_config").unlink()
    copied(["n4", "n5"])
    assert len(pushes) == 2  # they cannot hand it on
    assert tree(hosts.home("n4") / f"provision-run/{folder.name}/data").items() > tree(data).items()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_kills(hosts: Hosts, data: Path, seed: int) -> None:
    """One or two hosts, each at any moment, and never the same moment twice."""
    chance = random.Random(1000 + seed)
    victims = {name: chance.uniform(0, 1) for name in chance.sample(hosts.names, chance.choice((1, 1, 2)))}

    def disturb(made: Push) -> None:
        for name, part in sorted(victims.items(), key=lambda each: each[1]):
            target = made.targets[hosts.names.index(name)]
            when(
                lambda made, target=target, part=part: target.have >= part * made._data.bytes or target.is_over,
                lambda name=name: kill(hosts, name),
            )(made)

    made = hosts.push(data, rate=2e6, during=disturb)
    assert {*failures(made)} <= {*victims}
    for name in {*hosts.names} - {*failures(made)}:
        assert tree(hosts.home(name) / "provision-data/data") == tree(data)
    assert hosts.end_soon()
