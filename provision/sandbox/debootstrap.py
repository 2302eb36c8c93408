"""Debian from its mirror where the image cannot be pulled: debootstrap runs once, and the cache keeps the result as a tar.

The run is in namespaces of its own: when the controller dies, by any signal, the kernel ends it and drops its mounts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from provision.base import paths, process_locks
from provision.base.errors import ProvisionError
from provision.sandbox import names
from provision.sandbox.containers.controller_settings import Settings

#: Debian's image tag -> the suite that debootstrap makes instead.
SUITES = {"12": "bookworm", "bookworm": "bookworm", "13": "trixie", "trixie": "trixie"}
#: A slow mirror takes minutes, a dead one fails by itself: the lock is waited for at least as long as another run may need.
LOCK_SECONDS = 1800
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
#: The kernel ends unshare with its parent, and with unshare everything in its namespaces; their mounts go with them.
_NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")


def suite_of(base: str) -> str | None:
    """The Debian suite of a base image; None when debootstrap cannot make it."""
    repository, _, tag = base.removeprefix("library/").partition(":")
    return SUITES.get(tag.removesuffix("-slim")) if repository == "debian" else None


def tar(suite: str, packages: Sequence[str] = ()) -> Path:
    """Where the suite's tar is kept, whether or not it exists."""
    extra = f"-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}" if packages else ""
    return paths.cache() / "sandbox" / f"debian-{suite}-{platform.machine()}{extra}.tar"


def missing() -> str | None:
    """What keeps debootstrap from running here, as half a sentence; None when nothing does."""
    if os.geteuid() != 0:
        return "debootstrap needs root"
    for tool, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("setpriv", "util-linux"), ("tar", "tar")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package {package})"
    if not KEYRING.exists():
        return f"{KEYRING} is missing, which verifies Debian's signature (package debian-archive-keyring)"
    return None


def make(suite: str, settings: Settings, say: Callable[[str], None], packages: Sequence[str] = ()) -> Path:
    """The suite's tar, made now unless the cache has it. Two processes never make the same one at once.

    Args:
        suite: such as ``bookworm``.
        settings: the controller's: its mirror and its proxies.
        say: called with one line before what takes long.
        packages: what to install besides Debian's minimum.

    Raises:
        ProvisionError: debootstrap failed; its last lines say why.
    """
    kept = tar(suite, packages)
    with process_locks.acquired(names.lock(f"debootstrap-{suite}"), LOCK_SECONDS) as lock:
        if not lock:
            raise ProvisionError(
                f"Another process has been making Debian {suite} for {LOCK_SECONDS // 60} minutes.", hint="End it, then try again."
            )
        if not kept.exists():
            say(f"making Debian {suite} with debootstrap; this takes a minute or two, once")
            work = _partial() / suite
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            try:
                _run(suite, work, settings, packages)
                (work / "base.tar").replace(kept)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return kept


def remove_partial() -> list[str]:
    """Remove what killed runs left; leave alone what another process is making now. Returns what was removed."""
    removed = []
    for work in sorted(_partial().glob("*")):
        with process_locks.acquired(names.lock(f"debootstrap-{work.name}")) as lock:
            if lock and work.exists():
                shutil.rmtree(work, ignore_errors=True)
                removed.append(f"unfinished base {work.name}")
    return removed


def _run(suite: str, work: Path, settings: Settings, packages: Sequence[str]) -> None:
    mirror = settings.mirror.archive if settings.mirror and settings.distribution == "debian" else ""
    proxies, apt = settings.proxies or {}, settings.apt or {}
    # debootstrap fetches with wget, which does not know a proxy that only apt's configuration names.
    proxy_of = {scheme: proxies.get(f"{scheme}_proxy") or apt.get(f"Acquire::{scheme}::Proxy") for scheme in ("http", "https")}
    script = names.script("debootstrap.sh")
    process = subprocess.Popen(
        [*_NAMESPACES, "sh", "-c", script, "debootstrap", suite, str(work), str(KEYRING), ",".join(packages), mirror],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {f"{scheme}_proxy": url for scheme, url in proxy_of.items() if url},
        start_new_session=True,  # a terminal's Ctrl-C is for the controller, which ends this run itself
    )
    try:
        output, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        tail = " / ".join(line for line in output.splitlines()[-4:] if line.strip())
        hint = f"Check that apt's mirror answers (`apt-get update`) and that {paths.cache()} has space left, then try again."
        raise ProvisionError(f"debootstrap failed: {tail}", where=f"making Debian {suite}", hint=hint)


def _partial() -> Path:
    return paths.cache() / "sandbox" / "partial"
