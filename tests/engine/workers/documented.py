"""Runs the Python of pages of documentation as it stands, but for sizes, counts and measured costs.

Arguments: the pages. Files: in the working folder.
"""

import re
import sys
from pathlib import Path

import collective_core.torch as hvd
import common
import torch
from torch import nn

PARTS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: What would take minutes: rows of tables, steps.
SMALLER = {"50_000_000": "50_000", "1_000_000": "1_000", "10_000": "100", "sync_every=100": "sync_every=4"}
#: Costs that would be measured: a busy machine's may be against dividing the smaller table.
GIVEN = {"batch=2048)": "batch=2048, costs=hvd.nn.Costs())"}

hvd.init()
torch.set_num_threads(1)


def loss_of(output, labels):
    return nn.functional.cross_entropy(output, labels)


def train_one_step(model, optimizer, step):
    ids, clicks = torch.randint(1000, (8, 3)), torch.randint(2, (8, 1)).float()
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(ids), clicks).backward()
    optimizer.step()


def program():
    """What a page takes for granted: a small model and its data."""
    model = nn.Linear(6, 3)
    loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(10)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"hvd": hvd, "torch": torch, "model": model, "optimizer": optimizer, "loader": loader, "loss_of": loss_of, "steps": 9}


ran = []
for page in map(Path, sys.argv[1:]):
    names = {"train_one_step": train_one_step}
    for number, part in enumerate(PARTS.findall(page.read_text(encoding="utf-8"))):
        for shown, run in (*SMALLER.items(), *GIVEN.items()):
            part = part.replace(shown, run)
        names.update(program())
        exec(compile(part, f"{page.name}, part {number + 1}", "exec"), names)  # noqa: S102 - our own pages
        ran.append(f"{page.name} {number + 1}")
texts = [Path(page).read_text(encoding="utf-8") for page in sys.argv[1:]]
common.report(ran=ran, unknown=[shown for shown in (*SMALLER, *GIVEN) if not any(shown in text for text in texts)])
