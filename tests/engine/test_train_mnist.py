"""The smoke job on real handwritten digits, two ranks under the real mpirun.

It must pass as it is, and must fail when the engine, the data or a rank is sabotaged: a smoke test that cannot fail proves nothing.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import load

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "provision/hostside/train_mnist.py"
# Runs the training script after the sentence of sabotage given first.
SABOTEUR = """
import runpy, sys
import collective_core.torch as hvd
exec(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TIME_LIMIT_S = 240  # the job itself takes about ten seconds; a busy machine may take many times that


def toolkit(program: str, *words: str) -> Any:
    """What a program prints as JSON in the toolkit's environment: the engine's does not have what the toolkit needs."""
    python = REPOSITORY / ".venv/bin/python"
    assert python.exists(), "the toolkit's environment is needed here: make setup"
    done = subprocess.run([str(python), "-c", program, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{"folder", "flags", "bar"} of the shipped digits for two ranks."""
    program = (
        "import json, sys; from pathlib import Path; from provision.catalog import OURS; from provision.launch.smoke import mnist; "
        "got = mnist.obtain(Path(sys.argv[1]), OURS, source='digits'); "
        "print(json.dumps({'folder': str(got.folder), 'flags': got.flags(2), 'bar': got.bar_for(2)}))"
    )
    return toolkit(program, str(tmp_path_factory.mktemp("cache")))


@dataclass
class Outcome:
    code: int
    output: str
    seconds: float
    report: dict[str, Any] | None
    folder: Path


@pytest.fixture
def train(tmp_path: Path, digits: dict[str, Any]):
    """Trains on ``np`` ranks of this machine; ``sabotage`` is a Python sentence that may use ``hvd``."""

    def run(*flags: str, np: int = 2, sabotage: str | None = None, data: Path | None = None) -> Outcome:
        report = tmp_path / "report.json"
        script = [str(SCRIPT), *digits["flags"], f"--data-dir={data or digits['folder']}", f"--report={report}", *flags]
        if sabotage is not None:
            (tmp_path / "sabotage.py").write_text(SABOTEUR)
            script = [str(tmp_path / "sabotage.py"), sabotage, *script]
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = [str(Path(sys.executable).parent / "mpirun"), *as_root, "--oversubscribe", "--bind-to", "none", "--tag-output"]
        argv = [*mpirun, "-np", str(np), sys.executable, *script]
        begin = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `provision` runs it
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)
        return Outcome(
            done.returncode,
            done.stdout + done.stderr,
            time.monotonic() - begin,
            json.loads(report.read_text()) if report.exists() else None,
            tmp_path,
        )

    return run


def judged(outcome: Outcome, bar: float, np: int = 2) -> list[str]:
    """Why the toolkit would not count it."""
    assert outcome.report is not None, outcome.output
    program = (
        "import json, sys; from provision.launch.smoke import evaluation; report, host, np, bar = map(json.loads, sys.argv[1:]); "
        "print(json.dumps([fault.what for fault in evaluation.evaluate_training(report, {'localhost': host}, np, bar)[1]]))"
    )
    return toolkit(program, *map(json.dumps, (outcome.report, socket.gethostname(), np, bar)))


def test_two_ranks_train_together_and_the_report_says_so(train, digits: dict[str, Any]) -> None:
    at_end = "import atexit; atexit.register(lambda: sys.stderr.write('compiler: ' + str('torch._dynamo' in sys.modules) + chr(10)))"
    outcome = train("--log-interval=5", sabotage=at_end)
    assert outcome.code == 0, outcome.output
    assert re.findall(r"compiler: (\w+)", outcome.output) == ["False", "False"], "it takes each rank a second to import"
    assert judged(outcome, digits["bar"]) == []
    report = outcome.report
    assert report["dataset"] == "digits (UCI, 1,797 images of 8×8, in place of MNIST)"
    assert (report["np"], report["train_images"], report["test_images"], len(report["epochs"])) == (2, 1442, 355, 16)
    assert [(one["rank"], one["local_rank"]) for one in report["participants"]] == [(0, 0), (1, 1)]
    assert report["learning_rate"] == pytest.approx(0.1)
    assert report["speedup"] == pytest.approx(report["images_per_second"] / report["one_rank_images_per_second"], rel=0.01, abs=0.001)
    assert report["efficiency"] == pytest.approx(report["speedup"] / 2, rel=0.01, abs=0.001)
    ideal = report["without_communication_images_per_second"]
    assert report["efficiency_of_communication"] == pytest.approx(report["images_per_second"] / ideal, rel=0.01, abs=0.001)
    assert report["epochs"][-1]["loss"] < 0.5 < 2.0 < report["epochs"][0]["loss"]
    assert "rank 0 alone" in report["how_measured"]
    assert re.search(r"\[1,0\]<stdout>: ?Train Epoch: 1 \[320/721 \(42%\)\]\tLoss: \d\.\d+", outcome.output)
    assert "[1,1]<stdout>" not in outcome.output, "only rank 0 speaks"
    assert report["parameters_identical"] is True


@pytest.mark.slow
def test_the_same_seed_trains_the_same_model(train) -> None:
    """Two runs measure one rank's speed for as long as it takes; what they train is the same to the last bit."""
    first, again = (train("--epochs=2", "--bar=0").report for _ in range(2))
    assert first["parameter_digest"] == again["parameter_digest"]
    figures = [[(one["loss"], one["test_loss"], one["test_accuracy_percent"]) for one in report["epochs"]] for report in (first, again)]
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_one_rank_reaches_the_bar_too(train, digits: dict[str, Any]) -> None:
    outcome = train(np=1)
    assert outcome.code == 0, outcome.output
    assert judged(outcome, digits["bar"], np=1) == []
    assert (outcome.report["speedup"], outcome.report["efficiency"]) == (None, None), "there is nothing to be faster than"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param("hvd.DistributedOptimizer = lambda optimizer, **_: optimizer", id="gradients are not reduced"),
        pytest.param(
            "hvd.broadcast_parameters = lambda *_, **__: None", id="ranks start from their own parameters", marks=pytest.mark.slow
        ),
    ],
)
def test_the_job_fails_when_the_ranks_drift_apart(sabotage: str, train, digits: dict[str, Any]) -> None:
    outcome = train("--epochs=3", "--bar=0", sabotage=sabotage)
    assert outcome.code == 1, outcome.output
    assert outcome.report["parameters_identical"] is False
    assert outcome.report["passed_bar"] is True
    (sentence,) = judged(outcome, 0)
    assert sentence.startswith("the parameters are not the same on all ranks")


@pytest.mark.slow
def test_the_job_fails_when_the_labels_are_wrong(train, digits: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in Path(digits["folder"]).glob("*ubyte.gz"):
        content = bytearray(gzip.decompress(path.read_bytes()))
        if path.name.startswith("train-labels"):
            content[8:] = bytes(number % 10 for number in range(len(content) - 8))
        (data / path.name).write_bytes(gzip.compress(content))
    outcome = train("--epochs=10", data=data)
    assert outcome.code == 1, outcome.output
    assert outcome.report["parameters_identical"] is True
    assert outcome.report["passed_bar"] is False
    (sentence,) = judged(outcome, digits["bar"])
    assert sentence.startswith("test accuracy after epoch 10 is")


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_and_its_own_error_is_shown(train) -> None:
    outcome = train(sabotage="hvd.broadcast_optimizer_state = lambda *_, **__: 1 // (1 - hvd.rank())")
    assert outcome.code != 0
    assert "ZeroDivisionError" in outcome.output
    assert outcome.report is None
    assert outcome.seconds < TIME_LIMIT_S / 2


def test_missing_data_is_said_on_the_host_that_lacks_them(train, tmp_path: Path) -> None:
    outcome = train(data=tmp_path / "nowhere")
    assert outcome.code == 2
    assert f"{socket.gethostname()}: --data-dir: [Errno 2] No such file or directory: '{tmp_path}/nowhere/train-images" in outcome.output


# ------------------------------------------------------------------------------------------------------ parts, in process


@pytest.fixture(scope="module")
def script():
    return load("train_mnist", SCRIPT)


def test_measuring_without_communication_uses_up_no_random_numbers(script) -> None:
    args = SimpleNamespace(lr=0.01, batch_size=8)
    images, labels = torch.zeros(64, 1, 28, 28, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)
    model, before = script.Net(), torch.get_rng_state()
    assert script.local_rate(args, model, images, labels, measure=False) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert script.local_rate(args, model, images, labels) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_other_work_during_one_of_the_short_measurements_does_not_count(script, monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(lr=0.01, batch_size=8)
    images, labels = torch.zeros(64, 1, 28, 28, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)
    rates = iter([100.0, 3.0, 101.0])
    monkeypatch.setattr(script, "slice_rate", lambda *_: next(rates))
    assert script.local_rate(args, script.Net(), images, labels) == 100.0


@pytest.mark.parametrize(("count", "size"), [(10, 1), (10, 2), (10, 3), (1442, 4), (3, 7), (1, 16), (60000, 7)])
def test_shards_are_equally_long_and_together_hold_every_image(count: int, size: int, script) -> None:
    shards = [script.shard(count, 1, 42, rank, size) for rank in range(size)]
    assert {len(one) for one in shards} == {-(-count // size)}
    assert set(torch.cat(shards).tolist()) == set(range(count))
    repeated = len(torch.cat(shards)) - count
    assert repeated < size


def test_each_epoch_is_shuffled_anew_but_alike_on_all_ranks(script) -> None:
    assert script.shard(100, 1, 42, 0, 2).tolist() == script.shard(100, 1, 42, 0, 2).tolist()
    assert script.shard(100, 1, 42, 0, 2).tolist() != script.shard(100, 2, 42, 0, 2).tolist()


def test_ranks_that_share_a_machine_are_told_what_that_costs(script) -> None:
    def rank(host: str, machine: str, device: str = "cpu") -> dict[str, Any]:
        return {"host": host, "machine": machine, "device": device, "cores": 2, "threads": 1}

    assert script.sharing([rank("a", "m"), rank("a", "m"), rank("b", "m"), rank("b", "m")]) == (
        0.5,
        ["a and b are one machine with 2 cores for 4 ranks of 1 thread: 0.50 of linear is the most they can reach"],
    )
    assert script.sharing([rank("a", "m"), rank("a", "m"), rank("b", "n"), rank("b", "n")]) == (1.0, [])
    assert script.sharing([rank("a", "m", "H100")] * 4) == (1.0, [])
    alone = {**rank("c", "m"), "cores": 1, "threads": 2}
    assert script.sharing([alone])[1] == ["c is a machine with 1 core for 1 rank of 2 threads: 0.50 of linear is the most they can reach"]
    uneven = [*[rank("a", "m")] * 4, rank("b", "n"), rank("b", "n")]
    assert script.sharing(uneven)[0] == 0.5, "b's ranks have a core each, and wait for a's at every step"
