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
from collective_core.launch import cluster, program, timeouts
from collective_core.launch.elastic import NAME, Driver, cooldown_of, limits_of
from collective_core.launch.frames import Frame
from collective_core.launch.hosts import Host, ask, place_ranks, read, ways
from collective_core.launch.job import Job
from collective_core.launch.outcomes import show
from collective_core.launch.remote import SSH
from collective_core.launch.tracebacks import Tracebacks
from collective_core.runtime.config import RESTART_FROM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description="Runs a program on several ranks, over ssh, without MPI.")
    parser.add_argument("-np", "--num-proc", dest="np", type=int, help="ranks; one per slot of the hosts by default")
    parser.add_argument("-H", "--hosts", help="a:2,b:2, a file of lines `host slots=N`, or an inventory; this machine by default")
    parser.add_argument("--min-np", dest="least", type=int, help="an elastic job: at least so many ranks (-np, which it needs to begin)")
    parser.add_argument("--max-np", dest="most", type=int, help="an elastic job: at most so many ranks (-np, with a script all slots)")
    parser.add_argument("--host-discovery-script", dest="script", help="an elastic job: a program that prints host:slots, a line each")
    parser.add_argument("--slots-per-host", type=int, help="slots of hosts for which the script names none (1)")
    parser.add_argument("--elastic-timeout", type=float, help="seconds that an elastic job waits with too few ranks (600)")
    parser.add_argument("--reset-limit", type=int, help="changes of an elastic job's ranks after which it ends")
    set_aside = "seconds for which a host that fails again is set aside, at first and at most"
    parser.add_argument("--blacklist-cooldown-range", dest="cooldown", type=float, nargs=2, metavar=("MIN", "MAX"), help=set_aside)
    parser.add_argument("-x", dest="names", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks")
    parser.add_argument("--restart-from", metavar="DIR", help="go on from the last valid checkpoint there (hvd.Checkpoints, hvd.elastic)")
    parser.add_argument("--wdir", help="where ranks work; the home on other hosts by default")
    parser.add_argument("--ssh-config", help="a configuration file for ssh, instead of what `provision up` has left on its hosts")
    parser.add_argument("--start-timeout", type=float, help="seconds for hosts to answer and ranks to meet (60)")
    parser.add_argument("--tag-output", action="store_true", help="begin lines with [1,RANK]<stdout>: as mpirun does")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments; `python` is this interpreter")
    return parser


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    given = [entry.partition("=") for entry in arguments.names]
    missing = [name for name, is_given, _ in given if not is_given and name not in os.environ]
    if missing:
        raise CollectiveError(f"-x {missing[0]}: there is no such variable here", "invalid")
    found = {name: value if is_given else os.environ[name] for name, is_given, value in given}
    return {**found, RESTART_FROM: arguments.restart_from} if arguments.restart_from else found


def _run(arguments: argparse.Namespace, command: Sequence[str], show: Callable[[Frame], None]) -> program.Verdict:
    environment = _environment(arguments)
    ssh = [*SSH, "-F", arguments.ssh_config] if arguments.ssh_config else SSH
    hosts = cluster.reached(read(arguments.hosts), ssh) or [Host("localhost", arguments.most or arguments.np or 1)]
    script, timeout = arguments.script, timeouts.start() if arguments.start_timeout is None else arguments.start_timeout
    limits = limits_of(
        arguments.np,
        arguments.least,
        arguments.most,
        timeout,
        unlimited=script is not None,
        waiting=arguments.elastic_timeout,
        resets=arguments.reset_limit,
    )
    if limits is None:
        ranks_of = place_ranks(hosts, arguments.np)
        job = Job(ranks_of, ways(hosts), environment, directory=arguments.wdir, ssh=ssh, start_timeout=timeout)
        return program.run(job, command, show)
    return program.run_elastic(
        Driver(
            (lambda: cluster.reached(ask(script, arguments.slots_per_host), ssh)) if script else None,
            limits,
            show,
            program=command,
            environment=environment,
            directory=arguments.wdir,
            ssh=ssh,
            hosts=hosts,
            cooldown=cooldown_of(arguments.cooldown),
        )
    )


def _show_tagged(frame: Frame) -> None:
    """All on standard output, so that what a rank says on both streams stays in order."""
    line = b"[1,%d]<%s>:%s\n" % (frame.rank, b"stdout" if frame.kind == "out" else b"stderr", frame.body.rstrip(b"\r\n"))
    left = memoryview(line)
    while left:
        left = left[os.write(1, left) :]


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    arguments = _parser().parse_args()
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    tracebacks = Tracebacks(_show_tagged if arguments.tag_output else lambda frame: show(frame, True))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        if not command or (arguments.np is not None and arguments.np < 1):
            raise CollectiveError("say how many ranks (-np, at least 1) run which program", "invalid")
        if command[0] in ("python", "python3"):
            command = [sys.executable, *command[1:]]
        verdict = _run(arguments, command, tracebacks)
    except CollectiveError as error:
        verdict = program.Verdict(2 if error.kind == "invalid" else 1, str(error))
    except KeyboardInterrupt:
        verdict = program.Verdict(130, "interrupted; all ranks have been ended")
    except BrokenPipeError:
        return 1  # nobody reads any more
    if verdict.text:
        with contextlib.suppress(OSError):
            # Who reads tags takes the output apart by rank.
            if verdict.rank is not None:
                verdict = verdict.blaming(tracebacks.cause_of(verdict.rank))
            if verdict.rank is not None and not arguments.tag_output:
                for frame in tracebacks.to_read_last(verdict.rank):
                    show(frame, True)
            print(f"{NAME}: {verdict.text}", file=sys.stderr, flush=True)
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
