"""The smoke job's data: what a user gets from good, bad and absent mirrors, a damaged cache, a folder of their own, the shipped digits."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from changed_catalogue import change

from provision import catalog
from provision.base import downloads
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.install.bundle import archive, gather
from provision.launch.smoke import mnist
from provision.plan import lock
from provision.plan.options import Options, SmokeOptions


def idx(shape: tuple[int, ...], data: bytes) -> bytes:
    """An IDX file of unsigned bytes."""
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + data


def pack(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)


# A MNIST of 20 training and 10 test images: the same code on small files.
TINY = {
    "train-images-idx3-ubyte.gz": idx((20, 28, 28), bytes(i % 251 for i in range(20 * 784))),
    "train-labels-idx1-ubyte.gz": idx((20,), bytes(i % 10 for i in range(20))),
    "t10k-images-idx3-ubyte.gz": idx((10, 28, 28), bytes(i % 241 for i in range(10 * 784))),
    "t10k-labels-idx1-ubyte.gz": idx((10,), bytes(range(10))),
}
SERVED = {name: pack(raw) for name, raw in TINY.items()}
TRAINING = {"epochs": 1, "bar_percent": 92, "batch_size": 64, "learning_rate": 0.01, "max_learning_rate": 0.16, "min_steps": 1}


class Mirror(BaseHTTPRequestHandler):
    """The first part of the path says how this mirror behaves; the last names the file."""

    requests: list[str] = []  # noqa: RUF012 (one list for all, emptied by the fixture)

    def do_GET(self) -> None:
        _, how, name = self.path.split("/")
        self.requests.append(f"{how}/{name}")
        content = SERVED[name]
        if how.isdigit():
            self.send_error(int(how))
            return
        if how == "silent":
            time.sleep(30)
            return
        if how == "wrong" or (how == "wrong-images" and "images" in name):
            content = content[:-1] + bytes([content[-1] ^ 1])
        if how == "short":
            content = content[:-5]
        if how == "page":
            content = b"<html>please log in to this network</html>" * 1000
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if how == "truncated":
                self.wfile.write(content[: len(content) // 2])
            elif how == "trickle":
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            else:
                self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    Mirror.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def small_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        name: {
            "bytes": len(packed),
            "sha256": hashlib.sha256(packed).hexdigest(),
            "raw_sha256": hashlib.sha256(TINY[name]).hexdigest(),
        }
        for name, packed in SERVED.items()
    }
    change(monkeypatch, "mnist", {"mnist": {"files": files, "training": TRAINING}})
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.name.endswith(".part")]


# ------------------------------------------------------------------------------------------------------------- catalogue


def test_the_catalogue_is_complete() -> None:
    real = yaml.safe_load((Path(catalog.__file__).with_name("mnist.yaml")).read_text(encoding="utf-8"))
    assert real["schema"] == 1
    assert list(real["mnist"]["files"]) == [f"{name}.gz" for name in mnist.FILE_NAMES]
    for facts in real["mnist"]["files"].values():
        assert facts["bytes"] > 0
        assert all(len(facts[key]) == 64 and int(facts[key], 16) for key in ("sha256", "raw_sha256"))
    assert all(url.startswith(("http://", "https://")) and url.endswith("/") for url in real["mnist"]["mirrors"])
    assert real["digits"]["name"] == "digits (UCI, 1,797 images of 8×8, in place of MNIST)"
    for part in ("mnist", "digits"):
        assert set(real[part]["training"]) == set(TRAINING)
    assert real["mnist"]["training"]["epochs"] == 1
    assert real["mnist"]["training"]["bar_percent"] == 92


# --------------------------------------------------------------------------------------------------------------- mirrors


def test_a_good_mirror_gives_mnist_and_later_mirrors_are_not_asked(site: str, tmp_path: Path) -> None:
    said: list[str] = []
    got = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/", f"{site}/404/"], say=said.append)
    assert (got.key, got.name) == ("mnist", "MNIST")
    assert (got.train_images, got.test_images, got.training.epochs, got.training.bar_percent) == (20, 10, 1, 92.0)
    assert {file.name: file.path.read_bytes() for file in got.files} == SERVED
    assert all(file.sha256 == hashlib.sha256(file.path.read_bytes()).hexdigest() for file in got.files)
    assert Mirror.requests == [f"good/{name}" for name in SERVED]
    assert len(said) == 4
    assert left_over(tmp_path) == []


def test_a_second_time_nothing_is_asked_of_the_network(site: str, tmp_path: Path) -> None:
    first = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"])
    Mirror.requests.clear()
    assert mnist.obtain(tmp_path, OURS, mirrors=["http://127.0.0.1:9/nobody/"]) == first
    assert Mirror.requests == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("404", "HTTP 404"),
        ("403", "HTTP 403"),
        ("503", "HTTP 503"),
        ("truncated", "truncated: "),
        ("short", "truncated: "),
        ("wrong", "wrong content: SHA-256"),
        ("page", "probably an error page"),
        ("silent", "silent for 2 s"),
        ("trickle", "bytes after"),
    ],
)
def test_a_bad_mirror_is_named_with_its_reason_and_the_next_one_serves(
    how: str, reason: str, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silent":
        monkeypatch.setattr(downloads, "SILENCE_SECONDS", 2.0)
    if how == "trickle":
        monkeypatch.setattr(downloads, "FILE_SECONDS", 2.0)
    said: list[str] = []
    got = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/{how}", f"{site}/good"], say=said.append)
    assert got.key == "mnist"
    assert {file.name: file.path.read_bytes() for file in got.files} == SERVED
    assert said[0].startswith(f"{site}/{how}/train-images-idx3-ubyte.gz: ")
    assert reason in said[0]
    assert Mirror.requests[:2] == [f"{how}/train-images-idx3-ubyte.gz", "good/train-images-idx3-ubyte.gz"]
    assert left_over(tmp_path) == []


def test_mirrors_that_do_not_answer_are_asked_once_and_not_for_every_file(site: str, tmp_path: Path) -> None:
    said: list[str] = []
    mirrors = ["http://127.0.0.1:9/closed", "http://nobody.invalid/x", "file:///etc", f"{site}/good"]
    mnist.obtain(tmp_path, OURS, mirrors=mirrors, say=said.append)
    assert len(said) == 3 + len(SERVED)
    assert "Connection refused" in said[0]
    assert "not an http or https address" in said[2]


def test_one_bad_file_of_a_mirror_does_not_spoil_the_others(site: str, tmp_path: Path) -> None:
    mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/wrong-images", f"{site}/good"])
    assert Mirror.requests == [
        "wrong-images/train-images-idx3-ubyte.gz",
        "good/train-images-idx3-ubyte.gz",
        "wrong-images/train-labels-idx1-ubyte.gz",
        "wrong-images/t10k-images-idx3-ubyte.gz",
        "good/t10k-images-idx3-ubyte.gz",
        "wrong-images/t10k-labels-idx1-ubyte.gz",
    ]


def test_source_mnist_never_takes_the_digits_and_its_error_lists_every_mirror_and_what_to_do(site: str, tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="MNIST is unavailable") as caught:
        mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/404", f"{site}/wrong"], source="mnist")
    text = str(caught.value)
    assert f"{site}/404/train-images-idx3-ubyte.gz: HTTP 404 Not Found" in text
    assert f"{site}/wrong/train-images-idx3-ubyte.gz: wrong content" in text
    assert "--data DIR" in text
    assert caught.value.exit_code == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(ProvisionError, match="no mirror of MNIST is given"):
        mnist.obtain(tmp_path, OURS, mirrors=[], source="mnist")


# ----------------------------------------------------------------------------------------------------------------- cache


def test_bundle_has_the_data_for_a_controller_without_network(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "mnist", {"mnist": {"mirrors": [f"{site}/good/"]}})
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    key = gather.gather_data(tmp_path / "content/cache", Options(), lambda _line: None)
    listing = {"hosts": {}, "lock": lock.Lock({}, {}).as_dict(), "data": key, "supplies": {}}
    archive.pack(tmp_path / "content", listing, tmp_path / "hosts.bundle")
    change(monkeypatch, "mnist", {"mnist": {"mirrors": [f"{site}/404/"]}})
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "another"))
    Mirror.requests.clear()
    options = archive.unpack(tmp_path / "hosts.bundle", tmp_path / "unpacked").complete_smoke(SmokeOptions())
    assert options.cache is not None
    found = mnist.obtain(options.cache, OURS, source=options.source)
    assert (found.key, found.train_images, Mirror.requests) == ("mnist", 20, [])


@pytest.mark.parametrize("damage", [b"", b"half", None], ids=["empty", "short", "one bit"])
def test_a_damaged_file_in_the_cache_is_found_and_fetched_again(damage: bytes | None, site: str, tmp_path: Path) -> None:
    got = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"])
    victim = got.files[2].path
    content = victim.read_bytes()
    victim.write_bytes(content[:40] + bytes([content[40] ^ 8]) + content[41:] if damage is None else damage)
    Mirror.requests.clear()
    said: list[str] = []
    assert mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"], say=said.append) == got
    assert victim.read_bytes() == content
    assert Mirror.requests == [f"good/{victim.name}"]
    assert said[0].startswith(f"{victim}: damaged in the cache")


def test_an_interrupt_while_writing_leaves_neither_a_file_nor_a_part(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"]).key == "mnist"


def test_old_partial_downloads_are_removed(site: str, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    old, young = folder / ".train.abc.part", folder / ".train.def.part"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"])
    assert left_over(tmp_path) == [young.name]


def test_eight_controllers_at_once_all_get_good_files(site: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good/"]), range(8)))
    assert all(result == results[0] for result in results)
    assert {file.name: file.path.read_bytes() for file in results[0].files} == SERVED
    assert left_over(tmp_path) == []


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "mnist").write_text("a file where a folder should be")
    with pytest.raises(ProvisionError, match="cache of data sets cannot be used") as caught:
        mnist.obtain(tmp_path, OURS)
    assert caught.value.where == str(tmp_path)


# -------------------------------------------------------------------------------------------------------- shipped digits


# Of the data set's files, unpacked, as they have been since its first version.
DIGITS_SHA256 = {
    "train-images-idx3-ubyte.gz": "d07a682ff547909d0e2be4a5add90f21e441f8fab1e869b9bd125b34795624b4",
    "train-labels-idx1-ubyte.gz": "997d8237ea59870b42f811eaad3e13914b38ab6a9a5e9ad6affdff0f34e7cfdc",
    "t10k-images-idx3-ubyte.gz": "1587a39b15da728d080acd8c4d95369aad44311dbd36df6f178a7dd684b242f6",
    "t10k-labels-idx1-ubyte.gz": "6ff66f7ef309c514bc431118f706c8249a50930d6256e9191340a2d710351535",
}


def unpacked_sha256(data: mnist.Dataset) -> dict[str, str]:
    return {file.name: hashlib.sha256(gzip.decompress(file.path.read_bytes())).hexdigest() for file in data.files}


def test_the_digits_need_no_network_and_are_the_same_on_every_machine(site: str, tmp_path: Path) -> None:
    said: list[str] = []
    got = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/good"], source="digits", say=said.append)
    assert (got.key, got.train_images, got.test_images, Mirror.requests, said) == ("digits", 1442, 355, [], [])
    assert unpacked_sha256(got) == DIGITS_SHA256
    assert all(file.sha256 == hashlib.sha256(file.path.read_bytes()).hexdigest() for file in got.files)
    assert mnist.obtain(tmp_path, OURS, source="digits") == got
    assert left_over(tmp_path) == []


def test_every_class_is_in_both_parts_in_the_same_proportion() -> None:
    labels = [gzip.decompress((mnist.DIGITS / f"{part}-labels-idx1-ubyte.gz").read_bytes()) for part in ("train", "t10k")]
    train, test = (Counter(raw[8:]) for raw in labels)
    for digit in range(10):
        assert test[digit] == (train[digit] + test[digit]) // 5


def test_digits_replace_an_unreachable_mnist(site: str, tmp_path: Path) -> None:
    said: list[str] = []
    got = mnist.obtain(tmp_path, OURS, mirrors=[f"{site}/503"], say=said.append)
    assert got.key == "digits"
    assert got.name == "digits (UCI, 1,797 images of 8×8, in place of MNIST)"
    assert said == [
        f"{site}/503/train-images-idx3-ubyte.gz: HTTP 503 Service Unavailable",
        "MNIST could not be fetched: training on the smaller set of handwritten digits that provision ships",
    ]


@pytest.mark.parametrize("content", [None, b"not gzip"], ids=["missing", "damaged"])
def test_an_installation_without_its_digits_is_refused(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = shutil.copytree(mnist.DIGITS, tmp_path / "digits")
    (shipped / "train-labels-idx1-ubyte.gz").unlink()
    if content is not None:
        (shipped / "train-labels-idx1-ubyte.gz").write_bytes(content)
    monkeypatch.setattr(mnist, "DIGITS", shipped)
    with pytest.raises(ProvisionError, match="missing or damaged") as caught:
        mnist.obtain(tmp_path / "cache", OURS, source="digits")
    assert caught.value.where == str(shipped)
    assert caught.value.hint is not None


@pytest.mark.parametrize("damage", [b"\x1f\x8b damaged", pack(TINY["train-images-idx3-ubyte.gz"])], ids=["damaged", "others"])
def test_an_earlier_versions_bundle_of_digits_is_read_and_only_shipped_digits_are_used(damage: bytes, tmp_path: Path) -> None:
    content = tmp_path / "content/cache/digits"
    content.mkdir(parents=True)
    (content / "digits.csv.gz").write_bytes(damage)  # earlier versions took it out of scikit-learn's wheel
    (content / "train-images-idx3-ubyte.gz").write_bytes(damage)
    listing = {"hosts": {}, "lock": lock.Lock({}, {}).as_dict(), "data": "digits", "supplies": {}}
    archive.pack(tmp_path / "content", listing, tmp_path / "hosts.bundle")
    options = archive.unpack(tmp_path / "hosts.bundle", tmp_path / "unpacked").complete_smoke(SmokeOptions())
    assert options.cache is not None
    assert unpacked_sha256(mnist.obtain(options.cache, OURS, source=options.source)) == DIGITS_SHA256


# -------------------------------------------------------------------------------------------------------- a given folder


def fill(folder: Path, *, packed: bool, files: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, raw in (files or TINY).items():
        (folder / (name if packed else name.removesuffix(".gz"))).write_bytes(gzip.compress(raw) if packed else raw)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_with_mnist_is_recognised_packed_by_whatever_or_not_at_all(packed: bool, tmp_path: Path) -> None:
    got = mnist.obtain(tmp_path / "cache", OURS, data_dir=fill(tmp_path / "own", packed=packed))
    assert (got.key, got.name, got.train_images) == ("mnist", "MNIST", 20)
    assert [file.name for file in got.files] == [name if packed else name.removesuffix(".gz") for name in TINY]
    assert not (tmp_path / "cache").exists()


def test_other_digits_in_the_right_form_are_taken_and_not_called_mnist(tmp_path: Path) -> None:
    other = {**TINY, "t10k-labels-idx1-ubyte.gz": idx((10,), bytes(10))}
    got = mnist.obtain(tmp_path, OURS, data_dir=fill(tmp_path / "own", packed=True, files=other))
    assert got.key == "own"
    assert str(tmp_path / "own") in got.name
    assert "not MNIST" in got.name


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train-images-idx3-ubyte.gz", None, "missing"),
        ("train-images-idx3-ubyte.gz", pack(TINY["train-images-idx3-ubyte.gz"])[:-9], "cannot be read"),
        ("train-images-idx3-ubyte.gz", b"<html>", "cannot be read"),
        ("train-images-idx3-ubyte.gz", pack(TINY["train-images-idx3-ubyte.gz"][:-1]), "truncated: header says 15,680 values"),
        ("train-images-idx3-ubyte.gz", pack(idx((20, 28, 27), bytes(20 * 28 * 27))), "images of 28×27, must be 28×28"),
        ("train-labels-idx1-ubyte.gz", pack(idx((19,), bytes(19))), "20 images, but 19 labels"),
        ("train-labels-idx1-ubyte.gz", pack(idx((20,), bytes([10] * 20))), "a label of 10, must be 0 to 9"),
        ("t10k-labels-idx1-ubyte.gz", pack(TINY["t10k-images-idx3-ubyte.gz"]), "not an IDX file"),
    ],
)
def test_a_folder_with_a_bad_file_is_refused_with_file_and_reason(name: str, content: bytes | None, reason: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "own", packed=True)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=reason) as caught:
        mnist.obtain(tmp_path, OURS, data_dir=folder)
    assert name in str(caught.value)
    assert caught.value.exit_code == 2


# --------------------------------------------------------------------------------------------------------- IDX and flags


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\0\0\x08\x01\0\0", "truncated"),
        (bytes.fromhex("00000d01 00000001 00"), "not an IDX file of unsigned bytes"),
        (bytes.fromhex("00010801 00000001 00"), "not an IDX file"),
        (bytes.fromhex("00000801 00000002 00"), "truncated"),
        (bytes.fromhex("00000801 00000001 0000"), "too long"),
        (bytes.fromhex("00000801 ffffffff 00"), "truncated"),
    ],
)
def test_a_bad_idx_file_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mnist._count(content, 1)


def data_set(key: Literal["mnist", "digits"], folder: Path, images: int) -> mnist.Dataset:
    return mnist.Dataset(key, key, folder, (), images, 10000, getattr(OURS.mnist(), key).training)


def test_many_ranks_train_longer_so_that_the_bar_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "mnist", {"mnist": {"training": {**TRAINING, "min_steps": 59}}})
    big, small = data_set("mnist", tmp_path, 60000), data_set("digits", tmp_path, 1442)
    assert [big.epochs_for(ranks) for ranks in (1, 4, 16, 17, 32, 1000)] == [1, 1, 1, 2, 2, 59]
    assert [small.epochs_for(ranks) for ranks in (1, 2, 4, 8, 16, 23, 5000)] == [16, 16, 16, 27, 40, 80, 80]


def test_the_bar_is_lifted_only_when_fewer_epochs_are_asked_for(tmp_path: Path) -> None:
    data = data_set("digits", tmp_path, 1442)
    assert {"--bar=90", "--epochs=16"} < {*data.flags(4)}
    assert "--bar=90" in data.flags(4, epochs=17)
    assert "--bar=0" in data.flags(4, epochs=15)


def test_the_digest_tells_data_sets_and_forms_apart(tmp_path: Path) -> None:
    packed = mnist.obtain(tmp_path, OURS, data_dir=fill(tmp_path / "packed", packed=True))
    again = mnist.obtain(tmp_path, OURS, data_dir=packed.folder)
    plain = mnist.obtain(tmp_path, OURS, data_dir=fill(tmp_path / "plain", packed=False))
    assert packed.digest == again.digest != plain.digest
    assert len(packed.digest) == 12
