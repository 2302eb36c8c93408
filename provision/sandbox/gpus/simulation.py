"""The GPUs of a running sandbox: shown on its hosts, recorded in its folder, and changed while it runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from provision.base.errors import ProvisionError
from provision.sandbox import names
from provision.sandbox.engine import Engine
from provision.sandbox.gpus import library
from provision.sandbox.gpus.host import files
from provision.sandbox.gpus.model import Gpus, HostFault
from provision.sandbox.host_files import FOLDER, archive
from provision.sandbox.model import SandboxHost

_FOLDER, _SCRIPT = "gpus", "gpus.sh"
_AT_ONCE = 8  # hosts
_SECONDS = 300  # a mirror may be slow
_NO_NVIDIA_SMI = 4  # of gpus.sh
_REPLACE = f"cd / && rm -rf {FOLDER}/{_FOLDER} && tar -x && exec sh {FOLDER}/{_FOLDER}/{_SCRIPT} </dev/null"


@dataclass(frozen=True)
class Simulation:
    """What a sandbox's hosts show: their GPUs, and what is wrong with them now."""

    gpus: Gpus
    faults: tuple[HostFault, ...] = ()

    @classmethod
    def of(cls, sandbox: str) -> Simulation | None:
        """What was last shown; None for a sandbox without GPUs."""
        file = _record(sandbox)
        if not file.exists():
            return None
        document = json.loads(file.read_text(encoding="utf-8"))
        return cls(Gpus(**document["gpus"]), tuple(HostFault(**each) for each in document["faults"]))

    def changed(self, texts: Iterable[str], hosts: Sequence[str], *, clear: bool) -> Simulation:
        """With these faults (``xid79@node2``) also set; with ``clear`` without them, or without any where none is named.

        Raises:
            UsageError: as `HostFault.requested` does.
        """
        requested = dict.fromkeys(HostFault.requested(text, hosts, self.gpus) for text in texts)
        if not clear:
            return replace(self, faults=tuple(dict.fromkeys([*self.faults, *requested])))
        return replace(self, faults=tuple(each for each in self.faults if requested and each not in requested))


def show(runs: Engine, sandbox: str, hosts: Sequence[SandboxHost], wanted: Simulation) -> None:
    """Show this on all of the sandbox's hosts that show something else, and record it; what they show already is shown again.

    Raises:
        ProvisionError: a host cannot show it, with the reason.
    """
    libraries = library.built() if wanted.gpus.kind.vendor == "nvidia" else {}
    before = Simulation.of(sandbox)
    shared: dict[str, str | bytes] = {_SCRIPT: names.script(_SCRIPT), **libraries}

    def change(host: SandboxHost) -> None:
        made = files(host.name, wanted.gpus, wanted.faults)
        if before in (None, wanted) or files(host.name, before.gpus, before.faults) != made:
            _change(host.name, runs.process(host), {**shared, **made})

    _record(sandbox).unlink(missing_ok=True)  # after a failure every host is shown everything again
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(change, hosts))
    document = {"gpus": vars(wanted.gpus), "faults": [vars(each) for each in wanted.faults]}
    _record(sandbox).write_text(json.dumps(document), encoding="utf-8")


def _change(host: str, process: int, content: Mapping[str, str | bytes]) -> None:
    """Replace the host's folder of GPUs, then run the script in it. Both happen inside: a link of the host must not lead to files here."""
    if os.geteuid() != 0:
        raise ProvisionError("Simulated GPUs need root on this machine: they are mounted over the host's /sys and /proc.", where=host)
    if not process:
        raise ProvisionError("The host does not run.", where=host, hint="Remove the sandbox, and start it again.")
    enter = ["nsenter", "--target", str(process), "--mount", "--pid", "--net", "--uts", "--ipc", "sh", "-c", _REPLACE]
    given = archive({f"{_FOLDER}/{name}": text for name, text in content.items()})
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        done = subprocess.run(enter, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise ProvisionError("nsenter is not installed on this machine.", hint="Install it: `sudo apt-get install util-linux`.") from error
    except subprocess.TimeoutExpired as error:
        what = f"The host did not show its GPUs within {_SECONDS} s."
        raise ProvisionError(what, where=host, hint="Check that its apt mirror answers: nvidia-smi comes from there.") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        hint = "nvidia-smi comes from Debian's archive, part non-free: use a Debian base, and a mirror that has that part."
        what = f"The GPUs cannot be shown: {' / '.join(lines[-4:]) or f'exit {done.returncode}'}"
        raise ProvisionError(what, where=host, hint=hint if done.returncode == _NO_NVIDIA_SMI else None)


def _record(sandbox: str) -> Path:
    return names.folder(sandbox) / "gpus.json"
