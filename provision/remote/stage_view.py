"""The live view of a stage, as wide as the terminal: its hosts as a table, or a training job as one line.

Names are never cut: where a terminal is narrow the bar goes first. Of many hosts whose names are unlike two are named.
It is not higher than the terminal, which would not show its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from provision.base.terminal import Group, ProgressBar, RenderableType, Table, clipped, styled, wrapped
from provision.base.text import about, clock, counted, shortened
from provision.remote.stage import Row, Series, Stage

_STYLE = {"failed": "bold red", "unreachable": "bold red", "waiting": "yellow", "running": "cyan", "done": "green"}
_GAP = 2
_BAR = range(8, 33)  # columns
_REMARKS = 3  # about hosts that failed or wait
_LINES = 2  # of a remark, and of names
_KEPT = 4  # lines for the title, for how many hosts are not shown, for the last line above the view, and for the cursor


_Count = Annotated[int, Field(ge=1, lt=1_000_000_000)]


class TrainingProgress(BaseModel):
    """How far a training job is, as it prints it.

    Attributes:
        part: of the whole job, from 0 to 1.
        loss: of the last batch, or at the end of an epoch the mean of it.
        accuracy: on the test set in percent, at the end of an epoch.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    epoch: _Count
    epochs: _Count
    part: Annotated[float, Field(ge=0, le=1)]
    loss: float
    accuracy: Annotated[float, Field(ge=0, le=100)] | None

    def __str__(self) -> str:
        accuracy = f", test accuracy {self.accuracy:.2f} %" if self.accuracy is not None else ""
        return f"epoch {self.epoch} of {self.epochs}: loss {self.loss:.4f}{accuracy}"


def stage_view(stage: Stage, now: float, width: int, height: int) -> RenderableType:
    """The table of a stage's hosts below its title."""
    rows = stage.rows(now)
    remarks = [clipped(f"{shortened(row.hosts, width // 2)}: {row.remark}", width, _LINES) for row in rows if row.remark][:_REMARKS]
    table, others = _table(stage, rows, width, height - _KEPT - sum(len(wrapped(remark, width)) for remark in remarks))
    head = f"{stage.title}  {counted(len(stage.hosts), 'host')}  {clock(now - stage.began)}"
    parts: list[RenderableType] = [styled(clipped(head, width, 1), "bold"), table]
    if others:
        parts.append(styled(f"and {counted(sum(len(row.hosts) for row in others), 'host')} more", "dim"))
    return Group(*parts, *(styled(remark, "yellow") for remark in remarks))


def training_view(title: str, training: TrainingProgress, seconds: float, width: int) -> RenderableType:
    """A training job in one line."""
    accuracy = f"  {training.accuracy:.2f} %" if training.accuracy is not None else ""
    text = f"epoch {training.epoch}/{training.epochs}  loss {training.loss:.4f}{accuracy}  {clock(seconds)}"
    return _line(title, training.part, text, width)


def series_view(series: Series, part: str, now: float, width: int) -> RenderableType:
    """How far a series of stages is in one line, and below it the name of the part that runs."""
    left = series.left(now)
    text = clock(now - series.began) + (f"  about {about(left)} left" if left is not None else "")
    head = f"{series.title}  {series.number}/{series.count}"
    return Group(_line(head, (series.number - 1) / series.count, text, width), styled(part, "dim"))


def _line(title: str, part: float, text: str, width: int) -> Table:
    """A title and a text, and between them a bar where there is room."""
    room = width - len(title) - len(text) - 2 * _GAP
    bar = [_bar(part, min(room, _BAR.stop - 1))] if room >= _BAR.start else []
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_row(styled(title, "bold"), *bar, styled(text))
    return table


def _table(stage: Stage, rows: Sequence[Row], width: int, height: int) -> tuple[Table, Sequence[Row]]:
    """The columns that the width has room for, of the rows that the height has room for; and the other rows."""
    count = len(stage.steps)
    steps = [f"{row.number}/{count} {row.step}" if row.number else row.step for row in rows]
    times = [clock(row.seconds) for row in rows]
    columns: list[tuple[str, Sequence[RenderableType], int]] = [
        ("state", [styled(row.state, _STYLE.get(row.state, "dim")) for row in rows], max(map(len, (row.state for row in rows)), default=0)),
        ("step", [styled(text) for text in steps], max(map(len, steps), default=0)),
        ("time", [styled(text, "dim") for text in times], max(map(len, times), default=0)),
    ]
    room = width - sum(size + _GAP for _, _, size in columns)
    names = [shortened(row.hosts, _LINES * room) for row in rows]
    lines = accumulate(len(wrapped(name, room)) for name in names)
    shown = max(1, sum(line <= height for line in lines))
    bar = min(room - max(map(len, names), default=0) - _GAP, _BAR.stop - 1)
    if count > 1 and bar >= _BAR.start:
        columns.insert(2, ("bar", [_bar(row.part, bar) for row in rows], bar))
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(overflow="fold")
    for name, _, size in columns:
        table.add_column(justify="right" if name == "time" else "left", width=size)
    for number, name in enumerate(names[:shown]):
        table.add_row(styled(name, "bold"), *(cells[number] for _, cells, _ in columns))
    return table, rows[shown:]


def _bar(part: float, width: int) -> ProgressBar:
    """In colours of the terminal's own, which can be seen on light and on dark ground."""
    return ProgressBar(total=1.0, completed=part, width=width, style="bright_black", complete_style="cyan", finished_style="green")
