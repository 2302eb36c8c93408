"""Options of horovodrun 0.28 and of torchrun, as they are typed, on the command line of `provision run`: what becomes of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from click import Context
from typer.testing import CliRunner

from provision.cli import main
from provision.launch import program
from provision.launch.launchers import Elastic, RunOptions
from provision.launch.option_table import HOROVOD, HOST_OPTIONS, JOB_OPTIONS

#: As it is typed → variables of the ranks.
VARIABLES = {
    "--cycle-time-ms 3.5": {"HOROVOD_CYCLE_TIME": "3.5"},
    "--cache-capacity 2048": {"HOROVOD_CACHE_CAPACITY": "2048"},
    "--hierarchical-allreduce": {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"},
    "--no-hierarchical-allreduce": {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"},
    "--hierarchical-allgather": {"HOROVOD_HIERARCHICAL_ALLGATHER": "1"},
    "--no-hierarchical-allgather": {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"},
    "--torus-allreduce": {"HOROVOD_TORUS_ALLREDUCE": "1"},
    "--no-torus-allreduce": {"HOROVOD_TORUS_ALLREDUCE": "0"},
    "--autotune": {"COLLECTIVE_AUTOTUNE": "1"},
    "--no-autotune": {"COLLECTIVE_AUTOTUNE": "0"},
    "--autotune-log-file log.csv": {"HOROVOD_AUTOTUNE_LOG": "log.csv"},
    "--autotune-warmup-samples 5": {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5"},
    "--autotune-steps-per-sample 5": {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5"},
    "--autotune-bayes-opt-max-samples 5": {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "5"},
    "--autotune-gaussian-process-noise 0.2": {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.2"},
    "--timeline-filename t.json": {"COLLECTIVE_TIMELINE": "t.json"},
    "--timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    "--no-timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "0"},
    "--stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "0"},
    "--no-stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "1"},
    "--stall-check-warning-time-seconds 7": {"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"},
    "--stall-check-shutdown-time-seconds 8": {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"},
    "--mpi-threads-disable": {"HOROVOD_MPI_THREADS_DISABLE": "1"},
    "--no-mpi-threads-disable": {"HOROVOD_MPI_THREADS_DISABLE": "0"},
    "--num-nccl-streams 2": {"HOROVOD_NUM_NCCL_STREAMS": "2"},
    "--thread-affinity 1": {"HOROVOD_THREAD_AFFINITY": "1"},
    "--gloo-timeout-seconds 30": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"},
    "--log-level DEBUG": {"HOROVOD_LOG_LEVEL": "DEBUG"},
    "--log-with-timestamp": {"HOROVOD_LOG_HIDE_TIME": "0"},
    "--log-without-timestamp": {"HOROVOD_LOG_HIDE_TIME": "1"},
    "--log-hide-timestamp": {"HOROVOD_LOG_HIDE_TIME": "1"},
    "--no-log-hide-timestamp": {"HOROVOD_LOG_HIDE_TIME": "0"},
    "--fusion-threshold-mb 32": {"COLLECTIVE_FUSION_MB": "32.0"},
    "--tcp": {},
    "--disable-cache": {},
}
#: All that horovodrun 0.28.1 takes. Source: horovod/runner/launch.py.
HOROVODS = """-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity
--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
--no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host
--elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable
--no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp
-H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun"""
#: As it is typed → fields of the options.
FIELDS = {
    "--num-proc 4": {"np": 4},
    "--np 4": {"np": 4},
    "--verbose": {"verbose": True},
    "--start-timeout 9": {"start_timeout": 9.0},
    "--network-interface eth0 --network-interface eth1": {"networks": ("eth0", "eth1")},
    "--network-interfaces eth0,eth1": {"networks": ("eth0", "eth1")},
    "--network-interfaces 10.1.2.3/8,ib0.8001,fd00::/8": {"networks": ("10.1.2.3/8", "ib0.8001", "fd00::/8")},
    "-np 1000000 --start-timeout 31536000": {"np": 1_000_000, "start_timeout": 31_536_000.0},
    "--output-filename out": {"output": Path("out")},
    "--gloo": {"launcher": "own"},
    "--mpi": {"launcher": "mpi"},
    "--prefix-output-with-timestamp": {"timestamps": True},
    "-prefix-timestamp": {"timestamps": True},
    "--mpi-args='--map-by ppr:2:node'": {"mpi_args": ("--map-by", "ppr:2:node")},
    "--binding-args='--rankfile mine'": {"binding": ("--rankfile", "mine")},
    "-np 2 --min-num-proc 2 --max-num-proc 4": {"elastic": Elastic(2, 2, 4)},
    "-np 2 --max-np 4": {"elastic": Elastic(2, 2, 4)},
    "--nnodes 2": {"nodes": 2, "per_node": None, "np": None},
    "--nnodes=2 --nproc-per-node=2": {"nodes": 2, "per_node": 2, "np": 4},
    "--nnodes 2 --nproc_per_node auto --max_restarts 3": {"nodes": 2, "per_node": None, "launcher": "own", "restarts": 3},
    "-np 4 --nnodes 2": {"nodes": 2, "per_node": 2, "np": 4},
    "-np 4 --nproc-per-node gpu": {"nodes": None, "per_node": None, "np": 4},
    "--nnodes 1:2 --nproc_per_node 2": {"elastic": Elastic(None, 2, 4), "launcher": "own", "per_node": 2},
    "-np 8 --servers 2": {"np": 8, "environment": {"COLLECTIVE_SERVERS": "2"}},
    "--master_port 4711 --max-restarts 0": {"environment": {"MASTER_PORT": "4711"}, "launcher": None},
    "--no_python --node-rank 0": {"launcher": None},
    "--min-np 1 --slots-per-host 2 --elastic-timeout 50 --reset-limit 3 --blacklist-cooldown-range 5 60": {
        "elastic": Elastic(None, 1, None, None, 2, 50.0, 3, (5, 60))
    },
}


def launched(words: list[str], monkeypatch: pytest.MonkeyPatch, code: int = 0) -> tuple[Any, RunOptions | None, str]:
    """The inventory and options with which `provision run WORDS` would launch, and what it printed."""
    seen: list[Any] = [None, None]

    def run(inventory: Any, options: RunOptions, *_: Any, **__: Any) -> int:
        seen[:] = inventory, options
        return 0

    monkeypatch.setattr(program, "run", run)
    done = CliRunner().invoke(main.app, ["run", *words, "python", "train.py", "--lr", "1"])
    assert done.exit_code == code, done.output + repr(done.exception)
    return seen[0], seen[1], done.output


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))


@pytest.mark.parametrize("typed", [*VARIABLES, *FIELDS])
def test_an_option_of_horovodrun_or_torchrun(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options, _ = launched(["-H", "a:2,b:2", "--variables", "none", *shlex.split(typed)], monkeypatch)
    assert options is not None
    expected = FIELDS.get(typed, {})
    assert {name: getattr(options, name) for name in expected} == expected
    if typed in VARIABLES:
        assert dict(options.environment) == VARIABLES[typed]
    assert options.command == ("python", "train.py", "--lr", "1")


def test_what_follows_the_program_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `provision`, as it is started."""
    for typed in ("--debug", "-np 9 --version", "--limit x -- --debug", "-h"):
        seen: list[RunOptions] = []
        monkeypatch.setattr(program, "run", lambda _, options, *__, seen=seen, **___: seen.append(options) or 0)
        monkeypatch.setattr("sys.argv", ["provision", "run", "-H", "a:2", "-np", "2", "python", "train.py", *typed.split()])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 0
        assert (seen[0].np, seen[0].command) == (2, ("python", "train.py", *typed.split()))


