"""The training job on a run's page: its curves, and its speed next to that of other ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError

from provision.base.text import counted
from provision.bench import charts
from provision.bench.charts import Axes, Chart, Series
from provision.bench.results import Figure
from provision.launch.smoke import evaluation
from provision.launch.smoke.evaluation import TrainingReport
from provision.report.model import Report

_CHART = 440, 250  # pixels
_LARGEST = 1e12  # value of a curve; hosts may report anything


class _Speed(NamedTuple):
    """Images per second; ``share`` of the fastest way."""

    name: str
    rate: float
    share: float
    remark: str


def read(report: Report | None) -> TrainingReport | None:
    """The training job's report; None where there is none, or another job took its place."""
    try:
        return TrainingReport.model_validate(report.smoke) if report and report.smoke else None
    except ValidationError:
        return None


def curves(training: TrainingReport) -> list[Chart]:
    def series(name: str, values: Sequence[float | None]) -> Series:
        return Series(name, [(at, Figure(value)) for at, value in enumerate(values, 1) if value is not None and abs(value) < _LARGEST])

    epochs = training.epochs
    every = max(1, math.ceil(len(epochs) / 8))
    marks = {float(at): str(at) for at in range(1, len(epochs) + 1, every)}
    loss = [series("training", [epoch.loss for epoch in epochs]), series("test", [epoch.test_loss for epoch in epochs])]
    accuracy = [series("test", [epoch.test_accuracy_percent for epoch in epochs])]
    percent = Axes("epoch", "%", marks, doubling=False, top=100.0, target=training.bar_percent)
    found = [
        charts.chart("Loss", loss, Axes("epoch", "loss", marks, doubling=False), size=_CHART),
        charts.chart("Accuracy on the test set", accuracy, percent, size=_CHART, named=False),
    ]
    return [chart for chart in found if chart is not None]


def speeds(training: TrainingReport) -> list[_Speed]:
    found = [(f"{counted(training.np, 'rank')} together", training.images_per_second, "")]
    if silent := training.without_communication_images_per_second:
        found.append(("the same ranks at the same time, not communicating", silent, evaluation.left_by_communication(training) or ""))
    if training.np > 1 and (one := training.one_rank_images_per_second):
        found.append(("one rank alone", one, evaluation.beside_one_rank(training) or ""))
    fastest = max(rate for _, rate, _ in found) or 1.0
    return [_Speed(name, rate, rate / fastest, remark) for name, rate, remark in found]
