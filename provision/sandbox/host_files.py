"""The files that turn a container into a host of this network, rendered from the controller's settings.

All of them are put in one folder of the host; ``host/start.sh`` applies them when the host first starts.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from provision.base import aptsources
from provision.sandbox import names
from provision.sandbox.containers import controller_settings
from provision.sandbox.containers.controller_settings import BUNDLE_VARIABLES, PROXY_VARIABLES, Settings
from provision.sandbox.model import SudoMode

FOLDER = "etc/provision-sandbox"
HOST_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

#: What a host has that a minimal base may lack: enough to log in, become root and be surveyed. No compiler, no pip.
PACKAGES = ("ca-certificates", "iproute2", "openssh-server", "procps", "python3", "sudo")


@dataclass(frozen=True)
class Login:
    """Who may log in: the public key of root and the ordinary user, and how that user becomes root (``password`` only if sudo asks)."""

    public_key: str
    sudo: SudoMode
    password: str | None = None


def host_files(settings: Settings, release: Mapping[str, str], login: Login, hosts: Iterable[str]) -> dict[str, str]:
    """What a host finds in ``FOLDER`` when it starts.

    Args:
        settings: the controller's.
        release: the host's os-release.
        login: who may log in.
        hosts: names that are reached without a proxy.
    """
    files = {
        "start.sh": names.script("start.sh"),
        "sshd.conf": names.script("sshd.conf"),
        "packages": " ".join(PACKAGES) + "\n",
        "user": names.USER + "\n",
        "authorized_keys": login.public_key,
        "environment": environment(settings, hosts),
        "pip.conf": pip_conf(settings),
        "apt.conf": controller_settings.apt_conf(settings),
    }
    files |= {f"certificates/provision-{i:03}.crt": cert for i, cert in enumerate(settings.own_certificates)}
    if settings.bundle:
        files["bundle.crt"] = settings.bundle
    if login.sudo != "none":
        files["sudoers"] = _sudoers(login.sudo)
    if login.sudo == "password":
        files["password"] = f"{names.USER}:{login.password}\n"
    if sources := sources_for(settings, release):
        files["sources.list"] = sources
    return files


def environment(settings: Settings, hosts: Iterable[str] = ()) -> str:
    """Lines for ``/etc/environment``: sessions over SSH read it, while a container's own variables do not reach them."""
    proxies = dict(settings.proxies or {})
    if proxies:
        direct = [*proxies.get("no_proxy", "").split(","), "localhost", "127.0.0.1", *hosts]
        proxies["no_proxy"] = ",".join(dict.fromkeys(filter(None, map(str.strip, direct))))
    lines = [f'{spelling}="{value}"' for name, value in proxies.items() for spelling in (name, name.upper())]
    if settings.own_certificates:  # Python packages with a bundle of their own look here first
        lines += [f'{name}="{HOST_BUNDLE}"' for name in BUNDLE_VARIABLES]
    return "".join(f"{line}\n" for line in lines)


def pip_conf(settings: Settings) -> str:
    """``/etc/pip.conf``: the isolated builds that pip starts read it, too."""
    lines = ["# The controller's package index settings, written by `provision sandbox up`.", "[global]", f"cert = {HOST_BUNDLE}"]
    for option, values in (settings.pip or {}).items():
        lines.append(f"{option} = {values[0]}" if len(values) == 1 else f"{option} =" + "".join(f"\n    {value}" for value in values))
    return "\n".join(lines) + "\n"


def sources_for(settings: Settings, release: Mapping[str, str]) -> str:
    """The host's ``sources.list``, empty when the controller's mirror does not carry the host's distribution."""
    suite = release.get("VERSION_CODENAME", "")
    if settings.mirror is None or not suite or release.get("ID") != settings.distribution:
        return ""
    return aptsources.sources_list(settings.mirror, suite)


def archive(files: Mapping[str, str | bytes]) -> bytes:
    """A tar of the files in ``FOLDER``, all of them owned by root and readable by root alone."""
    return private_tar([FOLDER], {f"{FOLDER}/{name}": content for name, content in files.items()})


def private_tar(folders: Iterable[str], files: Mapping[str, str | bytes], uid: int = 0) -> bytes:
    """A tar of folders and files that only this user can read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in {**dict.fromkeys(folders), **files}.items():
            entry, data = tarfile.TarInfo(path), content.encode() if isinstance(content, str) else content or b""
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o700) if content is None else (tarfile.REGTYPE, 0o600)
            entry.size, entry.uid, entry.gid = len(data), uid, uid
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _sudoers(sudo: SudoMode) -> str:
    """Who may become root, and the variables that sudo must keep: proxies and the trust store are for root, too."""
    kept = [spelling for name in PROXY_VARIABLES for spelling in (name, name.upper())] + list(BUNDLE_VARIABLES)
    rule = "NOPASSWD: ALL" if sudo == "nopasswd" else "ALL"
    return f'Defaults env_keep += "{" ".join(kept)}"\n{names.USER} ALL=(ALL:ALL) {rule}\n'
