"""A training on clicks as they come: each is first predicted, which gives the AUC, then trained on, and never again.

    python -m collective_core.launch --min-np 1 -np 2 python examples/streaming_pytorch.py
    provision run --hosts hosts.ini --min-np 2 python examples/streaming_pytorch.py --folder /shared/clicks

Kill a rank while it trains: the others go on, and no click of a committed step is lost or counted twice. The clicks are made here: rank 0
puts files of them into the folder while all train.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import collective_core.torch as hvd
import torch
from torch import nn

USERS, ADS, CLICKS_PER_FILE = 60, 40, 250


def make_clicks(number: int) -> list[dict[str, int]]:
    """What happened in the time of one file: users see ads, and click on those that they like."""
    likes = torch.Generator().manual_seed(0)
    users, ads = torch.randn(USERS, 2, generator=likes), torch.randn(ADS, 2, generator=likes)
    seen = torch.Generator().manual_seed(number + 1)
    who, what = (torch.randint(most, (CLICKS_PER_FILE,), generator=seen) for most in (USERS, ADS))
    clicked = (users[who] * ads[what]).sum(dim=1) > 0
    rows = torch.stack([who, what, clicked.int()], dim=1).tolist()
    return [{"user": user, "ad": ad, "clicked": click} for user, ad, click in rows]


def put_files(folder: Path, files: int) -> None:
    """A file comes under another name and is renamed when it is whole."""
    for number in range(files):
        target = folder / f"clicks-{number:05d}.jsonl"
        if not target.exists():
            draft = folder / f".{target.name}"
            draft.write_text("".join(json.dumps(click) + "\n" for click in make_clicks(number)))
            draft.rename(target)
            time.sleep(0.02)


class Affinity(nn.Module):
    """The logit of a click: how well the user's and the ad's vectors agree."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.ads = nn.Embedding(USERS, 8), nn.Embedding(ADS, 8)
        for table in (self.users, self.ads):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, who: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
        return (self.users(who) * self.ads(what)).sum(dim=1)


def parse(records: list[bytes]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users, ads (int64) and clicks (float32), each of shape (n); n is 0 where this rank has no records in this step."""
    rows = [json.loads(record) for record in records]
    table = torch.tensor([[row["user"], row["ad"], row["clicked"]] for row in rows], dtype=torch.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("clicks"), help="which all ranks reach")
    parser.add_argument("--files", type=int, default=60, help="how many are made; after as many clicks the stream ends")
    options = parser.parse_args()

    hvd.init()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Affinity()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    stream = hvd.data.Stream(hvd.data.Directory(options.folder, "*.jsonl"), batch_size=64)
    evaluation = hvd.data.ProgressiveValidation(window=2000)
    writer = threading.Thread(target=put_files, args=(options.folder, options.files), daemon=True)
    total = options.files * CLICKS_PER_FILE

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        """Begins again behind the last commit when the ranks have changed."""
        if hvd.rank() == 0 and writer.ident is None:  # not started yet: another rank goes on with it where rank 0 was lost
            writer.start()
        if state.records >= total:
            stream.end()
        for batch in stream:
            who, what, clicked = parse(batch.records)
            logits = model(who, what)
            losses = nn.functional.binary_cross_entropy_with_logits(logits, clicked, reduction="none")
            evaluation.update(clicked, logits.detach(), losses.detach())
            optimizer.zero_grad()
            (losses.sum() * batch.scale).backward()  # the average over ranks is that over records
            optimizer.step()
            state.records += batch.total
            state.step += 1
            state.commit()  # model, optimizer, evaluation, and to where the files are read
            if hvd.rank() == 0 and state.step % 20 == 0:
                print(f"{state.records} clicks: AUC {evaluation.auc():.3f}, loss {evaluation.mean_loss():.3f}", flush=True)
            if state.records >= total:
                stream.end()

    train(hvd.elastic.TorchState(model, optimizer, stream=stream, evaluation=evaluation, step=0, records=0))
    who, what, clicked = parse([json.dumps(click).encode() for click in make_clicks(options.files)])
    with torch.no_grad():
        accuracy = ((model(who, what) > 0) == clicked.bool()).float().mean().item()
        weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
