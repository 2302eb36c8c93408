"""apt's lists of sources: the mirror of a machine's distribution, lists with another mirror, and lists for hosts.

Pure: text in, text out. Standard library and Python 3.7 only, because `install.installer.render` copies it next to the Ansible module
`apt_mirror`, which runs on hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Names of suites that move from release to release.
ROLLING_NAMES = {"debian": ("stable", "oldstable", "testing")}
#: Suffixes of a release's suites; `-security` from bullseye on, `/updates` before.
_SUFFIXES = ("", "-updates", "-security", "/updates", "-backports", "-proposed", "-proposed-updates")
#: Components of Debian and Ubuntu; third parties that use a suite's name have others, such as Docker's `stable`.
_PARTS = frozenset({"main", "contrib", "non-free", "non-free-firmware", "restricted", "universe", "multiverse"})
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")
_SECURITY = re.compile(r"-security$|/updates$")


@dataclass(frozen=True)
class Entry:
    """One suite of one repository, from either of apt's two formats."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""


@dataclass(frozen=True)
class Mirror:
    """Addresses of a distribution. ``updates`` and ``security`` are None where they are not used."""

    archive: str
    components: tuple[str, ...]
    updates: str | None = None
    security: str | None = None


def parse(text: str) -> list[Entry]:
    """Entries of a list in either format."""
    return [*parse_list(text), *parse_deb822(text)]


def parse_list(text: str) -> list[Entry]:
    """Entries of a one-line-style ``sources.list``; comments, source packages and invalid lines are left out."""
    entries = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if match:
            options, uri, suite, components = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            entries.append(Entry(uri, suite, tuple(components.split()), signed.group(1) if signed else ""))
    return entries


def parse_deb822(text: str) -> list[Entry]:
    """Entries of a ``.sources`` file; stanzas that are disabled or about source packages only are left out."""
    entries = []
    for stanza in re.split(r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields = {
            key.lower(): " ".join(value.split()) for key, value in re.findall(r"^([\w-]+):((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        }
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in {"no", "false", "0"}:
            continue
        components = tuple(fields.get("components", "").split())
        entries += [
            Entry(uri, suite, components, fields.get("signed-by", ""))
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return entries


def mirror_of(entries: Iterable[Entry], distribution: str, codename: str) -> Mirror | None:
    """The mirror of a machine's own distribution among all of its sources; None when there is none.

    Third parties use the distribution's suite names, too, but with another key.

    Args:
        entries: all that apt reads.
        distribution: ``ID`` of the controller's os-release, such as ``debian``.
        codename: its ``VERSION_CODENAME``, such as ``bookworm``.
    """
    own = [entry for entry in entries if is_own(entry, distribution, codename) and "main" in entry.components]

    def first(suffix: str) -> Entry | None:
        suites = {suite + suffix for suite in _suites(distribution, codename)}
        return next((entry for entry in own if entry.suite in suites), None)

    archive, updates, security = first(""), first("-updates"), first("-security")
    if archive is None:
        return None
    return Mirror(archive.uri, archive.components, updates.uri if updates else None, security.uri if security else None)


def mirror_at(url: str, distribution: str) -> Mirror:
    """A mirror by its address alone; most have Debian's security updates next to it."""
    base = url.rstrip("/")
    security = re.sub(r"(/debian)?$", "/debian-security", base, count=1) if distribution == "debian" else base
    parts = ("main", "universe") if distribution == "ubuntu" else ("main",)
    return Mirror(base, parts, base, security)


def moved(text: str, mirror: Mirror, distribution: str, codename: str) -> str:
    """A list of either format with the distribution's own entries moved to a mirror. Third-party repositories stay as they are."""

    def address(entries: list[Entry]) -> str | None:
        own = [is_own_part(entry, distribution, codename) for entry in entries]
        if not own or not all(own):
            return None
        return mirror.security if all(_SECURITY.search(entry.suite) for entry in entries) else mirror.archive

    if re.search(r"^Types:", text, re.MULTILINE | re.IGNORECASE):
        stanzas = re.split(r"(\n\s*\n)", text)
        for at, stanza in enumerate(stanzas):
            there = address(parse_deb822(stanza))
            if there:
                stanzas[at] = _with_address(r"(?im)^(URIs: *).*(\n[ \t].*)*$", there, stanza)
        return "".join(stanzas)
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        there = address(parse_list(line))
        if there:
            lines[at] = _with_address(r"^(\s*deb\s+(?:\[[^\]]*\]\s*)?)\S+", there, line)
    return "".join(lines)


def complaints(text: str, places: Iterable[str]) -> list[str]:
    """apt's errors about the repositories at ``places``, or about none in particular. Those about other repositories are left out."""
    plain = [re.sub(r"^(file|copy):/+", r"\1:/", without_logins(place)).rstrip("/") for place in places]
    prefixes = [place + end for place in plain for end in ("/dists/", "/InRelease", "/Release", "/Packages", " ")]
    found = []
    for line in without_logins(text).splitlines():
        named = ":/" not in line or any(place in line for place in prefixes)
        if named and re.match(r"E: (?!Some index files)|W: (Failed to fetch|GPG error)", line):
            found.append(line)
    return found


def without_logins(text: str) -> str:
    """The text without users and passwords in addresses, which apt can print."""
    return _LOGIN.sub("", text)


def _with_address(pattern: str, address: str, text: str) -> str:
    """The text with ``address`` instead of what the pattern matches after its first group."""
    return re.sub(pattern, lambda found: found[1] + address, text)


def is_own_part(entry: Entry, distribution: str, codename: str) -> bool:
    """As `is_own`, and with the distribution's own components only: third-party repositories can have suites of the same name."""
    return is_own(entry, distribution, codename) and _PARTS.issuperset(entry.components)


def is_own(entry: Entry, distribution: str, codename: str) -> bool:
    """Whether it is the distribution's, not a third party's with a suite of the same name."""
    known = {suite + suffix for suite in _suites(distribution, codename) for suffix in _SUFFIXES}
    trusted = not entry.signed_by or f"{distribution}-archive" in entry.signed_by
    return trusted and entry.suite in known


def _suites(distribution: str, codename: str) -> tuple[str, ...]:
    return (codename, *ROLLING_NAMES.get(distribution, ()))


def sources_list(mirror: Mirror, suite: str) -> str:
    """The text of ``sources.list`` for a host of that suite."""
    places = [(mirror.archive, suite), (mirror.updates, f"{suite}-updates"), (mirror.security, f"{suite}-security")]
    lines = [f"deb {uri} {name} {' '.join(mirror.components)}" for uri, name in places if uri]
    return "# The controller's own mirror, written by provision.\n" + "\n".join(lines) + "\n"
