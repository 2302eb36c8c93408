"""The GPUs of a running sandbox: shown on its hosts, recorded in its folder, and changed while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from provision.base import signals
from provision.base.errors import ProvisionError, UsageError
from provision.sandbox import names, namespaces
from provision.sandbox.engine import Engine
from provision.sandbox.gpus import library
from provision.sandbox.gpus.host import files
from provision.sandbox.gpus.model import Gpus, HostFault, faults, profiles
from provision.sandbox.host_files import FOLDER, archive
from provision.sandbox.model import SandboxHost

_FOLDER, _SCRIPT = "gpus", "gpus.sh"
_AT_ONCE = 8  # hosts
_SECONDS = 300  # a mirror may be slow
_TICK = 0.5  # seconds, after which an interrupt is noticed
_RECORDED = "recorded: "  # of gpus.sh: nvidia-smi prints recorded outputs, and why
_REPLACE = f"cd / && rm -rf {FOLDER}/{_FOLDER} && tar -x && exec sh {FOLDER}/{_FOLDER}/{_SCRIPT} </dev/null"


@dataclass(frozen=True)
class Simulation:
    """What a sandbox's hosts show: their GPUs, and what is wrong with them now."""

    gpus: Gpus
    faults: tuple[HostFault, ...] = ()

    @classmethod
    def of(cls, sandbox: str) -> Simulation | None:
        """What was last shown; None for a sandbox without GPUs, or where the record cannot be read or names what this version lacks."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads(_record(sandbox).read_text(encoding="utf-8"))
            found = cls(Gpus(**document["gpus"]), tuple(HostFault(**each) for each in document["faults"]))
            if found.gpus.profile in profiles().profiles and all(each.name in faults() for each in found.faults):
                return found
        return None

    def changed(self, texts: Iterable[str], hosts: Sequence[str], *, clear: bool) -> Simulation:
        """With these faults (``xid79@node2``) also set; with ``clear`` without them, or without any where none is named.

        Raises:
            UsageError: as `HostFault.requested` does, or two faults contradict each other.
        """
        requested = dict.fromkeys(HostFault.requested(text, hosts, self.gpus) for text in texts)
        if not clear:
            both = tuple(dict.fromkeys([*self.faults, *requested]))
            for at, new in enumerate(both):
                for old in (each for each in both[:at] if each.host == new.host):
                    one, other = faults()[new.name].host, faults()[old.name].host
                    if any(other.get(name, value) != value for name, value in one.items()):
                        raise UsageError(f"invalid fault: {new} contradicts {old}", hint="leave one out, or clear it first (--clear)")
            return replace(self, faults=both)
        return replace(self, faults=tuple(each for each in self.faults if requested and each not in requested))


def check(gpus: Gpus) -> None:
    """Raise ProvisionError where this machine cannot simulate GPUs: it needs root, and for NVIDIA's a C compiler."""
    if os.geteuid() != 0:
        raise ProvisionError("Simulated GPUs need root on this machine: they are mounted over the hosts' /sys and /proc.")
    if gpus.kind.vendor == "nvidia":
        library.built()


