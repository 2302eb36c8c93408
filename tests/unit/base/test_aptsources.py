"""apt's lists of sources: the mirror of a machine, and lists with another mirror."""

from __future__ import annotations

from provision.base import aptsources

DEB822 = """\
Types: deb
# a remark
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
URIs: http://mirror.example/security
Suites: bookworm-security
Components:
 main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
ONE_LINE = """\
# deb http://remark.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/vendor.gpg] https://vendor.example/apt bookworm main
deb [trusted=yes] http://user:pw@mirror.example/debian/ bookworm main non-free # remark
"""


THIRD_PARTY = """\
deb [signed-by=/etc/apt/keyrings/vendor.gpg] https://vendor.example/apt bookworm main
deb https://vendor.example/other bookworm stable
"""


def test_a_mirror_replaces_the_distribution_only():
    mirror = aptsources.mirror_at("http://m.example/debian/", "debian")
    lines = """\
# deb http://old.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://old.example/debian bookworm main contrib
deb http://old.example/debian bookworm-updates main
deb http://sec.example/debian-security bookworm-security main
"""
    moved = aptsources.moved(lines + THIRD_PARTY, mirror, "debian", "bookworm")
    assert [entry.uri for entry in aptsources.parse_list(moved)] == [
        "http://m.example/debian",
        "http://m.example/debian",
        "http://m.example/debian-security",
        "https://vendor.example/apt",
        "https://vendor.example/other",
    ]
    assert moved.endswith(THIRD_PARTY)
    assert moved.startswith("# deb http://old.example")
    assert "[arch=amd64 signed-by=" in moved
    stanzas = """\
Types: deb
URIs: http://old.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://sec.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: https://vendor.example/apt
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
"""
    found = aptsources.parse_deb822(aptsources.moved(stanzas, mirror, "debian", "bookworm"))
    assert [(entry.uri, entry.suite) for entry in found] == [
        ("http://m.example/debian", "bookworm"),
        ("http://m.example/debian", "bookworm-updates"),
        ("http://m.example/debian-security", "bookworm-security"),
        ("https://vendor.example/apt", "bookworm"),
    ]
    # As Ubuntu's installer writes it: a line for each group of components.
    jammy = """\
deb http://old.example/ubuntu jammy main restricted
deb http://old.example/ubuntu jammy universe
deb http://old.example/ubuntu jammy-updates multiverse
deb http://old.example/ubuntu jammy-security universe
"""
    mirror = aptsources.mirror_at("http://m.example/ubuntu", "ubuntu")
    assert "old.example" not in aptsources.moved(jammy, mirror, "ubuntu", "jammy")
    assert aptsources.mirror_at("http://m.example/ubuntu", "ubuntu").security == "http://m.example/ubuntu"


def test_both_formats_of_apt_sources():
    assert [(entry.uri, entry.suite, entry.components) for entry in aptsources.parse_deb822(DEB822)] == [
        ("http://mirror.example/debian", "bookworm", ("main", "contrib")),
        ("http://mirror.example/debian", "bookworm-updates", ("main", "contrib")),
        ("http://mirror.example/security", "bookworm-security", ("main",)),
    ]
    assert [entry.uri for entry in aptsources.parse_list(ONE_LINE)] == [
        "https://vendor.example/apt",
        "http://user:pw@mirror.example/debian/",
    ]
    assert aptsources.parse_list(ONE_LINE)[1].components == ("main", "non-free")


def test_a_third_partys_repository_is_not_the_mirror():
    mirror = aptsources.mirror_of(aptsources.parse_list(ONE_LINE), "debian", "bookworm")
    assert mirror == aptsources.Mirror("http://user:pw@mirror.example/debian/", ("main", "non-free"))


def test_hosts_of_another_release_use_the_same_mirror():
    mirror = aptsources.mirror_of(aptsources.parse_deb822(DEB822), "debian", "bookworm")
    assert mirror
    assert [line for line in aptsources.sources_list(mirror, "trixie").splitlines() if not line.startswith("#")] == [
        "deb http://mirror.example/debian trixie main contrib",
        "deb http://mirror.example/debian trixie-updates main contrib",
        "deb http://mirror.example/security trixie-security main contrib",
    ]


def test_another_distribution_has_no_mirror():
    assert aptsources.mirror_of(aptsources.parse_deb822(DEB822), "ubuntu", "noble") is None
