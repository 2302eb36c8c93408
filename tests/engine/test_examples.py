"""The scripts of examples/, each on two ranks, started as its first lines say: they learn, and all ranks end with the same weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BIN = Path(sys.executable).parent
#: Seconds; an example takes five to fifteen on a machine that does nothing else.
LIMIT = 240

#: What a launcher's command begins with.
LAUNCHERS: dict[str, list[str]] = {
    "python": [sys.executable],
    "collective_core.launch": [sys.executable, "-m", "collective_core.launch", "-np", "2", sys.executable],
    "elastic": [sys.executable, "-m", "collective_core.launch", "--min-np", "1", "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable],
}


@dataclass(frozen=True)
class Example:
    """One start of a script: the launcher, the script's arguments ({} is a folder of the test's own), and what it must have printed.

    ``check`` is given all that was printed; by default :func:`ranks_agree`. ``again``: words that a second start, with the same folder,
    must print. ``environment``: variables beside the test's.
    """

    script: str
    launcher: str
    arguments: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None
    again: str = ""
    marks: tuple[Any, ...] = (pytest.mark.frameworks,)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join((self.script, self.launcher, *self.environment.values()))


SLOW = (pytest.mark.slow,)
STARTED = [
    Example("pytorch_mnist.py", "collective_core.launch", marks=()),
    Example("pytorch_mnist.py", "mpirun", marks=SLOW),
    Example("pytorch_ddp.py", "torchrun", marks=SLOW),
    Example("pytorch_ddp.py", "collective_core.launch", marks=SLOW),
    Example("pytorch_fsdp2.py", "torchrun", ("--checkpoint", "{}"), again="continued after step 60", marks=SLOW),
    Example("pytorch_imagenet_resnet.py", "collective_core.launch", ("--checkpoints", "{}"), again="continued after epoch 2", marks=SLOW),
    Example("lightning_ddp.py", "python"),
    Example("lightning_ddp.py", "torchrun"),
    Example("lightning_ddp.py", "mpirun"),
    Example("lightning_ddp.py", "collective_core.launch"),
    Example("lightning_ddp.py", "collective_core.launch"),
    Example("accelerate_ddp.py", "mpirun"),
    Example("accelerate_ddp.py", "collective_core.launch"),
    Example("accelerate_ddp.py", "torchrun"),
    Example("accelerate_ddp.py", "collective_core.launch"),
    Example("hf_trainer.py", "torchrun", ("--output", "{}")),
    Example("tensorflow2_mnist.py", "collective_core.launch"),
    Example("tensorflow1_session.py", "collective_core.launch"),
    Example("elastic_pytorch.py", "elastic", marks=SLOW),
    Example("streaming_pytorch.py", "elastic", marks=SLOW),
    Example("spark_pytorch.py", "python", check=lambda printed: found_the_line(printed), marks=SLOW),
    Example("ray_pytorch.py", "python", check=lambda printed: loss_fell(printed), marks=SLOW),
    Example("jax_optax.py", "collective_core.launch"),
    *(Example("keras_mnist.py", "collective_core.launch", environment={"KERAS_BACKEND": each}) for each in ("tensorflow", "jax", "torch")),
]
NOT_STARTED = {
    "README.md": "what the others show",
    "slurm.sbatch": "Slurm starts it, in test_slurm.py",
}

LAST_LINE = re.compile(r"rank (\d+) of 2: accuracy ([\d.]+), sum of weights (-?\d+\.\d+)")


def ranks_agree(printed: str, least: float = 0.9) -> None:
    """Each of two ranks says at its end that it has learned, and they have the same weights."""
    lines = LAST_LINE.findall(printed)
    assert sorted(rank for rank, _, _ in lines) == ["0", "1"], printed
    assert all(float(accuracy) >= least for _, accuracy, _ in lines), lines
    assert len({weights for _, _, weights in lines}) == 1, lines


def loss_fell(printed: str) -> None:
    """The driver, which has seen that all ranks have the same weights, says how the loss fell."""
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < 0.02, printed
    assert 10 * last < first, printed


def found_the_line(printed: str) -> None:
    loss_fell(printed)
    weights = [float(number) for number in re.search(r"y = ([-\d.]+) x0 \+ ([-\d.]+) x1 \+ ([-\d.]+)", printed).groups()]
    assert weights == pytest.approx([3, -2, 1], abs=0.1)


@pytest.mark.parametrize("example", [pytest.param(each, marks=each.marks, id=str(each)) for each in STARTED])
def test_an_example_trains_on_two_ranks(example, tmp_path):
    arguments = [word.format(tmp_path / "state") for word in example.arguments]
    command = [*LAUNCHERS[example.launcher], str(EXAMPLES / example.script), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "OPAL_", "PMIX_", "COLLECTIVE_"))}
    environment.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", RAY_worker_niceness="0")

    def run() -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    check = example.check or ranks_agree
    check(run())
    if example.again:
        printed = run()
        assert example.again in printed
        check(printed)


@pytest.mark.slow
def test_the_example_of_a_stream_ends_where_the_folder_holds_more_than_it_makes(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"user": 1, "ad": 2, "clicked": 1}\n' * 10)
    command = [sys.executable, str(EXAMPLES / "streaming_pytorch.py"), "--folder", str(tmp_path), "--files", "2"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1: accuracy" in done.stdout


def test_every_example_is_started_and_listed():
    present = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert present == {each.script for each in STARTED} | set(NOT_STARTED)
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(present - {"README.md"}) if f"[{name}]({name})" not in table] == []


def test_the_tutorials_program_learns_on_two_ranks(tmp_path):
    page = (EXAMPLES.parent / "docs/tutorial.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    command = [*LAUNCHERS["collective_core.launch"], "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+) on 2 ranks", done.stdout)]
    lines = re.findall(r"y = .* x \+ .*", done.stdout)
    assert losses[-1] < losses[0] / 100
    assert len(lines) == 2
    assert lines[0] == lines[1]
