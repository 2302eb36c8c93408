"""The status page in a real browser: what it shows, in light and dark, and that nothing a host says runs there."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provision.survey.document import BEGIN, END

pytestmark = pytest.mark.slow

_SSH = "#!/bin/sh\nfor word; do address=$last; last=$word; done\ncat {folder}/$address || exit 255\n"
_EVIL = "<script>document.title='harmed'</script><img src=x onerror=\"document.title='harmed'\">"


@pytest.fixture(scope="module")
def browser() -> str:
    """Debian's Chromium."""
    if shutil.which("chromium") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=True, capture_output=True)
    return "chromium"


def look(browser: str, address: str, profile: Path, *options: str) -> str:
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1000,700"]
    return subprocess.run([*common, *options, address], check=True, capture_output=True, text=True, timeout=300).stdout


def test_a_browser_shows_what_hosts_say_and_runs_none_of_it(browser: str, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(_SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    inventory = tmp_path / "hosts.ini"
    inventory.write_text(f"node1 ansible_ssh_executable={tmp_path}/ssh\nnode2 ansible_ssh_executable={tmp_path}/ssh\n")
    room = {"total": 64 << 30, "available": 40 << 30}
    job = {"run": "20261126-170000-abc123", "ranks": 8, "age": 60.0, "program": _EVIL}
    gpu = {"index": 0, "uuid": "GPU-1", "name": _EVIL, "utilization": 97.0, "memory_used": 70 << 30, "memory_total": 80 << 30}
    answer = {
        "activity": {"uptime": 90_000.0, "load": 3.2, "cores": 16, "memory": room, "disk": room, "jobs": [job]},
        "gpu_load": {"gpus": [gpu], "error": None},
        "installed": {"prefix": "/opt/provision"},
    }
    (tmp_path / "node1").write_text(f"{BEGIN}\n{json.dumps(answer)}\n{END}\n")
    command = [sys.executable, "-m", "provision", "status", str(inventory), "--serve", "0", "--interval", "3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        page = look(browser, address, tmp_path / "profile", "--dump-dom")
        while "Waiting" in page:
            page = look(browser, address, tmp_path / "profile", "--dump-dom")
        pictures = {}
        for name, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
            picture = tmp_path / f"{name}.png"
            look(browser, address, tmp_path / "profile", f"--screenshot={picture}", *options)
            pictures[name] = picture.read_bytes()
        refused = look(browser, address.replace("token=", "token=x"), tmp_path / "profile", "--dump-dom")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    assert "&lt;script&gt;document.title" in page
    assert "<title>" in page
    assert "harmed</title>" not in page
    assert 'data-name="busy"' in page
    assert 'data-name="temp"' not in page, "no GPU says it"
    assert "unreachable" in page
    assert "node1" not in refused
    assert pictures["light"] != pictures["dark"]
    assert all(len(content) > 10_000 for content in pictures.values()), "an empty page is smaller"
