"""This machine's package settings: certificates, proxies, mirror and package indexes.

A container in the same network needs the same settings. They can contain passwords: running containers get them, and steps of image
builds as secrets, but no image contains them.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from provision.base import aptsources, uv_support
from provision.base.downloads import local_path

BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
LOCAL_CERTIFICATES = ("usr/local/share/ca-certificates", "etc/pki/ca-trust/source/anchors")
DISTRIBUTION_CERTIFICATES = "usr/share/ca-certificates"
SYSTEM_BUNDLES = ("etc/ssl/certs/ca-certificates.crt", "etc/pki/tls/certs/ca-bundle.crt")

#: pip's options about where packages come from, with one value and with several.
PIP_SINGLE = ("index-url", "timeout", "retries", "no-index", "proxy", "prefer-binary")
PIP_SEVERAL = ("extra-index-url", "find-links", "trusted-host")

#: apt's options about reaching a mirror, proxies of single hosts (``Acquire::http::Proxy::host``) included.
APT_OPTIONS = re.compile(r"Acquire::(https?::Proxy(::[^:]+)?|Retries|https?::Timeout|Check-Valid-Until|Check-Date)", re.IGNORECASE)

_DER_SEQUENCE = b"\x30"  # the first byte of every certificate
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """What a container needs to reach packages as this machine does.

    Attributes:
        own_certificates: PEM, one certificate each: those that this machine trusts beyond its distribution's own.
        bundle: PEM of all that this machine trusts.
        proxies: by lower-case variable name.
        pip: option name -> values, of pip's ``[global]`` section.
        apt: apt option -> value.
        distribution: this machine's, such as ``debian``; empty when unknown.
        mirror: where this machine gets its distribution from.
        mounts: local folders and files that pip's settings name.
        warnings: settings that cannot work from another machine, as sentences.
    """

    own_certificates: tuple[str, ...] = ()
    bundle: str = ""
    proxies: Mapping[str, str] | None = None
    pip: Mapping[str, tuple[str, ...]] | None = None
    apt: Mapping[str, str] | None = None
    distribution: str = ""
    mirror: aptsources.Mirror | None = None
    mounts: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()


def read(environ: Mapping[str, str], *, root: Path = Path("/"), prefix: Path | None = None, apt_dump: str | None = None) -> Settings:
    """The settings of this machine, from files and ``apt-config``; a missing file is not an error.

    Args:
        environ: the environment to read.
        root: where the file system begins (another folder in tests).
        prefix: the Python environment whose ``pip.conf`` counts, too.
        apt_dump: the output of ``apt-config dump``, which is run when None.
    """
    release = parse_os_release(_text(root / "etc/os-release"))
    told = uv_support.pip_settings(environ, str(prefix) if prefix else None, str(root).rstrip("/"))
    pip = {option: values for option, value in told.items() if (values := _values(option, value))}
    certificates, bundle = _read_certificates(environ, root, pip)
    apt = parse_apt_dump(_apt_dump() if apt_dump is None else apt_dump)
    proxies = {name: value for name in PROXY_VARIABLES if (value := environ.get(name) or environ.get(name.upper()))}
    distribution = release.get("ID", "")
    places = [*pip.get("index-url", ()), *pip.get("extra-index-url", ()), *pip.get("find-links", ())]
    mounts = sorted({_folder_with_links(path) for place in places if (path := local_path(place)) and path.is_absolute() and path.exists()})
    return Settings(
        own_certificates=certificates,
        bundle=bundle,
        proxies=proxies,
        pip={option: values for option, values in pip.items() if option in PIP_SINGLE + PIP_SEVERAL},
        apt=apt,
        distribution=distribution,
        mirror=aptsources.mirror_of(_read_apt_entries(root), distribution, release.get("VERSION_CODENAME", "")),
        mounts=tuple(path for path in mounts if not any(path != other and path.is_relative_to(other) for other in mounts)),
        warnings=tuple(_unreachable([*(value for name, value in proxies.items() if name != "no_proxy"), *apt.values(), *places])),
    )


def split_certificates(pem: str) -> list[str]:
    """The certificates of a bundle in canonical form, so that the same one compares equal wherever it was found."""
    found = []
    for block in _PEM.findall(pem):
        with contextlib.suppress(ValueError):  # a damaged certificate is skipped
            der = ssl.PEM_cert_to_DER_cert(block)
            if der.startswith(_DER_SEQUENCE):
                found.append(ssl.DER_cert_to_PEM_cert(der))
    return found


def parse_os_release(text: str) -> dict[str, str]:
    """``os-release`` as a mapping; lines that are not assignments are left out."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def parse_apt_dump(text: str) -> dict[str, str]:
    """The options of ``apt-config dump`` about reaching a mirror; empty values are left out."""
    options = (re.fullmatch(r'(\S+) "(.*)";', line) for line in text.splitlines())
    return {match.group(1): match.group(2) for match in options if match and match.group(2) and APT_OPTIONS.fullmatch(match.group(1))}


