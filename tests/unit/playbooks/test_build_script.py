"""The script that builds sources on a host, on tiny ones: what it makes, what it says when it fails, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provision.base import resources

CONFIGURE = """#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#--prefix=} ;; --broken) echo "configure: error: no $word" >&2; exit 1 ;; esac; done
source=$(dirname "$0")
printf 'all:\\n\\t@echo "  CC       one.lo"\\n\\t%s\\ninstall:\\n\\tmkdir -p $(DESTDIR)%s/bin\\n\\tcp %s/tool $(DESTDIR)%s/bin/\\n' \\
    "$(cat $source/recipe)" "$prefix" "$source" "$prefix" > Makefile
"""


Build = Callable[..., "subprocess.Popen[str]"]


def tarball(path: Path, recipe: str, *, configure: str = CONFIGURE) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text, mode in (("configure", configure, 0o755), ("recipe", recipe, 0o644), ("tool", "#!/bin/sh\necho built\n", 0o755)):
            if text:
                member = tarfile.TarInfo(f"thing-1.0/{name}")
                member.size, member.mode = len(text), mode
                tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """``build(recipe, *options, **settings)``: a build that has been started."""
    started: list[subprocess.Popen[str]] = []

    def start(recipe: str = "true", *options: str, configure: str = CONFIGURE, sources: str = "", **settings: str) -> subprocess.Popen[str]:
        path = sources or str(tarball(tmp_path / "thing.tar.gz", recipe, configure=configure))
        given = {
            "BUILD_NAME": "thing 1.0",
            "BUILD_SOURCES": path,
            "BUILD_SHA256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
            "BUILD_PREFIX": "/opt/thing",
            "BUILD_PYTHON": sys.executable,
            "BUILD_MAKE_WORDS": "",
            "BUILD_FOLDERS": "",
            "BUILD_JOB_MB": "700",
            "BUILD_WORK": str(tmp_path / "work"),
            "BUILD_ARCHIVE": str(tmp_path / "built.tar.gz"),
            **settings,
        }
        words = ["sh", str(resources.folder("playbooks") / "roles/from_source/files/build.sh"), *options]
        # A group of its own, so that a test ends all of it as a sweep does.
        made = subprocess.Popen(
            words, env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(made)
        return made

    yield start
    for made in started:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended, as it should
            os.killpg(made.pid, signal.SIGKILL)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_archive_is_relative_to_the_prefix_and_the_build_is_gone(build: Build, tmp_path: Path) -> None:
    out, err = (made := build()).communicate()
    assert (made.returncode, err) == (0, "")
    with tarfile.open(tmp_path / "built.tar.gz") as tar:
        assert [member.name for member in tar if not member.isdir()] == ["./bin/tool"]
        assert {(member.uid, member.uname) for member in tar} == {(0, "root")}
    digest = hashlib.sha256((tmp_path / "built.tar.gz").read_bytes()).hexdigest()
    assert out.strip() == (tmp_path / "built.tar.gz.sha256").read_text().strip() == digest
    assert not (tmp_path / "work").exists()


def test_an_archive_of_a_run_that_was_cut_off_is_taken_and_a_damaged_one_is_not(build: Build, tmp_path: Path) -> None:
    first = build().communicate()[0]
    assert build("false").communicate()[0] == first
    (tmp_path / "built.tar.gz").write_bytes(b"half of it")
    made = build("false")
    assert "make of thing 1.0 failed:" in made.communicate()[1]


@pytest.mark.parametrize(
    ("recipe", "options", "settings", "said"),
    [
        ("sh -c 'echo one.c:3: error: no such thing; exit 1'", [], {}, ["make of thing 1.0 failed:", "one.c:3: error: no such thing"]),
        ("true", ["--broken"], {}, ["configure of thing 1.0 failed:", "configure: error: no --broken", "the whole log: "]),
        ("true", [], {"configure": ""}, ["holds no sources that are ready to be built: it has no configure"]),
        ("true", [], {"BUILD_FOLDERS": "lib"}, ["holds no sources that are ready to be built: it has no Makefile"]),
        ("true", [], {"BUILD_SHA256": "0" * 64}, ["has checksum", "nothing of it was used"]),
    ],
)
def test_a_build_that_fails_says_why(
    recipe: str, options: list[str], settings: dict[str, str], said: list[str], build: Build, tmp_path: Path
) -> None:
    err = (made := build(recipe, *options, **settings)).communicate()[1]
    assert made.returncode == 1
    assert all(part in err for part in said), err
    assert {path.name for path in tmp_path.iterdir()} <= {"thing.tar.gz", "built.tar.gz.log"}


def test_of_a_long_log_the_first_error_is_told(build: Build) -> None:
    noise = 'for i in $$(seq 500); do echo "  CC       $$i.lo"; done'
    err = build(f"@sh -c '{noise}; echo x.c: error: the cause; {noise}; exit 1'").communicate()[1]
    assert "  CC       499.lo\n  CC       500.lo\nx.c: error: the cause\n" in err
    assert len(err.splitlines()) == 14


# A stand-in with the interface of NCCL's makefile: the target, BUILDDIR and PREFIX are its own, what it makes is not.
MAKEFILE = """
src.lib:
\tmkdir -p $(BUILDDIR)/lib/pkgconfig $(BUILDDIR)/include $(BUILDDIR)/obj
\t@echo "Compiling  one.cc"
\t%s
\techo '$(NVCC_GENCODE)' > $(BUILDDIR)/lib/libnccl.so.2.22.3
\tln -sf libnccl.so.2.22.3 $(BUILDDIR)/lib/libnccl.so.2
\techo 'prefix=$(PREFIX)' > $(BUILDDIR)/lib/pkgconfig/nccl.pc
\ttouch $(BUILDDIR)/include/nccl.h $(BUILDDIR)/obj/one.o
"""
NCCL = {"BUILD_MAKE_WORDS": "src.lib", "BUILD_FOLDERS": "include lib"}
OPTIONS = ("NVCC_GENCODE=-gencode=a -gencode=b",)


def with_makefile(path: Path, recipe: str = "true") -> str:
    with tarfile.open(path, "w:gz") as tar:
        text = (MAKEFILE % recipe).encode()
        member = tarfile.TarInfo("nccl-2.22.3-1/Makefile")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return str(path)


def test_sources_with_a_makefile_alone_are_made_and_what_is_wanted_is_taken(build: Build, tmp_path: Path) -> None:
    made = build("", *OPTIONS, sources=with_makefile(tmp_path / "nccl.tar.gz"), **NCCL)
    assert made.communicate()[1] == ""
    with tarfile.open(tmp_path / "built.tar.gz") as tar:
        names = [member.name for member in tar if not member.isdir()]
        assert names == ["include/nccl.h", "lib/libnccl.so.2", "lib/libnccl.so.2.22.3", "lib/pkgconfig/nccl.pc"]
        assert tar.getmember("lib/libnccl.so.2").linkname == "libnccl.so.2.22.3"
        read = {name: tar.extractfile(name).read().decode().strip() for name in names[2:]}  # type: ignore[union-attr]
    assert read == {"lib/libnccl.so.2.22.3": "-gencode=a -gencode=b", "lib/pkgconfig/nccl.pc": "prefix=/opt/thing"}
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("recipe", "folders", "said"),
    [
        ("sh -c 'echo all.cu: error: no such GPU; exit 1'", "lib", ["make of thing 1.0 failed:", "all.cu: error: no such GPU"]),
        ("true", "lib share", ["make of thing 1.0 ended well and made no share"]),
    ],
)
def test_a_makefile_that_fails_or_makes_something_else_is_said(
    recipe: str, folders: str, said: list[str], build: Build, tmp_path: Path
) -> None:
    made = build("", *OPTIONS, sources=with_makefile(tmp_path / "nccl.tar.gz", recipe), **{**NCCL, "BUILD_FOLDERS": folders})
    err = made.communicate()[1]
    assert all(part in err for part in said), err
    assert not (tmp_path / "built.tar.gz").exists()


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_build_that_is_ended_leaves_neither_process_nor_file(signals: tuple[signal.Signals, ...], build: Build, tmp_path: Path) -> None:
    made = build("sleep 3600")
    log = tmp_path / "work/log"
    wait(lambda: log.exists() and "CC" in log.read_text())
    for number in signals:
        os.killpg(made.pid, number)
    made.communicate()
    assert made.returncode != 0
    assert {path.name for path in tmp_path.iterdir()} == {"thing.tar.gz"}
    wait(lambda: not [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_to(path, tmp_path)])


def _leads_to(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False


def test_an_archive_that_cannot_be_completed_is_not_left_half_made(build: Build, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tar").write_text('#!/bin/sh\necho half > "$BUILD_ARCHIVE.part"; echo "No space left on device" >&2; exit 2\n')
    (tmp_path / "bin/tar").chmod(0o755)
    made = build(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert "No space left" in made.communicate()[1]
    assert {path.name for path in tmp_path.iterdir()} == {"thing.tar.gz", "bin"}