def test_every_option_of_horovodrun_is_taken() -> None:
    group = typer.main.get_command(main.app)
    command = group.get_command(Context(group), "run")  # type: ignore[attr-defined]
    assert command is not None
    assert set(HOROVODS.split()) - {name for each in command.params for name in (*each.opts, *each.secondary_opts)} == set()


def test_every_option_of_the_table_is_among_them() -> None:
    typed = {words.split()[0] for words in VARIABLES}
    assert {name for option in JOB_OPTIONS if option.panel == HOROVOD for form in option.names for name in form.split("/")} <= typed


def test_each_entry_of_the_table_is_the_only_one_of_its_kind() -> None:
    table = [*HOST_OPTIONS, *JOB_OPTIONS]
    names = [name for option in table for form in option.names for name in form.split("/")]
    for entries in (names, [option.parameter for option in table if option.names], *zip(*((o.horovod, o.key) for o in table), strict=True)):
        given = [entry for entry in entries if entry]
        assert len(given) == len(set(given)), given
    assert all(option.help for option in table if option.panel)


def test_options_of_torchrun_without_a_meaning_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = [option for option in JOB_OPTIONS if option.unused]
    words = " ".join(f"{option.names[-1]}{'' if option.kind is bool else ' x'}" for option in unused)
    _, _, said = launched(["-H", "a:2", *shlex.split(words)], monkeypatch)
    assert len(unused) == 14
    for option in unused:
        assert f"{option.names[0]} has no effect: " in said


def test_scripts_and_modules_run_as_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.py").write_text("#!/bin/sh\n")
    (tmp_path / "run.py").chmod(0o755)
    for typed, expected in {
        ("train.py", "1"): ("python", "train.py", "1"),
        ("--no-python", "train.py"): ("train.py",),
        ("run.py",): ("python", "run.py"),
        ("--no-python", "./run.py"): ("./run.py",),
        ("-m", "train", "1"): ("python", "-m", "train", "1"),
        ("--module", "train"): ("python", "-m", "train"),
        ("python", "-m", "train"): ("python", "-m", "train"),
    }.items():
        seen: list[RunOptions] = []
        monkeypatch.setattr(program, "run", lambda _, options, *__, seen=seen, **___: seen.append(options) or 0)
        done = CliRunner().invoke(main.app, ["run", "-H", "a:2", *typed])
        assert done.exit_code == 0, done.output
        assert seen[0].command == expected


