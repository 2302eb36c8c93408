"""A small company proxy: HTTP and tunnels for those who have the password. It records the requested hosts."""

from __future__ import annotations

import base64
import contextlib
import secrets
import select
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """A running proxy: its address with the password, the password, and the hosts that were requested."""

    url: str
    password: str
    asked: set[str] = field(default_factory=set)


@contextlib.contextmanager
def password_proxy() -> Iterator[Proxy]:
    """A proxy on this machine's loopback."""
    password = secrets.token_urlsafe(24)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    proxy = Proxy(f"http://someone:{password}@127.0.0.1:{server.server_address[1]}", password)
    server.proxy = proxy  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._may(urlsplit(self.path).hostname or ""):
            return
        kept = {name: value for name, value in self.headers.items() if name.lower() in ("range", "if-modified-since", "user-agent")}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            answer = opener.open(urllib.request.Request(self.path, headers=kept), timeout=120)  # noqa: S310
        except urllib.error.HTTPError as error:
            answer = error
        except OSError as error:
            self._answer(502, str(error).encode())
            return
        with answer:
            self._answer(answer.status or 200, answer.read())

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        if not self._may(host):
            return
        try:
            there = socket.create_connection((host, int(port)), timeout=30)
        except OSError as error:
            self._answer(502, str(error).encode())
            return
        with there:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            pair = (self.connection, there)
            with contextlib.suppress(OSError):
                while ready := select.select(pair, (), (), 120)[0]:
                    for one in ready:
                        data = one.recv(1 << 16)
                        if not data:
                            return
                        (there if one is self.connection else self.connection).sendall(data)

    def _may(self, host: str) -> bool:
        proxy: Proxy = self.server.proxy  # type: ignore[attr-defined]
        proxy.asked.add(host)
        word = base64.b64encode(f"someone:{proxy.password}".encode()).decode()
        if self.headers.get("Proxy-Authorization") == f"Basic {word}":
            return True
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="company"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a build fetches hundreds of files."""
