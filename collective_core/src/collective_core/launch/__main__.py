"""``python -m collective_core.launch -np 4 -H a:2,b:2 python train.py``: a program on several ranks, over ssh, without MPI.

Each host needs this engine, at the same path, and this one must reach the others with ssh and without a password. Exit code: of the rank
that failed first, whose traceback is what is shown last. Ctrl-C and SIGTERM end all ranks everywhere. Nothing secret is on a command line
or in the ranks' environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from typing import Any, Callable, Sequence

from collective_core.errors import CollectiveError
from collective_core.launch import cluster, nodes, program, timeouts
from collective_core.launch.elastic_driver import NAME, Driver, cooldown_of, limits_of
from collective_core.launch.frames import Frame
from collective_core.launch.hosts import Host, ask, place_ranks, read, ways
from collective_core.launch.job import Job
from collective_core.launch.outcomes import show
from collective_core.launch.remote import SSH
from collective_core.launch.tracebacks import Tracebacks
from collective_core.runtime import cores
from collective_core.runtime.config import RESTART_FROM, SERVERS
from collective_core.runtime.torch_variables import RESTART_COUNT

#: Ranks of this machine, which nobody has given slots.
MAX_PER_CORE = 8


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description="Runs a program on several ranks, over ssh, without MPI.")
    parser.add_argument("-np", "--num-proc", dest="np", type=int, help="ranks; one per slot of the hosts by default")
    hosts = "hosts, the first so many; MIN:MAX: an elastic job on at least and at most so many, with --nproc-per-node"
    parser.add_argument(*_spelled("--nnodes"), dest="nodes", metavar="N|MIN:MAX", help=hosts)
    per_node = "ranks on each host; auto: one per slot, on this machine alone one per GPU, or per core without any; cpu, gpu"
    parser.add_argument(*_spelled("--nproc-per-node"), dest="per_node", metavar="N", help=per_node)
    parser.add_argument("--oversubscribe", action="store_true", help=f"on this machine alone: more than {MAX_PER_CORE} ranks per core")
    parser.add_argument("-H", "--hosts", help="a:2,b:2, a file of lines `host slots=N`, or an inventory; this machine by default")
    parser.add_argument("--min-np", dest="least", type=int, help="an elastic job: at least so many ranks (-np, which it needs to begin)")
    parser.add_argument("--max-np", dest="most", type=int, help="an elastic job: at most so many ranks (-np, with a script all slots)")
    parser.add_argument("--host-discovery-script", dest="script", help="an elastic job: a program that prints host:slots, a line each")
    parser.add_argument("--slots-per-host", type=int, help="slots of hosts for which the script names none (1)")
    parser.add_argument("--elastic-timeout", type=float, help="seconds that an elastic job waits with too few ranks (600)")
    parser.add_argument("--reset-limit", type=int, help="changes of an elastic job's ranks after which it ends")
    restarts = "failures after which all ranks are started again (0); in an elastic job, failures of ranks that it survives (3)"
    parser.add_argument(*_spelled("--max-restarts"), dest="restarts", type=int, help=restarts)
    servers = "of the ranks the last N are parameter servers (hvd.ps)"
    parser.add_argument("--servers", type=int, metavar="N", help=servers)
    set_aside = "seconds for which a host that fails again is set aside, at first and at most"
    parser.add_argument("--blacklist-cooldown-range", dest="cooldown", type=float, nargs=2, metavar=("MIN", "MAX"), help=set_aside)
    parser.add_argument("-x", dest="names", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks")
    parser.add_argument("--restart-from", metavar="DIR", help="go on from the last valid checkpoint there (hvd.Checkpoints, hvd.elastic)")
    parser.add_argument("--wdir", help="where ranks work; the home on other hosts by default")
    parser.add_argument("--ssh-config", help="a configuration file for ssh, instead of what `provision up` has left on its hosts")
    parser.add_argument("--start-timeout", type=float, help="seconds for hosts to answer and ranks to meet (60)")
    parser.add_argument("--tag-output", action="store_true", help="begin lines with [1,RANK]<stdout>: as mpirun does")
    parser.add_argument(*_spelled("--master-port"), type=int, help="MASTER_PORT for torch.distributed; a free one by default")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module: -m package.train")
    parser.add_argument(*_spelled("--no-python"), action="store_true", help="execute a file NAME.py itself")
    parser.add_argument(*_spelled("--node-rank"), type=int, help=argparse.SUPPRESS)
    for name, (values, _) in nodes.WITHOUT_EFFECT.items():
        how = {"action": "store_true"} if values == 0 else {}
        parser.add_argument(*_spelled(name), dest=f"unused{name}", help=argparse.SUPPRESS, **how)  # type: ignore[arg-type]
    program = "the program and its arguments; `python` is this interpreter, which also runs a file NAME.py"
    parser.add_argument("program", nargs=argparse.REMAINDER, help=program)
    return parser


def _spelled(name: str) -> list[str]:
    """As torchrun takes it."""
    return list(dict.fromkeys([name, "--" + name[2:].replace("-", "_")]))


def _command(arguments: argparse.Namespace) -> list[str]:
    """The program as it is started. Raises :class:`CollectiveError` where there is none."""
    command: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command or (arguments.np is not None and arguments.np < 1):
        raise CollectiveError("say how many ranks (-np, at least 1) run which program", "invalid")
    if arguments.module:
        return [sys.executable, "-m", *command]
    if command[0] in ("python", "python3"):
        return [sys.executable, *command[1:]]
    return [sys.executable, *command] if command[0].endswith(".py") and not arguments.no_python else command


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def _note_options_of_torchrun(arguments: argparse.Namespace) -> None:
    """Says which have no effect. Raises :class:`CollectiveError` for one that asks for the wrong thing."""
    if arguments.node_rank:
        text = (
            f"--node-rank {arguments.node_rank}: this launcher is started once, on one machine, and starts the ranks of all hosts (-H a,b)"
        )
        raise CollectiveError(text, "invalid")
    given = vars(arguments)
    for name, (_, why) in nodes.WITHOUT_EFFECT.items():
        if given[f"unused{name}"]:
            _say(f"{name} has no effect: {why}")


def _refuse_too_many(ranks: int) -> None:
    """Raises :class:`CollectiveError` for a number of ranks that would bring this machine to a stop."""
    found = cores.share(1)
    if ranks > MAX_PER_CORE * found:
        text = f"{ranks} ranks: this machine takes {MAX_PER_CORE} for each of its cores ({found}): "
        raise CollectiveError(f"{text}start fewer, say which hosts (-H a:8,b:8), or allow it: --oversubscribe", "invalid")


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    given = [entry.partition("=") for entry in arguments.names]
    missing = [name for name, is_given, _ in given if not is_given and name not in os.environ]
    if missing:
        raise CollectiveError(f"-x {missing[0]}: there is no such variable here", "invalid")
    if not 0 <= (arguments.master_port or 0) < 1 << 16:
        raise CollectiveError(f"--master-port {arguments.master_port}: write a port, 1 to 65535, or leave it out for a free one", "invalid")
    found = {"MASTER_PORT": str(arguments.master_port)} if arguments.master_port else {}
    found.update({name: value if is_given else os.environ[name] for name, is_given, value in given})
    if arguments.restart_from:
        found[RESTART_FROM] = arguments.restart_from
    return found if arguments.servers is None else {**found, SERVERS: str(arguments.servers)}


def _run(arguments: argparse.Namespace, command: Sequence[str], tracebacks: Tracebacks) -> program.Verdict:
    environment = _environment(arguments)
    ssh = [*SSH, "-F", arguments.ssh_config] if arguments.ssh_config else SSH
    script, timeout = arguments.script, timeouts.start() if arguments.start_timeout is None else arguments.start_timeout
    asked = nodes.Size(arguments.np, arguments.least, arguments.most, cluster.reached(read(arguments.hosts), ssh))
    size = nodes.size_of(asked, arguments.nodes, arguments.per_node, discovered=script is not None)
    hosts = size.hosts or [Host("localhost", size.most or size.np or 1)]
    if arguments.hosts is None and script is None and not arguments.oversubscribe:
        slots = sum(host.slots for host in hosts)
        _refuse_too_many(min(slots, size.most or size.np or slots))
    if arguments.restarts is not None and arguments.restarts < 0:
        raise CollectiveError(f"--max-restarts {arguments.restarts}: write how often, 0 or more", "invalid")
    limits = limits_of(
        size.np,
        size.least,
        size.most,
        timeout,
        unlimited=script is not None,
        waiting=arguments.elastic_timeout,
        resets=arguments.reset_limit,
        restarts=arguments.restarts,
    )
    if arguments.servers is not None:
        fewest = limits.least if limits else size.np or sum(host.slots for host in hosts)
        if not 0 < arguments.servers < fewest:
            text = f"--servers {arguments.servers}: of {fewest} ranks at least one is a server and at least one a worker, which trains"
            raise CollectiveError(text, "invalid")
    if limits is None:
        ranks_of = place_ranks(hosts, size.np)

        def job(restarts: int) -> Job:
            variables = {RESTART_COUNT: str(restarts), **environment} if arguments.restarts else environment
            return Job(ranks_of, ways(hosts), variables, directory=arguments.wdir, ssh=ssh, start_timeout=timeout)

        return _run_again(job, command, tracebacks, arguments.restarts or 0)
    slots = int(arguments.per_node) if (arguments.per_node or "").isdecimal() else arguments.slots_per_host
    return program.run_elastic(
        Driver(
            (lambda: cluster.reached(ask(script, slots), ssh)) if script else None,
            limits,
            tracebacks,
            program=command,
            environment=environment,
            directory=arguments.wdir,
            ssh=ssh,
            hosts=hosts,
            cooldown=cooldown_of(arguments.cooldown),
        )
    )


def _run_again(job: Callable[[int], Job], command: Sequence[str], tracebacks: Tracebacks, restarts: int) -> program.Verdict:
    """Runs all ranks, and again after a failure, at most so many times. ``job``: one that has been started again so many times."""
    for attempt in range(restarts):
        verdict = program.run(job(attempt), command, tracebacks)
        if verdict.code == 0:
            return verdict
        tracebacks.forget()
        _say(f"{verdict.text}; all ranks are started again ({attempt + 1} of {restarts})")
    return program.run(job(restarts), command, tracebacks)


def _show_tagged(frame: Frame) -> None:
    """All on standard output, so that what a rank says on both streams stays in order."""
    line = b"[1,%d]<%s>:%s\n" % (frame.rank, b"stdout" if frame.kind == "out" else b"stderr", frame.body.rstrip(b"\r\n"))
    left = memoryview(line)
    while left:
        left = left[os.write(1, left) :]


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    arguments = make_parser().parse_args()
    # Who reads tags takes the output apart by rank.
    tracebacks = Tracebacks(_show_tagged if arguments.tag_output else lambda frame: show(frame, True), raw=arguments.tag_output)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        command = _command(arguments)
        _note_options_of_torchrun(arguments)
        verdict = _run(arguments, command, tracebacks)
    except CollectiveError as error:
        verdict = program.Verdict(2 if error.kind == "invalid" else 1, str(error))
    except KeyboardInterrupt:
        verdict = program.Verdict(130, "interrupted; all ranks have been ended")
    except BrokenPipeError:
        return 1  # nobody reads any more
    with contextlib.suppress(OSError):
        rank = verdict.rank
        if rank is not None:
            if tracebacks.are_consequences():
                verdict = verdict.blaming_who_left(tracebacks.has_any)
            else:
                tracebacks.show_cause(rank)
                verdict = verdict.blaming(tracebacks.cause_of(rank))
        tracebacks.show_held()
        if verdict.text:
            _say(verdict.text)
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
