"""The training job's data, on the controller: MNIST, or the handwritten digits that provision ships where MNIST is unreachable.

What enters the cache has passed a check of size and SHA-256, is written under a name of its own and renamed into place, and is checked
again whenever it is used: a half-written or damaged file is never copied to hosts, and two controllers do not disturb each other.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from provision.base import downloads, resources
from provision.base.downloads import Unavailable
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import counted
from provision.catalog import Catalog, models
from provision.plan.options import DataSource

Say = Callable[[str], None]

IMAGE_SIDE = 28
CLASSES = 10
DIGITS = Path(models.__file__).with_name("digits")
FILE_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class DataFile:
    """One file to copy to the hosts: its name there, where it is here, its size and SHA-256."""

    name: str
    path: Path
    bytes: int
    sha256: str

    @property
    def is_intact(self) -> bool:
        """Whether the file is there and has this content."""
        return self.path.is_file() and self.path.stat().st_size == self.bytes and downloads.digest(self.path) == self.sha256


@dataclass(frozen=True)
class Dataset:
    """Four checked IDX files and how the training job trains on them."""

    key: Literal["mnist", "digits", "own"]
    name: str
    folder: Path
    files: tuple[DataFile, ...]
    train_images: int
    test_images: int
    training: models.Training

    def epochs_for(self, ranks: int) -> int:
        """Epochs after which ``ranks`` ranks must have reached the accuracy bar: an epoch of many ranks has few steps."""
        share = -(-self.train_images // ranks)
        steps = -(-share // self.training.batch_size)
        return max(self.training.epochs, -(-self.training.min_steps // steps))

    def bar_for(self, ranks: int, epochs: int | None = None) -> float:
        """The test accuracy in percent to reach; 0 for fewer ``epochs`` than `epochs_for`, which None stands for."""
        return self.training.bar_percent if epochs is None or epochs >= self.epochs_for(ranks) else 0.0

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that differ between data sets: a folder of this name on the hosts never mixes two of them."""
        return hashlib.sha256("".join(f"{file.name} {file.sha256}\n" for file in self.files).encode()).hexdigest()[:12]

    def flags(self, ranks: int, epochs: int | None = None) -> list[str]:
        """The training script's flags for this data set, without its folder."""
        return [
            f"--dataset-name={self.name}",
            f"--epochs={self.epochs_for(ranks) if epochs is None else epochs}",
            f"--bar={self.bar_for(ranks, epochs):g}",
            f"--batch-size={self.training.batch_size}",
            f"--lr={self.training.learning_rate:g}",
            f"--max-lr={self.training.max_learning_rate:g}",
        ]


def obtain(
    cache: Path,
    catalog: Catalog,
    *,
    mirrors: Sequence[str] | None = None,
    say: Say = lambda _line: None,
    source: DataSource = "auto",
    data_dir: Path | None = None,
) -> Dataset:
    """The data set to train on, from ``data_dir``, the cache, a mirror of MNIST or, with ``source="auto"``, the shipped digits.

    Args:
        cache: folder for MNIST's files; made when missing.
        mirrors: base URLs, tried in order; None takes the catalogue's.
        source: ``mnist`` takes that one or fails; ``digits`` needs no network; ``auto`` takes MNIST where it is available, else the digits.
        data_dir: a folder with the four IDX files, ``.gz`` or not; nothing is downloaded then.

    Raises:
        UsageError: ``data_dir`` does not hold four good files.
        ProvisionError: the data are unavailable; says everything that was tried.
    """
    if data_dir is not None:
        return _read_folder(data_dir, catalog)
    if source == "digits":
        return _read_shipped(catalog)
    try:
        return _fetch_mnist(cache / "mnist", catalog.mnist().mnist, mirrors, say)
    except Unavailable as error:
        if source == "mnist":
            what = f"MNIST is unavailable; tried:\n    {error}"
            hint = "copy the four IDX files of MNIST (gzipped or not) into a folder of this machine and give it as --data DIR"
            raise ProvisionError(what, where="smoke, data", hint=hint) from error
    except OSError as error:
        what = f"the cache of data sets cannot be used: {error}"
        raise ProvisionError(what, where=str(cache), hint="free or fix this folder, or set PROVISION_HOME") from error
    say("MNIST could not be fetched: training on the smaller set of handwritten digits that provision ships")
    return _read_shipped(catalog)


