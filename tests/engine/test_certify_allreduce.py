"""What `provision certify` runs in an environment with the engine: allreduces of growing groups, and products of PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "provision/hostside"


@pytest.mark.parametrize("levels", [[[[0, 1]]], [[[0, 1], [2, 3]], [[1, 2], [3, 4]], [[0, 1, 2, 3]], [[0, 1, 2, 3, 4]]]])
def test_groups_grow_to_all_ranks_and_every_sum_is_right(tmp_path: Path, levels: list[list[list[int]]]) -> None:
    report, script = tmp_path / "report.json", (SCRIPTS / "certify_allreduce.py").read_text()
    space = {"__name__": "script"}
    exec(script, space)  # noqa: S102  our own
    ranks = len(levels[-1][0])
    assert space["levels"](ranks) == levels
    launch = [sys.executable, "-m", "collective_core.launch", "-np", str(ranks), sys.executable, "-c", script, str(report)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["groups"]
    assert len(found) == sum(map(len, levels))
    assert all(us > 0 and wrong == 0 for us, wrong in found)


def test_a_product_of_pytorch_with_a_flipped_bit_or_nan_is_wrong() -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(SCRIPTS.parents[1]))
    try:
        from provision.hostside.certify import torch_product
    finally:
        sys.path.pop(0)
    good = torch_product(torch, "cpu", 64, 0.0)
    assert good["wrong"] == 0
    assert good["made"] >= 5

    class Flipping(torch.Tensor):
        """Its products of matrices have one bit flipped, or are nan: the hardware that does so cannot be had here."""

        value = 1024.0

        def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
            made = torch.matmul(self.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
            if made.dtype == torch.float32:
                made[3, 5] += self.value
            return made

    class Faulty:
        """PyTorch whose tensors are those."""

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def randint(self, *arguments: object, **named: object) -> torch.Tensor:
            return torch.randint(*arguments, **named).as_subclass(Flipping)

    assert torch_product(Faulty(), "cpu", 64, 0.0)["wrong"] >= 5
    Flipping.value = float("nan")
    assert torch_product(Faulty(), "cpu", 64, 0.0)["wrong"] >= 5
