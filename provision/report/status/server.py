"""A read-only web server for the status, on this machine's loopback interface alone.

It never asks hosts itself: `observer.Poller` does that at an interval, and every request is answered with what it found last. A request
needs the token, in its address or as bearer; another name in ``Host`` is refused: no site in a browser can read it by DNS rebinding. As the
first part of a path the token is in the links of a run's page, too, which name its files alone.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from provision.base import pages, run_folders
from provision.base.errors import ProvisionError
from provision.base.text import duration
from provision.report import page as report_page
from provision.report.status import show
from provision.report.status.model import Status

LOOPBACK = "127.0.0.1"
_MAX_CONNECTIONS = 32  # without a complete request; beyond that, the oldest gives way to the newest
_REQUEST_S, _SILENT_S = 2.0, 5.0  # for a complete request; of a client that reads nothing
_OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HEADERS_OF = {HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"}, HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"}}
_POLICY = "default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class _Reply(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes
    policy: str = "default-src 'none'; frame-ancestors 'none'"


class Server(ThreadingHTTPServer):
    """The server; ``latest`` returns the newest status, None before there is one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, port: int, token: str, latest: Callable[[], Status | None], interval: float) -> None:
        self.token, self.latest, self.interval = token, latest, interval
        self.history: Sequence[show.Sample] = ()  # of the last hour; another thread may add to it
        self._silent: dict[socket.socket, float] = {}  # connections without a complete request, the oldest first: when each began
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProvisionError(f"no server can listen on port {port}: {reason}", hint="name another port: --serve PORT") from error

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/?token={quote(self.token, safe='')}"

    def get_request(self) -> tuple[socket.socket, object]:
        request, client = super().get_request()
        if len(self._silent) >= _MAX_CONNECTIONS:
            _cut(oldest := next(iter(list(self._silent))))
            self.note_request(oldest)
        self._silent[request] = time.monotonic()
        return request, client

    def note_request(self, request: socket.socket) -> None:
        """The request of a connection is complete, or the connection is over: it does not give way any more."""
        self._silent.pop(request, None)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        if isinstance(request, socket.socket):  # a datagram is not
            self.note_request(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections whose request takes too long. Called about twice a second."""
        for request, began in list(self._silent.items()):
            if time.monotonic() - began > _REQUEST_S:
                _cut(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is not an error."""

    def answer(self, method: str, target: str, host: str, authorization: str) -> _Reply:
        """The reply to any request; nothing changes."""
        if not _OWN_NAMES.fullmatch(host.strip()):
            return _plain(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to localhost and 127.0.0.1 only")
        if method not in ("GET", "HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read-only")
        parts = urlsplit(target)
        kind, _, bearer = authorization.partition(" ")
        query = parse_qs(parts.query, max_num_fields=10)
        given = [*query.get("token", []), *([bearer.strip()] if kind.lower() == "bearer" else [])]
        first, _, name = parts.path[1:].partition("/")
        name, given = (name, [unquote(first)]) if "/" in parts.path[1:] else (first, given)
        if not any(hmac.compare_digest(each.encode(), self.token.encode()) for each in given):
            return _plain(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong: use the address that provision status --serve printed")
        status = self.latest()
        if not name:
            nonce = secrets.token_urlsafe(16)
            token = self.token if "token" in query else None  # for links; who sent it as bearer has no use for them
            body = page(status, self.interval, nonce, tuple(self.history), paused=query.get("refresh") == ["0"], token=token)
            return _Reply(HTTPStatus.OK, "text/html; charset=utf-8", body.encode(), _POLICY.format(nonce=nonce))
        if (content := _of_run(status, name)) is not None:
            kind = "text/html" if name == report_page.NAME else "text/plain"
            return _Reply(HTTPStatus.OK, f"{kind}; charset=utf-8", content, _POLICY.replace("'nonce-{nonce}'", "'unsafe-inline'"))
        if name != "status.json":
            return _plain(HTTPStatus.NOT_FOUND, "there are /, /status.json, and after an installation /report.html with its files")
        if status is None:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "the hosts have not answered yet")
        return _Reply(HTTPStatus.OK, "application/json", status.model_dump_json(by_alias=True).encode())


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _SILENT_S
    protocol_version = "HTTP/1.0"  # one request per connection: no connection stays open

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(65537)
        if len(self.raw_requestline) > 65536 or not self.raw_requestline or not self.parse_request():
            return
        self.server.note_request(self.connection)
        try:
            reply = self.server.answer(self.command, self.path, self.headers.get("Host", ""), self.headers.get("Authorization", ""))
        except ValueError:  # an address that is none, or with too many fields
            reply = _plain(HTTPStatus.BAD_REQUEST, "invalid request")
        self._send(reply)

    def _send(self, reply: _Reply) -> None:
        self.send_response(reply.status)
        of_reply = {"Content-Security-Policy": reply.policy, "Content-Type": reply.kind, "Content-Length": str(len(reply.body))}
        for name, value in {**_HEADERS, **of_reply, **_HEADERS_OF.get(reply.status, {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What http.server refuses, without a word of the request."""
        self._send(_plain(HTTPStatus(code), "invalid request"))

    def version_string(self) -> str:
        return "provision"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: an address has the token."""


def _cut(request: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        request.shutdown(socket.SHUT_RDWR)


def _plain(status: HTTPStatus, text: str) -> _Reply:
    return _Reply(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _of_run(status: Status | None, name: str) -> bytes | None:
    """The page of the last run, or a file that it links."""
    last = status.last_run if status else None
    return run_folders.content(Path(last.folder) / name) if last and name in (report_page.NAME, *report_page.FILES) else None


def page(
    status: Status | None,
    interval: float,
    nonce: str,
    history: Sequence[show.Sample] = (),
    *,
    paused: bool = False,
    token: str | None = None,
) -> str:
    """The page, with the rows and lines of the terminal; before the first answer it only says so. It has no script: the browser loads it
    again after the interval, unless it is ``paused``. ``token``: for its links.
    """
    again, age = max(1, round(interval)), time.time() - status.when if status else 0.0
    return pages.template("provision.report.status").render(
        nonce=nonce,
        paused=paused,
        token=token,
        report=report_page.NAME if _of_run(status, report_page.NAME) else None,
        charts=show.charts(history),
        high=show.HIGH,
        again=again,
        summary=f"{status.inventory}: {show.summary(status)}" if status else "Waiting for the hosts' first answer",
        stale=duration(age) if age > 3 * again + 120 else "",
        tables=show.tables(status) if status else {},
        lines=show.lines(status) if status else [],
        styles=show.STYLES,
    )
