"""The smoke job's data, obtained once, on the controller: MNIST, or real digits that stand in for it where MNIST cannot be reached.

Everything that enters the cache has passed a size and SHA-256 check, is written under a name of its own and renamed into place, and is
checked again whenever it is used: a half-written or damaged file is never handed on, and two controllers at once do not meet.
This module must never import torch or numpy, and never let a rank download anything.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import hashlib
import io
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from provision import catalog, downloads
from provision.downloads import Unavailable
from provision.errors import ProvisionError, UsageError

Say = Callable[[str], None]
Source = Literal["auto", "mnist", "digits"]

# The stand-in's wheel is about 10 MB; pip's own retries and time-outs happen inside this.
PIP_SECONDS = 300.0

IMAGE_SIDE = 28
DIGIT_SIDE = 8  # side of a scikit-learn digit
DIGIT_MAX = 16  # its darkest value
DRAWN_SIDE = 20  # MNIST itself draws its digits in a box of 20×20, centred in 28×28
TEST_EVERY = 5  # every fifth image of a class is a test image
CLASSES = 10

FILE_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class DataFile:
    """One file to push to the hosts: its name there, where it lies here, its size and SHA-256."""

    name: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """Four checked IDX files and how the smoke job trains on them.

    ``epochs`` is for few ranks, see :meth:`epochs_for`; ``bar_percent`` is the test accuracy that is reached then.
    ``notes`` says, one sentence each, what was tried before this data set was taken; it is empty when nothing went wrong.
    """

    key: Literal["mnist", "digits", "own"]
    name: str
    folder: Path
    files: tuple[DataFile, ...]
    train_images: int
    test_images: int
    bar_percent: float
    epochs: int
    batch_size: int
    learning_rate: float
    max_learning_rate: float
    min_steps: int
    notes: tuple[str, ...] = ()

    @property
    def stands_in(self) -> bool:
        """Whether this is not MNIST itself."""
        return self.key != "mnist"

    def epochs_for(self, ranks: int) -> int:
        """Epochs after which ``ranks`` ranks must have reached ``bar_percent``: an epoch of many ranks has few steps."""
        share = -(-self.train_images // ranks)
        steps = -(-share // self.batch_size)
        return max(self.epochs, -(-self.min_steps // steps))

    def bar_for(self, ranks: int, epochs: int | None = None) -> float:
        """The test accuracy in percent to judge by; 0 for fewer ``epochs`` than the bar is meant for. None stands for epochs_for."""
        return self.bar_percent if epochs is None or epochs >= self.epochs_for(ranks) else 0.0

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that differ between data sets: a folder of this name on the hosts never mixes two of them."""
        return hashlib.sha256("".join(f"{file.name} {file.sha256}\n" for file in self.files).encode()).hexdigest()[:12]

    def flags(self, ranks: int, epochs: int | None = None) -> list[str]:
        """The training script's flags for this data set, without its folders."""
        bar = self.bar_for(ranks, epochs)
        epochs = self.epochs_for(ranks) if epochs is None else epochs
        return [
            f"--dataset-name={self.name}", f"--epochs={epochs}", f"--bar={bar:g}",
            f"--batch-size={self.batch_size}", f"--lr={self.learning_rate:g}", f"--max-lr={self.max_learning_rate:g}",
        ]  # fmt: skip


@dataclass(frozen=True)
class Idx:
    """The content of an IDX file of unsigned bytes: ``shape`` is (n,) or (n, rows, columns), ``data`` the values in row order."""

    shape: tuple[int, ...]
    data: bytes


def obtain(
    cache: Path,
    *,
    mirrors: Sequence[str] | None = None,
    say: Say = lambda _line: None,
    source: Source = "auto",
    data_dir: Path | None = None,
) -> Dataset:
    """The data set to train on, from ``data_dir``, the cache, a mirror of MNIST or, with ``source="auto"``, the stand-in.

    Args:
        cache: folder for downloads; made when missing.
        mirrors: base URLs, tried in order; None takes the catalogue's.
        say: called with one line per thing worth telling.
        source: ``mnist`` and ``digits`` take that one or fail; ``auto`` takes MNIST where it can be had, else the digits.
        data_dir: a folder with the four IDX files, ``.gz`` or not; nothing is downloaded then.

    Raises:
        UsageError: ``data_dir`` does not hold four good files, or the catalogue cannot be read.
        ProvisionError: the data cannot be had; says everything that was tried.
    """
    if data_dir is not None:
        return _from_folder(data_dir)
    try:
        tried: list[str] = []
        if source in ("auto", "mnist"):
            if found := _mnist(cache / "mnist", catalog.load("mnist")["mnist"]["mirrors"] if mirrors is None else mirrors, say, tried):
                return found
            if source == "mnist":
                raise _nothing_worked("MNIST cannot be had", tried)
            say("MNIST cannot be reached; taking the handwritten digits of scikit-learn in its place")
        notes = tuple(tried)
        if found := _digits(cache, say, tried, notes):
            return found
    except OSError as error:
        raise ProvisionError(
            f"the cache of data sets cannot be used: {error}", where=str(cache), todo="free or mend this folder, or set PROVISION_HOME"
        ) from error
    what = (
        "neither MNIST nor the digits that stand in for it can be had" if source == "auto" else "the digits of scikit-learn cannot be had"
    )
    raise _nothing_worked(what, tried)


