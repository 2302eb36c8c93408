"""The smoke job's data, obtained once, on the controller: MNIST, or the handwritten digits that provision ships where MNIST is unreachable.

Everything that enters the cache has passed a size and SHA-256 check, is written under a name of its own and renamed into place, and is
checked again whenever it is used: a half-written or damaged file is never handed on, and two controllers at once do not meet.
This module must never import torch or numpy, and never let a rank download anything.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from provision import catalog
from provision.base import downloads, resources
from provision.base.downloads import Unavailable
from provision.base.errors import ProvisionError, UsageError
from provision.plan.options import DataSource

Say = Callable[[str], None]

IMAGE_SIDE = 28
DIGITS = Path(catalog.__file__).with_name("optdigits.tes.gz")
DIGIT_SIDE = 8  # side of a shipped digit
DIGIT_MAX = 16  # its darkest value
DRAWN_SIDE = 20  # MNIST itself draws its digits in a box of 20×20, centred in 28×28
TEST_EVERY = 5  # every fifth image of a class is a test image
CLASSES = 10

FILE_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UNREADABLE = (OSError, EOFError, zlib.error)  # what a file that is not there, or no good gzip file, raises


@dataclass(frozen=True)
class DataFile:
    """One file to push to the hosts: its name there, where it is here, its size and SHA-256."""

    name: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """Four checked IDX files and how the smoke job trains on them.

    ``epochs`` is for few ranks, see :meth:`epochs_for`; ``bar_percent`` is the test accuracy that is reached then.
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
    source: DataSource = "auto",
    data_dir: Path | None = None,
) -> Dataset:
    """The data set to train on, from ``data_dir``, the cache, a mirror of MNIST or, with ``source="auto"``, the shipped digits.

    Args:
        cache: folder for the data sets' files; made when missing.
        mirrors: base URLs, tried in order; None takes the catalogue's.
        say: called with one line per thing worth telling.
        source: ``mnist`` takes that one or fails; ``digits`` needs no network; ``auto`` takes MNIST where it is available, else the digits.
        data_dir: a folder with the four IDX files, ``.gz`` or not; nothing is downloaded then.

    Raises:
        UsageError: ``data_dir`` does not hold four good files, or the catalogue cannot be read.
        ProvisionError: the data are unavailable; says everything that was tried.
    """
    if data_dir is not None:
        return _from_folder(data_dir)
    try:
        if source == "digits":
            return _digits(cache / "digits")
        try:
            return _mnist(cache / "mnist", mirrors, say)
        except Unavailable as error:
            if source == "mnist":
                raise ProvisionError(
                    f"MNIST is unavailable; tried:\n    {error}",
                    where="smoke, data",
                    hint="copy the four IDX files of MNIST (gzipped or not) into a folder of this machine and give it as --data DIR",
                ) from error
        say("MNIST could not be fetched: training on the smaller set of handwritten digits that provision ships")
        return _digits(cache / "digits")
    except OSError as error:
        raise ProvisionError(
            f"the cache of data sets cannot be used: {error}", where=str(cache), hint="free or fix this folder, or set PROVISION_HOME"
        ) from error


def _mnist(folder: Path, mirrors: Sequence[str] | None, say: Say) -> Dataset:
    """MNIST from the cache or the mirrors; Unavailable, with what was tried, when none of them has one of the files."""
    known = catalog.mnist().mnist
    folder.mkdir(parents=True, exist_ok=True)
    downloads.remove_leftovers(folder)
    files = [DataFile(name, folder / name, facts.bytes, facts.sha256) for name, facts in known.files.items()]
    usable = list(known.mirrors if mirrors is None else mirrors)
    tried: list[str] = []
    for file in files:
        if not _intact(file):
            if file.path.exists():
                say(f"{file.path}: damaged in the cache (size or SHA-256 differs); it is fetched again")
            downloads.store(file.path, _fetch(file, usable, tried, say))
    return _dataset("mnist", known.name, folder, files, known.training)


