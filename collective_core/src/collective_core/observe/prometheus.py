"""Metrics for Prometheus: with COLLECTIVE_METRICS_PORT, every rank answers ``GET /metrics`` at that port plus its local rank.

In the text format 0.0.4. It listens on loopback unless COLLECTIVE_METRICS_ADDRESS names another address: whoever reaches it can read
these numbers, and nothing else. It must never hold up training: what goes wrong here is a warning.
"""

from __future__ import annotations

import http
import http.server
import os
import socket
import socketserver
import threading
import time
import warnings
from typing import Any, Iterable, Mapping

from collective_core.observe.metrics import Metrics, metrics
from collective_core.runtime import launchers, membership
from collective_core.runtime.config import Config

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds without a byte after which a client is sent away.
PATIENCE = 10.0
#: Clients at a time; others are sent away at once. Threads and open files are the program's.
MAX_CLIENTS = 8
#: Seconds for a rank of an elastic job to leave its port to another one: both change at the same time.
HANDOVER = 3.0


#: Of each kind of operation: the key of a metric, and what it is.
_OF_KIND = (
    ("operations", "Operations that have ended, well or not."),
    ("failed", "Operations that have failed."),
    ("bytes", "Bytes of this rank's tensors."),
    ("queue_seconds", "Time of operations behind others of this rank."),
    ("peers_seconds", "Time of operations until all ranks had come to them and agreed."),
    ("hosts_seconds", "Of peers_seconds, for other hosts, on the first rank of one of several hosts."),
    ("transfer_seconds", "Time of operations in which data moved."),
)
#: The rest.
_OF_RANK = (
    ("waited_seconds", "counter", "Time in which the program's threads stood still for collectives."),
    ("elastic_resets", "counter", "How often this process has left its ranks for new ones."),
    ("arena_bytes", "gauge", "Allocated of this rank's part of the arena."),
    ("arena_peak_bytes", "gauge", "Allocated of it at most since this rank has joined the job."),
    ("arena_size_bytes", "gauge", "What could be allocated of it."),
    ("rank", "gauge", "This rank's number in the job."),
    ("size", "gauge", "Ranks of the job."),
)
_LATE = "Of peers_seconds, by rank of this host: operations to which it came last of this host."


def text(found: Metrics) -> str:
    """These metrics in Prometheus's text format: ``collective_KEY``, and ``collective_KEY_total`` for what only grows. Pure."""
    values: Mapping[str, object] = found
    lines = []
    for key, what in _OF_KIND:
        rows: list[Mapping[str, object]] = [*found["operations"]]
        named = [(f'{{kind="{row["kind"]}",process_set="{row["process_set"]}"}}', row[key]) for row in rows]
        lines += _family(key, "counter", what, named)
    lines += _family("late_seconds", "counter", _LATE, [(f'{{rank="{rank}"}}', value) for rank, value in found["late_seconds"].items()])
    for key, kind, what in _OF_RANK:
        if values[key] is not None:
            lines += _family(key, kind, what, [("", values[key])])
    return "".join(f"{line}\n" for line in lines)


def _family(key: str, kind: str, what: str, values: Iterable[tuple[str, object]]) -> list[str]:
    name = f"collective_{key}_total" if kind == "counter" else f"collective_{key}"
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *(f"{name}{labels} {value!r}" for labels, value in values)]


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version = "collective_core"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(http.HTTPStatus.NOT_FOUND, explain="metrics are at /metrics")
            return
        content = text(metrics()).encode()
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing: stderr is the program's."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Without the question for the address's name that http.server asks, which may take as long as a name server does not answer."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's end gives the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, *_: object) -> None:
        """A client that has gone away is no concern of the program's."""


_server: _Server | None = None


def begin(settings: Config) -> None:
    """Listens, if it is asked for, until the process ends. A port that cannot be had is a warning."""
    global _server
    if settings.metrics_port is None:
        return
    place = settings.metrics_address, settings.metrics_port + membership.local_rank()
    if _server is not None and _server.server_address[:2] == place:
        return
    if _server is not None:  # of another local rank, which this one was in an elastic job
        _server.shutdown()
        _server.server_close()
        _server = None
    give_up_at = time.monotonic() + (HANDOVER if launchers.is_elastic() else 0.0)
    while _server is None:
        try:
            _server = _Server(*place)
        except OSError as error:
            if time.monotonic() >= give_up_at:
                warnings.warn(
                    f"rank {membership.rank()} on {socket.gethostname()} serves no metrics: it cannot listen at {place[0]} port {place[1]} "
                    f"(COLLECTIVE_METRICS_PORT + local rank; COLLECTIVE_METRICS_ADDRESS): {error.strerror}",
                    stacklevel=2,
                )
                return
            time.sleep(0.05)
    threading.Thread(target=_server.serve_forever, name="collective_core metrics", daemon=True).start()


def _forget_in_child() -> None:
    """In a forked process, which has the socket but not the thread that answers: the port must be free when the rank ends."""
    global _server
    if _server is not None:
        _server.socket.close()
    _server = None


os.register_at_fork(after_in_child=_forget_in_child)