def test_hosts_port_key_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").touch()
    (tmp_path / "hosts").write_text("a slots=2\n")
    inventory, _, _ = launched(["--hosts", "a:2,b:4", "-p", "2222", "-i", str(tmp_path / "key")], monkeypatch)
    assert [(host.name, host.slots, host.port, host.key_file) for host in inventory.hosts] == [
        ("a", 2, 2222, str(tmp_path / "key")),
        ("b", 4, 2222, str(tmp_path / "key")),
    ]
    inventory, _, _ = launched(["-hostfile", str(tmp_path / "hosts")], monkeypatch)
    assert [(host.name, host.slots) for host in inventory.hosts] == [("a", 2)]
    assert launched(["-v"], monkeypatch)[2].startswith("provision 0.")


def test_invalid_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program").write_bytes(b"\x7fELF\xff")
    (tmp_path / "no_interpreter").write_text("echo a:2\n")
    for typed, says in {
        "--jsrun": "LSF",
        "--cycle-time-ms fast": "--cycle-time-ms: 'fast' is not a number",
        "--cycle-time-ms '{'": "--cycle-time-ms: '{' is not a number",
        "-np 2 --servers 2": "none a worker",
        "-np 4 --min-np 2 --servers 2": "none a worker",
        "--min-np 1 --blacklist-cooldown-range 9 3": "expected 0 < min <= max",
        "--mpi-args='\"'": "quote it as for a shell",
        "--gloo --mpi-args=--x": "are mpirun's",
        f"--host-discovery-script {tmp_path}": "must be a script that begins with #!",
        f"--host-discovery-script {tmp_path}/program": "must be a script that begins with #!",
        f"--host-discovery-script {tmp_path}/no_interpreter": "must be a script that begins with #!",
        "--mpi --max-np 2": "--max-np: mpirun ends a job",
        "-np 3 --nnodes 2 --nproc-per-node 2": "-np 3 and --nnodes 2 and --nproc-per-node 2 contradict each other",
        "-np 3 --nnodes 2": "-np 3 and --nnodes 2 contradict each other",
        "-np 3 --nproc-per-node 2": "-np 3 and --nproc-per-node 2 contradict each other",
        "--nnodes 2:1": "invalid --nnodes 2:1: expected N, or MIN:MAX",
        "--nnodes two": "invalid --nnodes two: expected N, or MIN:MAX",
        "--nnodes 1:2": "how many ranks has a host?",
        "--nnodes 1:2 --nproc-per-node 2 --min-np 2": "say the same thing",
        "--nnodes 2 --min-np 2": "say the same thing",
        "--nproc-per-node cpu": "expected a number, auto or gpu",
        "--nproc-per-node 0": "expected a number, auto or gpu",
        "--nproc-per-node ²": "expected a number, auto or gpu",
        **{
            f"{option} {value}": f"invalid value for '{option}'"
            for option in ("-np", "--max-np", "--min-np", "--slots-per-host", "--max-restarts", "--reset-limit", "--servers", "--node-rank")
            for value in ("99999999999999999999", "-1", "1e3", "nan")
        },
        **{
            f"{option} {value}": f"invalid value for '{option}'"
            for option in ("--start-timeout", "--elastic-timeout", "--fusion-threshold-mb")
            for value in ("1e400", "inf", "nan", "-1")
        },
        "--start-timeout 1e9": "expected less than or equal to 31536000",
        "--cycle-time-ms 1e400": "--cycle-time-ms: inf is not a number from 0 to",
        "--cache-capacity 99999999999999999999": "is not a number from 0 to 9223372036854775807",
        "--stall-check-warning-time-seconds nan": "nan is not a number from 0 to",
        "--nnodes 99999999999999999999": "expected N, or MIN:MAX",
        "--nnodes 1:9999999 --nproc-per-node 1": "expected N, or MIN:MAX",
        "--nproc-per-node 99999999999999999999": "expected a number, auto or gpu",
        "--min-np 1 --blacklist-cooldown-range 1 99999999999999999999": "0 < min <= max <= 31536000",
        "--network-interfaces 300.0.0.0/8": "invalid --network-interfaces 300.0.0.0/8: expected an interface or a network",
        "--network-interfaces eth0,10.0.0.0/33": "invalid --network-interfaces 10.0.0.0/33: expected",
        "--network-interfaces an_interface_of_20b": "invalid --network-interfaces an_interface_of_20b: expected",
        "--launcher mpi --python /venv/bin/python": "only the mpirun that `provision up` installed is used",
        "--node-rank 1": "a job is started once, on one machine",
    }.items():
        seen: list[Any] = []
        monkeypatch.setattr(program, "run", lambda *given, seen=seen, **_: seen.append(given))
        done = CliRunner().invoke(main.app, ["run", "-H", "a:2", *shlex.split(typed), "python", "train.py"])
        assert says in str(done.exception)
        assert seen == []


def test_start_and_elastic_timeouts_of_horovods_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "12")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "34")
    _, options, _ = launched(["-H", "a:2", "--min-np", "1"], monkeypatch)
    assert options is not None
    assert options.elastic is not None
    assert (options.start_timeout, options.elastic.timeout) == (12, 34)
