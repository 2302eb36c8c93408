"""Two ranks on a slow network: what each way to train together sends, how fast it is, and what it has learnt from as many samples.

    sudo .venv-engine/bin/python -m benchmarks.engine.slow_network            # root makes network namespaces; ten minutes
    sudo .venv-engine/bin/python -m benchmarks.engine.slow_network --rates 100 --models digits --report slow.json

Two network namespaces with a rank each are joined by a link with the given rate each way (tc's token bucket filter) and round trip. As not
every kernel has netem, a process of this benchmark carries the packets from one namespace to the other, half a round trip later. Bytes are
what the interface of rank 0 has sent, with headers and acknowledgements. The processors are shared by both ranks, the carrier and whatever
else runs.

`digits`: an MLP with 301 thousand parameters on 8x8 images of digits that are drawn, shifted and blurred by noise. `characters`: a model
with 319 thousand parameters that foretells the next character of Python's own reference from the last 16. Held-out samples give the loss.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import itertools
import json
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn

Batch = Callable[[int], "tuple[torch.Tensor, torch.Tensor]"]

ADDRESS = "10.213.78.{}"
#: A long packet costs the carrier as much as a short one: at a gigabit it could not carry short ones in time.
MTU = {True: 1500, False: 9000}
#: Of linux/if_tun.h.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET = 1 << 16
HELD_OUT = 4096
#: Training losses of rank 0 that the report has of each way, from the first step on.
CURVE = 20


# --- the link


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def open_tun(name: str) -> int:
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(number, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return number


def carry(ends: Sequence[int], delay: float) -> None:
    """Brings each packet that comes out of one end into the other, ``delay`` seconds later. Does not return."""
    order = itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], wait)
        now = time.monotonic()
        for number in ready:
            try:
                packet = os.read(number, MAX_PACKET)
            except BlockingIOError:
                continue
            heapq.heappush(waiting, (now + delay, next(order), ends[1 - ends.index(number)], packet))
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(target, packet)


class Link:
    """Two namespaces, and the process between them."""

    def __init__(self, mbit: float, round_trip_ms: float) -> None:
        self.names = [f"slow-network-{os.getpid()}-{number}" for number in range(2)]
        self._carrier = 0
        ends = [open_tun(f"slow{number}") for number in range(2)]
        for number, name in enumerate(self.names):
            device = f"slow{number}"
            run("ip", "netns", "add", name)
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "address", "add", f"{ADDRESS.format(number + 1)}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "txqueuelen", "10000", "mtu", str(MTU[mbit <= 100]), "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "100ms")
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        self._carrier = os.fork()
        if not self._carrier:
            carry(ends, round_trip_ms / 2e3)
        for number in ends:
            os.close(number)

    def remove(self) -> None:
        if self._carrier:
            os.kill(self._carrier, signal.SIGKILL)
            os.waitpid(self._carrier, 0)
        for name in self.names:
            subprocess.run(("ip", "netns", "delete", name), check=False)


# --- what is trained

#: Five columns of seven rows, a bit each, from the top.
GLYPHS = (
    *("0E 11 13 15 19 11 0E", "04 0C 04 04 04 04 0E", "0E 11 01 02 04 08 1F", "1F 02 04 02 01 11 0E", "02 06 0A 12 1F 02 02"),
    *("1F 10 1E 01 01 11 0E", "06 08 10 1E 11 11 0E", "1F 01 02 04 08 08 08", "0E 11 11 0E 11 11 0E", "0E 11 11 0F 01 02 0C"),
)


def digits(batch: int) -> tuple[nn.Module, Batch]:
    rows = torch.tensor([[int(row, 16) for row in glyph.split()] for glyph in GLYPHS])
    images = torch.stack([(rows >> bit) & 1 for bit in range(4, -1, -1)], dim=2).float()  # 10 x 7 x 5

    def sample(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count = batch if seed else HELD_OUT
        labels = torch.randint(0, 10, (count,), generator=generator)
        down, right = torch.randint(0, 2, (count,), generator=generator), torch.randint(0, 4, (count,), generator=generator)
        canvas = torch.zeros(count, 8, 8)
        y = down.view(-1, 1, 1) + torch.arange(7).view(1, -1, 1)
        x = right.view(-1, 1, 1) + torch.arange(5).view(1, 1, -1)
        canvas[torch.arange(count).view(-1, 1, 1), y, x] = images[labels]
        return (canvas + 0.6 * torch.randn(canvas.shape, generator=generator)).flatten(1), labels

    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), sample


class Characters(nn.Module):
    """The last characters, embedded and side by side, through one wide layer."""

    context, width, hidden = 16, 32, 512

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, self.width)
        self.layers = nn.Sequential(nn.Linear(self.context * self.width, self.hidden), nn.ReLU(), nn.Linear(self.hidden, characters))

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(self.embedding(last).flatten(1))
        return logits


def characters(batch: int) -> tuple[nn.Module, Batch]:
    from pydoc_data.topics import topics

    text = "".join(topics.values())
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[character] for character in text])
    edge = len(numbers) * 9 // 10

    def sample(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count, least, most = (batch, 0, edge) if seed else (HELD_OUT, edge, len(numbers))
        begin = torch.randint(least, most - Characters.context - 1, (count, 1), generator=generator)
        windows = numbers[begin + torch.arange(Characters.context + 1)]
        return windows[:, :-1], windows[:, -1]

    return Characters(len(alphabet)), sample


MODELS = {"digits": digits, "characters": characters}


class Way(NamedTuple):
    """One way to train together: DistributedOptimizer with a compression, or DiLoCo with options."""

    name: str
    compression: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


def ways(sync_every: int) -> list[Way]:
    every = f"DiLoCo, every {sync_every}"
    return [
        Way("DistributedOptimizer", "none"),
        Way("bf16", "bf16"),
        Way("int8", "int8"),
        Way("powersgd(rank=4)", "powersgd"),
        Way("topk(ratio=0.01)", "topk"),
        Way(every, "", {"sync_every": sync_every}),
        Way(f"{every}, 4 bits", "", {"sync_every": sync_every, "bits": 4}),
        Way(f"{every}, 4 bits, overlapped", "", {"sync_every": sync_every, "bits": 4, "delay": sync_every // 2}),
    ]


# --- in a rank


def sent_bytes(device: str) -> int:
    """What the interface has sent, as this network namespace counts it."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    found = [line.split(":")[1].split()[8] for line in lines if line.strip().startswith(f"{device}:")]
    return int(found[0]) if found else 0


