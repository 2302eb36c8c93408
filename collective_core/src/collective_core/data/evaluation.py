"""Evaluation while training: each record is predicted before it is trained on (progressive validation).

The last records of all ranks are kept on every rank, in the order of steps and ranks, so that no rank that is lost takes any away.
"""

from __future__ import annotations

import base64
from typing import Any, Mapping

import numpy as np

from collective_core import arrays

SCHEMA = 1
#: Columns: whether the record is positive, the score, the loss.
LABEL, SCORE, LOSS = 0, 1, 2


def auc(labels: Any, scores: Any) -> float:
    """Area under the ROC curve: the probability that a positive record has a higher score than a negative one, of ties one half.

    ``labels``: shape (n,), 0 or 1; ``scores``: shape (n,), any numbers that rise with the probability. NaN where one class is missing.
    Exact: the Mann-Whitney statistic from mean ranks.
    """
    positive = np.asarray(labels, dtype=np.float64).reshape(-1) > 0.5
    _, place, counts = np.unique(np.asarray(scores, dtype=np.float64).reshape(-1), return_inverse=True, return_counts=True)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return float("nan")
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2.0
    return float((mean_ranks[place.reshape(-1)][positive].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


class ProgressiveValidation:
    """AUC and mean loss over the last ``window`` records of all ranks.

    Call ``update`` once in each step, before the step trains on these records; ``auc()`` and ``mean_loss()`` are then the same on every
    rank. A part of ``TorchState`` and ``Checkpoints`` by ``state_dict`` and ``load_state_dict``. Raises ValueError for a window of none.
    """

    def __init__(self, window: int = 10_000) -> None:
        if window < 1:
            raise ValueError(f"window is a number of records: at least 1, not {window}")
        self._window = window
        self._kept = np.empty((0, 3))
        #: Records of all ranks so far.
        self.records = 0

    def update(self, labels: Any, scores: Any, losses: Any) -> None:
        """This rank's records of a step: labels (0 or 1), scores and losses, each of shape (n,), n maybe 0. Collective.

        Raises ValueError on every rank where those of one differ in length, or are not finite, or a label is neither 0 nor 1.
        """
        columns = [np.asarray(column, dtype=np.float64).reshape(-1) for column in (labels, scores, losses)]
        is_table = len({len(column) for column in columns}) == 1
        mine = np.stack(columns, axis=1) if is_table else np.full((1, 3), np.nan)
        everyone = arrays.allgather(np.ascontiguousarray(mine), "progressive_validation")
        if not np.isfinite(everyone).all() or not np.isin(everyone[:, LABEL], (0, 1)).all():
            text = "labels (0 or 1), scores and losses must be finite, and as many of each on a rank"
            raise ValueError(f"{text}; on some rank they are not")
        self.records += len(everyone)
        self._kept = np.concatenate([self._kept, everyone])[-self._window :]

    def auc(self) -> float:
        """NaN before there are records of both classes."""
        return auc(self._kept[:, LABEL], self._kept[:, SCORE])

    def mean_loss(self) -> float:
        """NaN before there are records."""
        return float(self._kept[:, LOSS].mean()) if len(self._kept) else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """The window. Plain values."""
        kept = base64.b64encode(self._kept.astype("<f8").tobytes()).decode()
        return {"schema": SCHEMA, "records": self.records, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for what is no such state. Of a larger window the last records are taken."""
        records, kept = state.get("records"), state.get("kept")
        if state.get("schema") != SCHEMA or type(records) is not int or not isinstance(kept, str):
            raise ValueError("this is no state of a ProgressiveValidation, or one of another version")
        try:
            values = np.frombuffer(base64.b64decode(kept, validate=True), "<f8").astype(np.float64).reshape(-1, 3)
        except ValueError as error:
            raise ValueError(f"the state of a ProgressiveValidation is damaged: {error}") from error
        self.records, self._kept = records, values[-self._window :]
