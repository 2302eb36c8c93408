"""The options of `provision run` as data, from which the command line, the ranks' environment and the reader of ``--config-file`` are made.

Sources: of horovodrun's options, horovod/runner/launch.py of Horovod 0.28.1; of its file, horovod/runner/common/util/config_parser.py;
of the engine's variables, collective_core/runtime/horovod_variables.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from provision.base.panels import FoldedPanel
from provision.base.validation import MAX_COUNT, MAX_SECONDS
from provision.launch import forwarded_variables, tuning
from provision.launch.launchers import LAUNCHERS
from provision.launch.stall_watch import Action

HOSTS, CONTAINERS, PROGRAM, LAUNCHING, OUTPUT = "Hosts and ranks", "Containers", "Program and files", "Launching", "Output"
ELASTIC = FoldedPanel("Elastic jobs", "docs/run.md")
TUNING = FoldedPanel("Tuning and timeline", "docs/run.md")
HOROVOD = "Horovod's settings, and the variables that they set"  # docs/horovod.md lists them, the help does not


class Option(NamedTuple):
    """An option, or a key of the file that has none.

    Attributes:
        panel: of the help; None and `HOROVOD` hide it. What is in `HOROVOD` is checked and passed on as the file's values are.
        spelled: its names and the placeholder of its value, as in the help; ``--this/--no-this`` is a switch. Empty: in the file only.
        kind: a type as typer takes it, or the words among which to choose.
        engine: the engine's variable for it, which wins over Horovod's.
        horovod: Horovod's variable for it, which the file sets.
        key: ``section.key`` of the file.
        on: what ``horovod`` is when this switch is on.
        scale: by which the file's number is multiplied in ``horovod``.
        unused: why it has no effect, which is said.
        checks: what typer.Option takes besides: bounds, whether a file must exist, the variable of this shell that it is read from.
    """

    panel: str | None
    spelled: str
    kind: Any
    help: str = ""
    engine: str = ""
    horovod: str = ""
    key: str = ""
    on: bool = True
    scale: int = 1
    default: Any = None
    unused: str = ""
    checks: Mapping[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """As they are typed, a switch's two forms with ``/`` between them; messages call it by the first."""
        return [word for word in self.spelled.split() if word.startswith("-")]

    @property
    def parameter(self) -> str:
        """The name of a function's parameter for it."""
        return self.names[0].partition("/")[0].strip("-").replace("-", "_")


def _ours(panel: str | None, spelled: str, kind: Any, help: str = "", **more: Any) -> Option:
    known = {name: more.pop(name) for name in Option._fields if name in more}
    return Option(panel, spelled, kind, help, **known, checks=more)


def _both(name: str) -> str:
    """As torchrun takes it: with underscores, too."""
    return " ".join(dict.fromkeys((name, f"--{name[2:].replace('-', '_')}")))


def _theirs(spelled: str, kind: type, horovod: str, key: str, engine: str = "", *, on: bool = True) -> Option:
    return Option(HOROVOD, spelled, kind, horovod, engine, horovod, key, on)


_TOLD = "the launcher starts all ranks and tells them where to meet"

# fmt: off
#: torchrun's options that take a value and have no effect, by why.
_WITHOUT_EFFECT = {
    _TOLD: ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    "MASTER_ADDR is where the others reach rank 0's host; -x MASTER_ADDR=… sets another": ("--master-addr",),
    "each host is known by its address in the plan or the inventory": ("--local-addr",),
    "it is for an agent of torchrun's, and there is none": ("--monitor-interval", "--start-method", "--role"),
    "what all ranks print is shown here; --output-filename also keeps it, --quiet-ranks shows rank 0 only":
        ("--tee", "--redirects", "--log-dir", "--local-ranks-filter"),
}
#: Where to run.
HOST_OPTIONS = (
    _ours(HOSTS, "--hosts HOSTS", str, "An inventory, or a list as for -H; default: that of the last successful run, else this machine."),
    _ours(HOSTS, "--host -H A:2,B:2", str, "Only these hosts, with so many slots each."),
    _ours(HOSTS, "--hostfile -hostfile FILE", Path, "The same as lines `host slots=N`.", dir_okay=False),
    _ours(HOSTS, "--limit PATTERN", str,
          "Of these hosts only some, as with Ansible: `a,b`, `!c`, a group; `@failed`: those that failed in the last run of provision up; "
          "`!@FILE`: not those that FILE lists."),
    _ours(HOSTS, "--ssh-port -p N", int, "ssh's port on the hosts.", min=1, max=65535),
    _ours(HOSTS, "--ssh-identity-file -i FILE", Path, "The private key for the hosts.", exists=True, dir_okay=False),
    _ours(CONTAINERS, "--image NAME", str, "Run in containers of this image, one on each host; hosts need a container engine only."),
    _ours(CONTAINERS, "--volume FOLDER:FOLDER[:ro]", list[str], "A folder of the hosts to mount into the containers."),
    _ours(CONTAINERS, "--keep-image", bool, "Leave the image on the hosts; by default it is removed at the end."),
    _ours(HOSTS, "--gpu-check/--no-gpu-check", bool,
          "Start nothing where a library of the environment has no code for a GPU of its host (default).", default=True),
    _ours(HOSTS, "--check-build -cb", bool, "Launch nothing; print what the hosts' environments can do."),
    _ours(None, "--version -v", bool),
)

