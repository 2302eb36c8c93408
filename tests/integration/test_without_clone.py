"""From the wheels of `make dist` to a trained model: an empty environment here, bare hosts there, and no compiler on them."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from hosts import good, root

ROOT = Path(__file__).parents[2]
UV = ROOT / ".venv/bin/uv"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """What `make dist` makes in a copy of the files that git knows: a checkout in which nothing was built."""
    copy = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=listed, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=packed, check=True)
    subprocess.run(["make", "--silent", "dist"], cwd=copy, check=True)
    return copy / "dist"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_empty_environment_and_bare_hosts_become_a_trained_model(dist, sandbox_factory, tmp_path, monkeypatch, capsys):
    cluster = sandbox_factory(2, "debian:12", name="wheels")
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # where no build is kept
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    (wheel,) = dist.glob("provision_cluster-*.whl")
    command = [str(UV), "tool", "run", "--quiet", "--from", str(wheel), "provision"]
    began = time.monotonic()
    good(run(tmp_path, *command, "--version"))
    installed = time.monotonic()
    document = json.loads(good(run(tmp_path, *command, "up", str(cluster.inventory), "--json")).stdout)
    ended = time.monotonic()
    assert document["ok"]
    assert document["smoke"]["passed_bar"] is True
    plan = json.loads((Path(document["folder"]) / "plan.json").read_text())
    for host in cluster.hosts:
        assert "manylinux" in plan["hosts"][host.name]["engine"]["file"]
        assert root(host, "command -v g++ || echo none").strip() == "none"
        kernels = root(host, "/opt/provision/venv/bin/python -m collective_core.check")
        assert ("default kernels" in kernels) == ("avx2" not in Path("/proc/cpuinfo").read_text()), "Zig's run time knows no processor"
    assert "up to date; nothing to do" in good(run(tmp_path, *command, "up", str(cluster.inventory), "--no-smoke")).stderr
    with capsys.disabled():
        print(f"\nan empty environment: {installed - began:.1f} s; up: {ended - installed:.1f} s")
