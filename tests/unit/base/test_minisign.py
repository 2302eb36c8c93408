"""minisign's format: what the program itself has written is read, and what was changed is refused."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable

import pytest
from minisign_keys import Key

from provision.base import minisign

# Written by minisign 0.11: `minisign -G -W`, `minisign -S` and `minisign -S -l` of hello.
PROGRAM_KEY = """\
untrusted comment: minisign public key 3A18A240837319D
RWSdMTcIJIqhA4/Qsf3lajgYjW1uAcutpGHD/vkHfuP8sCuYOp0liVCm
"""
PROGRAM_SIGNATURES = (
    """\
untrusted comment: signature from minisign secret key
RUSdMTcIJIqhA234++BGY/Vpc5Ivv24bIrNwYLGRdv61VgadO/Dn+l/9SdetHgWGdzC9nGv9IKh9ml1uzxlF/BlhLbFR9o+cNAg=
trusted comment: timestamp:1795935908	file:f	hashed
UJmg/jgO0FFRfn+vTqlAx/e2CqQILhYAY5sf8uY40/bsjAAM7wRu4A86Bj13zJgBoc2CTcwJuSMsr1wzCwbZAw==
""",
    """\
untrusted comment: signature from minisign secret key
RWSdMTcIJIqhA3WVAiWgHTnRbnWuXugS5sMPbMbAnXRwivJuUc3uczn9jftgmcuA4tuN2qEjEH1w3kQmJ1kx1ISI8cNAk8eZIAQ=
trusted comment: timestamp:1795935908	file:f
GXMTPDmSofWHBAtXEAOLvTLoC3kCKHeiHaTzqkjbDCh9pPR9rjdvp3WY1bZPz2WCKba0lozJqcqmhBBlgaD2Dg==
""",
)
KEY, OTHER = Key(), Key()
CONTENT = b'{"schema": 1}\n'


def signed(content: bytes = CONTENT) -> str:
    return KEY.signature(content, "timestamp:1\tfile:feed.json\thashed")


@pytest.mark.parametrize("signature", PROGRAM_SIGNATURES)
def test_signatures_of_the_program_are_valid(signature: str) -> None:
    name = PROGRAM_KEY.split()[5]
    assert minisign.verify(b"hello\n", signature, PROGRAM_KEY) == name
    assert minisign.verify(b"hello\n", signature, KEY.public_text + PROGRAM_KEY) == name
    with pytest.raises(ValueError, match=f"the key {name} has not signed this"):
        minisign.verify(b"hello", signature, PROGRAM_KEY)


@pytest.mark.parametrize("sign", [signed, functools.partial(KEY.signature, legacy=True)])
def test_both_kinds_of_signatures_are_of_one_content_by_one_key(sign: Callable[[bytes], str]) -> None:
    assert minisign.verify(CONTENT, sign(CONTENT), KEY.public_text) == KEY.shown
    with pytest.raises(ValueError, match="file or signature was changed"):
        minisign.verify(CONTENT + b" ", sign(CONTENT), KEY.public_text)
    with pytest.raises(ValueError, match=f"it is signed with the key {KEY.shown}; trusted: {OTHER.shown}"):
        minisign.verify(CONTENT, sign(CONTENT), OTHER.public_text)
    same_id = Key(OTHER.private, KEY.id)
    with pytest.raises(ValueError, match="file or signature was changed"):
        minisign.verify(CONTENT, sign(CONTENT), same_id.public_text)


def lines_with(number: int, line: str) -> str:
    lines = signed().splitlines()
    return "\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n"


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("", "not the four lines"),
        (signed() + "more\n", "not the four lines"),
        (lines_with(2, "comment: a"), "not the four lines"),
        (lines_with(2, "trusted comment: another"), "file or signature was changed"),
        (lines_with(1, signed().splitlines()[1][:-8]), "its signature is cut off or damaged"),
        (lines_with(1, "RW*" + signed().splitlines()[1][3:]), "its signature is cut off or damaged"),
        (lines_with(1, base64.b64encode(b"RS" + bytes(72)).decode()), "of an unknown kind"),
        (lines_with(3, signed().splitlines()[3][:-4]), "its signature of the comment is cut off or damaged"),
        (lines_with(3, base64.b64encode(bytes(64)).decode()), "file or signature was changed"),
    ],
)
def test_what_is_no_signature_or_was_changed_is_refused(signature: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        minisign.verify(CONTENT, signature, KEY.public_text)
