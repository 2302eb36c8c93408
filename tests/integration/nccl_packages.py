"""Fake NCCL packages with the names, versions and paths of NVIDIA's, a signed repository that serves them, and fake sources.

Their library only answers ncclGetVersion and contains the version string by which a real one reports its CUDA. That is enough to test
that the right build is installed, held and found.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
LIBRARY = "usr/lib/x86_64-linux-gnu"


def run(*command: str | Path, cwd: Path | None = None) -> bytes:
    return subprocess.run([str(word) for word in command], cwd=cwd, check=True, capture_output=True).stdout


def package(folder: Path, name: str, version: str, tree: Path, depends: str = "", arch: str = "amd64", more: Sequence[str] = ()) -> Path:
    """A .deb of ``tree``; ``more``: further lines of its control file."""
    control = [f"Package: {name}", f"Version: {version}", f"Architecture: {arch}", "Maintainer: test <test@example.org>"]
    control += [f"Depends: {depends}"] if depends else []
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    (tree / "DEBIAN/control").write_text("\n".join([*control, *more, "Description: fake", ""]))
    path = folder / f"{name}_{version}_{arch}.deb"
    run("dpkg-deb", "--build", "--root-owner-group", tree, path)
    return path


def nccl(folder: Path, work: Path, full: str) -> None:
    """libnccl2 and libnccl-dev of a version such as ``2.21.5-1+cuda12.4`` or, as a distribution writes it, ``2.21.5-1-1``."""
    number, _, cuda = full.partition("+cuda")
    number = number.split("-")[0]
    major, minor, patch = map(int, number.split("."))
    tree = work / f"libnccl2-{full}"
    (tree / LIBRARY).mkdir(parents=True)
    source = work / f"{full}.c"
    source.write_text(
        f'const char sentence[] = "NCCL version {number}+cuda{cuda or "11.8"}";\n'
        f"int ncclGetVersion(int* version) {{ *version = {major * 10000 + minor * 100 + patch}; return sentence[0] == 0; }}\n"
    )
    run("gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", tree / LIBRARY / f"libnccl.so.{number}", source)
    (tree / LIBRARY / "libnccl.so.2").symlink_to(f"libnccl.so.{number}")
    package(folder, "libnccl2", full, tree)
    tree = work / f"libnccl-dev-{full}"
    (tree / LIBRARY).mkdir(parents=True)
    (tree / LIBRARY / "libnccl.so").symlink_to("libnccl.so.2")
    package(folder, "libnccl-dev", full, tree, depends=f"libnccl2 (= {full})")


# The interface of NCCL's makefile: `src.lib`, CUDA_HOME, NVCC_GENCODE, BUILDDIR and PREFIX; the CUDA is what nvcc says.
MAKEFILE = r"""
include makefiles/version.mk
NUMBER := $(NCCL_MAJOR).$(NCCL_MINOR).$(NCCL_PATCH)
CUDA := $(shell $(CUDA_HOME)/bin/nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
src.lib:
	mkdir -p $(BUILDDIR)/lib $(BUILDDIR)/include $(BUILDDIR)/obj
	@echo "Compiling  nccl.cc"
	$(CXX) -fPIC -c -DSENTENCE='"NCCL version $(NUMBER)+cuda$(CUDA)"' -DCODE='"$(NVCC_GENCODE)"' nccl.cc -o $(BUILDDIR)/obj/nccl.o
	$(CXX) -shared -Wl,-soname,libnccl.so.$(NCCL_MAJOR) -o $(BUILDDIR)/lib/libnccl.so.$(NUMBER) $(BUILDDIR)/obj/nccl.o
	ln -sf libnccl.so.$(NUMBER) $(BUILDDIR)/lib/libnccl.so.$(NCCL_MAJOR)
	touch $(BUILDDIR)/include/nccl.h
"""
LIBRARY_SOURCE = """
extern "C" const char sentence[] = SENTENCE, code[] = CODE;
extern "C" int ncclGetVersion(int* version) { *version = %d; return sentence[0] == 0; }
"""


def sources(path: Path, number: str) -> Path:
    """A tarball that is built like NCCL's; the version is not in its name."""
    major, minor, patch = map(int, number.split("."))
    files = {
        "Makefile": MAKEFILE,
        "makefiles/version.mk": f"##### version\nNCCL_MAJOR   := {major}\nNCCL_MINOR   := {minor}\nNCCL_PATCH   := {patch}\n",
        "nccl.cc": LIBRARY_SOURCE % (major * 10000 + minor * 100 + patch),
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"sources/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


class Key:
    """A throw-away signing key."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        run(*self.gpg, "--quick-generate-key", "test <test@example.org>", "rsa3072", "sign", "never")

    @property
    def public(self) -> bytes:
        return run(*self.gpg, "--export")

    def sign(self, path: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        run(*self.gpg, "--digest-algo", "SHA512", "--clearsign", "--output", target, path)

    def close(self) -> None:
        subprocess.run(["gpgconf", "--homedir", self.gpg[2], "--kill", "all"], check=False, capture_output=True)


def index(folder: Path, key: Key) -> None:
    """Make ``folder`` a flat repository of the packages in it, signed."""
    entries = []
    for deb in sorted(folder.glob("*.deb")):
        if deb.name.startswith("cuda-keyring"):
            continue
        control = run("dpkg-deb", "--field", deb).decode().rstrip("\n")
        content = deb.read_bytes()
        entries.append(f"{control}\nFilename: ./{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n")
    packages = "\n".join(entries).encode()
    (folder / "Packages").write_bytes(packages)
    (folder / "Packages.gz").write_bytes(gzip.compress(packages))
    lines = ["Origin: test", "Label: test", "Date: Sat, 01 Jan 2022 00:00:00 UTC", "Architectures: amd64", "SHA256:"]
    for name in ("Packages", "Packages.gz"):
        content = (folder / name).read_bytes()
        lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}")
    (folder / "Release").write_text("\n".join(lines) + "\n")
    key.sign(folder / "Release", folder / "InRelease")


def keyring_package(folder: Path, work: Path, key: Key) -> Path:
    """cuda-keyring_1.1-1_all.deb, with the key at the path that NVIDIA uses."""
    tree = work / "cuda-keyring"
    target = tree / KEYRING.lstrip("/")
    target.parent.mkdir(parents=True)
    target.write_bytes(key.public)
    return package(folder, "cuda-keyring", "1.1-1", tree, arch="all")


def local_repository(folder: Path, work: Path, key: Key, system: str, full: str, *, signed_by: bool = True) -> Path:
    """nccl-local-repo-SYSTEM-VERSION-cudaX.Y_1.0-1_amd64.deb: a repository as files, with its list and its key."""
    number, cuda = full.split("-")[0], full.rpartition("+")[2]
    name = f"nccl-local-repo-{system}-{number}-{cuda}"
    tree = work / name
    inside = tree / "var" / name
    inside.mkdir(parents=True)
    nccl(inside, work / f"{name}-packages", full)
    index(inside, key)
    keyring = f"/usr/share/keyrings/nccl-local-{system}-{number}-{cuda}-keyring.gpg"
    (inside / Path(keyring).name).write_bytes(key.public)
    lists = tree / "etc/apt/sources.list.d"
    lists.mkdir(parents=True)
    option = f"[signed-by={keyring}] " if signed_by else ""
    (lists / f"nccl-local-{system}-{number}-{cuda}.list").write_text(f"deb {option}file:///var/{name} /\n")
    return package(folder, name, "1.0-1", tree)


@contextmanager
def served(folder: Path, address: str) -> Iterator[str]:
    """``folder`` over HTTP at ``address``, reachable for the hosts of that network only."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((address, 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def withdraw(folder: Path, versions: Sequence[str], away: Path) -> None:
    """Remove versions from a repository's folder."""
    away.mkdir(exist_ok=True)
    for version in versions:
        for deb in folder.glob(f"*_{version}_*.deb"):
            shutil.move(deb, away / deb.name)
