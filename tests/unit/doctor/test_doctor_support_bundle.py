"""A support bundle contains no secret, in whatever form one is written."""

import pytest

from provision.doctor.support_bundle import Redactor


@pytest.mark.parametrize(
    "line",
    [
        "export AWS_SECRET_ACCESS_KEY=PLANTED",
        "HF_TOKEN: PLANTED",
        '{"password": "PLANTED", "x": 1}',
        "mysql --password=PLANTED db",
        "curl --token PLANTED https://example.org",
        "Authorization: Bearer PLANTED",
        "https://user:PLANTED@example.org/simple",
        "key ghp_PLANTEDPLANTEDPLANTEDPLANTED",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nPLANTED\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nPLANTED, and the file ends",
        "ansible_become_password=PLANTED",
    ],
)
def test_secrets_are_removed(line) -> None:
    assert "PLANTED" not in Redactor([]).text(f"before {line}\n")


def test_users_are_renamed_consistently() -> None:
    redactor = Redactor(["carla"])
    text = redactor.text("/home/carla/x carla@node1 started by carla; /home/dora/y; root@node2")
    assert "carla" not in text
    assert "dora" not in text
    assert text.count("user1") == 3
    assert "root@node2" in text


def test_other_text_stays() -> None:
    line = "NCCL version 2.21.5+cuda12.4 on node1, driver 550.54.15, tokens per second 1200"
    assert Redactor(["lab"]).text(line).startswith("NCCL version 2.21.5+cuda12.4 on node1, driver 550.54.15")


def test_names_that_are_not_utf8() -> None:
    redactor = Redactor(["carla"])
    assert redactor.text("carla \udcff.log") == "user1 ?.log"
    assert redactor.data({"key\udcff": "a"}) == {"key\udcff": "a"}


def test_keys_that_announce_secrets_hide_their_values() -> None:
    assert Redactor([]).data({"api_key": ["a", "b"], "plain": "c"}) == {"api_key": "***", "plain": "c"}
