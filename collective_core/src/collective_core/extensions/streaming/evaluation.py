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
    positive = _column(labels) > 0.5
    _, place, counts = np.unique(_column(scores), return_inverse=True, return_counts=True)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return float("nan")
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2.0
    return float((mean_ranks[place.reshape(-1)][positive].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def _column(values: Any) -> np.ndarray:
    """As numpy has them. Of PyTorch also tensors with gradients, on a GPU, and of types that numpy has not, such as bfloat16."""
    for name in ("detach", "cpu", "double"):
        values = getattr(values, name)() if hasattr(values, name) else values
    return np.asarray(values, dtype=np.float64).reshape(-1)


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

        Raises ValueError on every rank where those of one are no numbers, differ in length, or are not finite, or a label is neither 0
        nor 1.
        """
        cause: Exception | None = None
        try:
            mine = np.stack([_column(values) for values in (labels, scores, losses)], axis=1)
        except Exception as error:  # noqa: BLE001 - the others wait for a word, whatever it is
            cause, mine = error, np.full((1, 3), np.nan)
        everyone = arrays.allgather(np.ascontiguousarray(mine), "progressive_validation")
        if not np.isfinite(everyone).all() or not np.isin(everyone[:, LABEL], (0, 1)).all():
            text = "labels (0 or 1), scores and losses must be finite, and as many of each on a rank"
            raise ValueError(f"{text}; on some rank they are not") from cause
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
        """Raises ValueError for what is not such a state. Of a larger window the last records are taken."""
        records, kept = state.get("records"), state.get("kept")
        if state.get("schema") != SCHEMA or type(records) is not int or not isinstance(kept, str):
            raise ValueError("this is not a state of a ProgressiveValidation, or one of another version")
        try:
            values = np.frombuffer(base64.b64decode(kept, validate=True), "<f8").astype(np.float64).reshape(-1, 3)
        except ValueError as error:
            raise ValueError(f"the state of a ProgressiveValidation is damaged: {error}") from error
        self.records, self._kept = records, values[-self._window :]
