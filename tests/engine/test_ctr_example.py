"""The click-through-rate example: it learns in all modes, in most of them what one process would from the same records."""

from __future__ import annotations

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from cases import slow_but_last

torch = pytest.importorskip("torch")

CTR = Path(__file__).parents[2] / "examples/ctr"
STEPS, BATCH, MAX_IDS, LR = 20, 256, 100, 0.05
LAST_LINE = re.compile(r"^(\w+): loss ([\d.]+) at first, ([\d.]+) at last, .* ([\d.]+) MB/step .*AUC ([\d.]+)", re.MULTILINE)


def one_process(monkeypatch, name: str) -> tuple[float, float]:
    """Mean losses of the first and the last ten steps with all ranks' records as one batch."""
    monkeypatch.syspath_prepend(str(CTR))
    from data import Clicks
    from model import MODELS
    from modes import Job, plain_table

    clicks = Clicks(MAX_IDS, seed=0)
    torch.manual_seed(0)
    model = MODELS[name](partial(plain_table, Job(None, clicks.rows, LR, None), sparse=False))
    optimizer = torch.optim.Adagrad(model.parameters(), LR)
    losses = []
    for step in range(STEPS):
        numbers, ids, clicked = clicks.records(step * BATCH, BATCH)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), clicked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def train(launch, n: int, model: str, modes: tuple[str, ...], **options) -> dict[str, tuple[float, ...]]:
    """By mode: mean losses of the first and the last ten steps, megabytes per step, AUC."""
    sizes = {"batch-size": BATCH // 2, "held-out": 1024, "steps": STEPS, "most-ids": MAX_IDS, "lr": LR}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    printed = launch(str(CTR / "train.py"), n, arguments=("--model", model, "--mode", *modes, *words), **options).must_succeed().stdout
    found = {mode: tuple(map(float, numbers)) for mode, *numbers in LAST_LINE.findall(printed)}
    assert tuple(found) == modes
    for mode, (first, last, sent, auc) in found.items():
        assert last < 0.95 * first, mode
        assert auc > 0.55, mode
        assert (sent > 0) == (mode != "alone"), mode
    return found


MODES = ("sharded", "sparse", "dense", "ddp", "alone")


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_but_last("dlrm", "wide_deep"))
def test_ranks_train_what_one_process_does(launch, monkeypatch, model):
    found = train(launch, 2, model, MODES)
    expected = one_process(monkeypatch, model)
    for mode in MODES[:-1]:
        # Up to rounding: each rank sums the gradients of its own records first.
        assert found[mode][:2] == pytest.approx(expected, abs=1e-4), mode


@pytest.mark.slow
def test_workers_of_a_parameter_server_train_it(launch):
    train(launch, 3, "wide_deep", ("ps",), env={"COLLECTIVE_SERVERS": "1"})


def test_servers_that_no_mode_uses_are_refused(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(CTR))
    monkeypatch.setenv("COLLECTIVE_SERVERS", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--mode", "sharded", "alone"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(CTR / "train.py"), run_name="__main__")
    assert "start it without --servers" in capsys.readouterr().err
