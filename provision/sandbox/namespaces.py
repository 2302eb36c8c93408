"""Hosts as Linux namespaces of this machine, for where no container engine answers: own mounts, network, processes, host name and IPC.

A host is a network namespace with a name (``ip netns``), which says what belongs to a sandbox and which processes are a host's. All of them
are in one, in front of a bridge; their packets leave this machine with its address. After a reboot only files are left.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from provision.base import process_locks, signals
from provision.base.errors import ProvisionError, UsageError
from provision.containers import controller_settings
from provision.containers.controller_settings import Settings
from provision.sandbox import debootstrap, names
from provision.sandbox.engine import Base, Say
from provision.sandbox.host_files import FOLDER, PACKAGES
from provision.sandbox.model import EngineName, SandboxHost

#: The base of hosts that see this machine's own programs, where debootstrap cannot run.
THIS_MACHINE = "this machine"
#: What such hosts do not see of this machine, because a bare host has nothing there.
HIDDEN = ("home", "mnt", "opt", "root", "run", "srv", "tmp", "usr/local", "var/tmp")
#: For measurements within a network (RFC 2544): no address that a host may need to reach.
ADDRESSES = ipaddress.IPv4Network("198.18.0.0/15")
MAX_HOSTS = 250
END_SECONDS = 20
LOCK = Path("/run/provision-sandbox.lock")  # of addresses, whatever PROVISION_HOME is
_TOOLS = {"ip": "iproute2", "mount": "mount", "nsenter": "util-linux", "pivot_root": "util-linux", "setpriv": "util-linux"}
_TOOLS |= {"setsid": "util-linux", "tar": "tar", "unshare": "util-linux"}
_UNSHARED = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
_TRIAL = "mount -t proc proc /proc && ip link add name trial type bridge && ip link add name a type veth peer name b"
_NAMESPACE = re.compile(r"provision-(.+)-(node\d+)")
_NFT = """\
add table ip {0}
add chain ip {0} out {{ type nat hook postrouting priority 100; }}
add rule ip {0} out ip saddr {1} oifname != {0} masquerade
"""


def missing() -> str | None:
    """What keeps namespaces from being hosts here, as half a sentence; None when nothing does."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    for tool, package in _TOOLS.items():
        if not _which(tool):
            return f"{tool} is not installed (package {package})"
    if not (_which("iptables") or _which("nft")):
        return "hosts would have no way out: neither iptables nor nft is installed"
    if (without := debootstrap.missing()) and not _which("apt-get"):
        return f"{without}, and this machine is no Debian or relative of it"
    try:
        _run("unshare", "--net", *_UNSHARED[1:], "sh", "-c", _TRIAL)
        _run(*(("iptables", "-w", "-S") if _which("iptables") else ("nft", "list", "tables")))
    except ProvisionError as failure:
        return f"this machine does not allow it ({failure.what})"
    return None