def apt_conf(settings: Settings) -> str:
    """apt's own settings and the proxies, which it would not see otherwise: ``sudo apt-get`` drops the environment."""
    proxies = settings.proxies or {}
    options = {f"Acquire::{scheme}::Proxy": url for scheme in ("http", "https") if (url := proxies.get(f"{scheme}_proxy"))}
    options |= settings.apt or {}
    return "".join(f'{option} "{value}";\n' for option, value in options.items())


def _read_certificates(environ: Mapping[str, str], root: Path, pip: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], str]:
    named = [Path(environ[variable]) for variable in BUNDLE_VARIABLES if environ.get(variable)]
    named += [Path(value) for value in pip.get("cert", ())]
    trusted = [cert for path in named for cert in split_certificates(_text(path))]
    local = [
        cert for folder in LOCAL_CERTIFICATES for path in sorted((root / folder).rglob("*")) for cert in split_certificates(_text(path))
    ]
    system = next((text for path in SYSTEM_BUNDLES if (text := _text(root / path))), "")
    shipped = {cert for path in (root / DISTRIBUTION_CERTIFICATES).rglob("*.crt") for cert in split_certificates(_text(path))}
    own = [cert for cert in dict.fromkeys(local + trusted) if cert not in shipped]
    return tuple(own), "".join(dict.fromkeys(split_certificates(system) + trusted + local))


def _values(option: str, value: str) -> tuple[str, ...]:
    return tuple(value.split()) if option in PIP_SEVERAL else tuple(filter(None, [value.strip()]))


def _read_apt_entries(root: Path) -> list[aptsources.Entry]:
    parts = root / "etc/apt/sources.list.d"
    lists = (root / "etc/apt/sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources")))
    return [entry for path in lists for entry in aptsources.parse(_text(path))]


def is_loopback(place: str) -> bool:
    """Whether an address, with its scheme or without, is on this machine's loopback interface."""
    try:
        host = urlsplit(place if "://" in place else f"//{place}").hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1") or host.startswith("127.")


def _unreachable(places: Iterable[str]) -> list[str]:
    return [
        f"{aptsources.without_logins(place)} is on this machine's loopback address: the hosts will not reach it."
        for place in dict.fromkeys(places)
        if "://" in place and is_loopback(place)
    ]


def _folder_with_links(index: Path) -> Path:
    """The folder that a local index needs: its pages can link to files above it. The first page with links stands for all."""
    for page in sorted(index.glob("*/index.html"))[:20]:
        links = [urlsplit(link) for link in re.findall(r"""href=["']([^"'#]+)""", _text(page))]
        targets = [(page.parent / unquote(link.path)).resolve() for link in links if not link.scheme and link.path]
        if targets:
            common = Path(os.path.commonpath([index.resolve(), *targets]))
            return common if common != Path("/") else index
    return index


def _apt_dump() -> str:
    try:
        return subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
