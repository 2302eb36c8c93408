"""The error of a failed task, from what Ansible reports of it."""

from __future__ import annotations

import pytest

from provision.remote.ansible import Event

CLOSED = "Shared connection to 10.0.0.1 closed.\r\n"


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("ansible.builtin.script", "libcufft.so.12: cannot open shared object file\nnon-zero return code"),
        ("ansible.builtin.command", "Shared connection to 10.0.0.1 closed.\nnon-zero return code"),
    ],
)
def test_a_script_prints_on_its_terminal_and_ssh_beside_it(action: str, text: str) -> None:
    result = {"rc": 1, "stdout": "libcufft.so.12: cannot open shared object file\r\n", "stderr": CLOSED, "msg": "non-zero return code"}
    assert Event("failed", "a", "pytorch", "Load PyTorch", result, action=action).text == text
