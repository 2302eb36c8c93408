"""A Python that uv downloads, on a host whose own does not fit. GitHub is replaced by a list and an archive with this machine's Python."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hosts import RUN_S, container, good, report, root, state

from provision.catalog import OURS

pytestmark = pytest.mark.slow

HOST, ITS_PYTHON = "debian:13", "3.13"
#: Linked statically, so that it runs in any folder.
SYSTEM_PYTHON = Path("/usr/bin/python3").resolve()
NOT_NEEDED = re.compile(r"/(__pycache__|test|config-[^/]*|sitecustomize\.py|EXTERNALLY-MANAGED)(/|$)")


def release(folder: Path, version: str, minor: str) -> bytes:
    """A tar file for ``/``: uv's settings in /etc/uv, and in /var/tmp its list of downloads and the one release that the list names."""
    archive = folder / "python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(SYSTEM_PYTHON, f"python/bin/python{minor}")
        library = f"python/lib/python{minor}"
        packed.add(f"/usr/lib/python{minor}", library, filter=lambda member: None if NOT_NEEDED.search(member.name) else member)
        (settings,) = Path(f"/usr/lib/python{minor}").glob("_sysconfigdata__x86_64*.py")
        packed.add(settings, f"{library}/_sysconfigdata__linux_x86_64-linux-gnu.py")
    numbers = dict(zip(("major", "minor", "patch"), map(int, version.split(".")), strict=True))
    entry = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        **numbers,
        "prerelease": "",
        "variant": None,
        "build": None,
        "url": "file:///var/tmp/python.tar.gz",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    files = {
        "etc/uv/uv.toml": b'python-downloads-json-url = "/var/tmp/downloads.json"\n',
        "var/tmp/downloads.json": json.dumps({f"cpython-{version}-linux-x86_64-gnu": entry}).encode(),
        "var/tmp/python.tar.gz": archive.read_bytes(),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_python_is_downloaded_once_and_removed(sandbox_factory, tmp_path):
    printed = subprocess.run([SYSTEM_PYTHON, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True)
    version = printed.stdout.strip()
    minor = version.rpartition(".")[0]
    if minor == ITS_PYTHON:
        pytest.skip(f"this machine's Python is {minor}, as the host's")
    sandbox = sandbox_factory(1, HOST, name="python", slots=1)
    (host,) = sandbox.hosts
    container(host).put_archive("/", release(tmp_path, version, minor))
    pythons = {**dict.fromkeys(OURS.python_packages().uv.pythons), minor: version}
    changes = tmp_path / "catalogue.json"
    changes.write_text(json.dumps({"python_packages": {"numpy": {"of": {ITS_PYTHON: None}}, "uv": {"pythons": pythons}}}))

    def provision(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(Path(__file__).with_name("other_catalogue.py")), str(changes), words[0], str(sandbox.inventory)]
        result = subprocess.run([*command, *words[1:]], input="", capture_output=True, text=True, timeout=RUN_S, check=False)
        return good(result)

    before = state(host)
    lean = ("--torch", "none", "--no-smoke", "--json")
    assert report(provision("up", *lean, "--check"))["hosts"][0]["changed"] > 0
    assert state(host) == before
    provision("up", *lean)
    program = f"import sys, collective_core, mpi4py.MPI; print('{minor}' in sys.version, sys.base_prefix)"
    found = root(host, f'/opt/provision/venv/bin/python -B -c "{program}"')
    assert found == f"True /opt/provision/python/cpython-{version}-linux-x86_64-gnu"
    assert report(provision("up", *lean, "--full"))["hosts"][0]["changed"] == 0
    provision("remove", "--yes")
    assert state(host) == before
