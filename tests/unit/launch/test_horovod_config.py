"""horovodrun's configuration file: what it sets, and what in it is refused with its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from provision.base.errors import UsageError
from provision.cli.run_options import run_options
from provision.launch import horovod_config
from provision.launch.option_table import JOB_OPTIONS

#: Of the shape that Horovod's documentation gives.
FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 1.5
  hierarchical_allreduce: true
autotune:
  enabled: false
timeline:
  filename: /tmp/timeline.json
  mark_cycles: false
stall_check:
  enabled: false
  warning_time_seconds: 120
library_options:
  gloo_timeout_seconds: 45
logging:
  level: INFO
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


def test_a_file_becomes_the_variables_that_horovod_makes_of_it(file: Path) -> None:
    found = horovod_config.read(file)
    assert found.launcher == "own"
    assert found.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "1.5",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_TIMELINE": "/tmp/timeline.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "45",
        "HOROVOD_LOG_LEVEL": "INFO",
    }


def test_options_win_over_the_file(file: Path) -> None:
    chosen = run_options(["train"], config_file=file, mpi=True, fusion_threshold_mb=8)
    assert chosen.launcher == "mpi"
    assert chosen.environment["COLLECTIVE_FUSION_MB"] == "8"  # which the engine prefers
    assert run_options(["train"], config_file=file).launcher == "own"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("params: 3", "params: keys and values"),
        ("params: {cycle_time_ms: fast}", "'fast' is not a number"),
        ("params: {fusion_threshold_mb: -1}", "-1 is not a number from 0 to"),
        ("params: {fusion_threshold_mb: true}", "True is not a number"),
        ("stall_check: {enabled: 3}", "3 is neither true nor false"),
        ('autotune: {enabled: "false"}', "'false' is neither true nor false"),
        ("params: {fusion_threshold_mb: 1.0e+308}", r"1e\+308 is not a number from 0 to"),
        ("params: {cycle_time_ms: 2024-13-99}", "not valid YAML"),
        (f"params: {{cycle_time_ms: {'9' * 5000}}}", "not valid YAML"),
        ("[" * 4000, "not valid YAML"),
        ('timeline: {filename: "a\\0b"}', "cannot be a variable's value"),
        ("controller: nccl", "must be gloo or mpi"),
        ("- 3", "a mapping"),
        ("a: b: c", "config.yaml:1: not valid YAML"),
    ],
)
def test_invalid_values_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        horovod_config.read(path)
    assert str(path) in str(error.value)


def test_unknown_keys_have_no_effect_and_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("parms: {}\nparams: {fusion_threshold: 3, cycle_time_ms: 2, torus_allreduce: true}\nxgboost: 3\n")
    chosen = run_options(["train"], config_file=path, variables="none")
    assert chosen.environment == {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_TORUS_ALLREDUCE": "1"}
    assert [line.partition(", it has no effect; there are ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"warning: {path}: parms: no such section",
        f"warning: {path}: params: fusion_threshold: no such key",
        f"warning: {path}: xgboost: no such section",
    ]


def test_tuning_reaches_the_engine_wherever_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("autotune: {enabled: true}")
    for given in ({"autotune": True}, {"config_file": tmp_path / "c.yaml"}):
        assert run_options(["train"], **given).environment["COLLECTIVE_AUTOTUNE"] == "1"  # type: ignore[arg-type]
    assert "COLLECTIVE_AUTOTUNE" not in run_options(["train"]).environment
    with pytest.raises(UsageError, match="cannot read it"):
        horovod_config.read(tmp_path / "none.yaml")


def test_the_engines_names_are_those_that_the_engine_knows() -> None:
    """The toolkit does not import the engine, so its table is read from the engine's source."""
    source = (Path(__file__).parents[3] / "collective_core/src/collective_core/runtime/horovod_variables.py").read_text(encoding="utf-8")
    assignments = [each for each in ast.parse(source).body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Dict)]
    honoured = next(ast.literal_eval(each.value) for each in assignments if ast.unparse(each.targets[0]) == "HONOURED")
    set_here = {each.horovod: each.engine for each in JOB_OPTIONS if each.horovod in honoured and each.horovod != "HOROVOD_LOG_LEVEL"}
    assert set_here == {name: honoured[name] for name in set_here}  # HOROVOD_LOG_LEVEL only takes warnings away
    assert set_here == {each.horovod: each.engine for each in JOB_OPTIONS if each.horovod and each.engine}
