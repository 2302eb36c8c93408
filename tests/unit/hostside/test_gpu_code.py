"""`hostside/gpu_code.py` on libraries that nvcc made, and on damaged ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import zlib
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


# ------------------------------------------------------------------------------- AMD: made here, by LLVM's documented layouts


def _bundle(*targets: str, size: int = 4096) -> bytes:
    """An offload bundle for the host (without code) and these targets."""
    names = [b"host-x86_64-unknown-linux-gnu-", *(f"hipv4-amdgcn-amd-amdhsa--{each}".encode() for each in targets)]
    entries = [struct.pack("<QQQ", 4096 * at, size * bool(at), len(name)) + name for at, name in enumerate(names)]
    header = gpu_code.BUNDLE + struct.pack("<Q", len(entries)) + b"".join(entries)
    return header.ljust(4096 * len(names), b"\0") + b"\0" * (size - 4096)


def _zstd(data: bytes) -> bytes:
    """A frame of zstd with a block that is not compressed (RFC 8878)."""
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(data)) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def _compressed(packed: bytes, version: int = 3, method: int = gpu_code.ZSTD, size: int | None = None) -> bytes:
    form = "<HHIIQ" if version == 2 else "<HHQQQ"
    whole = 4 + struct.calcsize(form) + len(packed)
    return gpu_code.COMPRESSED + struct.pack(form, version, method, whole if size is None else size, 9999, 0) + packed


def _library(*containers: bytes, name: bytes = b".hip_fatbin") -> bytes:
    """A library with one section of GPU code, whose containers are aligned as hipcc does it."""
    code = b"".join(each.ljust(-(-len(each) // 4096) * 4096, b"\0") for each in containers)
    names = b"\0" + name + b"\0.shstrtab\0"
    table = 64 + len(code) + len(names)
    sections = [(0, 0, 0, 0), (1, 1, 64, len(code)), (2 + len(name), 3, 64 + len(code), len(names))]
    start = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    return b"".join(
        [start.ljust(0x3A, b"\0"), struct.pack("<HHH", 64, 3, 2), code, names, *(gpu_code.SECTION_HEADER.pack(*each) for each in sections)]
    )


AMD = _library(_bundle("gfx90a:sramecc+:xnack-", "gfx942"), _compressed(_zstd(_bundle("gfx942", "gfx11-generic"))))


def _read(path: Path, content: bytes) -> GpuCode | None:
    path.write_bytes(content)
    return gpu_code.read(str(path))


def _machine_code(*targets: str) -> GpuCode:
    return GpuCode(1, dict.fromkeys(targets, 1), {})


def test_what_hipcc_compiled_for(tmp_path: Path) -> None:
    path = tmp_path / "amd.so"
    assert _read(path, AMD) == GpuCode(2, {"gfx90a": 1, "gfx942": 2, "gfx11-generic": 1}, {})
    targets = "gfx1100", "gfx1201"
    zlib_bundle = zlib.compress(_bundle(*targets))
    assert _read(path, _library(_compressed(zlib_bundle, version=2, method=0))) == _machine_code(*targets)
    assert _read(path, _library(_compressed(_zstd(_bundle(*targets)), version=2))) == _machine_code(*targets)
    assert _read(path, _library(_bundle("gfx942", size=0))) is None, "a bundle without code"


@pytest.mark.parametrize("packed", [b"", b"\x28\xb5\x2f\xfd", _zstd(b"something else")])
def test_a_bundle_that_cannot_be_decompressed_is_unknown(tmp_path: Path, packed: bytes) -> None:
    assert _read(tmp_path / "amd.so", _library(_compressed(_zstd(_bundle("gfx942")), version=1))) == _machine_code("unknown")
    for method in (0, gpu_code.ZSTD, 7):
        assert _read(tmp_path / "amd.so", _library(_compressed(packed, method=method))) == _machine_code("unknown")


def test_without_libzstd_a_bundle_is_unknown_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    path = tmp_path / "amd.so"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with monkeypatch.context() as without:
        without.setattr(ctypes, "CDLL", absent)
        assert _read(path, AMD) == GpuCode(2, {"gfx90a": 1, "gfx942": 1, "unknown": 1}, {})
        found, _complete = gpu_code.scan({}, float("inf"))
    found, _complete = gpu_code.scan(found, float("inf"))
    assert found[str(path)]["code"]["machine_code"] == {"gfx90a": 1, "gfx942": 2, "gfx11-generic": 1}


@pytest.mark.parametrize(
    ("container", "said"),
    [
        (_compressed(b"", size=1 << 60), "larger than its section"),
        (_compressed(b"", size=0), "larger than its section"),
        (gpu_code.BUNDLE + struct.pack("<Q", 1 << 63), "ends too early"),
        (gpu_code.BUNDLE + struct.pack("<QQQQ", 1 << 63, 0, 0, 1 << 63), "ends too early"),
        (gpu_code.BUNDLE + struct.pack("<QQQQ", 1, 1 << 63, 1 << 63, 0), "larger than its section"),
        (b"", "no container"),
    ],
)
def test_a_bundle_that_lies_is_damaged(tmp_path: Path, container: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        _read(tmp_path / "amd.so", _library(container.ljust(40000, b"\0")))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(64, 64 + 300) | st.integers(12352, 12700), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)
)
def test_damaged_bundles_are_named_or_read(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]) -> None:
    _read_damaged(tmp_path_factory, changes, AMD)


def test_files_with_a_target_in_their_name_are_one_library_for_each_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "torch/lib/rocblas/library/TensileLibrary_Type_HH_fallback_gfx942.hsaco",
        "torch/lib/rocblas/library/Kernels.so-000-gfx90a-xnack+.hsaco",
        "torch/lib/rocblas/library/TensileLibrary.dat",
        "torch/lib/hipblaslt/library/kernel_gfx942.co",
        "sdk/.kpack/blas_lib_gfx1151.kpack",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found, complete = gpu_code.scan({}, float("inf"))
    assert complete
    assert {path: set(entry["code"]["machine_code"]) for path, entry in found.items()} == {
        f"{tmp_path}/torch/lib/rocblas/library": {"gfx942", "gfx90a"},
        f"{tmp_path}/sdk/.kpack": {"gfx1151"},
    }


def test_gpus_of_amd_are_told_from_graphics_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(version: int, bus: int) -> str:
        return f"simd_count 1\ngfx_target_version {version}\nlocation_id {bus << 8}\n"

    card, graphics = "/sys/bus/pci/devices/0000:03:00.0/", "/sys/bus/pci/devices/0000:0c:00.0/"
    files = {
        "0": "cpu_cores_count 16\ngfx_target_version 0\n", "1": node(90402, 0x1B), "2": node(100100, 0x03), "3": node(100306, 0x0C),
        "/sys/bus/pci/devices/0000:1b:00.0/class": "0x120000\n",
        card + "class": "0x030000\n", card + "mem_info_vram_total": f"{16 << 30}\n",
        graphics + "class": "0x030000\n", graphics + "mem_info_vram_total": f"{512 << 20}\n",
    }  # fmt: skip
    monkeypatch.setattr(gpu_code.glob, "glob", lambda _pattern: ["0", "1", "2", "3"])
    monkeypatch.setattr(gpu_code, "start_of", lambda path: files.get(path, ""))
    assert [each["architecture"] for each in gpu_code.amd_gpus()] == ["gfx942", "gfx1010"]


def _with_size(size: int) -> bytes:
    """The library whose container says that it has this size."""
    at = WHOLE.index(gpu_code.MAGIC) + 8
    return WHOLE[:at] + struct.pack("<Q", size) + WHOLE[at + 8 :]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)
