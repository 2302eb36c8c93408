"""The module that builds from a tarball, on tiny sources: what it makes, what it says when it fails, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from loading import load

CONFIGURE = """#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#--prefix=} ;; --broken) echo "configure: error: no $word" >&2; exit 1 ;; esac; done
source=$(dirname "$0")
printf 'all:\\n\\t@echo "  CC       one.lo"\\n\\t%s\\ninstall:\\n\\tmkdir -p $(DESTDIR)%s/bin\\n\\tcp %s/tool $(DESTDIR)%s/bin/\\n' \\
    "$(cat $source/recipe)" "$prefix" "$source" "$prefix" > Makefile
"""


PLAYBOOKS = Path(__file__).parents[2] / "playbooks"


# Ansible puts it there on hosts.
sys.modules["ansible.module_utils.checksums"] = load("ansible.module_utils.locked_files", PLAYBOOKS / "module_utils/checksums.py")
source_build = load("source_build", PLAYBOOKS / "library/source_build.py")


def tarball(path: Path, recipe: str, *, configure: str = CONFIGURE) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text, mode in (("configure", configure, 0o755), ("recipe", recipe, 0o644), ("tool", "#!/bin/sh\necho built\n", 0o755)):
            if text:
                member = tarfile.TarInfo(f"thing-1.0/{name}")
                member.size, member.mode = len(text), mode
                tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """``build(recipe, **changes)``: a build that has been started."""

    def start(recipe: str = "true", configure: str = CONFIGURE, **changes: Any) -> Any:
        given = {
            "name": "thing 1.0",
            "tarball": str(tarball(tmp_path / "thing.tar.gz", recipe, configure=configure)),
            "prefix": "/opt/thing",
            "options": [],
            "make_words": [],
            "taken": [],
            "job_mb": 700,
            "work": str(tmp_path / "work"),
            "archive": str(tmp_path / "built.tar.gz"),
            **changes,
        }
        made = source_build.Build(given)
        made.start("this run")
        return made

    return start


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(build: Any) -> None:
    wait(lambda: not build.runs())


def test_the_archive_is_relative_to_the_prefix_and_the_build_is_gone(build: Any, tmp_path: Path) -> None:
    made = build()
    ended(made)
    assert made.last_words("this run") is None
    with tarfile.open(tmp_path / "built.tar.gz") as tar:
        assert [member.name for member in tar if not member.isdir()] == ["bin/tool"]
        assert {member.uname for member in tar} == {"root"}
    assert source_build.complete(str(tmp_path / "built.tar.gz"))
    wait(lambda: not (tmp_path / "work").exists())


def test_an_archive_that_was_damaged_since_does_not_count(build: Any, tmp_path: Path) -> None:
    ended(build())
    (tmp_path / "built.tar.gz").write_bytes(b"half of it")
    assert source_build.complete(str(tmp_path / "built.tar.gz")) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": "sh -c 'echo one.c:3: error: no such thing; exit 1'"}, ["make of thing 1.0 failed:", "one.c:3: error: no such thing"]),
        ({"options": ["--broken"]}, ["configure of thing 1.0 failed:", "configure: error: no --broken"]),
        ({"configure": ""}, ["holds no sources that are ready to be built: it has no configure"]),
        ({"taken": ["lib"]}, ["holds no sources that are ready to be built: it has no Makefile"]),
    ],
)
def test_a_build_that_fails_says_why_to_the_run_that_began_it(changes: dict[str, Any], said: list[str], build: Any) -> None:
    made = build(**changes)
    ended(made)
    words = made.last_words("this run")
    assert all(part in words for part in said), words
    assert made.last_words("another run") is None


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
NCCL = {"make_words": ["src.lib"], "options": ["NVCC_GENCODE=-gencode=a -gencode=b"], "taken": ["include", "lib"]}


def with_makefile(path: Path, recipe: str = "true") -> str:
    with tarfile.open(path, "w:gz") as tar:
        text = (MAKEFILE % recipe).encode()
        member = tarfile.TarInfo("nccl-2.22.3-1/Makefile")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return str(path)


def test_sources_with_a_makefile_alone_are_made_and_what_is_wanted_is_taken(build: Any, tmp_path: Path) -> None:
    made = build(tarball=with_makefile(tmp_path / "nccl.tar.gz"), **NCCL)
    ended(made)
    assert made.last_words("this run") is None
    with tarfile.open(tmp_path / "built.tar.gz") as tar:
        names = [member.name for member in tar if not member.isdir()]
        assert names == ["include/nccl.h", "lib/libnccl.so.2", "lib/libnccl.so.2.22.3", "lib/pkgconfig/nccl.pc"]
        assert tar.getmember("lib/libnccl.so.2").linkname == "libnccl.so.2.22.3"
        read = {name: tar.extractfile(name).read().decode().strip() for name in names[2:]}  # type: ignore[union-attr]
    assert read == {"lib/libnccl.so.2.22.3": "-gencode=a -gencode=b", "lib/pkgconfig/nccl.pc": "prefix=/opt/thing"}
    wait(lambda: not (tmp_path / "work").exists())


@pytest.mark.parametrize(
    ("recipe", "taken", "said"),
    [
        ("sh -c 'echo all.cu: error: no such GPU; exit 1'", ["lib"], ["make of thing 1.0 failed:", "all.cu: error: no such GPU"]),
        ("true", ["lib", "share"], ["make of thing 1.0 ended well and made no share"]),
    ],
)
def test_a_makefile_that_fails_or_makes_something_else_is_said(
    recipe: str, taken: list[str], said: list[str], build: Any, tmp_path: Path
) -> None:
    made = build(tarball=with_makefile(tmp_path / "nccl.tar.gz", recipe), **{**NCCL, "taken": taken})
    ended(made)
    words = made.last_words("this run")
    assert all(part in words for part in said), words
    assert not (tmp_path / "built.tar.gz").exists()


def test_its_progress_is_counted_in_files(build: Any, tmp_path: Path) -> None:
    made = build("sh -c 'for i in $$(seq 250); do echo \"  CC       x.lo\"; done; sleep 30'")
    wait(lambda: made.progress() == "compiling, 200 files so far")
    os.kill(made.state()["pid"], signal.SIGTERM)
    ended(made)


def test_a_build_that_ends_between_two_questions_has_nothing_left_to_tell(tmp_path: Path) -> None:
    made = source_build.Build({"work": str(tmp_path / "work")})
    made.ask()
    assert made.progress() == "packing"
    (tmp_path / "work").mkdir()
    made.run = "this run"
    made.enter("compiling")
    assert made.progress() == "compiling", "its log is not begun"


def leaves_neither_process_nor_file(tmp_path: Path) -> None:
    wait(lambda: not (tmp_path / "work").exists())
    # The process that has cleared up is there for a moment longer.
    wait(lambda: {path.name for path in tmp_path.iterdir()} == {"thing.tar.gz"})
    wait(lambda: not [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_to(path, tmp_path)])


def test_a_build_that_is_ended_leaves_neither_process_nor_file(build: Any, tmp_path: Path) -> None:
    made = build("sleep 3600")
    wait(lambda: made.progress().startswith("compiling"))
    os.kill(made.state()["pid"], signal.SIGTERM)
    leaves_neither_process_nor_file(tmp_path)


def test_nor_does_one_that_is_ended_after_its_compiler(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep ends both: on a busy machine the kernel has buried the child before the build hears of its own end."""
    end = os.killpg

    def buried(group: int, number: int) -> None:
        end(group, number)
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "killpg", buried)
    made = build("sleep 3600")
    wait(lambda: made.progress().startswith("compiling"))
    os.kill(made.state()["pid"], signal.SIGTERM)
    leaves_neither_process_nor_file(tmp_path)


