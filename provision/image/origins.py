"""Where a build's packages really come from: asked by the controller with its own certificates, proxies, mirrors and indexes.

The steps ask for what any Dockerfile asks for. A distribution's packages (``…/dists/…``, ``…/pool/…``) come from the mirror that is named
or that this machine uses itself; Python packages from wheels of the user's and from this machine's indexes, merged into one.
"""

from __future__ import annotations

import base64
import io
import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from provision.image.indexes import Indexes, Unavailable
from provision.sandbox import aptsources
from provision.sandbox.settings import Settings

#: A host that exists in builds alone: Python packages are asked for there.
PACKAGES_HOST = "packages.provision.internal"
INDEX_URL = f"http://{PACKAGES_HOST}/simple/"
TORCH_INDEX_URL = f"http://{PACKAGES_HOST}/torch/"

_HTTPS = 443
_CONNECT_S = 30.0
_READ_S = 120.0


class Origins:
    """Opens in the controller's name what a build asks for.

    Args:
        settings: this machine's own.
        distribution: of the base, such as ``debian``; its mirror is used where this machine runs the same.
        mirror: of the user's, for the base's distribution.
        wheels: a folder of the user's that comes first.
        index: takes the place of this machine's own package index.
        torch_index: where PyTorch's build lies.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        distribution: str = "",
        mirror: str | None = None,
        wheels: Path | None = None,
        index: str | None = None,
        torch_index: str | None = None,
    ) -> None:
        own = settings.mirror if settings.distribution == distribution else None
        self._mirror = aptsources.mirror_at(mirror, distribution) if mirror else own
        self._proxies = _proxies(settings)
        context = ssl.create_default_context(cadata=settings.bundle or None)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(self._proxies), urllib.request.HTTPSHandler(context=context), _Redirects()
        )
        self._indexes = Indexes(self._read, settings.pip or {}, wheels=wheels, index=index, torch_index=torch_index)

    def open(self, method: str, url: str, headers: Mapping[str, str]) -> Any:
        """The answer to a step's request: an object with ``status``, ``headers`` and ``read``, to be closed. Raises Unavailable."""
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise Unavailable("not an http address", 400)
        if parts.hostname != PACKAGES_HOST:
            mirrored = self._mirrored(url)
            if mirrored == url:
                _refuse_own(parts.hostname or "")
            return self._ask(method, mirrored, headers)
        if (page := self._indexes.page(unquote(parts.path))) is not None:
            return _Page(page)
        real = self._indexes.file(unquote(parts.path))
        if real is None:
            raise Unavailable("no index of this machine has it", 404)
        return self._ask(method, real, {name: value for name, value in headers.items() if name.lower() == "range"})

    def tunnel(self, host: str, port: int) -> socket.socket:
        """A connection to where a step wants to speak https by itself, through this machine's proxy if it has one."""
        if port != _HTTPS:
            raise Unavailable("a build may open connections of its own for https alone", 403)
        _refuse_own(host)
        proxy = self._proxies.get("https")
        try:
            if not proxy or cast(Any, urllib.request).proxy_bypass_environment(host, {"no": self._proxies.get("no", "")}):
                return socket.create_connection((host, port), timeout=_CONNECT_S)
            return _through(proxy, host, port)
        except OSError as error:
            raise Unavailable(f"cannot be reached: {error}") from error

    def _mirrored(self, url: str) -> str:
        """The mirror's address of a distribution's file; any other address as it is."""
        path = urlsplit(url).path
        if ".." in unquote(path).split("/"):
            raise Unavailable("a path may not lead upwards", 403)  # out of a mirror that is a folder of this machine
        for part in ("/dists/", "/pool/"):
            head, found, rest = path.partition(part)
            if found and self._mirror is not None:
                base = self._mirror.security if head.rstrip("/").endswith("security") else self._mirror.archive
                return f"{base.rstrip('/')}{part}{rest}" if base else url
        return url

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> Any:
        parts = urlsplit(url)
        request = urllib.request.Request(_without_login(url), method=method, headers=dict(headers))  # noqa: S310 - an origin of ours
        if parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        try:
            return self._opener.open(request, timeout=_READ_S)
        except urllib.error.HTTPError as answer:
            if answer.code == 304:
                return answer
            raise Unavailable(f"{parts.hostname} answers {answer.code} {answer.reason}", answer.code) from answer
        except urllib.error.URLError as error:
            raise Unavailable(f"{parts.hostname or url}: {error.reason}", 404 if parts.scheme == "file" else 502) from error
        except OSError as error:
            raise Unavailable(f"{parts.hostname}: {error}") from error

    def _read(self, url: str) -> str | None:
        """A page of an index as text; None where it has none. Raises Unavailable where the index itself cannot be asked."""
        try:
            with self._ask("GET", url, {"Accept": "text/html"}) as answer:
                text: str = answer.read().decode("utf-8", errors="replace")
                return text
        except Unavailable as error:
            if error.status in (404, 410):
                return None
            raise


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows an answer elsewhere without the login, which is for the first place alone, and not to this machine's own addresses."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None:
            before, now = urlsplit(req.full_url), urlsplit(newurl)
            if (before.scheme, before.netloc) != (now.scheme, now.netloc):
                made.remove_header("Authorization")
                _refuse_own(now.hostname or "")
        return made


class _Page(io.BytesIO):
    """A page of our own, as an answer."""

    def __init__(self, text: str) -> None:
        content = text.encode()
        super().__init__(content)
        self.status = 200
        self.headers = Message()
        self.headers["Content-Type"] = "text/html; charset=utf-8"
        self.headers["Content-Length"] = str(len(content))


def _refuse_own(host: str) -> None:
    """A step has no business with what listens on this machine's loopback, nor with a cloud's metadata. Raises Unavailable."""
    try:
        addresses = {ipaddress.ip_address(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return  # only this machine's proxy may know it
    addresses |= {address.ipv4_mapped for address in addresses if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped}
    if any(address.is_loopback or address.is_link_local or address.is_unspecified for address in addresses):
        raise Unavailable("a build may not reach this machine's own addresses", 403)


def _proxies(settings: Settings) -> dict[str, str]:
    """For urllib: scheme → proxy; those that only apt is told of count, too."""
    apt = {name.lower(): value for name, value in (settings.apt or {}).items()}
    found = {
        scheme: proxy
        for scheme in ("http", "https")
        if (proxy := (settings.proxies or {}).get(f"{scheme}_proxy") or apt.get(f"acquire::{scheme}::proxy"))
    }
    if found and (direct := (settings.proxies or {}).get("no_proxy")):
        found["no"] = direct
    return found


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _through(proxy: str, host: str, port: int) -> socket.socket:
    parts = urlsplit(proxy)
    connection = socket.create_connection((cast(str, parts.hostname), parts.port or 3128), timeout=_CONNECT_S)
    login = ""
    if parts.username:
        word = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        login = f"Proxy-Authorization: Basic {word}\r\n"
    connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{login}\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = connection.recv(1)
        if not data:
            raise OSError("the proxy hung up")
        answer += data
    if answer.split()[1] != b"200":
        connection.close()
        raise OSError(f"the proxy answers {answer.splitlines()[0].decode(errors='replace')}")
    return connection
