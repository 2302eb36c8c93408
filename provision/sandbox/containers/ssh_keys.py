"""SSH keys of containers: a user's key pair and the hosts' public keys. The user's own ~/.ssh is neither read nor written."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from provision.base.errors import ProvisionError


def make_pair(key: Path, comment: str) -> str:
    """Make an ed25519 key pair without passphrase at ``key`` (mode 0600) and ``key``.pub.

    Returns:
        The public key's line.

    Raises:
        ProvisionError: ``ssh-keygen`` is missing or failed.
    """
    try:
        made = subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(key)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as failure:
        raise ProvisionError(
            "This machine has no ssh-keygen.", hint="Install the SSH client: `sudo apt-get install openssh-client`."
        ) from failure
    if made.returncode != 0:
        raise ProvisionError(f"ssh-keygen failed: {made.stderr.strip()}", where=str(key))
    return key.with_name(key.name + ".pub").read_text(encoding="utf-8")


def options(known: Path) -> list[str]:
    """Arguments for ``ssh`` besides user, key and host: only the keys in this file count, and only keys that are named."""
    shown = f'"{known}"' if " " in str(known) else str(known)  # ssh splits the value at blanks
    said = [f"UserKnownHostsFile={shown}", "GlobalKnownHostsFile=/dev/null", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"]
    return [word for option in said for word in ("-o", option)]


def known_hosts(keys: Mapping[tuple[str, str], str]) -> str:
    """The text of a known_hosts file.

    Args:
        keys: (host name, address) -> that host's public keys, one a line as in ``ssh_host_*_key.pub``.
    """
    lines = []
    for (name, address), public in keys.items():
        for line in public.splitlines():
            kind, data, *_comment = line.split()
            lines.append(f"{name},{address} {kind} {data}\n")
    return "".join(lines)