def _intact(file: DataFile) -> bool:
    return file.path.is_file() and file.path.stat().st_size == file.bytes and downloads.digest(file.path) == file.sha256


def _fetch(file: DataFile, usable: list[str], tried: list[str], say: Say) -> bytes:
    """The file from the first of the ``usable`` mirrors that has it. Those that do not answer at all leave the list, the reasons go to
    ``tried``."""
    for base in list(usable):
        url = base.rstrip("/") + "/" + file.name
        try:
            content = downloads.read(url, size=file.bytes, sha256=file.sha256)
        except Unavailable as error:
            tried.append(f"{url}: {error}")
            say(tried[-1])
            if error.whole_server:
                usable.remove(base)
        else:
            say(f"fetched {url} ({len(content):,} bytes, SHA-256 as expected)")
            return content
    raise Unavailable("\n    ".join(tried) or "no mirror of MNIST is given")


# ------------------------------------------------------------------------------------------------------- shipped digits


def _digits(folder: Path) -> Dataset:
    """The digits that provision ships, as MNIST's four files in ``folder``: what is there already is used only where it is the same."""
    known = catalog.mnist().digits
    table = b""
    with contextlib.suppress(*_UNREADABLE):
        table = _unpacked(DIGITS)
    if hashlib.sha256(table).hexdigest() != known.sha256:
        raise ProvisionError("the digits that provision ships are missing or damaged", where=str(DIGITS), hint=resources.REINSTALL_HINT)
    folder.mkdir(parents=True, exist_ok=True)
    downloads.remove_leftovers(folder)
    files = []
    for name, raw in digits_as_idx(table.decode("ascii")).items():
        packed = pack(raw)
        file = DataFile(f"{name}.gz", folder / f"{name}.gz", len(packed), hashlib.sha256(packed).hexdigest())
        if not _intact(file):
            downloads.store(file.path, packed)
        files.append(file)
    return _dataset("digits", known.name, folder, files, known.training)


def digits_as_idx(table: str) -> dict[str, bytes]:
    """UCI's table (per line 64 values of 0 to 16, then the label) as MNIST's four files: name → IDX content."""
    parts: dict[str, list[tuple[bytes, int]]] = {"train": [], "t10k": []}
    seen: Counter[int] = Counter()
    for line in table.splitlines():
        *pixels, label = map(int, line.split(","))
        seen[label] += 1
        parts["t10k" if seen[label] % TEST_EVERY == 0 else "train"].append((enlarge(pixels), label))
    files = {}
    for part, rows in parts.items():
        files[f"{part}-images-idx3-ubyte"] = write_idx((len(rows), IMAGE_SIDE, IMAGE_SIDE), b"".join(image for image, _ in rows))
        files[f"{part}-labels-idx1-ubyte"] = write_idx((len(rows),), bytes(label for _, label in rows))
    return files


