"""The options of `provision run`, which `provision image run` shares: horovodrun's, by its names, and ours."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provision import forwarded, horovod_config, horovod_options, terminal
from provision.errors import UsageError
from provision.launch import LAUNCHERS, Elastic
from provision.options import Oversubscribe, also, one_of
from provision.run import RunOptions


@also(horovod=horovod_options.variables)
def run_options(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The program and its arguments; `python` is the one that has the engine there."),
    ] = None,
    np: Annotated[int | None, typer.Option("-np", "--num-proc", min=1, help="Ranks; all slots by default.")] = None,
    oversubscribe: Oversubscribe = False,
    min_np: Annotated[
        int | None,
        typer.Option("--min-np", "--min-num-proc", min=1, help="An elastic job: goes on while there are so many ranks; -np by default."),
    ] = None,
    max_np: Annotated[
        int | None,
        typer.Option(
            "--max-np",
            "--max-num-proc",
            min=1,
            help="An elastic job: at most so many ranks; with a discovery script no limit by default, else -np.",
        ),
    ] = None,
    host_discovery_script: Annotated[
        Path | None,
        typer.Option(
            help="An elastic job: a program that prints `host:slots` lines; asked again and again, on the first host.", exists=True
        ),
    ] = None,
    slots_per_host: Annotated[
        int | None, typer.Option("--slots-per-host", "--slots", min=1, help="Slots of hosts for which the script names none.")
    ] = None,
    elastic_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that an elastic job waits with too few ranks (600).", min=1, envvar="HOROVOD_ELASTIC_TIMEOUT"),
    ] = None,
    reset_limit: Annotated[int | None, typer.Option(help="Changes of an elastic job's ranks after which it ends.", min=0)] = None,
    blacklist_cooldown_range: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Seconds for which a host that fails again is set aside: at first, and at most.", metavar="MIN MAX"),
    ] = None,
    variables: Annotated[
        list[str] | None, typer.Option("-x", metavar="NAME[=VALUE]", help="A variable for every rank; without a value, this shell's.")
    ] = None,
    env: Annotated[
        str,
        typer.Option(
            "--env",
            help="Which of this shell's variables travel without -x: `known` (the engine's, Horovod's, NCCL's, OpenMP's, CUDA's, "
            "PyTorch's, Python's), `all`, `none`; never those whose names look secret.",
            metavar="known|all|none",
        ),
    ] = forwarded.KNOWN,
    bring: Annotated[
        list[Path] | None, typer.Option("--bring", help="A file or folder to bring along besides the program's file.", exists=True)
    ] = None,
    modules: Annotated[
        bool, typer.Option("--modules/--no-modules", help="Bring the modules and packages beside the program's file (default).")
    ] = True,
    workdir: Annotated[
        str | None, typer.Option("--workdir", help="Run in this folder, which is there on every host; nothing is brought.", metavar="DIR")
    ] = None,
    restart_from: Annotated[
        str | None,
        typer.Option(help="Go on from the last valid checkpoint in this folder of rank 0's host (hvd.Checkpoints).", metavar="DIR"),
    ] = None,
    output_filename: Annotated[
        Path | None, typer.Option(help="Keep each rank's output in DIR/rank.N/stdout and stderr.", metavar="DIR", file_okay=False)
    ] = None,
    quiet_ranks: Annotated[bool, typer.Option("--quiet-ranks", help="Show rank 0's output only.")] = False,
    timeline_filename: Annotated[str | None, typer.Option(help="Write the timeline to this file on rank 0's host.")] = None,
    fusion_threshold_mb: Annotated[float | None, typer.Option(help="Gradients up to this size travel together.", min=0)] = None,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds in which all hosts answer and all ranks meet.", min=1, envvar="HOROVOD_START_TIMEOUT")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="`mpi`: under mpirun; `own`: over ssh, without MPI.", metavar="mpi|own")] = None,
    gloo: Annotated[bool, typer.Option("--gloo", help="The same as --launcher own.")] = False,
    mpi: Annotated[bool, typer.Option("--mpi", help="The same as --launcher mpi (default, where it is installed).")] = False,
    python: Annotated[
        str | None,
        typer.Option(
            help="A Python with the engine, there on every host: own launcher, nothing of ours need be installed.", metavar="PATH"
        ),
    ] = None,
    network_interfaces: Annotated[
        list[str] | None,
        typer.Option(
            "--network-interfaces",
            "--network-interface",
            help="What hosts use between them: interfaces or networks (CIDR), comma separated.",
            metavar="eth0,…",
        ),
    ] = None,
    mpi_args: Annotated[str | None, typer.Option(help='More words for mpirun: --mpi-args="--report-bindings".')] = None,
    binding_args: Annotated[str | None, typer.Option(help="Words for mpirun instead of `--map-by slot --bind-to none`.")] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Settings as horovodrun's YAML file has them; options win.", metavar="FILE", dir_okay=False)
    ] = None,
    autotune: Annotated[
        bool | None, typer.Option("--autotune/--no-autotune", help="Let the engine choose how much travels together, while training.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("-prefix-timestamp", "--prefix-output-with-timestamp", help="Begin each line of ranks' output with the time.")
    ] = False,
    tcp: Annotated[bool, typer.Option("--tcp", hidden=True)] = False,  # noqa: ARG001 - so it is anyway
    disable_cache: Annotated[bool, typer.Option("--disable-cache", hidden=True)] = False,  # noqa: ARG001 - nothing is cached
    jsrun: Annotated[bool, typer.Option("--jsrun", hidden=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is started where.")] = False,
    *,
    horovod: Mapping[str, str],
) -> RunOptions:
    """What is to be launched. Raises UsageError for what cannot be meant."""
    config = horovod_config.read(config_file) if config_file is not None else horovod_config.Config()
    for sentence in config.unknown:
        terminal.say(f"warning: {sentence}")
    elastic = _elastic(np, min_np, max_np, host_discovery_script)
    if elastic is not None:
        cooldown = blacklist_cooldown_range
        if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
            raise UsageError(f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: they must rise", todo="0 < min <= max")
        elastic = replace(elastic, slots_per_host=slots_per_host, timeout=elastic_timeout, reset_limit=reset_limit, cooldown=cooldown)
    if jsrun:
        raise UsageError("--jsrun: LSF's launcher is not supported", todo="leave it out: ranks are started by mpirun or over ssh")
    asked = {name for name in ("own" if gloo else "", "mpi" if mpi else "", launcher) if name}
    if len(asked) > 1:
        raise UsageError("--gloo, --mpi and --launcher name different launchers", todo="leave all but one of them out")
    usual = None if python is None and elastic is None else "own"
    named = asked.pop() if asked else config.launcher
    chosen = usual if named is None else one_of("--launcher", named, tuple(LAUNCHERS))
    if python is not None and not python.startswith("/"):
        raise UsageError(f"--python {python}: this is no absolute path", todo="write it as it is on every host: /path/to/bin/python")
    if python is not None and chosen == "mpi":
        raise UsageError("--python: mpirun would have to be found beside it", todo="use our own launcher: --launcher own")
    if elastic is not None and chosen == "mpi":
        made_so = {"--min-np": min_np, "--max-np": max_np, "--host-discovery-script": host_discovery_script}
        given = " and ".join(name for name, value in made_so.items() if value is not None)
        raise UsageError(f"{given}: mpirun ends a job when a rank dies", todo="use our own launcher: --launcher own")
    if chosen == "own" and (mpi_args or binding_args):
        raise UsageError("--mpi-args and --binding-args are mpirun's", todo="use it: --mpi")
    if bring and workdir is not None:
        raise UsageError("--bring and --workdir: with a folder of yours nothing is brought", todo="leave one of them out")
    settings = {
        "COLLECTIVE_TIMELINE": timeline_filename,
        "COLLECTIVE_RESTART_FROM": restart_from,
        "COLLECTIVE_FUSION_MB": fusion_threshold_mb,
        "COLLECTIVE_START_TIMEOUT": start_timeout,
        "COLLECTIVE_AUTOTUNE": int(autotune) if autotune is not None else 1 if config.autotune else None,
    }
    inherited = forwarded.chosen(os.environ, env)
    if network_interfaces:
        inherited.pop("COLLECTIVE_NETWORK", None)
        inherited.pop("HOROVOD_GLOO_IFACE", None)
    said = {name: str(value) for name, value in settings.items() if value is not None}
    asked_for = {**config.variables, **horovod}
    environment = {**inherited, **horovod_config.unset(asked_for, os.environ), **asked_for, **said}
    for entry in variables or ():
        name, has_value, value = entry.partition("=")
        if not has_value and name not in os.environ:
            raise UsageError(f"-x {name}: there is no such variable here", todo=f"give its value: -x {name}=…")
        environment[name] = value if has_value else os.environ[name]
    if elastic is not None and oversubscribe:
        todo = "leave it out, and give the hosts the slots that you mean (`slots` in the inventory, -H a:8)"
        raise UsageError("--oversubscribe: an elastic job starts as many ranks as its hosts have slots", todo=todo)
    return RunOptions(
        tuple(command or ()),
        np,
        environment,
        workdir,
        tuple(bring or ()),
        modules,
        output_filename,
        quiet_ranks,
        launcher=chosen,
        python=python,
        networks=tuple(name for names in network_interfaces or () for name in names.split(",") if name),
        start_timeout=start_timeout,
        verbose=verbose,
        elastic=elastic,
        timestamps=timestamps,
        mpi_args=_words("--mpi-args", mpi_args),
        binding=_words("--binding-args", binding_args),
        oversubscribe=oversubscribe,
    )


def _elastic(np: int | None, least: int | None, most: int | None, script: Path | None) -> Elastic | None:
    """An elastic job, if one of its options is given. Raises UsageError for numbers that do not rise, and a script that cannot run."""
    if least is None and most is None and script is None:
        return None
    found = Elastic(np, least or np or 1, most, script)
    if not found.least <= (np or found.least) <= (most or np or found.least):
        asked_for = {"--min-np": found.least, "-np": np, "--max-np": most}
        said = ", ".join(f"{name} {number}" for name, number in asked_for.items() if number is not None)
        raise UsageError(f"{said}: they must rise", todo="1 <= min-np <= np <= max-np")
    if script is not None:
        try:
            is_script = script.read_bytes()[:2] == b"#!" and bool(script.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            is_script = False
        if not is_script:
            what = "it is brought to the first host and run there, so it must be a script that begins with #!"
            raise UsageError(what, where=f"--host-discovery-script {script}", todo="write one that calls your program: #!/bin/sh")
    return found


def _words(option: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}", todo="quote it as for a shell") from error