def _nothing_worked(what: str, tried: Sequence[str]) -> ProvisionError:
    return ProvisionError(
        "\n    ".join([f"{what}; tried:", *tried]),
        where="smoke, data",
        todo="copy the four IDX files of MNIST (gzipped or not) into a folder of this machine and give it as --data DIR",
    )


# ---------------------------------------------------------------------------------------------------------------- MNIST


def _mnist(folder: Path, mirrors: Sequence[str], say: Say, tried: list[str]) -> Dataset | None:
    """MNIST from the cache or the mirrors; None, and the reasons in ``tried``, when one file cannot be had from any of them."""
    known = catalog.load("mnist")["mnist"]
    folder.mkdir(parents=True, exist_ok=True)
    downloads.sweep(folder)
    files = []
    usable = list(mirrors)
    for name, facts in known["files"].items():
        target = folder / name
        if not _cached(target, facts["bytes"], facts["sha256"], say):
            content = None
            for base in list(usable):
                url = base.rstrip("/") + "/" + name
                try:
                    content = downloads.read(url, size=facts["bytes"], sha256=facts["sha256"])
                except Unavailable as error:
                    tried.append(f"{url}: {error}")
                    say(f"{url}: {error}")
                    if error.whole_server:
                        usable.remove(base)
                    continue
                say(f"fetched {url} ({len(content):,} bytes, SHA-256 as expected)")
                break
            if content is None:
                if not mirrors:
                    tried.append("no mirror of MNIST is given")
                return None
            downloads.store(target, content)
        files.append(DataFile(name, target, facts["bytes"], facts["sha256"]))
    return _dataset("mnist", known["name"], folder, files, known["training"], tuple(tried))


def _cached(path: Path, size: int, sha256: str, say: Say) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if len(content) == size and hashlib.sha256(content).hexdigest() == sha256:
        return True
    say(f"{path}: damaged in the cache (size or SHA-256 differs); it is fetched again")
    return False


# --------------------------------------------------------------------------------------------------------------- digits


def _digits(cache: Path, say: Say, tried: list[str], notes: tuple[str, ...]) -> Dataset | None:
    """The stand-in from the cache or a fresh wheel; None, and the reason in ``tried``, when the wheel cannot be had."""
    known = catalog.load("mnist")["digits"]
    table = cache / "digits" / "digits.csv.gz"
    table.parent.mkdir(parents=True, exist_ok=True)
    downloads.sweep(table.parent)
    content = table.read_bytes() if table.is_file() else b""
    if hashlib.sha256(content).hexdigest() != known["member_sha256"]:
        if content:
            say(f"{table}: damaged in the cache (SHA-256 differs); it is fetched again")
        wheel = f"{known['package']} {known['version']} (wheel, through pip)"
        try:
            content = _digits_from_wheel(known)
        except Unavailable as error:
            tried.append(f"{wheel}: {error}")
            return None
        say(f"fetched the digits out of {wheel}, SHA-256 as expected")
        downloads.store(table, content)
    files = []
    for name, raw in digits_as_idx(gzip.decompress(content).decode("ascii")).items():
        target = table.parent / f"{name}.gz"
        packed = _packed(target, raw)
        files.append(DataFile(target.name, target, len(packed), hashlib.sha256(packed).hexdigest()))
    return _dataset("digits", known["name"], table.parent, files, known["training"], notes)


def _packed(target: Path, raw: bytes) -> bytes:
    """The bytes of ``target``, written when it does not hold ``raw`` yet. What another Python's zlib packed otherwise is as good."""
    with contextlib.suppress(OSError, EOFError, zlib.error):
        packed = target.read_bytes()
        if gzip.decompress(packed) == raw:
            return packed
    packed = pack(raw)
    downloads.store(target, packed)
    return packed


