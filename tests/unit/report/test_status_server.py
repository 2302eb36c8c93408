"""The web server of `provision status --serve`: who is let in, what a page says, and hosts that mean harm."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from status_of import ACTIVITY, GPU, JOB, Hosts

from provision import inventory
from provision.base.errors import ProvisionError
from provision.cli import main
from provision.cli.status import _serve
from provision.report.status import server as serving
from provision.report.status.model import LastRun, Size, Status
from provision.report.status.observer import Observer, Poller
from provision.report.status.server import Server
from provision.report.status.show import MAX_DRAWN, sample

TOKEN = secrets.token_urlsafe(32)
EVIL = '<script>alert(1)</script>"} 1\n\x1b[2J\u202e\\'


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Status:
    """Of a host whose every text means harm, and one that is down."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    hosts = Hosts(tmp_path, "node1", "node2")
    gpus = [{**GPU, "name": EVIL, "uuid": EVIL}, {**GPU, "index": 1, "utilization": None, "memory_used": 2**60}]
    jobs = [{**JOB, "program": EVIL, "run": EVIL, "ranks": 1_000_000}]
    activity = {**ACTIVITY, "jobs": jobs, "locked": {"owner": EVIL, "since": EVIL}}
    hosts.answer("node1", activity=activity, gpu_load={"gpus": gpus, "error": EVIL})
    return Observer(inventory.load(str(hosts)), {}).look(threading.Event())


@pytest.fixture
def server(status: Status) -> Iterator[Server]:
    latest: list[Status | None] = [status]
    with Server(0, TOKEN, lambda: latest[0], 15.0) as running:
        running.box = latest  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def ask(server: Server, target: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, target, headers=headers)
    reply = connection.getresponse()
    return reply, reply.read().decode()


def raw(server: Server, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# ------------------------------------------------------------------------------------------------------- who is let in


@pytest.mark.parametrize(("target", "known"), [("/", 200), ("/status.json", 200), ("/report.html", 404)])
def test_the_token_is_needed_everywhere(server: Server, target: str, known: int) -> None:
    for given in ("", "?token=", f"?token={TOKEN}x", "?token=%ff%00", f"?other={TOKEN}"):
        reply, body = ask(server, target + given)
        assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "token" in body
        assert "node1" not in body
    assert ask(server, target, Authorization=f"Basic {TOKEN}")[0].status == 401
    assert ask(server, target, Authorization="Bearer wrong")[0].status == 401
    assert ask(server, f"{target}?token={TOKEN}")[0].status == known
    assert ask(server, target, Authorization=f"Bearer {TOKEN}")[0].status == known


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "localhost:80@evil.example", ""])
def test_another_name_is_refused(server: Server, host: str) -> None:
    """A page of that name could be made to lead here (DNS rebinding)."""
    reply, body = ask(server, f"/?token={TOKEN}", Host=host)
    assert reply.status == 421
    assert "node1" not in body


