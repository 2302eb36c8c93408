"""The files that turn a container into a host of this network: rendered from the settings, as text. Touches nothing.

All of them land in one folder of the host; ``host/start.sh`` puts them in place when the host first starts.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from importlib import resources

from provision.base import aptsources
from provision.containers import controller_settings
from provision.containers.controller_settings import BUNDLE_VARIABLES, PROXY_VARIABLES, Settings
from provision.sandbox import names

FOLDER = "etc/provision-sandbox"
BUILD_FOLDER = "provision-build"
HOST_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

#: What a host has that a minimal base may lack: enough to log in, become root and be looked at. No compiler, no pip.
PACKAGES = ("ca-certificates", "iproute2", "openssh-server", "procps", "python3", "sudo")


def script(name: str) -> str:
    """The text of a shell script that runs inside a container."""
    return resources.files("provision.sandbox").joinpath("host", name).read_text(encoding="utf-8")


def environment(settings: Settings, hosts: Iterable[str] = ()) -> str:
    """Lines for ``/etc/environment``: sessions over SSH read it, while a container's own variables do not reach them."""
    proxies = dict(settings.proxies or {})
    if proxies:
        direct = [*proxies.get("no_proxy", "").split(","), "localhost", "127.0.0.1", *hosts]
        proxies["no_proxy"] = ",".join(dict.fromkeys(filter(None, map(str.strip, direct))))
    lines = [f'{spelt}="{value}"' for name, value in proxies.items() for spelt in (name, name.upper())]
    if settings.own_certificates:  # Python packages that bring their own bundle look here first
        lines += [f'{name}="{HOST_BUNDLE}"' for name in BUNDLE_VARIABLES]
    return "".join(f"{line}\n" for line in lines)


def pip_conf(settings: Settings) -> str:
    """``/etc/pip.conf``: also the isolated builds that pip starts read it."""
    lines = ["# The controller's package index settings, passed on by `provision sandbox up`.", "[global]", f"cert = {HOST_BUNDLE}"]
    for option, values in (settings.pip or {}).items():
        lines.append(f"{option} = {values[0]}" if len(values) == 1 else f"{option} =" + "".join(f"\n    {value}" for value in values))
    return "\n".join(lines) + "\n"


def sudoers(sudo: str) -> str:
    """Who may become root, and which settings sudo must not drop on the way: proxies and the trust store count for root too."""
    kept = [spelt for name in PROXY_VARIABLES for spelt in (name, name.upper())] + list(BUNDLE_VARIABLES)
    rule = "NOPASSWD: ALL" if sudo == "nopasswd" else "ALL"
    return f'Defaults env_keep += "{" ".join(kept)}"\n{names.USER} ALL=(ALL:ALL) {rule}\n'


def start_files(
    settings: Settings, release: Mapping[str, str], public_key: str, sudo: str, password: str | None, hosts: Iterable[str]
) -> dict[str, str]:
    """What a host finds in ``FOLDER`` when it starts.

    Args:
        settings: the controller's.
        release: the host's os-release.
        public_key: who may log in.
        sudo: ``nopasswd``, ``password`` or ``none``.
        password: of the ordinary user; needed when ``sudo`` is ``password``.
        hosts: names that no proxy is asked for.
    """
    files = {
        "start.sh": script("start.sh"),
        "user": names.USER + "\n",
        "authorized_keys": public_key,
        "environment": environment(settings, hosts),
        "pip.conf": pip_conf(settings),
        "apt.conf": controller_settings.apt_conf(settings),
    }
    files |= {f"certificates/provision-{i:03}.crt": cert for i, cert in enumerate(settings.own_certificates)}
    if sudo != "none":
        files["sudoers"] = sudoers(sudo)
    if sudo == "password":
        files["password"] = f"{names.USER}:{password}\n"
    if sources := sources_for(settings, release):
        files["sources.list"] = sources
    return files


def build_files(settings: Settings, release: Mapping[str, str]) -> dict[str, str]:
    """What a builder finds in ``BUILD_FOLDER``. The folder is gone before the image is made: proxies may hold passwords."""
    sources = sources_for(settings, release)
    options = controller_settings.apt_conf(settings)
    if sources:
        options += f'Dir::Etc::sourcelist "/{BUILD_FOLDER}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
    if settings.bundle:  # a minimal base trusts no one yet, and the mirror may speak https
        options += f'Acquire::https::CaInfo "/{BUILD_FOLDER}/bundle.crt";\n'
    return {
        "build.sh": script("build.sh"),
        "user": names.USER + "\n",
        "packages": "\n".join(PACKAGES) + "\n",
        "sshd.conf": script("sshd.conf"),
        "apt.conf": options,
        "sources.list": sources,
        "bundle.crt": settings.bundle,
    }


def sources_for(settings: Settings, release: Mapping[str, str]) -> str:
    """The host's ``sources.list``, empty when the controller's mirror does not carry the host's distribution."""
    suite = release.get("VERSION_CODENAME", "")
    if settings.mirror is None or not suite or release.get("ID") != settings.distribution:
        return ""
    return aptsources.sources_list(settings.mirror, suite)


def archive(folder: str, files: Mapping[str, str]) -> bytes:
    """A tar of the files below ``folder``, all of them root's and readable by root alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        top = tarfile.TarInfo(folder)
        top.type, top.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(top)
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
