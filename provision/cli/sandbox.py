"""`provision sandbox …` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, get_args

import typer

from provision import sandbox
from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.text import counted, joined
from provision.base.validation import MAX_COUNT, max_here
from provision.cli.help import App
from provision.cli.options import one_of, with_options
from provision.remote import progress
from provision.sandbox import names
from provision.sandbox.gpus import simulation
from provision.sandbox.gpus.model import Gpus, refusal
from provision.sandbox.gpus.model import faults as known_faults
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate

app = App(no_args_is_help=True, help="Throw-away hosts on this machine: containers with sshd, or Linux namespaces.")

_LIMITS = "The GPUs are simulated: survey, plan and doctor see them, and no program can run on one. dmesg is a stand-in."
_TOOLS = {
    "nvidia": "nvidia-smi asks a stand-in for NVIDIA's library; CUDA finds no GPU.",
    "amd": "amd-smi prints recorded answers.",
}
Name = Annotated[str, typer.Option("--name", help="Name of the sandbox; several can exist side by side.")]


class _GpuOptions(NamedTuple):
    gpus: Gpus | None
    faults: Sequence[str]


def gpu_options(
    gpus: Annotated[str, typer.Option("--gpus", help="Simulate GPUs on each host, such as h100:8; no program can run on them.")] = "",
    driver: Annotated[str, typer.Option("--driver", help="Branch or version of their driver.")] = "",
    fabric: Annotated[str, typer.Option("--fabric", help="Simulate RDMA cards, one for each GPU: ib or roce.")] = "",
    fault: Annotated[list[str] | None, typer.Option("--fault", help="Fault of a host, such as xid79@node2; can be repeated.")] = None,
) -> _GpuOptions:
    """The GPUs to simulate, and their faults."""
    if not gpus and (driver or fabric or fault):
        raise UsageError("--driver, --fabric and --fault need --gpus", hint="for example: --gpus h100:8")
    return _GpuOptions(Gpus.requested(gpus, driver, fabric) if gpus else None, fault or ())


@app.command()
@with_options(simulated=gpu_options)
def up(
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=max_here(), help="Number of hosts.")] = 2,
    base: Annotated[
        list[str] | None, typer.Option("--base", help="Image of the hosts, e.g. debian:12; can be repeated to mix several.")
    ] = None,
    name: Name = "default",
    sudo: Annotated[str, typer.Option("--sudo", help="How the user becomes root: nopasswd, password or none.")] = "nopasswd",
    slots: Annotated[int | None, typer.Option("--slots", min=1, max=MAX_COUNT, help="Ranks per host; default: 2, or its GPUs.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="What runs the hosts: docker, or namespaces (root); default: the first possible.")
    ] = "",
    *,
    simulated: _GpuOptions,
) -> None:
    """Start hosts and write an inventory of them."""
    hosts = [f"node{number}" for number in range(1, count + 1)]
    wanted = Simulation(simulated.gpus).changed(simulated.faults, hosts, clear=False) if simulated.gpus else None
    mode = one_of("--sudo", sudo, get_args(sandbox.SudoMode))
    kind = one_of("--engine", engine, get_args(sandbox.EngineName)) if engine else None
    ranks = slots or (wanted.gpus.count if wanted else 2)
    if wanted:
        simulation.check(wanted.gpus)
    with progress.make() as shown:
        made = sandbox.up(count=count, base=base or None, name=name, say=shown.stage, sudo=mode, slots=ranks, engine=kind)
    if wanted:
        simulate(name, wanted)
        terminal.say(f"{_LIMITS} {_TOOLS[wanted.gpus.kind.vendor]}")
    terminal.out().say(str(made.inventory))


@app.command()
def fault(
    faults: Annotated[
        list[str] | None, typer.Argument(metavar="FAULT@HOST", help="Such as xid79@node2, or xid79@node2:3 for its GPU 3.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Clear these faults, or all.")] = False,
    name: Name = "default",
) -> None:
    """Set or clear faults of simulated GPU hosts while they run; without a fault, list those that they can have."""
    found = sandbox.status(name)
    shown = Simulation.of(name) if found else None
    if found is None or shown is None:
        raise UsageError(f"sandbox '{name}' has no simulated GPUs", hint=f"start it: {names.command('up', name)} --gpus h100:8")
    hosts = [host.name for host in found.hosts]
    if faults or clear:
        shown = shown.changed(faults or [], hosts, clear=clear)
        simulate(name, shown)
    else:
        set_on = {each: ", ".join(str(one) for one in shown.faults if one.name == each) for each in known_faults()}
        rows = [
            {"fault": each, "is": entry.what, "doctor finds": joined(entry.finds), "set": set_on[each]}
            for each, entry in known_faults().items()
            if refusal(entry, shown.gpus, len(hosts)) is None
        ]
        terminal.out().print(terminal.table(rows))
    terminal.out().say("set: " + (", ".join(map(str, shown.faults)) or "none"))


@app.command()
def check() -> None:
    """Say what `up` would run hosts with: a container engine, or namespaces; if neither is possible, why not."""
    hosts = {"docker": "containers: a container engine answers", "namespaces": "namespaces of this machine: no container engine answers"}
    terminal.out().say(hosts[sandbox.engine_for_hosts()])


@app.command()
def status(name: Name = "default") -> None:
    """Show the hosts and their state."""
    found = sandbox.status(name)
    if found is None:
        others = [one.name for one in sandbox.every()]
        seen = f" (others: {joined(others)})" if others else ""
        terminal.out().say(f"no sandbox '{name}' is up{seen}; start it: {names.command('up', name)}")
        raise typer.Exit(1)
    rows = [{"host": host.name, "address": host.address, "base": host.base, "state": host.state} for host in found.hosts]
    terminal.out().print(terminal.table(rows))
    if shown := Simulation.of(name):
        terminal.out().say(f"simulated on each host: {shown.gpus}; faults: {', '.join(map(str, shown.faults)) or 'none'}")
    terminal.out().say(f"inventory: {found.inventory}")


@app.command("ls")
def list_() -> None:
    """List all sandboxes of this machine."""
    found = sandbox.every()
    if not found:
        terminal.out().say("no sandbox is up; start one: provision sandbox up")
        return
    rows = (
        {
            "sandbox": one.name,
            "hosts": str(len(one.hosts)),
            "engine": one.engine,
            "state": "running" if one.running else joined(sorted({host.state for host in one.hosts})),
            "inventory": str(one.inventory) if one.inventory.exists() else f"not in {one.inventory.parent}",
        }
        for one in found
    )
    terminal.out().print(terminal.table(rows))
    for one in found:
        if not one.inventory.exists():
            why = "it was made with another PROVISION_HOME, or its files were removed"
            if one.inventory.parent.exists():
                why = "it is still being made, or its making was interrupted"
            terminal.out().say(f"{one.name}: {why}; if it is no longer needed: {names.command('down', one.name)}")


@app.command()
def down(name: Name = "default") -> None:
    """Remove the hosts and everything that was made for them."""
    removed = sandbox.down(name, say=terminal.say)
    terminal.out().say(f"removed {counted(len(removed), 'thing')}" if removed else "nothing to remove")