def _fetch_mnist(folder: Path, known: models.DataSet, mirrors: Sequence[str] | None, say: Say) -> Dataset:
    """MNIST from the cache or the mirrors; raises Unavailable, with what was tried, when none of them has one of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    downloads.remove_leftovers(folder)
    usable = list(known.mirrors if mirrors is None else mirrors)
    tried: list[str] = []
    files = _files(folder, known)
    for file in files:
        if not file.is_intact:
            if file.path.exists():
                say(f"{file.path}: damaged in the cache (size or SHA-256 differs); it is fetched again")
            downloads.store(file.path, _fetch(file, usable, tried, say))
    return _dataset("mnist", known.name, folder, files, known.training)


def _fetch(file: DataFile, usable: list[str], tried: list[str], say: Say) -> bytes:
    """The file from the first mirror that has it. Mirrors that do not answer leave ``usable``; the reasons go to ``tried``."""
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


def _read_shipped(catalog: Catalog) -> Dataset:
    known = catalog.mnist().digits
    files = _files(DIGITS, known)
    if not all(file.is_intact for file in files):
        raise ProvisionError("the digits that provision ships are missing or damaged", where=str(DIGITS), hint=resources.REINSTALL_HINT)
    return _dataset("digits", known.name, DIGITS, files, known.training)


def _files(folder: Path, known: models.DataSet) -> list[DataFile]:
    return [DataFile(name, folder / name, facts.bytes, facts.sha256) for name, facts in known.files.items()]


def _read_folder(folder: Path, catalog: Catalog) -> Dataset:
    """The four files of a user's folder, each ``.gz`` or not. MNIST is recognised by its checksums, anything else is the user's own."""
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
        except (OSError, EOFError, zlib.error) as error:
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
            hint="put MNIST's four files there (train- and t10k-, images and labels, gzipped or not), or leave --data out",
        )
    if is_mnist:
        return _dataset("mnist", known.name, folder, [*files.values()], known.training)
    return _dataset("own", f"own data set ({folder}; not MNIST, its checksums differ)", folder, [*files.values()], known.training)


def _count(raw: bytes, dimensions: int) -> int:
    """How many images or labels an IDX file of unsigned bytes holds; raises ValueError, with the reason, for an unusable one."""
    head = 4 + 4 * dimensions
    if len(raw) < head:
        raise ValueError(f"truncated: {len(raw)} bytes, the header alone has {head}")
    if raw[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"not an IDX file of unsigned bytes with {counted(dimensions, 'dimension')}: starts with {raw[:4].hex()}")
    shape = struct.unpack(f">{dimensions}I", raw[4:head])
    count, there = math.prod(shape), len(raw) - head
    if there != count:
        kind = "truncated" if there < count else "too long"
        raise ValueError(f"{kind}: header says {count:,} values for shape {shape}, the file has {there:,}")
    if not count:
        raise ValueError("holds nothing")
    if dimensions == 3 and shape[1:] != (IMAGE_SIDE, IMAGE_SIDE):
        raise ValueError(f"images of {shape[1]}×{shape[2]}, must be {IMAGE_SIDE}×{IMAGE_SIDE}")
    if dimensions == 1 and max(raw[head:]) >= CLASSES:
        raise ValueError(f"a label of {max(raw[head:])}, must be 0 to {CLASSES - 1}")
    return int(shape[0])


def _dataset(
    key: Literal["mnist", "digits", "own"], name: str, folder: Path, files: Sequence[DataFile], training: models.Training
) -> Dataset:
    train, test = (_count(_unpacked(file.path), 1) for file in files if "labels" in file.name)
    return Dataset(key, name, folder, tuple(files), train, test, training)


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content