def _digits_from_wheel(known: Mapping[str, Any]) -> bytes:
    """The table of digits out of the pinned wheel. Every platform's wheel holds it, so one is named, whatever this Python is."""
    wheel = known["wheel"]
    with tempfile.TemporaryDirectory(prefix="provision-digits-") as folder:
        command = [
            *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input",
            "--quiet", "--progress-bar=off", "--retries=1", f"--python-version={wheel['python_version']}",
            f"--implementation={wheel['implementation']}", *(f"--platform={name}" for name in wheel["platforms"]),
            f"--dest={folder}", f"{known['package']}=={known['version']}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PIP_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"pip did not finish in {PIP_SECONDS:.0f} s") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise Unavailable(errors[-1].strip() if errors else f"pip ended with {done.returncode} and said nothing")
        found = sorted(Path(folder).glob("*.whl"))
        if not found:
            raise Unavailable("pip left no wheel")
        try:
            with zipfile.ZipFile(found[0]) as archive:
                content = archive.read(known["member"])
        except (zipfile.BadZipFile, KeyError) as error:
            raise Unavailable(f"{found[0].name} does not hold {known['member']}: {error}") from error
    if (digest := hashlib.sha256(content).hexdigest()) != known["member_sha256"]:
        raise Unavailable(f"{known['member']} is not the expected one: SHA-256 {digest[:12]}…, expected {known['member_sha256'][:12]}…")
    return content


def _pip() -> list[str]:
    """pip of this Python, which knows the user's index; a virtual environment made without pip falls back to one on PATH."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    for name in ("pip3", "pip"):
        if program := shutil.which(name):
            return [program]
    raise Unavailable("no pip in this Python or on PATH")


def digits_as_idx(table: str) -> dict[str, bytes]:
    """scikit-learn's table (per line 64 values of 0 to 16, then the label) as MNIST's four files: name → IDX content."""
    images: dict[str, list[bytes]] = {"train": [], "t10k": []}
    labels: dict[str, list[int]] = {"train": [], "t10k": []}
    seen: Counter[int] = Counter()
    for row in csv.reader(io.StringIO(table)):
        *pixels, label = (int(float(cell)) for cell in row)
        seen[label] += 1
        part = "t10k" if seen[label] % TEST_EVERY == 0 else "train"
        images[part].append(enlarge(pixels))
        labels[part].append(label)
    files = {}
    for part in ("train", "t10k"):
        files[f"{part}-images-idx3-ubyte"] = write_idx((len(images[part]), IMAGE_SIDE, IMAGE_SIDE), b"".join(images[part]))
        files[f"{part}-labels-idx1-ubyte"] = write_idx((len(labels[part]),), bytes(labels[part]))
    return files


@functools.cache
def _taps() -> tuple[tuple[int, int, int], ...]:
    """Per drawn pixel: left source pixel, right one, and the right one's weight in 1/(2·DRAWN_SIDE); centres aligned, edges repeated."""
    unit = 2 * DRAWN_SIDE
    taps = []
    for drawn in range(DRAWN_SIDE):
        at = min(max((2 * drawn + 1) * DIGIT_SIDE - DRAWN_SIDE, 0), (DIGIT_SIDE - 1) * unit)
        left, weight = divmod(at, unit)
        taps.append((left, min(left + 1, DIGIT_SIDE - 1), weight))
    return tuple(taps)


def enlarge(pixels: Sequence[int]) -> bytes:
    """An 8×8 digit of values 0 to 16 as a 28×28 image of values 0 to 255: bilinear to 20×20, centred. Integers only, so that the
    same bytes come out on every machine."""
    unit = 2 * DRAWN_SIDE
    whole = unit * unit * DIGIT_MAX
    rows = [pixels[start : start + DIGIT_SIDE] for start in range(0, DIGIT_SIDE * DIGIT_SIDE, DIGIT_SIDE)]
    wide = [[row[left] * (unit - weight) + row[right] * weight for left, right, weight in _taps()] for row in rows]
    margin = (IMAGE_SIDE - DRAWN_SIDE) // 2
    side = bytes(margin)
    edge = bytes(margin * IMAGE_SIDE)
    drawn = b""
    for top, bottom, weight in _taps():
        mixed = (up * (unit - weight) + down * weight for up, down in zip(wide[top], wide[bottom], strict=True))
        drawn += side + bytes((255 * value + whole // 2) // whole for value in mixed) + side
    return edge + drawn + edge


# ------------------------------------------------------------------------------------------------------------- IDX files


def write_idx(shape: Sequence[int], data: bytes) -> bytes:
    """An IDX file of unsigned bytes: two zero bytes, type 8, number of dimensions, the dimensions as big-endian uint32, the values."""
    count = 1
    for length in shape:
        count *= length
    if count != len(data):
        raise ValueError(f"shape {tuple(shape)} needs {count} values, got {len(data)}")
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + data


def read_idx(content: bytes, dimensions: int) -> Idx:
    """The opposite of :func:`write_idx`; ValueError, with the reason, unless every byte is as it must be."""
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise ValueError(f"truncated: {len(content)} bytes, the header alone has {head}")
    if content[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"not an IDX file of unsigned bytes with {dimensions} dimension(s): starts with {content[:4].hex()}")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    count = 1
    for length in shape:
        count *= length
    if len(content) - head != count:
        kind = "truncated" if len(content) - head < count else "too long"
        raise ValueError(f"{kind}: header says {count:,} values for shape {shape}, the file has {len(content) - head:,}")
    return Idx(shape, content[head:])


def pack(raw: bytes) -> bytes:
    """gzip without name or time, so that the same content gives the same file."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0) as packed:
        packed.write(raw)
    return out.getvalue()


def _unpack(path: Path, content: bytes) -> bytes:
    return gzip.decompress(content) if path.suffix == ".gz" else content


# ------------------------------------------------------------------------------------------------------ a given folder


def _from_folder(folder: Path) -> Dataset:
    """The four files of ``folder``, each ``.gz`` or not; MNIST is recognised by its checksums, anything else is called the user's own."""
    known = catalog.load("mnist")["mnist"]
    files: list[DataFile] = []
    raw: dict[str, str] = {}
    wrong: list[str] = []
    for name in FILE_NAMES:
        candidates = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
        if not candidates:
            wrong.append(f"{folder / name}.gz: missing (without .gz would do as well)")
            continue
        path = candidates[0]
        try:
            content = path.read_bytes()
            raw[name] = hashlib.sha256(_unpack(path, content)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            wrong.append(f"{path}: cannot be read: {error}")
            continue
        files.append(DataFile(path.name, path, len(content), hashlib.sha256(content).hexdigest()))
    if not wrong:
        wrong = list(_faults(files))
    if wrong:
        raise UsageError(
            "\n    ".join(["this folder does not hold a usable data set:", *wrong]),
            where=str(folder),
            todo="put MNIST's four files there (train- and t10k-, images and labels, gzipped or not), or leave --data away",
        )
    if all(raw[name] == known["files"][f"{name}.gz"]["raw_sha256"] for name in FILE_NAMES):
        return _dataset("mnist", known["name"], folder, files, known["training"], ())
    name = f"own data set ({folder}; not MNIST, its checksums differ)"
    return _dataset("own", name, folder, files, known["training"], ())


def _faults(files: Sequence[DataFile]) -> Iterator[str]:
    """What is wrong with the content of four IDX files, in the order of FILE_NAMES."""
    for images, labels in (files[0:2], files[2:4]):
        counts = []
        for file, dimensions in ((images, 3), (labels, 1)):
            try:
                idx = read_idx(_unpack(file.path, file.path.read_bytes()), dimensions)
            except ValueError as error:
                yield f"{file.path}: {error}"
                continue
            counts.append(idx.shape[0])
            if idx.shape[0] == 0:
                yield f"{file.path}: holds nothing"
            if dimensions == 3 and idx.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE):
                yield f"{file.path}: images of {idx.shape[1]}×{idx.shape[2]}, must be {IMAGE_SIDE}×{IMAGE_SIDE}"
            if dimensions == 1 and idx.data and max(idx.data) >= CLASSES:
                yield f"{file.path}: a label of {max(idx.data)}, must be 0 to {CLASSES - 1}"
        if len(counts) == 2 and counts[0] != counts[1]:
            yield f"{images.path}: {counts[0]:,} images, but {counts[1]:,} labels in {labels.name}"


def _dataset(
    key: Literal["mnist", "digits", "own"],
    name: str,
    folder: Path,
    files: Sequence[DataFile],
    training: Mapping[str, Any],
    notes: tuple[str, ...],
) -> Dataset:
    counts = {}
    for file in files:
        if "labels" in file.name:
            counts[file.name.split("-")[0]] = read_idx(_unpack(file.path, file.path.read_bytes()), 1).shape[0]
    return Dataset(
        key=key,
        name=name,
        folder=folder,
        files=tuple(files),
        train_images=counts["train"],
        test_images=counts["t10k"],
        bar_percent=float(training["bar_percent"]),
        epochs=int(training["epochs"]),
        batch_size=int(training["batch_size"]),
        learning_rate=float(training["learning_rate"]),
        max_learning_rate=float(training["max_learning_rate"]),
        min_steps=int(training["min_steps"]),
        notes=notes,
    )