class NamespaceEngine:
    """See ``Engine``."""

    name: EngineName = "namespaces"

    def sandboxes(self) -> set[str]:
        return {sandbox for sandbox, _host in _namespaces()}

    def has(self, sandbox: str) -> bool:
        return sandbox in self.sandboxes() or _folder(sandbox).exists()

    def hosts(self, sandbox: str) -> list[SandboxHost]:
        found, network = (host for one, host in _namespaces() if one == sandbox), _network(sandbox)
        return [_host(sandbox, host, network) for host in sorted(found, key=names.number)]

    def create_network(self, sandbox: str, hosts: Sequence[str]) -> None:
        if len(hosts) > MAX_HOSTS:
            raise UsageError(f"{len(hosts)} hosts of namespaces: at most {MAX_HOSTS} are possible")
        _folder(sandbox).mkdir()
        bridge = _bridge(sandbox)
        with signals.deferred(), process_locks.acquired(LOCK, END_SECONDS) as lock:
            if not lock:
                raise ProvisionError("Another process has been choosing addresses for too long.", where=str(LOCK))
            for host in hosts:
                _run("ip", "netns", "add", _namespace(sandbox, host))
            network = _free_network(sandbox)
            _run("ip", "link", "add", "name", bridge, "type", "bridge")
            _run("ip", "address", "add", f"{network[1]}/{network.prefixlen}", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
        for host in hosts:
            inside, outside = ("ip", "-n", _namespace(sandbox, host)), f"{bridge}.{names.number(host)}"
            with signals.deferred():
                _run("ip", "link", "add", "name", outside, "type", "veth", "peer", "name", "eth0", "netns", _namespace(sandbox, host))
                _run("ip", "link", "set", outside, "master", bridge, "up")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "address", "add", f"{_address(network, host)}/{network.prefixlen}", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "route", "add", "default", "via", str(network[1]))
        _let_out(bridge, network)

    def base(self, sandbox: str, base: str, settings: Settings, say: Say) -> Base:
        if base == THIS_MACHINE:
            return Base(base, "/")
        suite = debootstrap.suite_of(base)
        if why := "only debian:12 and debian:13 can be" if suite is None else debootstrap.missing():
            hint = "Start a container engine for other bases, or install what is missing."
            raise ProvisionError(f"The base cannot be made here ({why}).", where=f"base {base}", hint=hint)
        archive = debootstrap.make(str(suite), settings, say, PACKAGES)
        tree = _folder(sandbox) / names.image_tag(sandbox, base)
        tree.mkdir()
        _run("tar", "--extract", "--file", str(archive), "--directory", str(tree), "--numeric-owner", "--same-permissions")
        return Base(base, str(tree))

    def start(
        self, sandbox: str, host: str, base: Base, sudo: str, settings: Settings, files: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> SandboxHost:
        here, network = _folder(sandbox) / host, _network(sandbox)
        for folder in ("", "upper", "upper/etc", "upper/usr", "upper/var", "work", "root"):
            (here / folder).mkdir()
            (here / folder).chmod(0o755)
        (here / "lower").symlink_to(base.image)
        (here / "labels.json").write_text(json.dumps({"base": base.name, "sudo": sudo}), encoding="utf-8")
        for hidden in HIDDEN if base.image == "/" else ():
            _hide(here / "upper" / hidden, Path("/") / hidden)
        release = controller_settings.parse_os_release((Path(base.image) / "etc/os-release").read_text(encoding="utf-8"))
        for file, text in files(release).items():
            path = here / "upper" / FOLDER / file
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        addresses = [f"{_address(network, one)} {one}" for name, one in _namespaces() if name == sandbox]
        table = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *addresses]
        (here / "upper/etc/hosts").write_text("".join(f"{line}\n" for line in table), encoding="utf-8")
        (here / "upper/etc/hostname").write_text(f"{host}\n", encoding="utf-8")
        (here / "upper/etc/resolv.conf").write_text(_name_servers(), encoding="utf-8")
        script = resources.files("provision.sandbox").joinpath("host", "namespaces.sh").read_text(encoding="utf-8")
        command = ["setsid", "--fork", "ip", "netns", "exec", _namespace(sandbox, host), *_UNSHARED, "sh", "-c", script, "sh", host]
        with (here / "log").open("wb") as log, signals.deferred():
            subprocess.run(
                [*command, *map(str, settings.mounts)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=here,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                check=True,
            )
        return _host(sandbox, host, network)

    def public_keys(self, host: SandboxHost) -> str | None:
        upper = _folder_of(host) / "upper"
        if not (upper / FOLDER / "settled").exists():
            return None
        return "".join(key.read_text(encoding="utf-8") for key in sorted((upper / "etc/ssh").glob("ssh_host_*_key.pub")))

    def require_running(self, host: SandboxHost) -> None:
        if not _processes(host.container):
            hint = "The packages of a minimal base come from apt's mirror: check that it answers."
            raise ProvisionError(f"The host stopped right after its start: {self.last_lines(host)}", where=host.name, hint=hint)

    def last_lines(self, host: SandboxHost) -> str:
        lines = (_folder_of(host) / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return " / ".join(filter(None, map(str.strip, lines))) or "it printed nothing"

    def remove(self, sandbox: str, note: Callable[[str], None]) -> None:
        hosts = [host for one, host in _namespaces() if one == sandbox]
        for host in hosts:
            _end(_namespace(sandbox, host))
        bridge = _bridge(sandbox)
        _shut(bridge)
        for link in _links():
            if link == bridge or link.startswith(f"{bridge}."):
                with contextlib.suppress(ProvisionError) if link != bridge else contextlib.nullcontext():  # it goes with its namespace
                    _run("ip", "link", "delete", link)
        for host in hosts:  # last, because they are how the rest is found
            _run("ip", "netns", "delete", _namespace(sandbox, host))
            note(f"host {host} (namespaces)")


# ---------------------------------------------------------------------------------------------------------------- naming


def _folder(sandbox: str) -> Path:
    return names.folder(sandbox) / "namespaces"


def _folder_of(host: SandboxHost) -> Path:
    sandbox = host.container.removeprefix("provision-").removesuffix(f"-{host.name}")
    return _folder(sandbox) / host.name


def _namespace(sandbox: str, host: str) -> str:
    return names.container(sandbox, host)


def _bridge(sandbox: str) -> str:
    """A name of a network interface has at most 15 characters; its ports add a point and a number."""
    return f"prov{hashlib.sha256(sandbox.encode()).hexdigest()[:7]}"


def _namespaces() -> list[tuple[str, str]]:
    """(sandbox, host) of all that exist."""
    folder = Path("/run/netns")
    found = (_NAMESPACE.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return [(each[1], each[2]) for each in found if each]


def _host(sandbox: str, host: str, network: ipaddress.IPv4Network | None) -> SandboxHost:
    labels = {"base": "", "sudo": ""}
    with contextlib.suppress(FileNotFoundError):  # made with another PROVISION_HOME, or only begun
        labels |= json.loads((_folder(sandbox) / host / "labels.json").read_text(encoding="utf-8"))
    namespace = _namespace(sandbox, host)
    is_running = bool(_processes(namespace))
    address, state = (_address(network, host), "running") if is_running else ("", "exited")
    return SandboxHost(host, address, namespace, labels["base"], labels["sudo"], state)


# --------------------------------------------------------------------------------------------------------------- network


def _free_network(sandbox: str) -> ipaddress.IPv4Network:
    """A network of which this machine knows no part. The same name begins at the same place."""
    used = [
        ipaddress.IPv4Network(each, strict=False)
        for each in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b", _run("ip", "-4", "route", "show", "table", "all"))
    ]
    networks = list(ADDRESSES.subnets(new_prefix=24))
    first = int(hashlib.sha256(sandbox.encode()).hexdigest(), 16) % len(networks)
    for network in (*networks[first:], *networks[:first]):
        if not any(network.overlaps(one) for one in used):
            return network
    raise ProvisionError(f"No network of {ADDRESSES} is free.", hint="Remove sandboxes that no one uses: `provision sandbox ls`.")


def _network(sandbox: str) -> ipaddress.IPv4Network | None:
    """The network in front of that sandbox's bridge; None where there is none."""
    shown = json.loads(_run("ip", "-json", "-4", "address", "show"))
    found = (f"{at['local']}/{at['prefixlen']}" for link in shown if link.get("ifname") == _bridge(sandbox) for at in link["addr_info"])
    return next((ipaddress.IPv4Network(one, strict=False) for one in found), None)


def _address(network: ipaddress.IPv4Network | None, host: str) -> str:
    return str(network[1 + names.number(host)]) if network else ""


def _name_servers() -> str:
    """This machine's resolv.conf; systemd's own where the servers that it names are on the loopback address."""
    text = Path("/etc/resolv.conf").read_text(encoding="utf-8")
    behind = Path("/run/systemd/resolve/resolv.conf")
    return behind.read_text(encoding="utf-8") if re.search(r"^nameserver\s+127\.", text, re.MULTILINE) and behind.exists() else text


def _let_out(bridge: str, network: ipaddress.IPv4Network) -> None:
    """Forward the network's packets, with this machine's address where they leave it. Forwarding stays on, as after Docker."""
    forwards = Path("/proc/sys/net/ipv4/ip_forward")
    if forwards.read_text(encoding="utf-8").strip() != "1":
        forwards.write_text("1\n", encoding="utf-8")
    with signals.deferred():
        if _which("iptables"):
            _run("iptables", "-w", "-I", "FORWARD", "-i", bridge, "-j", "ACCEPT")
            _run("iptables", "-w", "-I", "FORWARD", "-o", bridge, "-j", "ACCEPT")
            _run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", str(network), "!", "-o", bridge, "-j", "MASQUERADE")
        else:
            _run("nft", "-f", "-", given=_NFT.format(bridge, network))


def _shut(bridge: str) -> None:
    """Remove the rules of that bridge, of which there may be some only."""
    if _which("iptables"):
        for table in ("nat", "filter"):
            for rule in map(shlex.split, _run("iptables", "-w", "-t", table, "-S").splitlines()):
                if bridge in rule and rule[0] == "-A":
                    _run("iptables", "-w", "-t", table, "-D", *rule[1:])
    if _which("nft") and f"table ip {bridge}" in _run("nft", "list", "tables").splitlines():
        _run("nft", "delete", "table", "ip", bridge)


def _links() -> list[str]:
    return [link["ifname"] for link in json.loads(_run("ip", "-json", "link", "show"))]


# ------------------------------------------------------------------------------------------------------------- processes


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _end(namespace: str) -> None:
    """Kill everything in a host, and wait until it is gone."""
    deadline = time.monotonic() + END_SECONDS
    while processes := _processes(namespace):
        if time.monotonic() > deadline:
            raise ProvisionError(f"Processes do not end: {' '.join(map(str, processes[:5]))}", where=namespace)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _hide(mine: Path, theirs: Path) -> None:
    """Make an empty folder that hides this machine's from an overlay."""
    if theirs.is_dir() and not theirs.is_symlink():
        mine.mkdir(parents=True)
        shutil.copystat(theirs, mine)
        os.setxattr(mine, "trusted.overlay.opaque", b"y")


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=_path())


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # a user who became root by `su` lacks them


def _run(*command: str, given: str | None = None) -> str:
    """The output of a command. Raises ProvisionError, with what it says, where it fails."""
    env = os.environ | {"PATH": _path(), "LC_ALL": "C"}
    done = subprocess.run(command, input=given or "", capture_output=True, text=True, errors="replace", check=False, env=env)
    if done.returncode:
        raise ProvisionError(f"`{shlex.join(command[:4])} …` failed: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
