"""The library itself: what it links, its arithmetic over all values, its version check."""

from __future__ import annotations

import shutil
import subprocess
from ctypes import c_void_p
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collective_core
from collective_core import _native

LIBRARY = Path(collective_core.__file__).with_name("libcollective_core.so")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_links_neither_framework_nor_mpi_nor_gpu_nor_python():
    dynamic = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
    allowed = ("libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libgcc_s.so", "libstdc++.so", "ld-linux", "linux-vdso")
    assert needed
    assert all(name.startswith(allowed) for name in needed), needed
    assert "RUNPATH" not in dynamic


def test_exports_only_its_interface():
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert {n for n in names if not n.startswith("cc_")} == set()


def reduce(parts, dtype, op=_native.SUM, divisor=1, prescale=1.0, postscale=1.0):
    """What the engine computes of these arrays; uint16 arrays carry float16 and bfloat16 bits."""
    parts = [np.ascontiguousarray(p) for p in parts]
    out = np.empty_like(parts[0])
    pointers = (c_void_p * len(parts))(*[p.ctypes.data for p in parts])
    fault = _native.library().cc_reduce(
        _native.DTYPES[dtype], op, divisor, prescale, postscale, out.ctypes.data, pointers, len(parts), out.size
    )
    assert fault == 0
    return out


def test_float16_to_float32_and_back_for_all_values():
    every = np.arange(1 << 16, dtype=np.uint16)
    back = reduce([every], "float16")
    values = every.view(np.float16)
    nan = np.isnan(values)
    assert (back[~nan] == every[~nan]).all()
    assert np.isnan(back.view(np.float16)[nan]).all()


def test_bfloat16_to_float32_and_back_for_all_values():
    every = np.arange(1 << 16, dtype=np.uint16)
    back = reduce([every], "bfloat16")
    nan = ((every & 0x7F80) == 0x7F80) & ((every & 0x7F) != 0)
    assert (back[~nan] == every[~nan]).all()
    assert (((back[nan] & 0x7F80) == 0x7F80) & ((back[nan] & 0x7F) != 0)).all()


def test_half_types_round_to_nearest_even_once():
    rng = np.random.default_rng(5)
    bits = [rng.integers(0, 1 << 16, 200_003, dtype=np.uint16) for _ in range(3)]
    with np.errstate(over="ignore", invalid="ignore"):
        a, b, c = (x.view(np.float16).astype(np.float32) for x in bits)
        want = ((a + b) + c).astype(np.float16)
        got = reduce(bits, "float16").view(np.float16)
        assert np.array_equal(got, want, equal_nan=True)
        a, b, c = ((x.astype(np.uint32) << 16).view(np.float32) for x in bits)
        total = (a + b) + c
        raw = total.view(np.uint32)
        want_bits = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
        got_bits = reduce(bits, "bfloat16")
        fine = ~np.isnan(total)
        assert (got_bits[fine] == want_bits[fine]).all()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3000),
    inputs=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float64", "int32", "uint8", "int64"]),
    seed=st.integers(0, 1 << 30),
)
def test_any_number_of_inputs_is_added_in_order(n, inputs, dtype, seed):
    rng = np.random.default_rng(seed)
    if "float" in dtype:
        parts = [(rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(dtype) for _ in range(inputs)]
    else:
        info = np.iinfo(dtype)
        parts = [rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True) for _ in range(inputs)]
    want = parts[0].copy()
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            want = want + part
    assert reduce(parts, dtype).tobytes() == want.tobytes()


def test_average_of_integers_is_rounded_towards_zero():
    parts = [np.array([-1, -7, 7, 0, 5], dtype=np.int8), np.array([0, 0, 0, -1, 5], dtype=np.int8)]
    assert reduce(parts, "int8", _native.AVERAGE, divisor=2).tolist() == [0, -3, 3, 0, 5]
    large = [np.array([199, 200], dtype=np.uint8)]
    assert reduce(large, "uint8", _native.AVERAGE, divisor=200).tolist() == [0, 1]


def test_nan_passes_through_min_and_max():
    a = np.array([1.0, np.nan, 2.0, np.nan], dtype=np.float32)
    b = np.array([np.nan, 1.0, 3.0, np.nan], dtype=np.float32)
    assert np.isnan(reduce([a, b], "float32", _native.MIN)).tolist() == [True, True, False, True]
    assert np.isnan(reduce([a, b], "float32", _native.MAX)).tolist() == [True, True, False, True]


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "_library", None)
    monkeypatch.setattr(_native, "ABI", _native.ABI + 1)
    with pytest.raises(collective_core.CollectiveError, match="reinstall"):
        _native.library()


def test_using_the_engine_before_init_says_so():
    with pytest.raises(collective_core.CollectiveError, match="call init"):
        collective_core.allreduce(np.ones(3))
    with pytest.raises(collective_core.CollectiveError, match="call init"):
        collective_core.rank()


def test_works_without_torch(tmp_path):
    """A stand-in that cannot be imported proves that nothing asks for it."""
    import sys

    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import collective_core.check as c; sys.argv=['check']; sys.exit(c.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "all collectives correct" in done.stdout
