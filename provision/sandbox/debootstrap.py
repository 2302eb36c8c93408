"""Debian from its mirror instead of from an image registry: runs debootstrap once and keeps the result as a tar.

The run lives in namespaces of its own: when the controller dies, by whatever signal, the kernel ends it and drops its mounts.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from provision.base import paths, process_locks
from provision.base.errors import ProvisionError
from provision.containers.controller_settings import Settings
from provision.sandbox import hostfiles, names

#: A slow mirror takes minutes, a dead one fails by itself: the lock is waited for at least as long as another run may need.
LOCK_SECONDS = 1800
#: The kernel ends unshare with its parent, and with unshare everything in its namespaces; their mounts go with them.
_NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def kept(suite: str) -> Path:
    """Where the suite's tar is kept, whether or not it is there."""
    return paths.cache() / "sandbox" / f"debian-{suite}-{platform.machine()}.tar"


def lacking() -> str | None:
    """What keeps debootstrap from running here, as half a sentence; None when nothing does."""
    if os.geteuid() != 0:
        return "debootstrap needs root"
    for tool, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("setpriv", "util-linux"), ("tar", "tar")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package {package})"
    if not KEYRING.exists():
        return f"{KEYRING} is not there to check Debian's signature (package debian-archive-keyring)"
    return None


def make(suite: str, settings: Settings, say: Callable[[str], None]) -> Path:
    """The suite's tar, made now unless it is kept already. Two processes never make the same one at once.

    Args:
        suite: such as ``bookworm``.
        settings: the controller's: its mirror and its proxies.
        say: told in one line what takes long.

    Raises:
        ProvisionError: debootstrap failed; its last lines say why.
    """
    with process_locks.acquired(names.lock(f"debootstrap-{suite}"), LOCK_SECONDS) as mine:
        if not mine:
            raise ProvisionError(
                f"Another process has been making Debian {suite} for {LOCK_SECONDS // 60} minutes.", hint="End it, then try again."
            )
        if not kept(suite).exists():
            say(f"making Debian {suite} with debootstrap; this takes a minute or two, once")
            _clear(suite)
            try:
                _run(suite, settings)
            finally:
                _clear(suite)
    return kept(suite)


def remove_orphans() -> list[str]:
    """Removes what a run left that was killed; leaves alone what another process is making now.

    Returns:
        What was removed.
    """
    removed = []
    for tree in sorted(_partial().glob("*")):
        with process_locks.acquired(names.lock(f"debootstrap-{tree.name}")) as mine:
            if mine and tree.exists():
                _clear(tree.name)
                removed.append(f"unfinished base {tree.name}")
    if _partial().is_dir() and not any(_partial().iterdir()):
        _partial().rmdir()
    return removed


def _run(suite: str, settings: Settings) -> None:
    work = _partial() / suite
    work.mkdir(parents=True)
    kept(suite).parent.mkdir(parents=True, exist_ok=True)
    mirror = settings.mirror.archive if settings.mirror and settings.distribution == "debian" else ""
    proxies = settings.proxies or {}
    apt = settings.apt or {}
    # debootstrap fetches with wget, which knows nothing of a proxy that only apt is told of.
    environ = dict(os.environ) | {
        f"{scheme}_proxy": url
        for scheme in ("http", "https")
        if (url := proxies.get(f"{scheme}_proxy") or apt.get(f"Acquire::{scheme}::Proxy"))
    }
    process = subprocess.Popen(
        [*_NAMESPACES, "sh", "-c", hostfiles.script("debootstrap.sh"), "debootstrap", suite, str(work), str(KEYRING), mirror],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,  # a terminal's Ctrl-C is for the controller, who ends this run in its own way
    )
    try:
        output, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        tail = " / ".join(line for line in output.splitlines()[-4:] if line.strip())
        full = "no space left on device" in output.lower()
        hint = f"Free some space where {paths.cache()} is." if full else "See that apt's mirror answers (`apt-get update`), then try again."
        raise ProvisionError("The disk is full." if full else f"debootstrap failed: {tail}", where=f"making Debian {suite}", hint=hint)
    (work / "base.tar").replace(kept(suite))


def _partial() -> Path:
    return paths.cache() / "sandbox" / "partial"


def _clear(suite: str) -> None:
    shutil.rmtree(_partial() / suite, ignore_errors=True)
