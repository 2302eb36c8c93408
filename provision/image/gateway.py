"""The one door of a build: a proxy on the build's own network through which its steps fetch everything.

The steps know an address and a token, both gone with the build. Certificates, proxies with their passwords, mirrors and package indexes
stay with the controller, which asks in the steps' place (`origins`): no layer can hold what no step has ever seen.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import secrets
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

from provision.image.indexes import Unavailable
from provision.image.origins import Origins

_USER = "build"
_CHUNK = 1 << 16
_SILENCE_S = 300.0
_POLL_S = 0.05  # how soon the end of a build is seen
# What concerns one connection alone and is not handed on.
_OWN_HEADERS = {
    "connection",
    "proxy-connection",
    "proxy-authorization",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
}


class Gateway:
    """Listens on one address of this machine; only who knows the token is answered.

    Attributes:
        proxy: what the steps get as ``http_proxy``.
        refused: what could not be had, a sentence each, latest last.
    """

    def __init__(self, address: str, origins: Origins) -> None:
        self.origins = origins
        self.refused: list[str] = []
        token = secrets.token_urlsafe(24)
        self.credentials = "Basic " + base64.b64encode(f"{_USER}:{token}".encode()).decode()
        self._server = _Server((address, 0), self)
        self.proxy = f"http://{_USER}:{token}@{address}:{self._server.server_address[1]}"

    def __enter__(self) -> Gateway:
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], gateway: Gateway) -> None:
        self.gateway = gateway
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A step that went away is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_S

    @property
    def gateway(self) -> Gateway:
        return cast(_Server, self.server).gateway

    def do_GET(self) -> None:
        if not self._may():
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
        try:
            with self.gateway.origins.open(self.command, self.path, headers) as answer:
                length = answer.headers.get("Content-Length")
                self.send_response(answer.status or 200)  # a file has none
                for name, value in answer.headers.items():
                    if name.lower() not in _OWN_HEADERS:
                        self.send_header(name, value)
                if length is None and answer.status not in (204, 304):
                    self.send_header("Connection", "close")
                    self.close_connection = True
                self.end_headers()
                sent = 0
                while self.command != "HEAD" and (chunk := answer.read(_CHUNK)):
                    self.wfile.write(chunk)
                    sent += len(chunk)
                if self.command != "HEAD" and length is not None and sent < int(length):
                    self.close_connection = True  # or what comes next would be taken for the rest of it
        except Unavailable as error:
            self._refuse(error.status, f"{_shown(self.path)}: {error}")

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        if not self._may():
            return
        host, _, port = self.path.rpartition(":")
        try:
            there = self.gateway.origins.tunnel(host.strip("[]"), int(port))
        except (Unavailable, ValueError) as error:
            self._refuse(502, f"{self.path}: {error}")
            return
        with there:
            self.send_response(200, "Connection established")
            self.end_headers()
            self.close_connection = True
            _carry(self.connection, there)

    def _may(self) -> bool:
        given = self.headers.get("Proxy-Authorization", "")
        if hmac.compare_digest(given.encode(), self.gateway.credentials.encode()):
            return True
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="provision"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def _refuse(self, status: int, why: str) -> None:
        if why not in self.gateway.refused:
            self.gateway.refused.append(why)
        body = f"{why}\n".encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a build fetches hundreds of files."""


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}{parts.path}"


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Bytes both ways until one side is done or nobody says anything any more."""
    pair: Sequence[socket.socket] = (one, other)
    with contextlib.suppress(OSError):
        for ready in _ready(pair):
            data = ready.recv(_CHUNK)
            if not data:
                return
            (other if ready is one else one).sendall(data)


def _ready(pair: Sequence[socket.socket]) -> Iterator[socket.socket]:
    while True:
        readable, _, _ = select.select(pair, (), (), _SILENCE_S)
        if not readable:
            return
        yield from readable
