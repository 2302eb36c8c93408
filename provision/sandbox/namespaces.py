"""Hosts as Linux namespaces of this machine, for where no container engine answers: own mounts, network, processes, host name and IPC.

A host is a network namespace with a name (``ip netns``), which says what belongs to a sandbox and which processes are a host's. All of them
are in one, in front of a bridge; their packets leave this machine with its address. After a reboot only files are left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from provision.base import paths, process_locks, signals
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import joined
from provision.sandbox import debootstrap, names
from provision.sandbox.containers import controller_settings
from provision.sandbox.containers.controller_settings import Settings
from provision.sandbox.host_files import FOLDER, PACKAGES
from provision.sandbox.model import EngineName, Files, SandboxHost, Say

#: The base of hosts that see this machine's own programs, where debootstrap cannot run.
THIS_MACHINE = "this machine"
#: What such hosts do not see of this machine, because a bare host has nothing there.
HIDDEN = ("home", "mnt", "opt", "root", "run", "srv", "tmp", "usr/local", "var/tmp")
#: For measurements within a network (RFC 2544): no address that a host may need to reach.
ADDRESSES = ipaddress.IPv4Network("198.18.0.0/15")
MAX_HOSTS = 250
END_SECONDS = 20
LOCK = Path("/run/provision-sandbox.lock")  # of addresses, for any PROVISION_HOME
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # a user who became root by `su` lacks them
_TOOLS = ("ip", "mount", "pivot_root", "setpriv", "setsid", "tar", "unshare")
_UNSHARED = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
_TRIAL = "mount -t proc proc /proc && ip link add name trial type bridge && ip link add name a type veth peer name b"
_OVERLAY_TRIAL = 'cd "$1" && mkdir upper work root && mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root'
_NAMESPACE = re.compile(r"provision-(.+)-(node\d+)")
_BRIDGE = "link add name {bridge} type bridge\naddress add {gateway}/24 dev {bridge}\nlink set {bridge} up\n"
_OUTSIDE = "link add name {port} type veth peer name eth0 netns {namespace}\nlink set {port} master {bridge} up\n"
_INSIDE = "link set lo up\naddress add {address}/24 dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
_NFT = """\
add table ip {0}
add chain ip {0} out {{ type nat hook postrouting priority 100; }}
add rule ip {0} out ip saddr {1} oifname != {0} masquerade
"""


@functools.cache
def missing() -> str | None:
    """What keeps namespaces from being hosts here, as half a sentence; None when nothing does."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    if absent := [tool for tool in _TOOLS if not _which(tool)]:
        return f"{joined(absent)} is not installed"
    if not (_which("iptables") or _which("nft")):
        return "hosts would have no access to other networks: neither iptables nor nft is installed"
    if (without := debootstrap.missing()) and not _which("apt-get"):
        return f"{without}, and this machine is not Debian or derived from it"
    try:
        _run("unshare", "--net", *_UNSHARED[1:], "sh", "-c", _TRIAL)
        _run(*(("iptables", "-w", "-S") if _which("iptables") else ("nft", "list", "tables")))
        if without:
            paths.sandbox().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=paths.sandbox()) as folder:
                _run("unshare", "--mount", "sh", "-c", _OVERLAY_TRIAL, "sh", folder)
    except ProvisionError as failure:
        return f"this machine does not allow it ({failure.what})"
    return None


