"""Keys of minisign, as `minisign -G -W` writes them."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class Key:
    """A key pair. ``id``: as it is in files."""

    private: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    id: bytes = field(default_factory=lambda: os.urandom(8))

    @property
    def shown(self) -> str:
        return f"{int.from_bytes(self.id, 'little'):X}"

    @property
    def public_text(self) -> str:
        raw = b"Ed" + self.id + self.private.public_key().public_bytes_raw()
        return f"untrusted comment: minisign public key {self.shown}\n{base64.b64encode(raw).decode()}\n"

    def signature(self, content: bytes, comment: str = "a test", *, legacy: bool = False) -> str:
        """As `minisign -S` signs; ``legacy``: the content itself (`-l`), not its BLAKE2b."""
        signed = self.private.sign(content if legacy else hashlib.blake2b(content).digest())
        lines = ((b"Ed" if legacy else b"ED") + self.id + signed, self.private.sign(signed + comment.encode()))
        first, second = (base64.b64encode(line).decode() for line in lines)
        return f"untrusted comment: signature\n{first}\ntrusted comment: {comment}\n{second}\n"