def show(runs: Engine, sandbox: str, hosts: Sequence[SandboxHost], wanted: Simulation) -> dict[str, str]:
    """Show this on all of the sandbox's hosts that show something else, or nothing since a restart, and record it; what all show already
    is shown again.

    Returns:
        Of these hosts those where nvidia-smi prints recorded outputs, with the reason.

    Raises:
        ProvisionError: a host cannot show it, with the reason. Faults that recorded outputs cannot show are left out, the others are shown.
    """
    check(wanted.gpus)
    libraries = library.built() if wanted.gpus.kind.vendor == "nvidia" else {}
    before = Simulation.of(sandbox)
    shared: dict[str, str | bytes] = {_SCRIPT: names.script(_SCRIPT), **libraries}
    stop, reasons = threading.Event(), dict[str, str]()

    def change(host: SandboxHost) -> None:
        made, process = files(host.name, wanted.gpus, wanted.faults), runs.process(host)
        if before in (None, wanted) or not _shows(process) or files(host.name, before.gpus, before.faults) != made:
            reasons[host.name] = _change(host.name, process, {**shared, **made}, stop)

    _record(sandbox).unlink(missing_ok=True)  # after a failure every host is shown everything again
    with signals.termination_as_interrupt(), ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            list(pool.map(change, hosts))
        except (KeyboardInterrupt, SystemExit):
            stop.set()
            raise
    recorded = {host: why for host, why in reasons.items() if why}
    unseen = [each for each in wanted.faults if each.host in recorded and not faults()[each.name].log and not faults()[each.name].host]
    document = {"gpus": vars(wanted.gpus), "faults": [vars(each) for each in wanted.faults if each not in unseen]}
    new = _record(sandbox).with_suffix(".new")
    new.write_text(json.dumps(document), encoding="utf-8")
    new.replace(_record(sandbox))
    if unseen:
        what = f"Only nvidia-smi shows {', '.join(map(str, unseen))}, and there it prints recorded outputs: {recorded[unseen[0].host]}."
        raise ProvisionError(what, hint="Leave these faults out, or use a Debian base, and a mirror that has the part non-free.")
    return recorded


def _shows(process: int) -> bool:
    """Whether the host shows GPUs now: a restart unmounts them."""
    with suppress(OSError):
        return "\nprovision-gpus /sys overlay " in Path(f"/proc/{process}/mounts").read_text(encoding="utf-8")
    return False


def _is_first_of_host(process: int) -> bool:
    """Whether it is the first process of a container, with mounts of its own: not a process of this machine, which an engine in another
    PID namespace can name by mistake."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return namespaces.is_first(process) and Path(f"/proc/{process}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
    return False


def _change(host: str, process: int, content: Mapping[str, str | bytes], stop: threading.Event | None = None) -> str:
    """Replace the host's folder of GPUs, then run the script in it. Both happen inside: a link of the host must not lead to files here.
    Returns why nvidia-smi prints recorded outputs there, or nothing."""
    if not process:
        raise ProvisionError("The host does not run.", where=host, hint="Remove the sandbox, and start it again.")
    if not _is_first_of_host(process):
        what = f"Process {process}, which the engine names, is not this host's first one as seen from here; nothing was changed."
        raise ProvisionError(what, where=host, hint="The engine must run in this machine's PID namespace; or use --engine namespaces.")
    enter = ["nsenter", "--target", str(process), "--mount", "--pid", "--net", "--uts", "--ipc", "sh", "-c", _REPLACE]
    given = archive({f"{_FOLDER}/{name}": text for name, text in content.items()})
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        code, said = _run(enter, given, env, stop or threading.Event())
    except FileNotFoundError as error:
        raise ProvisionError("nsenter is not installed on this machine.", hint="Install it: `sudo apt-get install util-linux`.") from error
    except subprocess.TimeoutExpired as error:
        what = f"The host did not show its GPUs within {_SECONDS} s."
        raise ProvisionError(what, where=host, hint="Check that its apt mirror answers: nvidia-smi comes from there.") from error
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    if code:
        raise ProvisionError(f"The GPUs cannot be shown: {' / '.join(lines[-4:]) or f'exit {code}'}", where=host)
    return next((line.removeprefix(_RECORDED) for line in lines if line.startswith(_RECORDED)), "")


def _run(command: Sequence[str], given: bytes, env: Mapping[str, str], stop: threading.Event) -> tuple[int, bytes]:
    """Exit code and output. After too long, or an interrupt, the group is killed: nsenter's child is not the process started here."""
    deadline, pipe = time.monotonic() + _SECONDS, subprocess.PIPE
    with tempfile.TemporaryFile() as file:  # a pipe would not be written to the end where communicate() is called again
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(command, stdin=file, stdout=pipe, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        while True:
            try:
                said = process.communicate(timeout=_TICK)[0]
                return process.returncode, said
            except subprocess.TimeoutExpired:
                if stop.is_set() or time.monotonic() > deadline:
                    raise
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def _record(sandbox: str) -> Path:
    return names.folder(sandbox) / "gpus.json"