def test_names_of_this_machine_are_known_at_any_port(server: Server) -> None:
    for host in ("localhost", "127.0.0.1:1", "[::1]:8080", "LOCALHOST:65535"):  # as through ssh -L
        assert ask(server, f"/?token={TOKEN}", Host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "ODD"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    reply, body = ask(server, f"/?token={TOKEN}", method)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
    assert "node1" not in body


def test_every_answer_keeps_a_browser_from_more(server: Server) -> None:
    for target in (f"/?token={TOKEN}", "/", f"/nothing?token={TOKEN}", f"/status.json?token={TOKEN}"):
        headers = ask(server, target)[0].headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "script" not in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers["Server"]


def test_odd_requests_end_and_others_are_answered(server: Server) -> None:
    for sent in (b"", b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000, b"\xff" * 100 + b"\r\n\r\n"):
        assert b"node1" not in raw(server, sent)
    headers = b"".join(b"X-%d: y\r\n" % number for number in range(200))
    assert b"node1" not in raw(server, b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
    target = b"/?" + b"a=b&" * 100 + b"token=" + TOKEN.encode()
    assert raw(server, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 400")
    assert raw(server, b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 40")
    assert ask(server, f"/?token={TOKEN}")[0].status == 200


def test_connections_that_say_nothing_are_few_and_give_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_REQUEST_S", 600.0)  # none ends by itself
    monkeypatch.setattr(serving._Handler, "timeout", 600.0)
    silent = [socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) for _ in range(60)]
    for connection in silent:
        connection.sendall(b"GET / HTTP/1.1\r\nX-a: b\r\n")
    assert ask(server, f"/status.json?token={TOKEN}")[0].status == 200
    assert silent[0].recv(1) == b"", "the oldest"
    silent[-1].sendall(f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert silent[-1].recv(12) == b"HTTP/1.0 200", "the newest"
    for connection in silent:
        connection.close()


def test_those_who_have_the_token_are_served_while_others_hold_and_reconnect(server: Server) -> None:
    ended = threading.Event()

    def hold() -> None:
        while not ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n")
                    while not ended.wait(0.2):
                        connection.sendall(b"X-a: b\r\n")
            except OSError:
                ended.wait(0.05)

    holding = [threading.Thread(target=hold) for _ in range(60)]
    for thread in holding:
        thread.start()
    try:
        answered, deadline = [], time.monotonic() + 60
        while len(answered) < 5:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError, http.client.HTTPException):  # one may be unlucky
                answered.append(ask(server, f"/status.json?token={TOKEN}")[0].status)
    finally:
        ended.set()
        for thread in holding:
            thread.join()
    assert set(answered) == {200}


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_a_request_that_never_ends_is_cut(server: Server, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_REQUEST_S", 0.3)
    monkeypatch.setattr(serving._Handler, "timeout", 600.0)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_the_printed_address_works_for_any_token(server: Server) -> None:
    server.token = f"{TOKEN}+/#&%20=? ".strip()
    address = urlsplit(server.url)
    assert ask(server, f"{address.path}?{address.query}")[0].status == 200


def test_before_the_first_answer_the_page_waits(server: Server) -> None:
    server.box[0] = None  # type: ignore[attr-defined]
    assert "Waiting" in ask(server, f"/?token={TOKEN}")[1]
    assert ask(server, f"/status.json?token={TOKEN}")[0].status == 503


def test_a_port_in_use_is_named(server: Server) -> None:
    with pytest.raises(ProvisionError, match="in use"):
        Server(server.server_address[1], TOKEN, lambda: None, 1.0)


# ------------------------------------------------------------------------------------------------------- what it says


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_what_hosts_say_as_text_alone(server: Server) -> None:
    reply, body = ask(server, f"/?token={TOKEN}")
    page = Page()
    page.feed(body)
    assert not {"script", "img", "iframe", "form", "link", "object"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on") or name == "style"]
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in body
    assert "\u202e" not in body
    assert "No route to host" in page.text
    assert body.count(TOKEN) == page.tags.count("a") == 1, "the link that pauses it has the token of its address"
    assert TOKEN not in ask(server, "/", Authorization=f"Bearer {TOKEN}")[1]
    nonce = re.search(r"'nonce-([^']+)'", reply.headers["Content-Security-Policy"])
    assert nonce is not None
    assert f'<style nonce="{nonce[1]}">' in body
    assert nonce[1] not in ask(server, f"/?token={TOKEN}")[1]
    assert ask(server, f"/?token={TOKEN}", "HEAD")[1] == ""


def test_a_page_can_be_paused(server: Server) -> None:
    address = f"/?token={TOKEN}"
    running = ask(server, address)[1]
    assert 'http-equiv="refresh"' in running
    (to_pause,) = re.findall(r'<a href="([^"]+)">Pause<', running)
    paused = ask(server, f"/{html.unescape(to_pause)}")[1]
    assert 'http-equiv="refresh"' not in paused
    assert "No route to host" in paused
    (to_go_on,) = re.findall(r'<a href="([^"]+)">Go on<', paused)
    assert f"/{html.unescape(to_go_on)}" == address
    server.box[0] = None  # type: ignore[attr-defined]
    assert ">Pause<" in ask(server, address)[1]


def test_tables_are_read_by_screen_readers_and_on_narrow_screens(server: Server) -> None:
    body = ask(server, f"/?token={TOKEN}")[1]
    assert body.count("<table") == body.count("<caption>") == body.count('role="region" aria-label=') == 2
    assert not re.findall(r"<th(?![^>]* scope=)[ >]", body)
    for name in ("mem GiB", "disk GiB", "GPUs", "ranks", "up for"):
        assert f'data-name="{name}"' in body


def test_what_is_out_of_range_is_marked_and_empty_columns_are_hidden(server: Server, status: Status) -> None:
    gib = 1 << 30
    host = status.hosts[0].model_copy(
        update={"load": 40.0, "cores": 16, "memory": Size(total=64 * gib, available=2 * gib), "disk": Size(total=9 * gib, available=gib)}
    )
    hot = host.gpus[0].model_copy(update={"name": "H100", "temperature": 90.0, "power": None})
    server.box[0] = status.model_copy(update={"hosts": (host.model_copy(update={"gpus": (hot,)}),), "jobs": ()})  # type: ignore[attr-defined]
    body = ask(server, f"/?token={TOKEN}")[1]
    assert re.findall(r'data-name="([^"]+)" class="red bold">([^<]+)<', body) == [
        ("load", "40.0/16 (high)"),
        ("mem GiB", "62/64 (high)"),
        ("temp", "90 °C (high)"),
    ]
    assert 'data-name="disk GiB"' in body
    assert not re.search(r'data-name="(ranks|power)"', body)


def test_the_last_hour_is_a_chart_for_each_host_and_figure(server: Server, status: Status) -> None:
    address, now = f"/?token={TOKEN}", status.when
    assert "The last hour" not in ask(server, address)[1]
    loads = [(4000.0, 9.0), (1800.0, 0.5), (900.0, None), (600.0, 0.25), (0.0, 3.0)]
    history = [(now - ago, {EVIL: {"load": load} if load is not None else {}, "down": {}}) for ago, load in loads]
    server.history = history
    body = ask(server, address)[1]
    page = Page()
    page.feed(body)
    assert re.findall(r'<path d="([^"]*)"/>', body) == ["M60.0,12.0 M100.0,18.0 L120.0,0.0", ""], "a gap; nothing above the frame"
    assert "25 to 300 %" in page.text
    assert "<script>alert(1)</script>" in page.text
    assert "script" not in page.tags
    assert not re.search(r'data-name="memory"', body), "of no host"
    many = status.model_copy(update={"hosts": status.hosts * 100})
    assert len(sample(many)[1]) <= MAX_DRAWN
    assert sample(status)[1]["node1"] == {"load": 3.25 / 16, "memory": 24 / 64, "GPUs": 0.97}


def test_the_page_of_the_last_run_is_linked(server: Server, status: Status, tmp_path: Path) -> None:
    address = f"/{TOKEN}/report.html"
    last = LastRun(run="20261126-170000-abc123", command="provision up", verdict="ready", began=None, folder=str(tmp_path))
    server.box[0] = status.model_copy(update={"last_run": last})  # type: ignore[attr-defined]
    assert ask(server, address)[0].status == 404
    assert address not in ask(server, f"/?token={TOKEN}")[1]
    (tmp_path / "report.html").write_text("<p>the page</p>")
    assert f'href="{address}"' in ask(server, f"/?token={TOKEN}")[1]
    reply, body = ask(server, address)
    assert (reply.status, body) == (200, "<p>the page</p>")
    assert ask(server, f"/report.html?token={TOKEN}")[1] == body
    (tmp_path / "site/artifacts/ansible").mkdir(parents=True)
    for name in ("plan.json", "secrets.json", "site/artifacts/ansible/stdout", "site/artifacts/ansible/secrets"):
        (tmp_path / name).write_text("{}")
    reply, body = ask(server, f"/{TOKEN}/plan.json")
    assert (reply.headers["Content-Type"], body) == ("text/plain; charset=utf-8", "{}"), "as the page links it: by its name alone"
    assert ask(server, f"/{TOKEN}/site/artifacts/ansible/stdout")[1] == "{}"
    unknown = ("secrets.json", "../plan.json", "survey", "site/artifacts/ansible/secrets", "plan.json/")
    assert [ask(server, f"/{TOKEN}/{name}")[0].status for name in unknown] == [404] * len(unknown)
    assert [ask(server, target)[0].status for target in (f"/{TOKEN}x/plan.json", f"/wrong/report.html?token={TOKEN}", "/plan.json")] == [
        401
    ] * 3
    assert "script-src" not in reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]


def test_the_document_is_the_one_of_the_command(server: Server, status: Status) -> None:
    reply, body = ask(server, f"/status.json?token={TOKEN}")
    assert reply.headers["Content-Type"] == "application/json"
    assert json.loads(body) == json.loads(status.model_dump_json(by_alias=True))


# ------------------------------------------------------------------------------------------------------- the command


def test_an_invalid_port_is_named_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (["--serve", "99999"], ["--serve=99999"], ["--serve=x"]):
        assert main.guarded(lambda typed=typed: main.app(args=["status", "a,", *typed], prog_name="provision"), debug=False) == 2
        assert "--serve" in capsys.readouterr().err


def test_ctrl_c_while_the_server_is_loaded_ends_it_as_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            signal.raise_signal(signal.SIGINT)
            return getattr(serving, name)

    monkeypatch.setitem(sys.modules, "provision.report.status.server", Loading("server"))
    monkeypatch.setattr(Poller, "start", lambda _: None)
    _serve(Observer(inventory.load("a,"), {}), 0, 1.0)


def test_it_serves_until_it_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    hosts = Hosts(tmp_path, "node1")
    hosts.answer("node1")
    command = [sys.executable, "-m", "provision", "status", str(hosts), "--serve", "0", "--interval", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S{40,})\n", process.stdout.readline())
        assert address is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=20)
        connection.request("GET", f"/?token={address[2]}")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert address[2] not in err
