"""The Ansible collection on bare hosts, by the playbook of its README: people who have playbooks of their own use it so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import good, provision, root

from provision import __version__
from provision.sandbox import Sandbox

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_playbook_of_ones_own_installs_nccl_and_the_engine(sandbox_factory: Callable[..., Sandbox], tmp_path: Path) -> None:
    cluster = sandbox_factory(2, name="collection")
    programs, collections, archive = Path(sys.executable).parent, tmp_path / "there", tmp_path / f"provision-cluster-{__version__}.tar.gz"
    subprocess.run([sys.executable, REPOSITORY / "ansible/build.py", tmp_path], check=True)
    subprocess.run([programs / "ansible-galaxy", "collection", "install", "--offline", archive, "-p", collections], check=True)
    playbook = re.findall(r"^```yaml\n(.*?)^```", (REPOSITORY / "ansible/README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "playbook.yml").write_text(playbook)

    def play(*options: str) -> subprocess.CompletedProcess[str]:
        words = [
            programs / "ansible-playbook",
            "-i",
            cluster.inventory,
            "playbook.yml",
            "-e",
            f"provision_cache={tmp_path}/cache",
            *options,
        ]
        environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(collections)}
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    first = good(play("-v")).stdout
    assert first.count("all collectives correct") >= 2, first
    assert len(list((tmp_path / "cache/engine").glob("*.whl"))) == 1, "one host has built for both"
    for host in cluster.hosts:
        assert "libnccl.so.2" in root(host, "ldconfig -p")
    assert re.findall(r"changed=(\d+)", good(play()).stdout) == ["0", "0"], "a second run changes nothing"
    refused = play("-e", "nccl_version=0.0.1")
    assert refused.returncode != 0
    assert "nvidia-nccl-cu12==0.0.1" in refused.stdout
    good(provision("remove", "--yes", str(cluster.inventory)))
    assert (
        root(cluster.hosts[0], "ls -d /opt/provision /etc/ld.so.conf.d/00-provision.conf 2>/dev/null || echo nothing").strip() == "nothing"
    )
