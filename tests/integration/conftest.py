"""Fixtures for tests on real hosts: throw-away sandboxes and a state folder per test process, one cache per machine.

Without a container engine the hosts are namespaces, for which the tests must run as root, and tests of containers are skipped, with the
way to install an engine. With ``CI=true`` or ``PROVISION_REQUIRE_CONTAINERS=1`` they fail instead, so that a run that tested nothing cannot
pass.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import docker
import pytest
import ready
from hosts import ENGINE_S, good, provision

from provision import sandbox as sandboxes
from provision.base import paths, process_locks, resources
from provision.sandbox import EngineName, Sandbox, SandboxHost, SudoMode, names, namespaces

#: The sandboxes of one test process: ``it<pid>-<what>``.
PREFIX = f"it{os.getpid()}"

#: What `make` installs for the engine's tests, too: machines without PyTorch's own index have its build for CPUs as a wheel, and no other.
TORCH = "2.13.0"
CATALOGUE = f"""
schema: 1
source: the Makefile
date: 2026-11-29
defaults: [{{version: "{TORCH}", why: the release of these tests, source: the Makefile, date: 2026-11-29}}]
"""

#: In an order in which three workers of xdist, each with two modules at the beginning, end at about the same time. test_up.py is the first,
#: as it makes the image of a ready host that test_run.py and others begin with, and the engine's wheel, which others find in the cache.
ORDER = (
    "test_up.py",
    "test_namespaces.py",
    "test_wirings.py",
    "test_gpu_hosts.py",
    "test_doctor.py",
    "test_no_root.py",
    "test_detached.py",
    "test_remove.py",
    "test_stalled_jobs.py",
    "test_image.py",
    "test_sandbox.py",
    "test_up_bare.py",
    "test_run.py",
)

SandboxFactory = Callable[..., Sandbox]
Ssh = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of this test process, with a catalogue in which `TORCH` is the default. The cache is shared: debootstrap runs once
    per machine, not once per test."""
    if any(resources.ENGINE_WHEELS.glob("*.whl")):
        pytest.exit(
            f"hosts would take the wheels of `make dist` instead of compiling, as these tests expect: remove {resources.ENGINE_WHEELS}", 1
        )
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("provision-home")
        patch.setenv("PROVISION_HOME", str(home))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        (home / "config/provision/catalog").mkdir(parents=True)
        (home / "config/provision/catalog/pytorch.yaml").write_text(CATALOGUE, encoding="utf-8")
        if "PROVISION_CACHE" not in os.environ:
            patch.setenv("PROVISION_CACHE", str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "provision-tests"))
        yield home


def missing(message: str) -> None:
    required = os.environ.get("CI") == "true" or os.environ.get("PROVISION_REQUIRE_CONTAINERS") == "1"
    pytest.fail(message, pytrace=False) if required else pytest.skip(message)


@pytest.fixture(scope="session")
def engine(own_state: Path) -> Iterator[docker.DockerClient]:
    """A client of the container engine; sandboxes of test processes that were killed are removed first."""
    answers, sentence = sandboxes.engine_available()
    if not answers:
        missing(f"These tests need a container engine. {sentence} scripts/prepare-machine.sh does it on Debian.")
    client = docker.from_env(timeout=ENGINE_S)
    _remove_orphans(client)
    yield client
    client.close()


@pytest.fixture(scope="session")
def engine_if_any(request: pytest.FixtureRequest) -> docker.DockerClient | None:
    """A client of the container engine; None where the hosts are namespaces, because none answers."""
    if sandboxes.engine_available()[0] or namespaces.missing():
        client: docker.DockerClient = request.getfixturevalue("engine")
        return client
    return None


@pytest.fixture(scope="session")
def sandbox_factory(engine_if_any: docker.DockerClient | None) -> Iterator[SandboxFactory]:
    """Creates sandboxes: ``sandbox_factory(count, base, sudo, name, slots, engine)``; they are removed after the session.

    ``name`` identifies a sandbox within the session: a second call with the same values returns the same sandbox.
    """
    made: list[str] = []

    def make(
        count: int = 2,
        base: str | Sequence[str] | None = None,
        sudo: SudoMode = "nopasswd",
        name: str | None = None,
        slots: int = 2,
        engine: EngineName | None = None,
    ) -> Sandbox:
        full = f"{PREFIX}-{name or len(made)}"
        made.append(full)
        say = lambda line: print(f"[{full}] {line}")  # noqa: E731
        return sandboxes.up(count=count, base=base, name=full, sudo=sudo, slots=slots, say=say, engine=engine)

    yield make
    for full in dict.fromkeys(made):
        sandboxes.down(full, say=lambda _line: None)


@pytest.fixture(scope="session")
def ready_sandbox(engine_if_any: docker.DockerClient | None, sandbox_factory: SandboxFactory) -> Callable[..., Sandbox]:
    """Creates sandboxes with everything installed, of containers from an image built once: ``ready_sandbox(name, count, slots)``."""

    def make(name: str, count: int = 2, slots: int = 2) -> Sandbox:
        base = ready.image(engine_if_any, sandbox_factory) if engine_if_any else "debian:12"
        made: Sandbox = sandbox_factory(count, base, name=name, slots=slots)
        good(provision("up", str(made.inventory), "--no-smoke"))  # the hosts are copies of one: this gives each its own name and keys
        return made

    return make


@pytest.fixture(scope="session")
def ssh() -> Ssh:
    """``ssh(sandbox, host, command, user=None, key=None, known_hosts=None)`` runs a shell command over a fresh connection."""

    def run(
        sandbox: Sandbox,
        host: SandboxHost,
        command: str,
        user: str | None = None,
        key: Path | None = None,
        known_hosts: Path | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        options = [
            f"UserKnownHostsFile={known_hosts or sandbox.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
        ]
        options += ["IdentitiesOnly=yes", "IdentityAgent=none", "BatchMode=yes", "ConnectTimeout=10"]
        login = ["ssh", "-F", "/dev/null", *(word for option in options for word in ("-o", option)), "-i", str(key or sandbox.key)]
        return subprocess.run(
            [*login, f"{user or sandbox.user}@{host.address}", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def _remove_orphans(client: docker.DockerClient) -> None:
    """One test process at a time: what another is removing is gone when this one looks."""
    with process_locks.acquired(paths.cache() / "locks/orphans.lock", ENGINE_S):
        abandoned = {one.name for one in sandboxes.every() if one.engine == "namespaces"}
        labels = [one.attrs.get("Labels") or {} for one in client.networks.list(filters={"label": names.LABEL})]
        for name in abandoned | {label[names.LABEL] for label in labels}:
            match = re.match(r"it(\d+)-", name)
            if match and not Path(f"/proc/{match.group(1)}").exists():
                sandboxes.down(name, say=lambda _line: None)
