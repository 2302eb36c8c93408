"""The archive of the engine's sources: the same bytes for the same sources, and nothing that was built."""

from __future__ import annotations

import hashlib
import io
import tarfile

from provision.base import engine_source, resources


def names() -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(engine_source.pack().content)) as archive:
        return archive.getnames()


def test_two_packings_are_the_same_bytes() -> None:
    one, two = engine_source.pack(), engine_source.pack()
    assert one == two
    assert one.sha256 == hashlib.sha256(one.content).hexdigest()


def test_it_holds_the_build_files_and_every_source_but_no_tests() -> None:
    root = resources.folder("collective_core")
    inner = {name.split("/", 1)[1] for name in names()}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "NOTICE"} <= inner
    files = {path.relative_to(root).as_posix() for path in (root / "csrc").rglob("*") if path.is_file()}
    tests = {name for name in files if name.startswith("csrc/tests/")}
    assert tests
    assert files & inner == files - tests


def test_it_holds_nothing_that_was_built() -> None:
    assert not [name for name in names() if "__pycache__" in name or "/build/" in name or name.endswith((".so", ".pyc"))]