class NamespaceEngine:
    """It has the methods of `DockerEngine`."""

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
                _run("ip", "netns", "add", names.container(sandbox, host))
            network = _free_network(sandbox)
            _run("ip", "-batch", "-", given=_BRIDGE.format(bridge=bridge, gateway=network[1]))
        for host in hosts:
            namespace, port = names.container(sandbox, host), f"{bridge}.{names.number(host)}"
            _run("ip", "-batch", "-", given=_OUTSIDE.format(port=port, namespace=namespace, bridge=bridge))
            _run("ip", "-n", namespace, "-batch", "-", given=_INSIDE.format(address=_address(network, host), gateway=network[1]))
        _let_out(bridge, network)

    def image(self, sandbox: str, base: str, settings: Settings, say: Say) -> str:
        if base == THIS_MACHINE:
            return "/"
        suite = debootstrap.suite_of(base)
        if why := "only debian:12 and debian:13 can be" if suite is None else debootstrap.missing():
            hint = "Start a container engine for other bases, or install what is missing."
            raise ProvisionError(f"The base cannot be made here ({why}).", where=f"base {base}", hint=hint)
        archive = debootstrap.make(str(suite), settings, say, PACKAGES)
        tree = _folder(sandbox) / names.image_tag(sandbox, base)
        tree.mkdir()
        _run("tar", "--extract", "--file", str(archive), "--directory", str(tree), "--numeric-owner", "--same-permissions")
        return str(tree)

    def start(self, sandbox: str, host: str, image: str, labels: Mapping[str, str], settings: Settings, files: Files) -> SandboxHost:
        here, network = _folder(sandbox) / host, _network(sandbox)
        for folder in ("", "upper", "upper/etc", "upper/usr", "upper/var", "work", "root"):
            (here / folder).mkdir()
            (here / folder).chmod(0o755)
        (here / "lower").symlink_to(Path(image).absolute())
        (here / "labels.json").write_text(json.dumps(dict(labels)), encoding="utf-8")
        for hidden in HIDDEN if image == "/" else ():
            if Path("/", hidden).is_dir():
                (here / "upper" / hidden).mkdir()
                shutil.copystat(Path("/", hidden), here / "upper" / hidden)
                os.setxattr(here / "upper" / hidden, "trusted.overlay.opaque", b"y")
        release = controller_settings.parse_os_release((Path(image) / "etc/os-release").read_text(encoding="utf-8"))
        for file, text in files(release).items():
            path = here / "upper" / FOLDER / file
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        addresses = "".join(f"{_address(network, one)} {one}\n" for name, one in _namespaces() if name == sandbox)
        (here / "upper/etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{addresses}", encoding="utf-8")
        (here / "upper/etc/hostname").write_text(f"{host}\n", encoding="utf-8")
        (here / "upper/etc/resolv.conf").write_text(_name_servers(), encoding="utf-8")
        script = names.script("namespaces.sh")
        enter = ["ip", "netns", "exec", names.container(sandbox, host), "setsid", "--fork"]  # returns when the process is in the namespace
        command = [*enter, *_UNSHARED, "sh", "-c", script, "sh", host, *map(str, settings.mounts)]
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        with (here / "log").open("wb") as log, signals.deferred():
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=here, env=env, check=True)
        return _host(sandbox, host, network)

    def process(self, host: SandboxHost) -> int:
        return next(filter(is_first, _processes(host.container)), 0)

    def public_keys(self, host: SandboxHost) -> str | None:
        upper = _folder_of(host) / "upper"
        # A key of this machine that the host has removed is a device there, as overlays mark what is gone.
        keys = [key for key in sorted((upper / "etc/ssh").glob("ssh_host_*_key.pub")) if key.is_file()]
        return "".join(key.read_text(encoding="utf-8") for key in keys) if (upper / FOLDER / "settled").exists() else None

    def is_running(self, host: SandboxHost) -> bool:
        return bool(_processes(host.container))

    def last_lines(self, host: SandboxHost) -> str:
        lines = (_folder_of(host) / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return " / ".join(filter(None, map(str.strip, lines))) or "it printed nothing"

    def remove(self, sandbox: str, note: Say) -> None:
        hosts = [host for one, host in _namespaces() if one == sandbox]
        for host in hosts:
            _end(names.container(sandbox, host))
        _shut(bridge := _bridge(sandbox))
        for link in Path("/sys/class/net").glob(f"{bridge}*"):
            _run("ip", "link", "delete", link.name)
        for host in hosts:  # last, because they are how the rest is found
            _run("ip", "netns", "delete", names.container(sandbox, host))
            note(f"host {host} (namespaces)")


def _folder(sandbox: str) -> Path:
    return names.folder(sandbox) / "namespaces"


def _folder_of(host: SandboxHost) -> Path:
    return _folder(host.container.removeprefix("provision-").removesuffix(f"-{host.name}")) / host.name


def _bridge(sandbox: str) -> str:
    """A name of a network interface has at most 15 characters; its ports add a point and a number."""
    return f"prov{hashlib.sha256(sandbox.encode()).hexdigest()[:7]}"


def _namespaces() -> list[tuple[str, str]]:
    """(sandbox, host) of all that exist."""
    folder = Path("/run/netns")
    found = (_NAMESPACE.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return [(each[1], each[2]) for each in found if each]


def _host(sandbox: str, host: str, network: ipaddress.IPv4Network | None) -> SandboxHost:
    labels = dict[str, str]()
    with contextlib.suppress(FileNotFoundError):  # made with another PROVISION_HOME, or only begun
        labels = json.loads((_folder(sandbox) / host / "labels.json").read_text(encoding="utf-8"))
    namespace = names.container(sandbox, host)
    address, state = (_address(network, host), "running") if _processes(namespace) else ("", "exited")
    return SandboxHost(host, address, namespace, labels.get(names.BASE, ""), labels.get(names.SUDO, ""), state)


def _free_network(sandbox: str) -> ipaddress.IPv4Network:
    """A network of which this machine knows no part. The same name begins at the same place."""
    routes = re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b", _run("ip", "-4", "route", "show", "table", "all"))
    used = [ipaddress.IPv4Network(each, strict=False) for each in routes]
    free = [each for each in ADDRESSES.subnets(new_prefix=24) if not any(map(each.overlaps, used))]
    if free:
        return free[int(hashlib.sha256(sandbox.encode()).hexdigest(), 16) % len(free)]
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
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n", encoding="utf-8")
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


def _processes(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]
    except ProvisionError:
        if not Path("/run/netns", namespace).exists():  # removed meanwhile
            return []
        raise


def is_first(pid: int) -> bool:
    """Whether it is the first process of a host: of a PID namespace right below this one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return bool(re.search(r"^NSpid:\t\d+\t1$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE))
    return False


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


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=_PATH)


def _run(*command: str, given: str | None = None) -> str:
    """The output of a command. Raises ProvisionError, with what it says, where it fails."""
    env = os.environ | {"PATH": _PATH, "LC_ALL": "C"}
    done = subprocess.run(command, input=given or "", capture_output=True, text=True, errors="replace", check=False, env=env)
    if done.returncode:
        raise ProvisionError(f"`{shlex.join(command[:4])} …` failed: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
