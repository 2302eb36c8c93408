"""Support bundle: facts, findings and logs in one archive that can be shared. What could be secret is redacted.

Names of users become user1, user2 …, the same everywhere in the archive, so that a colleague can still tell them apart.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from provision.base.errors import UsageError
from provision.diagnosis.findings import document
from provision.diagnosis.patterns import Pattern
from provision.doctor.host_checks import Examination
from provision.survey import Facts

LARGEST_LOG = 20 << 20  # bytes kept of each log, from its end
_HIDDEN = "***"
# A name that announces a secret, in the forms NAME=value, NAME: value, --name value, "name": "value".
_NAMED = Pattern(
    r"""(?i)((?:[\w.-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential|bearer)[\w.-]*)["']?"""
    r"""(?:\s*[:=]\s*|\s+))(?:"[^"]*"|'[^']*'|[^\s,;"']+)""",
)
_SHAPED = (
    Pattern(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\z)"),
    Pattern(r"\b(?:ssh-(?:rsa|ed25519|dss)|ecdsa-sha2-\w+)\s+[A-Za-z0-9+/=]{20,}"),
    Pattern(r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abps]|sk|pk|npm|pypi)[-_][A-Za-z0-9_-]{16,}"),
    Pattern(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    Pattern(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
)
_AUTHORIZATION = Pattern(r"(?i)(Authorization: )\S+(?: \S+)?")
_IN_URL = Pattern(r"(\w+://)[^/@\s]+@")
_HOME = Pattern(r"(/home/)([A-Za-z0-9._-]+)")
_LOGIN = Pattern(r"\b([A-Za-z_][\w.-]*)(@[\w.-]+)")


class Redactor:
    """Removes secrets from text and replaces the names of users."""

    def __init__(self, users: Iterable[str]) -> None:
        self._users: dict[str, str] = {}
        for user in users:
            self._alias(user)

    def _alias(self, user: str) -> str:
        if user in ("root", ""):
            return user
        return self._users.setdefault(user, f"user{len(self._users) + 1}")

    def text(self, text: str) -> str:
        """The text without secrets and names of users."""
        for shape in _SHAPED:
            text = shape.replace(_HIDDEN, text)
        text = _AUTHORIZATION.replace(rf"\1{_HIDDEN}", text)
        text = _IN_URL.replace(rf"\1{_HIDDEN}@", text)
        text = _NAMED.replace(rf"\1{_HIDDEN}", text)
        text = _HOME.replace(lambda found: found[1] + self._alias(found[2]), text)
        text = _LOGIN.replace(lambda found: self._alias(found[1]) + found[2], text)
        for user, alias in self._users.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(user)}(?![\w-])", alias, text)
        return text

    def data(self, value: object) -> object:
        """The same for every text in plain data; a value is hidden as a whole where its key means a secret."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: _HIDDEN if _NAMED.match(f"{key}=x") else self.data(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.data(each) for each in value]
        return value


def write(out: Path, examination: Examination, logs: Sequence[Path]) -> None:
    """Write the archive: facts.json, findings.json, logs/. Raises UsageError when a file cannot be read or written."""
    redactor = Redactor(facts.user.name or "" for facts in examination.facts.values())
    parts = {
        "facts.json": json.dumps(redactor.data({"schema": 1, "hosts": _plain(examination.facts)}), indent=2, default=str),
        "findings.json": json.dumps(redactor.data(document(examination.findings)), indent=2),
    }
    for number, path in enumerate(logs, 1):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LARGEST_LOG))
                parts[f"logs/{number}-{redactor.text(path.name)}"] = redactor.text(file.read().decode(errors="replace"))
        except OSError as error:
            raise UsageError(f"cannot read it: {error.strerror}", where=str(path)) from error
    try:
        with tarfile.open(out, "w:gz") as archive:
            for name, text in parts.items():
                entry = tarfile.TarInfo(name)
                body = text.encode()
                entry.size, entry.mode = len(body), 0o600
                archive.addfile(entry, io.BytesIO(body))
    except OSError as error:
        raise UsageError(f"cannot write it: {error.strerror}", where=str(out)) from error


def _plain(facts: Mapping[str, Facts]) -> dict[str, Any]:
    """Facts without what a diagnosis does not need: host keys and machine ids."""
    kept = {name: each.model_dump() for name, each in facts.items()}
    for each in kept.values():
        each["ssh"] = {**each["ssh"], "host_keys": []}
        each["machine_id"] = None
    return kept
