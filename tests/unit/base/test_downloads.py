"""Downloads: only complete files with the right checksum enter the cache. The server is real, on the loopback interface."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import pytest

from provision.base import downloads
from provision.base.errors import ProvisionError, UsageError

CONTENT = b"the sources of something\n" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
KNOWN_AS = {"what": "the sources", "hint": "bring the file yourself"}


class Site(BaseHTTPRequestHandler):
    """``/good.tar.gz``, ``/404``, ``/503``, ``/other`` (another content), ``/short`` (ends before its announced length)."""

    asked: list[str] = []  # noqa: RUF012  common to all handlers on purpose

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.asked.append(name)
        if name in ("404", "503"):
            self.send_error(int(name))
            return
        body = b"an error page" if name == "other" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:100] if name == "short" else body)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_file_is_fetched_once_and_has_its_name(site: str) -> None:
    first = downloads.fetch(f"{site}/good.tar.gz", SHA256, **KNOWN_AS)
    assert first.read_bytes() == CONTENT
    assert first.name.endswith("good.tar.gz")
    assert downloads.fetch(f"{site}/good.tar.gz", SHA256, **KNOWN_AS) == first
    assert Site.asked == ["good.tar.gz"]


def test_a_damaged_file_of_the_cache_is_fetched_again(site: str) -> None:
    path = downloads.fetch(f"{site}/good.tar.gz", SHA256, **KNOWN_AS)
    path.write_bytes(b"half of it")
    assert downloads.fetch(f"{site}/good.tar.gz", SHA256, **KNOWN_AS).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "reason"),
    [("404", "HTTP 404"), ("503", "HTTP 503"), ("other", "SHA-256"), ("short", "SHA-256"), ("gone", "refused")],
)
def test_a_wrong_file_is_one_error_and_leaves_nothing(name: str, reason: str, site: str, cache: Path) -> None:
    url = "http://127.0.0.1:1/gone" if name == "gone" else f"{site}/{name}"
    with pytest.raises(ProvisionError) as caught:
        downloads.fetch(url, SHA256, **KNOWN_AS)
    assert caught.value.where == url
    assert reason in str(caught.value)
    assert "bring the file yourself" in str(caught.value)
    assert kept(cache) == []


def test_a_read_only_cache(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "file"))
    with pytest.raises(ProvisionError, match="cannot keep the sources"):
        downloads.fetch(f"{site}/good.tar.gz", SHA256, **KNOWN_AS)


def test_an_invalid_url(cache: Path) -> None:
    with pytest.raises(ProvisionError, match="not an http or https address"):
        downloads.fetch("file:///etc/passwd", SHA256, **KNOWN_AS)


def test_a_file_of_the_user_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "openmpi.tar.gz"
    path.write_bytes(CONTENT)
    assert downloads.check_user_file(path, SHA256, what="the tarball") == path
    assert downloads.check_user_file(path, None, what="the tarball") == path
    with pytest.raises(UsageError, match=f"expected {'0' * 12}"):
        downloads.check_user_file(path, "0" * 64, what="the tarball")
    with pytest.raises(UsageError, match="No such file"):
        downloads.check_user_file(tmp_path / "missing", None, what="the tarball")


def test_a_link_is_replaced_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "real.whl").write_bytes(b"wheel")
    (tmp_path / "wheels/x.whl").symlink_to("../real.whl")
    downloads.link_or_copy(tmp_path / "wheels/x.whl", tmp_path / "x.whl")
    assert not (tmp_path / "x.whl").is_symlink()
    assert (tmp_path / "x.whl").read_bytes() == b"wheel"


def test_a_file_of_the_cache_is_linked_and_one_of_the_user_is_not_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    for folder, links in (("cache", 2), ("wheels", 1)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "x.whl"
        file.write_bytes(b"wheel")
        changed = file.stat().st_ctime_ns
        downloads.link_or_copy(file, tmp_path / f"{folder}.whl")
        assert (tmp_path / f"{folder}.whl").read_bytes() == b"wheel"
        assert file.stat().st_nlink == links
        assert (file.stat().st_ctime_ns == changed) == (folder == "wheels")


def test_a_full_disk_is_not_blamed_on_the_server(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path))

    @contextlib.contextmanager
    def full(_path: Path) -> Iterator[IO[bytes]]:
        with open("/dev/full", "wb", buffering=0) as out:
            yield out

    monkeypatch.setattr(downloads, "_stored", full)
    with pytest.raises(ProvisionError, match=r"cannot keep the file: .*No space left") as refused:
        downloads.fetch(f"{site}/good", "0" * 64, what="the file", hint="ask your network administrator")
    assert "PROVISION_CACHE" in str(refused.value.hint)