def enlarge(pixels: Sequence[int]) -> bytes:
    """An 8×8 digit of values 0 to 16 as a 28×28 image of values 0 to 255: bilinear to 20×20, centred. Integers only, so that the
    same bytes come out on every machine."""
    wide = [_stretched(pixels[start : start + DIGIT_SIDE]) for start in range(0, DIGIT_SIDE * DIGIT_SIDE, DIGIT_SIDE)]
    columns = [_stretched(column) for column in zip(*wide, strict=True)]
    whole = _UNIT * _UNIT * DIGIT_MAX
    margin = (IMAGE_SIDE - DRAWN_SIDE) // 2
    drawn = (bytes((255 * value + whole // 2) // whole for value in row) for row in zip(*columns, strict=True))
    edge = bytes(margin * IMAGE_SIDE)
    return edge + b"".join(bytes(margin) + row + bytes(margin) for row in drawn) + edge


_UNIT = 2 * DRAWN_SIDE
# Per drawn pixel: the source pixel left of its centre, and how far right of that one's centre it is, in 1/_UNIT; edges are repeated.
_TAPS = [divmod(min(max((2 * at + 1) * DIGIT_SIDE - DRAWN_SIDE, 0), (DIGIT_SIDE - 1) * _UNIT), _UNIT) for at in range(DRAWN_SIDE)]


def _stretched(line: Sequence[int]) -> list[int]:
    """8 values as 20, bilinear, times _UNIT."""
    source = (*line, line[-1])
    return [source[left] * (_UNIT - weight) + source[left + 1] * weight for left, weight in _TAPS]


# ------------------------------------------------------------------------------------------------------------- IDX files


def write_idx(shape: Sequence[int], data: bytes) -> bytes:
    """An IDX file of unsigned bytes: two zero bytes, type 8, number of dimensions, the dimensions as big-endian uint32, the values."""
    count = math.prod(shape)
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
    count = math.prod(shape)
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


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


# ------------------------------------------------------------------------------------------------------ a given folder


def _from_folder(folder: Path) -> Dataset:
    """The four files of ``folder``, each ``.gz`` or not; MNIST is recognised by its checksums, anything else is called the user's own."""
    known = catalog.mnist().mnist
    files: dict[str, DataFile] = {}
    counts: dict[str, int] = {}
    wrong: list[str] = []
    is_mnist = True
    for name in FILE_NAMES:
        path = next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)
        if path is None:
            wrong.append(f"{folder / name}.gz: missing (without .gz would do as well)")
            continue
        try:
            raw = _unpacked(path)
            counts[name] = _count(raw, 3 if "images" in name else 1)
            files[name] = DataFile(path.name, path, path.stat().st_size, downloads.digest(path))
        except _UNREADABLE as error:
            wrong.append(f"{path}: cannot be read: {error}")
        except ValueError as error:
            wrong.append(f"{path}: {error}")
        else:
            is_mnist = is_mnist and hashlib.sha256(raw).hexdigest() == known.files[f"{name}.gz"].raw_sha256
    for images, labels in (FILE_NAMES[:2], FILE_NAMES[2:]):
        if files.keys() >= {images, labels} and counts[images] != counts[labels]:
            wrong.append(f"{files[images].path}: {counts[images]:,} images, but {counts[labels]:,} labels in {files[labels].name}")
    if wrong:
        raise UsageError(
            "\n    ".join(["this folder does not hold a usable data set:", *wrong]),
            where=str(folder),
            hint="put MNIST's four files there (train- and t10k-, images and labels, gzipped or not), or leave --data away",
        )
    if is_mnist:
        return _dataset("mnist", known.name, folder, [*files.values()], known.training)
    return _dataset("own", f"own data set ({folder}; not MNIST, its checksums differ)", folder, [*files.values()], known.training)


def _count(raw: bytes, dimensions: int) -> int:
    """How many images or labels an IDX file holds; ValueError, with the reason, for what cannot be trained on."""
    idx = read_idx(raw, dimensions)
    if not idx.data:
        raise ValueError("holds nothing")
    if dimensions == 3 and idx.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE):
        raise ValueError(f"images of {idx.shape[1]}×{idx.shape[2]}, must be {IMAGE_SIDE}×{IMAGE_SIDE}")
    if dimensions == 1 and max(idx.data) >= CLASSES:
        raise ValueError(f"a label of {max(idx.data)}, must be 0 to {CLASSES - 1}")
    return idx.shape[0]


def _dataset(
    key: Literal["mnist", "digits", "own"], name: str, folder: Path, files: Sequence[DataFile], training: catalog.models.Training
) -> Dataset:
    train, test = (read_idx(_unpacked(file.path), 1).shape[0] for file in files if "labels" in file.name)
    return Dataset(key, name, folder, tuple(files), train_images=train, test_images=test, **training.model_dump())
