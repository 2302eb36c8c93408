"""A small registry, on loopback unless told otherwise: enough of the distribution protocol (v2) for a push and a pull by digest. It keeps
everything in memory.
"""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Registry:
    """``with Registry() as registry``: serves at ``registry.address``.

    Attributes:
        blobs: digest → content.
        manifests: (name, tag or digest) → (media type, content).
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self._server: Any = ThreadingHTTPServer((address, 0), _Handler)
        self._server.daemon_threads, self._server.registry = True, self
        self.address = f"{address}:{self._server.server_address[1]}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _do(self) -> None:
        registry: Registry = self.server.registry  # type: ignore[attr-defined]
        body = self._body() if self.command in ("POST", "PATCH", "PUT") else b""
        path, _, query = self.path.partition("?")
        if path == "/v2/":
            self._answer(200)
        elif blob := re.fullmatch(r"/v2/(.+)/blobs/(sha256:[0-9a-f]{64})", path):
            content = registry.blobs.get(blob[2])
            self._answer(404) if content is None else self._answer(200, content, Docker_Content_Digest=blob[2])
        elif upload := re.fullmatch(r"/v2/(.+)/blobs/uploads/([0-9a-f-]*)", path):
            name, session = upload[1], upload[2] or str(uuid.uuid4())
            registry.uploads[session] = registry.uploads.get(session, b"") + body
            place = f"/v2/{name}/blobs/uploads/{session}"
            if self.command != "PUT":
                self._answer(202, Location=place, Range=f"0-{max(0, len(registry.uploads[session]) - 1)}", Docker_Upload_UUID=session)
                return
            content, wanted = registry.uploads.pop(session), query.partition("digest=")[2].replace("%3A", ":")
            if _digest(content) != wanted:
                self._answer(400)
                return
            registry.blobs[wanted] = content
            self._answer(201, Location=f"/v2/{name}/blobs/{wanted}", Docker_Content_Digest=wanted)
        elif manifest := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", path):
            name, reference = manifest[1], manifest[2]
            if self.command == "PUT":
                kept = (self.headers.get("Content-Type", ""), body)
                registry.manifests[(name, reference)] = registry.manifests[(name, _digest(body))] = kept
                self._answer(201, Location=path, Docker_Content_Digest=_digest(body))
            elif (name, reference) in registry.manifests:
                kind, content = registry.manifests[(name, reference)]
                self._answer(200, content, Content_Type=kind, Docker_Content_Digest=_digest(content))
            else:
                self._answer(404)
        else:
            self._answer(404)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = _do

    def log_message(self, *_: Any) -> None:
        pass
