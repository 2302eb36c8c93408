"""Optimizers that are applied to the rows of a table where they live, and only to rows that were used in the step (lazily).

Each is given the summed gradient of every used row once. ``lr=None`` takes the learning rate of the parameter group that the table is
in, so that a scheduler of the wrapped optimizer holds for the table, too.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch


class Slot(NamedTuple):
    """State of a row: as wide as the row, or one number for it."""

    is_wide: bool
    fill: float


class Update(NamedTuple):
    """Arguments of an optimizer: ``values`` and every one of ``state`` have a row for each used row, and are changed in place.

    ``step`` counts from 1. ``row_mean``: means over whole rows, of which a column-wise shard holds a part only.
    """

    values: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    lr: float
    step: int
    row_mean: Callable[[torch.Tensor], torch.Tensor]


class RowOptimizer:
    """The interface. ``slots``: what it keeps for each row, by name."""

    slots: dict[str, Slot]

    def __init__(self, lr: float | None = None) -> None:
        _check("lr", lr, lr is None or lr >= 0)
        self.lr = lr
        self.slots = {}

    def update(self, of: Update) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        """Its name and options: ranks compare them."""
        options = ", ".join(f"{name}={value}" for name, value in sorted(vars(self).items()) if name != "slots")
        return f"{type(self).__name__}({options})"


class SGD(RowOptimizer):
    """w -= lr·g, as torch.optim.SGD without momentum."""

    def update(self, of: Update) -> None:
        of.values.add_(of.gradient, alpha=-of.lr)


class Adagrad(RowOptimizer):
    """Adagrad, as torch.optim.Adagrad with sparse gradients: s += g², w -= lr / (1 + (step - 1)·lr_decay) · g / (√s + eps)."""

    def __init__(self, lr: float | None = None, lr_decay: float = 0.0, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(lr)
        _check("lr_decay", lr_decay, lr_decay >= 0)
        _check("initial_accumulator_value", initial_accumulator_value, initial_accumulator_value >= 0)
        _check("eps", eps, eps >= 0)
        self.lr_decay, self.eps = lr_decay, eps
        self.slots = {"sum": Slot(True, initial_accumulator_value)}

    def update(self, of: Update) -> None:
        squares = of.state["sum"].add_(of.gradient.pow(2))
        rate = of.lr / (1 + (of.step - 1) * self.lr_decay)
        of.values.add_(of.gradient / squares.sqrt().add_(self.eps), alpha=-rate)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one number per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD: s += mean(g²), w -= lr · g / (√s + eps)."""

    def __init__(self, lr: float | None = None, initial_accumulator_value: float = 0.0, eps: float = 1e-8) -> None:
        super().__init__(lr)
        _check("initial_accumulator_value", initial_accumulator_value, initial_accumulator_value >= 0)
        _check("eps", eps, eps >= 0)
        self.eps = eps
        self.slots = {"sum": Slot(False, initial_accumulator_value)}

    def update(self, of: Update) -> None:
        squares = of.state["sum"].add_(of.row_mean(of.gradient.pow(2)))
        of.values.add_(of.gradient / squares.sqrt().add_(self.eps), alpha=-of.lr)


class Adam(RowOptimizer):
    """Adam, as torch.optim.SparseAdam: moments of used rows alone are updated, the bias is corrected by the table's count of steps."""

    def __init__(self, lr: float | None = None, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(lr)
        _check("betas", betas, all(0 <= beta < 1 for beta in betas))
        _check("eps", eps, eps > 0)
        self.betas, self.eps = tuple(betas), eps
        self.slots = {"exp_avg": Slot(True, 0.0), "exp_avg_sq": Slot(True, 0.0)}

    def update(self, of: Update) -> None:
        beta1, beta2 = self.betas
        average, squares = of.state["exp_avg"], of.state["exp_avg_sq"]
        average.add_(of.gradient.sub(average).mul_(1 - beta1))
        squares.add_(of.gradient.pow(2).sub_(squares).mul_(1 - beta2))
        size = of.lr * (1 - beta2**of.step) ** 0.5 / (1 - beta1**of.step)
        of.values.add_(average.div(squares.sqrt().add_(self.eps)).mul_(-size))


class FTRL(RowOptimizer):
    """FTRL-Proximal of McMahan et al., "Ad click prediction: a view from the trenches" (2013), algorithm 1, per coordinate.

    σ = (√(n + g²) - √n) / lr, z += g - σ·w, n += g²; w = 0 where |z| ≤ l1, elsewhere -(z - sign(z)·l1) / ((beta + √n) / lr + l2).
    """

    def __init__(self, lr: float | None = None, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> None:
        super().__init__(lr)
        _check("lr", lr, lr is None or lr > 0)
        for name, value in (("beta", beta), ("l1", l1), ("l2", l2)):
            _check(name, value, value >= 0)
        self.beta, self.l1, self.l2 = beta, l1, l2
        self.slots = {"z": Slot(True, 0.0), "n": Slot(True, 0.0)}

    def update(self, of: Update) -> None:
        if of.lr == 0:  # of a schedule: nothing is learned, and the formula divides by it
            return
        z, n = of.state["z"], of.state["n"]
        root = n.sqrt()
        n.add_(of.gradient.pow(2))
        new_root = n.sqrt()
        z.add_(of.gradient - (new_root - root).div_(of.lr).mul_(of.values))
        shrunk = z - z.sign().mul_(self.l1)
        weights = shrunk.div_(-((self.beta + new_root) / of.lr + self.l2))
        of.values.copy_(torch.where(z.abs() <= self.l1, torch.zeros_like(z), weights))


def _check(name: str, value: object, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"{name}={value} is not possible")
