"""`hostside/gpu_code.py` on libraries that nvcc made, and on damaged ones."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provision.hostside import gpu_code
from provision.hostside.gpu_code import Damaged, GpuCode

LIBRARIES = Path(__file__).parents[2] / "data" / "gpu_code"
WHOLE = (LIBRARIES / "compressed.so").read_bytes()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("architectures", GpuCode(1, {"7.5": 1, "8.0": 1, "9.0a": 1, "10.0f": 1, "12.0": 1}, {"12.0": 1})),
        ("compressed", GpuCode(1, {"7.5": 1, "9.0": 1}, {"9.0": 1})),
        ("linked", GpuCode(2, {"8.0": 2, "9.0": 1}, {"9.0": 1})),
    ],
)
def test_what_nvcc_compiled_for(name: str, expected: GpuCode) -> None:
    assert gpu_code.read(str(LIBRARIES / f"{name}.so")) == expected


def test_what_the_device_linker_leaves_without_a_kernel_is_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in cuFFT, which has its kernels elsewhere, for all GPUs: it would seem to have code for one alone."""
    monkeypatch.setattr(gpu_code, "SMALLEST_CODE", 3400)  # more than the code that is linked, 3,368 bytes, which stands for none
    assert gpu_code.read(str(LIBRARIES / "linked.so")) == GpuCode(1, {"9.0": 1}, {"9.0": 1})
    assert gpu_code.read(str(LIBRARIES / "compressed.so")) == GpuCode(1, {"9.0": 1}, {"9.0": 1})  # by its size when unpacked
    monkeypatch.setattr(gpu_code, "SMALLEST_CODE", 4096)
    monkeypatch.setattr(gpu_code, "PTX", 99)
    assert gpu_code.read(str(LIBRARIES / "linked.so")) == GpuCode(1, {}, {})


def test_files_without_gpu_code(tmp_path: Path) -> None:
    empty = tmp_path / "empty.so"
    empty.touch()
    os.mkfifo(tmp_path / "pipe.so")
    assert gpu_code.read(sys.executable) is None
    assert gpu_code.read(__file__) is None
    assert gpu_code.read(str(empty)) is None
    with pytest.raises(OSError, match="seek"):
        gpu_code.read(str(tmp_path / "pipe.so"))
    with pytest.raises(FileNotFoundError):
        gpu_code.read(str(tmp_path / "absent.so"))


def test_a_library_that_was_cut_off_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(WHOLE[:200])
    with pytest.raises(Damaged, match="ends too early"):
        gpu_code.read(str(path))


def test_no_container_is_larger_than_its_section(tmp_path: Path) -> None:
    path = tmp_path / "large.so"
    path.write_bytes(_with_size(1 << 60))
    with pytest.raises(Damaged, match="larger than its section"):
        gpu_code.read(str(path))


def test_a_section_of_terabytes_without_containers_is_read_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.so"
    section = gpu_code.find_section(_opened(LIBRARIES / "compressed.so"))
    assert section
    header = WHOLE.index(struct.pack("<QQ", *section), len(WHOLE) - 64 * 40)
    path.write_bytes(WHOLE[:header] + struct.pack("<QQ", 1 << 20, 1 << 40) + WHOLE[header + 16 :])
    os.truncate(path, 1 << 41)
    reads: list[int] = []
    read = gpu_code.part
    monkeypatch.setattr(gpu_code, "part", lambda file, at, size: reads.append(size) or read(file, at, size))
    with pytest.raises(Damaged, match="has no container"):
        gpu_code.read(str(path))
    assert len(reads) < 100
    assert sum(reads) < 20_000


def test_the_number_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_code, "MAX_ENTRIES", 2)
    with pytest.raises(Damaged, match="more than 2 containers and entries"):
        gpu_code.read(str(LIBRARIES / "architectures.so"))


def test_containers_without_entries_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_code, "MAX_ENTRIES", 100)
    path = tmp_path / "many.so"
    for number in (100, 101):
        path.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0) * number)
        with contextlib.closing(path.open("rb")) as file:
            if number == 100:
                assert gpu_code.count(file.fileno(), 0, 16 * number + 1) == GpuCode(0, {}, {})
            else:
                with pytest.raises(Damaged, match="more than 100"):
                    gpu_code.count(file.fileno(), 0, 16 * number + 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 9), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6),
    st.integers(0, len(WHOLE)),
)
def test_damaged_files_are_named_or_read(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], cut: int) -> None:
    _read_damaged(tmp_path_factory, changes, WHOLE[:cut] if cut % 3 == 0 else WHOLE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_damaged_headers_are_named_or_read(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]) -> None:
    start = WHOLE.index(gpu_code.MAGIC)
    _read_damaged(tmp_path_factory, [(start + at, new) for at, new in changes], WHOLE)


def _read_damaged(folders: pytest.TempPathFactory, changes: list[tuple[int, bytes]], data: bytes) -> None:
    damaged = bytearray(data)
    for at, new in changes:
        damaged[at : at + len(new)] = new
    path = folders.getbasetemp() / "damaged.so"
    path.write_bytes(damaged)
    with contextlib.suppress(Damaged):  # anything else is a defect
        found = gpu_code.read(str(path))
        assert found is None or found.containers < 100


def _with_size(size: int) -> bytes:
    """The library whose container says that it has this size."""
    at = WHOLE.index(gpu_code.MAGIC) + 8
    return WHOLE[:at] + struct.pack("<Q", size) + WHOLE[at + 8 :]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)
