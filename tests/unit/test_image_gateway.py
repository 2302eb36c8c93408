"""The door of a build: a real proxy, before real servers on loopback. What a step may ask for, and what it never gets to see."""

from __future__ import annotations

import http.client
import io
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from provision.image import indexes, origins
from provision.image.gateway import Gateway
from provision.image.origins import INDEX_URL, TORCH_INDEX_URL, Origins
from provision.sandbox.settings import Settings


class _Upstream(BaseHTTPRequestHandler):
    """A mirror, an index and a company's proxy in one: it notes what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, str]]
    pages: dict[str, bytes]

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("Authorization", ""), self.headers.get("Proxy-Authorization", "")))
        body = server.pages.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    server.daemon_threads, server.asked, server.pages = True, [], {}
    server.address = f"127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(gateway: Gateway, url: str, proxy: str | None = None) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy or gateway.proxy}))
    with opener.open(url, timeout=20) as answer:
        content: bytes = answer.read()
        return content


def test_without_the_token_nothing_is_answered(upstream: Any) -> None:
    with Gateway("127.0.0.1", Origins(Settings())) as gateway:
        port = gateway.proxy.rpartition(":")[2]
        for login in ("", "build:guess@"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(gateway, f"http://{upstream.address}/x", proxy=f"http://{login}127.0.0.1:{port}")
            assert refused.value.code == 407
    assert upstream.asked == []


def test_a_distributions_files_come_from_the_mirror(upstream: Any) -> None:
    upstream.pages = {"/mine/debian/pool/a.deb": b"main", "/mine/debian-security/dists/x/InRelease": b"security"}
    origins = Origins(Settings(), distribution="debian", mirror=f"http://{upstream.address}/mine/debian")
    with Gateway("127.0.0.1", origins) as gateway:
        assert ask(gateway, "http://archive.example/debian/pool/a.deb") == b"main"
        assert ask(gateway, "http://other.example/debian-security/dists/x/InRelease") == b"security"


def test_the_companys_proxy_is_asked_with_its_password_by_the_controller_alone(upstream: Any) -> None:
    upstream.pages = {"http://far.example/file": b"content"}
    settings = Settings(proxies={"http_proxy": f"http://me:secret@{upstream.address}"})
    with Gateway("127.0.0.1", Origins(settings)) as gateway:
        assert ask(gateway, "http://far.example/file") == b"content"
        assert "secret" not in gateway.proxy
    assert upstream.asked == [("http://far.example/file", "", "Basic bWU6c2VjcmV0")]


def test_what_cannot_be_had_is_remembered_with_its_reason(upstream: Any) -> None:
    for mirror, reason in ((upstream.address, "127.0.0.1 answers 404 Not Found"), ("127.0.0.1:1", "Connection refused")):
        with Gateway("127.0.0.1", Origins(Settings(), mirror=f"http://{mirror}/debian")) as gateway:
            with pytest.raises(urllib.error.HTTPError):
                ask(gateway, "http://archive.example/debian/dists/gone")
            assert gateway.refused[0].startswith("archive.example/debian/dists/gone: 127.0.0.1")
            assert reason in gateway.refused[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254"])
def test_what_listens_on_this_machine_alone_is_out_of_reach(upstream: Any, host: str) -> None:
    upstream.pages = {"/x": b"private"}
    with Gateway("127.0.0.1", Origins(Settings())) as gateway:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(gateway, f"http://{host}:{upstream.server_address[1]}/x")
        assert refused.value.code == 403
        connection = http.client.HTTPConnection("127.0.0.1", int(gateway.proxy.rpartition(":")[2]), timeout=20)
        connection.set_tunnel(host, upstream.server_address[1], {"Proxy-Authorization": gateway.credentials})
        with pytest.raises(OSError, match="502"):
            connection.connect()
    assert upstream.asked == []


def test_indexes_and_wheels_are_merged_and_passwords_stay_here(upstream: Any, tmp_path: Path) -> None:
    wheels, local = tmp_path / "wheels", tmp_path / "simple"
    wheels.mkdir()
    (wheels / "my_thing-1.0-py3-none-any.whl").write_bytes(b"mine")
    (local / "my-thing").mkdir(parents=True)
    (tmp_path / "my_thing-2.0-py3-none-any.whl").write_bytes(b"local")
    (local / "my-thing/index.html").write_text('<a href="../../my_thing-2.0-py3-none-any.whl">x</a>')
    page = b'<a href="files/my_thing-3.0.tar.gz#sha256=ab" data-requires-python="&gt;=3.8">x</a>'
    upstream.pages = {"/simple/my-thing/": page, "/simple/my-thing/files/my_thing-3.0.tar.gz": b"far"}
    settings = Settings(pip={"index-url": (f"http://me:secret@{upstream.address}/simple",), "extra-index-url": (local.as_uri(),)})
    with Gateway("127.0.0.1", Origins(settings, wheels=wheels)) as gateway:
        text = ask(gateway, INDEX_URL + "My.Thing/").decode()
        links = [part.split('"')[0] for part in text.split('href="')[1:]]
        assert [ask(gateway, "http://packages.provision.internal" + link.partition("#")[0]) for link in links] == [
            b"mine",
            b"local",
            b"far",
        ]
        assert links[2].endswith("#sha256=ab")
        assert 'data-requires-python="&gt;=3.8"' in text
        assert "secret" not in text
        assert str(tmp_path) not in text
    assert {login for _path, login, _ in upstream.asked} == {"Basic bWU6c2VjcmV0"}


def test_the_companys_certificate_is_trusted_by_the_controller(upstream: Any, tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
    upstream.pages = {"/simple/thing/": b'<a href="thing-1-py3-none-any.whl">x</a>', "/simple/thing/thing-1-py3-none-any.whl": b"content"}
    index = f"https://localhost:{upstream.server_address[1]}/simple"
    with Gateway("127.0.0.1", Origins(Settings(bundle=(tmp_path / "cert").read_text()), index=index)) as gateway:
        link = ask(gateway, INDEX_URL + "thing/").decode().partition('href="')[2].partition('"')[0]
        assert ask(gateway, "http://packages.provision.internal" + link) == b"content"
    with Gateway("127.0.0.1", Origins(Settings(), index=index)) as gateway:
        with pytest.raises(urllib.error.HTTPError):
            ask(gateway, INDEX_URL + "thing/")
        assert "CERTIFICATE_VERIFY_FAILED" in gateway.refused[0]


def test_pytorchs_index_is_one_of_its_own(upstream: Any) -> None:
    upstream.pages = {"/cpu/torch/": b'<a href="torch-9-py3-none-any.whl">x</a>'}
    origins = Origins(Settings(pip={"no-index": ("yes",)}), torch_index=f"http://{upstream.address}/cpu")
    with Gateway("127.0.0.1", origins) as gateway:
        assert "torch-9-py3-none-any.whl" in ask(gateway, TORCH_INDEX_URL + "torch/").decode()
        assert "torch-9" not in ask(gateway, INDEX_URL + "torch/").decode()


def test_an_index_that_does_not_answer_is_asked_once_and_pip_goes_on(upstream: Any) -> None:
    upstream.pages = {"/simple/a/": b'<a href="a-1.tar.gz">x</a>'}
    settings = Settings(pip={"index-url": (f"http://{upstream.address}/simple",), "extra-index-url": ("http://127.0.0.1:1/simple",)})
    with Gateway("127.0.0.1", Origins(settings, torch_index="http://127.0.0.1:1/cpu")) as gateway:
        assert "a-1.tar.gz" in ask(gateway, INDEX_URL + "a/").decode()
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(gateway, TORCH_INDEX_URL + "torch/")
            assert refused.value.code == 404  # at 502 pip would ask five times more
        assert len(gateway.refused) == 1
        assert "Connection refused" in gateway.refused[0]


def test_no_file_of_this_machine_is_handed_out_that_no_index_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    with Gateway("127.0.0.1", Origins(Settings(pip={"no-index": ("yes",)}), wheels=tmp_path)) as gateway:
        for path in ("file" + str(tmp_path / "secret"), "file/" + "0" * 32 + "/secret", "simple/../../secret"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(gateway, f"http://packages.provision.internal/{path}")
            assert refused.value.code == 404
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(gateway, "http://packages.provision.internal/simple/%2e%2e/")
        assert refused.value.code == 404


def test_https_goes_through_as_it_is(upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_refuse_own", lambda _host: None)  # the far host of this test is on loopback
    monkeypatch.setattr(origins, "_HTTPS", upstream.server_address[1])
    upstream.pages = {"/x": b"through"}
    with Gateway("127.0.0.1", Origins(Settings())) as gateway:
        port = int(gateway.proxy.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.set_tunnel("127.0.0.1", upstream.server_address[1], {"Proxy-Authorization": gateway.credentials})
        connection.request("GET", "/x")
        assert connection.getresponse().read() == b"through"
        connection.close()


def test_a_step_opens_connections_of_its_own_for_https_alone() -> None:
    with pytest.raises(indexes.Unavailable, match="https alone"):
        Origins(Settings()).tunnel("mirror.example", 22)


@pytest.mark.parametrize("path", ["/debian/dists/../../key", "/debian/pool/%2e%2e/%2E%2e/key"])
def test_a_mirror_that_is_a_folder_hands_out_nothing_above_it(path: str, tmp_path: Path) -> None:
    (tmp_path / "mirror/debian/dists").mkdir(parents=True)
    (tmp_path / "mirror/debian/pool").mkdir()
    (tmp_path / "mirror/debian/dists/Release").write_text("there")
    (tmp_path / "mirror/key").write_text("secret")
    places = Origins(Settings(), distribution="debian", mirror=(tmp_path / "mirror/debian").as_uri())
    assert places.open("GET", "http://archive.example/debian/dists/Release", {}).read() == b"there"
    with pytest.raises(indexes.Unavailable, match="upwards"):
        places.open("GET", f"http://archive.example{path}", {})


def test_a_login_does_not_follow_an_answer_elsewhere() -> None:
    redirects = origins._Redirects()
    asked = urllib.request.Request("https://me:pw@index.example/simple/", headers={"Authorization": "Basic x"})

    def followed(place: str) -> Any:
        return redirects.redirect_request(asked, io.BytesIO(), 302, "Found", {}, place)

    assert followed("https://me:pw@index.example/other/").has_header("Authorization")
    for place in ("https://files.example/a.whl", "http://index.example/simple/", "https://index.example:8443/simple/"):
        assert not followed(place).has_header("Authorization")
    with pytest.raises(indexes.Unavailable, match="own addresses"):
        followed("http://127.0.0.1:1/secret")


def test_an_index_that_has_answered_before_is_not_replaced_by_another() -> None:
    failing: list[str] = []

    def read(url: str) -> str | None:
        if any(url.startswith(place) for place in failing):
            raise indexes.Unavailable("503")
        return f'<a href="{url}pkg-1.0.tar.gz">pkg</a>'

    both = {"extra-index-url": ("https://ours.example/simple",), "index-url": ("https://public.example/simple",)}
    found = indexes.Indexes(read, both)
    assert "pkg-1.0" in (found.page("/simple/pkg/") or "")
    failing.append("https://ours.example")
    with pytest.raises(indexes.Unavailable):
        found.page("/simple/pkg/")
    failing.clear()
    assert "pkg-1.0" in (found.page("/simple/pkg/") or ""), "it is asked again"