#: What to run.
JOB_OPTIONS = (
    _ours(HOSTS, "-np --np --num-proc N", int, "Ranks; all slots by default.", min=1),
    _ours(HOSTS, "--nnodes N|MIN:MAX", str, "Hosts: the first so many. MIN:MAX: an elastic job, with --nproc-per-node."),
    _ours(HOSTS, f"{_both('--nproc-per-node')} N", str, "Ranks on each host; auto, gpu: one per slot (default)."),
    _ours(HOSTS, "--oversubscribe", bool, "Allow more ranks than slots."),
    _ours(HOSTS, "--network-interfaces --network-interface eth0,…", list[str], "What hosts use between them: interfaces, networks (CIDR)."),
    _ours(PROGRAM, "-x NAME[=VALUE]", list[str], "A variable for every rank; without a value, this shell's."),
    _ours(PROGRAM, "--env FILE", Path, "A uv.lock, pyproject.toml or requirements.txt: the ranks run in an environment of its packages."),
    _ours(PROGRAM, "--index-url URL", str, "Package index for --env, instead of what pip is set up for here and on the hosts."),
    _ours(PROGRAM, "--variables", forwarded_variables.CHOICES,
          "Which of this shell's variables ranks get without -x: `known` (the engine's, Horovod's, NCCL's, OpenMP's, CUDA's, PyTorch's, "
          "Python's), `all`, `none`; never those whose names look secret.", default=forwarded_variables.KNOWN),
    _ours(PROGRAM, "--copy PATH", list[Path], "A file or folder to copy to the hosts besides the program's file.", exists=True),
    _ours(PROGRAM, "--modules/--no-modules", bool, "Copy the modules and packages next to the program's file (default).", default=True),
    _ours(PROGRAM, "--workdir DIR", str, "Run in this folder, which exists on every host; nothing is copied."),
    _ours(PROGRAM, "--restart-from DIR", str, "Continue from the last valid checkpoint in this folder of rank 0's host (hvd.Checkpoints).",
          engine="COLLECTIVE_RESTART_FROM"),
    _ours(PROGRAM, "--module -m", bool, "The program is a Python module: -m package.train."),
    _ours(PROGRAM, "--python PATH", str, "A Python with the engine, on every host; nothing need be installed by provision."),
    _ours(LAUNCHING, "--launcher", tuple(LAUNCHERS), "`mpi`: under mpirun (default, where it is installed); `own`: over ssh, without MPI."),
    _ours(None, "--gloo", bool),  # --launcher own
    _ours(None, "--mpi", bool),  # --launcher mpi
    _ours(LAUNCHING, "--detach", bool, "Leave the job to its first host, print its id, and end: see provision jobs, logs, cancel, fetch."),
    _ours(LAUNCHING, "--wait", bool, "Where other jobs use the GPUs or slots, wait for their end instead of ending."),
    _ours(TUNING, "--mpi-args WORDS", str, 'More words for mpirun: --mpi-args="--report-bindings".'),
    _ours(TUNING, "--binding-args WORDS", str, "Words for mpirun that place and bind ranks (slot by slot, not bound)."),
    _ours(LAUNCHING, "--tune", tuple(tuning.LEVELS), "On hosts without GPUs: keep freed memory, in huge pages (`memory`, default); also "
          "sum by the engine where the program says gloo (`engine`); also multiply in bfloat16 (`bf16`); nothing (`off`).",
          default="memory"),
    _ours(LAUNCHING, f"{_both('--max-restarts')} N", int, "Failures after which all ranks are started again (0), by --launcher own; "
          "in an elastic job, failures of ranks that it survives (3).", min=0),
    _ours(LAUNCHING, "--stall-after SECONDS", str, "Examine a job that shows no progress for so long (60), or for longer where it has gone "
          "on after that; `off`: never.", default="60"),
    _ours(LAUNCHING, "--on-stall", tuple(get_args(Action)), "Name what a job that has stalled waits for (default), also end it, with exit "
          "code 124, or with --max-restarts start its ranks again.", default="report"),
    _ours(LAUNCHING, "--servers N", int, "Of the ranks the last N are parameter servers (hvd.ps).", engine="COLLECTIVE_SERVERS", min=1),
    _ours(LAUNCHING, f"{_both('--master-port')} N", int, "MASTER_PORT for torch.distributed; a free port by default.",
          engine="MASTER_PORT", min=1, max=65535),
    _ours(LAUNCHING, "--start-timeout SECONDS", float, "Time for all hosts to answer and all ranks to meet.",
          engine="COLLECTIVE_START_TIMEOUT", min=1, envvar="HOROVOD_START_TIMEOUT"),
    _ours(ELASTIC, "--min-np --min-num-proc N", int, "Continue while there are so many ranks; -np by default.", min=1),
    _ours(ELASTIC, "--max-np --max-num-proc N", int, "At most so many ranks; by default -np, with a discovery script no limit.", min=1),
    _ours(ELASTIC, "--host-discovery-script FILE", Path,
          "A program that prints `host:slots` lines; run again and again, on the first host.", exists=True),
    _ours(ELASTIC, "--slots-per-host --slots N", int, "Slots of hosts for which the script names none.", min=1),
    _ours(ELASTIC, "--elastic-timeout SECONDS", float, "How long the job waits with too few ranks (600).",
          min=1, envvar="HOROVOD_ELASTIC_TIMEOUT"),
    _ours(ELASTIC, "--reset-limit N", int, "Changes of the job's ranks after which it ends.", min=0),
    _ours(ELASTIC, "--blacklist-cooldown-range MIN MAX", tuple[int, int],
          "Seconds for which a host that fails again is set aside: at first, and at most."),
    _ours(OUTPUT, "--output-filename DIR", Path, "Keep each rank's output in DIR/rank.N/stdout and stderr.", file_okay=False),
    _ours(OUTPUT, "--quiet-ranks", bool, "Show rank 0's output only."),
    _ours(OUTPUT, "--prefix-output-with-timestamp -prefix-timestamp", bool, "Begin each line of ranks' output with the time."),
    _ours(OUTPUT, "--verbose", bool, "Print what is started where."),
    _ours(TUNING, "--config-file FILE", Path, "Settings in the format of horovodrun's YAML file; options win.", dir_okay=False),
    _ours(TUNING, "--fusion-threshold-mb MB", float, "Size up to which gradients are fused.", engine="COLLECTIVE_FUSION_MB",
          horovod="HOROVOD_FUSION_THRESHOLD", key="params.fusion_threshold_mb", scale=1 << 20, min=0),
    _ours(TUNING, "--autotune/--no-autotune", bool, "Let the engine tune the fusion threshold while training.",
          engine="COLLECTIVE_AUTOTUNE", key="autotune.enabled"),
    _ours(TUNING, "--timeline-filename FILE", str, "Write the timeline to this file on rank 0's host.", engine="COLLECTIVE_TIMELINE",
          horovod="HOROVOD_TIMELINE", key="timeline.filename"),
    _theirs("--cycle-time-ms N", float, "HOROVOD_CYCLE_TIME", "params.cycle_time_ms"),
    _theirs("--cache-capacity N", float, "HOROVOD_CACHE_CAPACITY", "params.cache_capacity"),
    _theirs("--hierarchical-allreduce/--no-hierarchical-allreduce", bool,
            "HOROVOD_HIERARCHICAL_ALLREDUCE", "params.hierarchical_allreduce"),
    _theirs("--hierarchical-allgather/--no-hierarchical-allgather", bool,
            "HOROVOD_HIERARCHICAL_ALLGATHER", "params.hierarchical_allgather"),
    _theirs("--torus-allreduce/--no-torus-allreduce", bool, "HOROVOD_TORUS_ALLREDUCE", "params.torus_allreduce"),
    _theirs("--autotune-log-file FILE", str, "HOROVOD_AUTOTUNE_LOG", "autotune.log_file"),
    _theirs("--autotune-warmup-samples N", float, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples"),
    _theirs("--autotune-steps-per-sample N", float, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample"),
    _theirs("--autotune-bayes-opt-max-samples N", float, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune.bayes_opt_max_samples"),
    _theirs("--autotune-gaussian-process-noise N", float, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune.gaussian_process_noise"),
    _theirs("--timeline-mark-cycles/--no-timeline-mark-cycles", bool, "HOROVOD_TIMELINE_MARK_CYCLES", "timeline.mark_cycles"),
    _theirs("--stall-check/--no-stall-check", bool,
            "HOROVOD_STALL_CHECK_DISABLE", "stall_check.enabled", "COLLECTIVE_STALL_WARNING", on=False),
    _theirs("--stall-check-warning-time-seconds N", float,
            "HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_check.warning_time_seconds", "COLLECTIVE_STALL_WARNING"),
    _theirs("--stall-check-shutdown-time-seconds N", float,
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_check.shutdown_time_seconds", "COLLECTIVE_TIMEOUT"),
    _theirs("--mpi-threads-disable/--no-mpi-threads-disable", bool, "HOROVOD_MPI_THREADS_DISABLE", "library_options.mpi_threads_disable"),
    _theirs("--num-nccl-streams N", float, "HOROVOD_NUM_NCCL_STREAMS", "library_options.num_nccl_streams"),
    _theirs("--thread-affinity N", float, "HOROVOD_THREAD_AFFINITY", "library_options.thread_affinity"),
    _theirs("", float, "HOROVOD_CCL_BGT_AFFINITY", "library_options.ccl_bgt_affinity"),
    _theirs("--gloo-timeout-seconds N", float,
            "HOROVOD_GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds", "COLLECTIVE_START_TIMEOUT"),
    _theirs("--log-level LEVEL", str, "HOROVOD_LOG_LEVEL", "logging.level"),
    _theirs("--log-with-timestamp/--log-without-timestamp --no-log-hide-timestamp/--log-hide-timestamp", bool,
            "HOROVOD_LOG_HIDE_TIME", "logging.with_timestamp", on=False),
    # torchrun's; source: torch/distributed/run.py of PyTorch 2.13.
    _ours(None, _both("--node-rank"), int),
    _ours(None, _both("--no-python"), bool),
    _ours(None, "--standalone", bool, unused=_TOLD),
    *(_ours(None, _both(name), str, unused=why) for why, names in _WITHOUT_EFFECT.items() for name in names),
    _ours(None, "--tcp", bool),  # always so
    _ours(None, "--disable-cache", bool),  # nothing is cached
    _ours(None, "--jsrun", bool),
)
# fmt: on


def signature(options: Iterable[Option], *before: inspect.Parameter) -> inspect.Signature:
    """Of a function that typer gives these options, behind other parameters."""
    return inspect.Signature([*before, *(_parameter(option) for option in options if option.spelled)])


def _parameter(option: Option) -> inspect.Parameter:
    choices = option.kind if isinstance(option.kind, tuple) else ()
    kind: Any = str if choices or (option.panel == HOROVOD and option.kind is not bool) else option.kind
    default = False if kind is bool and "/" not in option.spelled else option.default  # a switch may be left open
    info = typer.Option(
        *option.names,
        metavar="|".join(choices) or " ".join(word for word in option.spelled.split() if word not in option.names) or None,
        help=option.help,
        hidden=option.panel in (None, HOROVOD),
        rich_help_panel=option.panel,
        show_default=kind is not bool,
        **({"min": 0, "max": MAX_COUNT if kind is int else MAX_SECONDS} if kind in (int, float) else {}) | dict(option.checks),
    )
    taken = kind | None if default is None else kind
    return inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[taken, info])