def test_nor_does_one_that_is_ended_while_it_starts_its_compiler(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            if command[0] == "make":
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(source_build.subprocess, "Popen", Starting)
    build("sleep 3600")
    leaves_neither_process_nor_file(tmp_path)


def test_nor_does_one_that_is_ended_while_it_packs(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_build, "digest", lambda _path: os.kill(os.getpid(), signal.SIGTERM))
    build()
    leaves_neither_process_nor_file(tmp_path)


def test_an_archive_that_cannot_be_completed_is_not_left_half_made(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(source_build, "digest", full)
    made = build()
    ended(made)
    assert "No space left" in made.last_words("this run")
    assert {path.name for path in tmp_path.iterdir()} == {"thing.tar.gz", "work"}


def _leads_to(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False


def test_a_build_that_nobody_asks_for_ends_itself(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_build, "FORGOTTEN_S", 0.2)
    build("sleep 3600")
    wait(lambda: not (tmp_path / "work").exists())


KILLED_WHILE_NOTING = """
import os, signal, sys
unit = os.path.dirname(sys.argv[1])
sys.path[:0] = [unit, os.path.dirname(unit)]
import test_source_build
build = test_source_build.source_build.Build({"work": sys.argv[2], "archive": sys.argv[2] + ".tar.gz"})
build.enter = lambda doing, pid: os.kill(os.getpid(), signal.SIGKILL)
build.start("this run")
"""


def test_a_build_whose_caller_was_killed_before_it_was_noted_is_none(tmp_path: Path) -> None:
    work = tmp_path / "work"
    caller = subprocess.run([sys.executable, "-c", KILLED_WHILE_NOTING, __file__, str(work)], check=False)
    assert caller.returncode == -signal.SIGKILL
    wait(lambda: not work.exists())
    wait(lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, work)])


def _names(cmdline: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in cmdline.read_bytes()
    except OSError:
        return False