def train(way: Way, wanted: argparse.Namespace, model_name: str) -> dict[str, Any]:
    """From the same parameters, with the same samples for every way; figures of this rank."""
    import collective_core.torch as hvd

    torch.manual_seed(0)
    model, sample = MODELS[model_name](wanted.batch)
    inner = torch.optim.Adam(model.parameters(), lr=wanted.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if way.compression:
        kinds = hvd.Compression
        choices = {"none": kinds.none, "bf16": kinds.bf16, "int8": kinds.int8, "powersgd": kinds.powersgd(4), "topk": kinds.topk(0.01)}
        compression = choices[way.compression]
        optimizer: Any = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), compression=compression)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=wanted.outer_lr, momentum=wanted.outer_momentum, nesterov=True)
        optimizer = hvd.DiLoCo(model, inner, outer, **way.options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer if way.compression else inner, lambda step: max(0.0, 1 - step / wanted.steps))
    hvd.barrier()
    curve: list[float] = []
    before, began = sent_bytes(wanted.device), time.perf_counter()
    for step in range(wanted.steps):
        inputs, labels = sample(1 + step * hvd.size() + hvd.rank())
        optimizer.zero_grad()
        training_loss = nn.functional.cross_entropy(model(inputs), labels)
        training_loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if step % max(wanted.steps // CURVE, 1) == 0:
            curve.append(round(float(training_loss.detach()), 4))
        optimizer.step()
        schedule.step()
    if not way.compression:
        optimizer.synchronize()
    hvd.barrier()
    seconds, sent = time.perf_counter() - began, sent_bytes(wanted.device) - before
    with torch.no_grad():
        inputs, labels = sample(0)
        loss = float(nn.functional.cross_entropy(model(inputs), labels))
    return {
        "way": way.name.strip(),
        "bytes_per_step": round(sent / wanted.steps),
        "samples_per_second": round(wanted.steps * wanted.batch * hvd.size() / seconds, 1),
        "milliseconds_per_step": round(seconds / wanted.steps * 1e3, 2),
        "loss": round(loss, 5),
        "curve": curve,
    }


def in_rank(wanted: argparse.Namespace) -> None:
    import collective_core.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {"plan": {}, "models": {}}
    for name in wanted.models:
        plan = hvd.plan_communication(MODELS[name](wanted.batch)[0], sync_every=wanted.sync_every)
        found["plan"][name] = str(plan)
        chosen = [way for way in ways(wanted.sync_every) if wanted.ways in way.name or way.compression == "none"]
        found["models"][name] = [train(way, wanted, name) for way in chosen]
    if hvd.rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    hvd.shutdown()


# --- outside


def measure(mbit: float, wanted: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What the ranks found on a link of this rate; 0: on the machine's own loopback, without a link between them."""
    if not mbit:
        return _measure(mbit, None, arguments)
    link = Link(mbit, wanted.round_trip)
    try:
        return _measure(mbit, link, arguments)
    finally:
        link.remove()


def _measure(mbit: float, link: Link | None, arguments: Sequence[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(secrets.token_hex())
        secret.flush()
        ranks = []
        for rank in range(2):
            place = ["ip", "netns", "exec", link.names[rank]] if link else []
            device = f"slow{rank}" if link else "lo"
            address = ADDRESS.format(1) if link else "127.0.0.1"
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "COLLECTIVE_HOST_ID": f"slow{rank}"}
            shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": "29611", "OMP_NUM_THREADS": "1"}
            shared["COLLECTIVE_SECRET_FILE"] = secret.name
            if not link:
                shared["COLLECTIVE_ADDRESS"] = address
            command = [*place, sys.executable, "-m", f"{__package__}.slow_network", *arguments, "--device", device]
            ranks.append(subprocess.Popen(command, env={**os.environ, **shared, **own}, stdout=subprocess.PIPE, text=True))
        out = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit(f"the ranks ended with {[rank.returncode for rank in ranks]}")
        found: dict[str, Any] = json.loads(next(line for line in out[0].splitlines() if line.startswith("RESULT "))[7:])
        return {"mbit": mbit, "load": os.getloadavg()[0], **found}


def show(results: Sequence[dict[str, Any]], round_trip: float) -> None:
    for result in results:
        where = f"{result['mbit']:g} Mbit/s, {round_trip:g} ms round trip" if result["mbit"] else "loopback"
        print(f"\n{where}; load of {result['load']:.1f} on {os.cpu_count()} processors")
        for model, rows in result["models"].items():
            ordinary = rows[0]
            print(f"\n{model}:\n{result['plan'][model]}\n")
            print(f"{'':34}  {'KB/step':>9}  {'samples/s':>10}  {'loss':>8}  {'bytes':>7}  {'speed':>6}  {'loss':>7}")
            for row in rows:
                fewer = ordinary["bytes_per_step"] / max(row["bytes_per_step"], 1)
                faster = row["samples_per_second"] / ordinary["samples_per_second"]
                print(
                    f"{row['way']:34}  {row['bytes_per_step'] / 1e3:9.2f}  {row['samples_per_second']:10.0f}  {row['loss']:8.4f}  "
                    f"1/{fewer:<5.0f}  {faster:5.1f}x  {row['loss'] / ordinary['loss'] - 1:+7.1%}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000], help="Mbit/s; 0: loopback (%(default)s)")
    parser.add_argument("--round-trip", type=float, default=20, help="milliseconds (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", default="", help="only those with this in their names, and the ordinary one")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank in a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="of Adam, falling to 0 (%(default)s: the ordinary way's best of 1, 2, 4e-3)")
    parser.add_argument("--sync-every", type=int, default=8, help="of DiLoCo (%(default)s)")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5, help="%(default)s: the paper's 0.9 overshoots in so short a training")
    parser.add_argument("--report", type=Path, help="write JSON into this file, too")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # in a rank
    wanted = parser.parse_args()
    if wanted.device:
        in_rank(wanted)
        return 0
    if any(wanted.rates) and os.geteuid() != 0:
        sys.exit("network namespaces need root: run it with sudo, or with --rates 0")
    results = [measure(mbit, wanted, sys.argv[1:]) for mbit in wanted.rates]
    show(results, wanted.round_trip)
    if wanted.report:
        wanted.report.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
