"""Signatures in minisign's format: Ed25519 of a file or its BLAKE2b, and of that signature with its trusted comment; each key has an ID."""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "


def verify(content: bytes, signature: str, public_keys: str) -> str:
    """Verify the text of a ``.minisig`` by the texts of trusted public keys, one after another; returns the ID of the key that has signed.

    Raises:
        ValueError: it is not a signature of ``content`` by one of them; says why.
    """
    known = {raw[2:10]: raw[10:] for raw in (_bytes(line, 42, "public key") for line in public_keys.splitlines()[1::2])}
    lines = signature.splitlines()
    if len(lines) != 4 or not lines[0].startswith(_UNTRUSTED) or not lines[2].startswith(_TRUSTED):
        raise ValueError("its signature is not the four lines that minisign writes")
    of_content, of_comment = _bytes(lines[1], 74, "signature"), _bytes(lines[3], 64, "signature of the comment")
    algorithm, key, signed = of_content[:2], of_content[2:10], of_content[10:]
    if algorithm not in (b"Ed", b"ED"):
        raise ValueError("its signature is of an unknown kind")
    if key not in known:
        raise ValueError(f"it is signed with the key {_id(key)}; trusted: {', '.join(map(_id, known))}")
    try:
        public = Ed25519PublicKey.from_public_bytes(known[key])
        public.verify(signed, content if algorithm == b"Ed" else hashlib.blake2b(content).digest())
        public.verify(of_comment, signed + lines[2].removeprefix(_TRUSTED).encode())
    except InvalidSignature:
        raise ValueError(f"the key {_id(key)} has not signed this: file or signature was changed") from None
    return _id(key)


def _bytes(line: str, size: int, what: str) -> bytes:
    try:
        raw = base64.b64decode(line, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != size:
        raise ValueError(f"its {what} is cut off or damaged")
    return raw


def _id(key: bytes) -> str:
    """The ID of a key as minisign shows it."""
    return f"{int.from_bytes(key, 'little'):X}"
