"""NCCL built from its real sources on a sandbox host, by the product's own way, loaded there and taken off again: what it takes.

    python benchmarks/nccl_from_source.py nvidia-nccl_2.29.7-1.orig.tar.gz [--whole]

The tarball is GitHub's archive of a tag, or Debian's: `apt-get source --download-only --tar-only nvidia-nccl` brings it. The CUDA toolkit
comes from the Python package index as wheels. The host has no GPU: `nvidia-smi` there is a stand-in. Without `--whole` only AllReduce of
float32 is compiled, which takes minutes; all of it takes the better part of an hour on two cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import docker
from docker.models.containers import Container

from provision import sandbox as sandboxes
from provision.base import tarball
from provision.catalog import OURS

#: CUDA 13.0: compiler, its back end, headers, the run-time library.
TOOLKIT = (
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88"),
    *("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cccl==13.0.85"),
)
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*compute_cap*) echo 'NVIDIA A100-SXM4-40GB, GPU-0, 40960, 580.65.06, 00000000:00:04.0, 8.0' ;;
--query-gpu=*) echo 'NVIDIA A100-SXM4-40GB, GPU-0, 40960, 580.65.06, 00000000:00:04.0' ;;
*) echo '| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |' ;;
esac
"""
ASK = "import ctypes; n = ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n)); print(n.value)"
NAME = "nccl-source"


def on_host(box: Container, command: str) -> str:
    """The output of a shell command as root, which must succeed."""
    code, output = box.exec_run(["sh", "-c", command])
    if code:
        sys.exit(f"{command} ended with {code}: {output.decode()}")
    text: str = output.decode().strip()
    return text


def equip(box: Container, work: Path) -> None:
    """Give a host the CUDA toolkit and what seems to be a driver."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(work / "wheels")]
    subprocess.run([*pip, *TOOLKIT], check=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(work / "wheels/nvidia/cu13", "cuda")
    box.put_archive("/usr/local", packed.getvalue())
    on_host(box, "cd /usr/local/cuda && chmod 755 bin/* nvvm/bin/* && ln -s lib lib64")
    on_host(box, f"cat > /usr/local/bin/nvidia-smi <<'EOF'\n{NVIDIA_SMI}EOF\nchmod 755 /usr/local/bin/nvidia-smi")


def run(work: Path, *words: str, whole: bool) -> float:
    """Seconds of ``provision WORDS…``, which must succeed."""
    make = OURS.nccl().tarball.make
    changes = work / "catalogue.json"
    changes.write_text(json.dumps({"nccl": {"tarball": {"make": list(make) if whole else [*make, "ONLY_FUNCS=AllReduce Sum f32"]}}}))
    other = Path(__file__).parents[1] / "tests/integration/other_catalogue.py"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, str(other), str(changes), *words],
        env={**os.environ, "PROVISION_CACHE": str(work / "cache")},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


def main() -> int:
    """Build, load, ask, take off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tarball", type=Path)
    parser.add_argument("--whole", action="store_true", help="every collective, type and reduction")
    wanted = parser.parse_args()
    version = tarball.nccl_version(wanted.tarball)
    number = sum(part * int(each) for part, each in zip((10000, 100, 1), version.split("."), strict=True))
    try:
        host = sandboxes.up(count=1, base="debian:12", name=NAME, slots=1, say=lambda _line: None)
        box = docker.from_env().containers.get(host.hosts[0].container)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            equip(box, work)
            words = ("up", str(host.inventory), "--torch", "none", "--no-smoke", "--nccl", str(wanted.tarball))
            first = run(work, *words, whole=wanted.whole)
            said = on_host(box, f'python3 -c "{ASK}"; ldconfig -p | grep libnccl.so.2; du -sh /opt/provision/nccl-built')
            if not said.startswith(f"{number}\n"):
                sys.exit(f"the library says {said}, not {number}")
            print(said)
            again = run(work, *words, whole=wanted.whole)
            run(work, "remove", str(host.inventory), "--yes", whole=wanted.whole)
            if left := on_host(box, "ls -d /opt/provision 2>/dev/null || true"):
                sys.exit(f"`provision remove` left {left}")
    finally:
        sandboxes.down(NAME, say=lambda _line: None)
    print(f"NCCL {version}, {'all of it' if wanted.whole else 'AllReduce of float32 alone'}: first run {first:.0f} s, second {again:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
