"""Closed networks: a bundle is gathered, the hosts lose every way out, and the whole job runs from it; a changed bundle is refused.

Also here, because it needs finished hosts: what was changed behind our back is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import good, provision, remove_default_route, report, root

from provision.launch.program_files import MAX_NEIGHBOURS
from provision.sandbox import Sandbox, SandboxHost

LEAN = (
    "--torch",
    "none",
)


pytestmark = pytest.mark.slow  # minutes until there is a bundle


@pytest.fixture(scope="module")
def closed(sandbox_factory) -> Sandbox:
    return sandbox_factory(2, "debian:12", name="closed", slots=1)


@pytest.fixture(scope="module")
def bundle(closed, tmp_path_factory) -> Iterator[Path]:
    """The bundle for both hosts; from here on they reach nothing but the network they share with the controller, which is one that has
    downloaded nothing before, and reaches no package index."""
    target = tmp_path_factory.mktemp("bundle") / "hosts.bundle"
    good(provision("bundle", str(closed.inventory), "--out", str(target), *LEAN))
    for host in closed.hosts:
        remove_default_route(host)
        root(host, "rm -f /etc/pip.conf /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/90provision-sandbox")
        root(host, "! apt-get update -q 2>/dev/null | grep -q ^Get:")
        assert root(host, "ip route get 192.0.2.1 2>&1 || true").endswith("Network is unreachable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVISION_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        yield target


@pytest.fixture(scope="module")
def installed(closed, bundle) -> dict[str, Any]:
    """Report of the installation from the bundle, and what the first host has sent meanwhile."""
    before = _sent(closed.hosts[0])
    made = report(good(provision("up", str(closed.inventory), "--bundle", str(bundle), *LEAN, "--json")))
    return {**made, "sent": _sent(closed.hosts[0]) - before}


def _sent(host: SandboxHost) -> int:
    return int(root(host, "cat /sys/class/net/eth0/statistics/tx_bytes"))


def test_a_changed_bundle_is_refused_before_a_host_is_touched(closed, bundle, tmp_path):
    content = bytearray(bundle.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "changed").write_bytes(content)
    refused = provision("up", str(closed.inventory), "--bundle", str(tmp_path / "changed"), *LEAN)
    assert refused.returncode == 2
    assert "nothing of it was used" in refused.stderr
    (tmp_path / "short").write_bytes(bundle.read_bytes()[: len(content) // 3])
    assert provision("up", str(closed.inventory), "--bundle", str(tmp_path / "short"), *LEAN).returncode == 2
    assert all("provision" not in root(host, "ls /opt") for host in closed.hosts)


def test_a_bundle_that_lacks_something_is_named_before_a_host_is_touched(closed, bundle):
    lacking = provision("up", str(closed.inventory), "--bundle", str(bundle), "--torch", "2.13.0")  # made without PyTorch
    assert lacking.returncode == 2
    assert "torch==" in lacking.stderr
    assert all("provision" not in root(host, "ls /opt") for host in closed.hosts)


def test_hosts_without_a_network_are_installed_and_verified_from_the_bundle(installed):
    assert {host["state"] for host in installed["hosts"]} == {"ready"}
    assert installed["smoke"]["size"] == 2


def test_the_first_host_hands_the_files_on_and_nothing_is_left_of_the_way(closed, installed):
    archive = next((Path(installed["folder"]) / "playbook").glob("bundle-*.tar"))
    assert installed["sent"] > archive.stat().st_size > MAX_NEIGHBOURS
    assert not any("prov" in root(host, "ls -A /var/tmp") for host in closed.hosts)
    events = Path(installed["folder"]) / "site/artifacts/ansible/job_events"
    assert len(list(events.iterdir())) == 2, "each host runs its own steps"


@pytest.mark.usefixtures("installed")
def test_drift_is_detected_and_fixed(closed, bundle):
    one, two = closed.hosts
    root(one, "dpkg --purge --force-depends g++ && echo /elsewhere >> /etc/ld.so.conf.d/00-provision.conf")
    engine = root(two, "ls /opt/provision/venv/lib/python3*/site-packages/collective_core/*.so* | head -1")
    root(two, f"printf x | dd of={engine} bs=1 seek=4096 conv=notrunc 2>/dev/null")
    root(two, "rm $(ls /opt/provision/bundle/wheels/*.whl | head -1)")
    fixed = good(provision("up", str(closed.inventory), "--bundle", str(bundle), *LEAN, "--json"))
    assert "node1: package g++ is gone; /etc/ld.so.conf.d/00-provision.conf was changed" in fixed.stderr
    assert f"node2: {engine} has other content" in fixed.stderr
    assert {host["state"] for host in report(fixed)["hosts"]} == {"ready"}
    assert all(host["changed"] > 0 for host in report(fixed)["hosts"])


@pytest.mark.usefixtures("installed")
def test_a_run_on_one_host_leaves_it_connected_with_the_other(closed, bundle, ssh):
    before = root(closed.hosts[0], "cat ~trainer/.ssh/authorized_keys ~trainer/.ssh/provision_config")
    good(provision("up", str(closed.inventory), "--bundle", str(bundle), *LEAN, "--no-smoke", "--full", "--limit", "node1"))
    assert root(closed.hosts[0], "cat ~trainer/.ssh/authorized_keys ~trainer/.ssh/provision_config") == before
    reached = ssh(closed, closed.hosts[0], f"ssh -F ~/.ssh/provision_config {closed.hosts[1].address} hostname")
    assert reached.stdout.strip() == "node2", reached.stderr
