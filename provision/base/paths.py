"""Folders of the controller: state, runs, sandbox, cache."""

from __future__ import annotations

import os
import re
from pathlib import Path


def home() -> Path:
    """The state folder: ``$PROVISION_HOME``, else ``$XDG_STATE_HOME/provision``, else ``~/.local/state/provision``."""
    if own := os.environ.get("PROVISION_HOME"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "provision"


def short(text: str) -> str:
    """A sentence or a command with ``~`` for the home folder, as a shell takes it; words in quotes stay as they are."""
    return re.sub(rf"(?<!\S){re.escape(os.path.expanduser('~'))}(?=/)", "~", text)


def runs() -> Path:
    """One folder per run: logs, rendered playbook, report."""
    return home() / "runs"


def sandbox() -> Path:
    """The sandbox's key pair, known hosts and inventory."""
    return home() / "sandbox"


def cache() -> Path:
    """Downloads and archives that are kept, in ``$PROVISION_CACHE`` or the state folder."""
    return Path(os.environ.get("PROVISION_CACHE") or home() / "cache").expanduser()
