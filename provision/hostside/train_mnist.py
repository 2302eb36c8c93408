#!/usr/bin/env python3
"""The smoke job: Horovod's MNIST example on collective_core, run on the hosts by mpirun, one process per rank.

    mpirun -np 4 ... python train_mnist.py --data-dir DIR --epochs 1 --bar 92 --report report.json

Every rank trains on its share of the images, starts from rank 0's parameters and averages its gradients with the others after each
batch. The report says whether all of that happened: who took part, whether the parameters are the same bits on every rank, what test
accuracy was reached, and how fast it was compared with one rank alone and with the same ranks at the same time without communication.

Exit codes: 0 parameters identical and accuracy at or above --bar · 1 not so, or something failed · 2 wrong usage or data.
This file is self-contained and downloads nothing; it needs torch and collective_core, Python 3.8 or newer.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import inspect
import json
import os
import socket
import statistics
import sys
import time
import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F

import collective_core.torch as hvd

REPORT_SCHEMA = 1
IMAGE_SIDE = 28
CLASSES = 10
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training images, as every MNIST example has them
MOMENTUM = 0.5
TEST_BATCH_SIZE = 1000
MAX_THREADS = 4  # this network is too small for more: they wait for each other longer than they compute
WARM_UP_BATCHES = 5  # the first batches pay for thread pools, kernels and memory, on every rank
LOCAL_SLICES = 3  # of which the middle one counts: other work of the machine seldom spoils two of them
SLICE_SECONDS = 0.3  # dozens of batches: long enough for a steady rate, all slices short enough that waiting ranks do not mind
SLICE_MIN_BATCHES = 4


class Net(nn.Module):
    """The network of the PyTorch and Horovod MNIST examples. Input: float (n, 1, 28, 28); output: log probabilities (n, 10).

    From github.com/pytorch/examples, mnist/main.py: copyright (c) 2017 Pytorch contributors, BSD 3-Clause License, see NOTICE.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, CLASSES)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def load(folder, part):
    """(images uint8 (n, 1, 28, 28), labels int64 (n,)) of part ``train`` or ``t10k``; the controller has checked the IDX files.

    As bytes the images take a quarter of the memory that floats would take per rank.
    """
    found = []
    for name, head in ((part + "-images-idx3-ubyte", 16), (part + "-labels-idx1-ubyte", 8)):
        path = os.path.join(folder, name)
        with gzip.open(path + ".gz") if os.path.exists(path + ".gz") else open(path, "rb") as file:
            found.append(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=head))
    images, labels = found[0].reshape(-1, 1, IMAGE_SIDE, IMAGE_SIDE), found[1].long()
    if len(images) != len(labels):
        raise ValueError("%s: %d images, but %d labels" % (part, len(images), len(labels)))
    return images, labels


def normalised(images):
    return images.float().div_(255).sub_(MEAN).div_(DEVIATION)


def shard(count, epoch, seed, rank, size):
    """This rank's image numbers in ``epoch``: one shuffle for all ranks, filled up by repeating so that all shards are equally long."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator)
    while len(order) % size:
        order = torch.cat([order, order[: size - len(order) % size]])
    return order[rank::size]


def leave_compiler_out():
    """Keep PyTorch's compiler out of SGD, which would import it with its first call: a second of every rank, and nothing is compiled here."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    torch.optim.SGD.step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def step(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = F.nll_loss(model(normalised(images)), labels)
    loss.backward()
    optimizer.step()
    return loss


def local_rate(args, model, images, labels, measure=True):
    """Images per second of this rank without communication: a copy of the model, plain SGD. Only warms up unless ``measure``.

    How many batches it takes depends on the machine, so the random numbers that it uses are given back: the training after it depends on
    the seed alone.
    """
    with torch.random.fork_rng([images.device] if images.is_cuda else []):
        model = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
        order = torch.randperm(len(images))
        batches = 0

        def one_batch():
            nonlocal batches
            first = (batches * args.batch_size) % max(1, len(order) - args.batch_size + 1)
            chosen = order[first : first + args.batch_size]
            step(model, optimizer, images[chosen], labels[chosen])
            batches += 1
            return len(chosen)

        for _ in range(WARM_UP_BATCHES):
            one_batch()
        synchronize(images.device)
        if not measure:
            return None
        return statistics.median(slice_rate(one_batch, images.device) for _ in range(LOCAL_SLICES))


def slice_rate(one_batch, device):
    """Images per second over a short time of calling ``one_batch``."""
    done, batches, begin = 0, 0, time.perf_counter()
    while batches < SLICE_MIN_BATCHES or time.perf_counter() - begin < SLICE_SECONDS:
        done += one_batch()
        batches += 1
    synchronize(device)
    return done / (time.perf_counter() - begin)


def say(args, text, epoch, part, loss, accuracy=None):
    """Print how far the job is: as a line for people, or with ``--json-lines`` for programs. ``part``: of the epoch, from 0 to 1."""
    if args.json_lines:
        of_all = (epoch - 1 + part) / args.epochs
        text = json.dumps({"epoch": epoch, "epochs": args.epochs, "part": of_all, "loss": loss, "accuracy": accuracy})
    print(text, flush=True)


def train(args, epoch, model, optimizer, images, labels):
    """One epoch; returns (mean loss over all ranks, seconds until the slowest rank was done, images of all ranks)."""
    model.train()
    order = shard(len(images), epoch, args.seed, hvd.rank(), hvd.size())
    batches = order.split(args.batch_size)
    total = torch.zeros((), dtype=torch.float64)
    hvd.barrier()
    begin = time.perf_counter()
    for number, chosen in enumerate(batches):
        loss = step(model, optimizer, images[chosen], labels[chosen])
        total += loss.detach().double().cpu() * len(chosen)
        if number % args.log_interval == 0 and hvd.rank() == 0:
            now = float(loss.detach())
            place = (epoch, number * args.batch_size, len(order), 100.0 * number / len(batches))
            say(args, "Train Epoch: %d [%d/%d (%.0f%%)]\tLoss: %.6f" % (*place, now), epoch, number / len(batches), now)
    synchronize(images.device)
    hvd.barrier()
    seconds = time.perf_counter() - begin
    mean = hvd.allreduce(total / len(order), op=hvd.Average)
    return float(mean), seconds, len(order) * hvd.size()


def test(model, images, labels):
    """(mean loss, accuracy in percent) over the whole test set, of which each rank looks at its own part."""
    model.eval()
    mine = torch.arange(hvd.rank(), len(images), hvd.size())
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, images
    with torch.no_grad():
        for chosen in mine.split(TEST_BATCH_SIZE):
            output = model(normalised(images[chosen]))
            sums[0] += float(F.nll_loss(output, labels[chosen], reduction="sum"))
            sums[1] += int((output.argmax(dim=1) == labels[chosen]).sum())
            sums[2] += len(chosen)
    sums = hvd.allreduce(sums, op=hvd.Sum)
    return float(sums[0] / sums[2]), 100.0 * float(sums[1] / sums[2])


def digest(model):
    """SHA-256 over names and bytes of all parameters and buffers: equal on two ranks only if every bit is."""
    value = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        value.update(name.encode())
        value.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return value.hexdigest()


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id():
    """Tells machines apart: containers of one machine share its cores, however many hosts they seem to be."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def usable_gpu():
    """Whether this rank can have a GPU of its own that this torch has kernels for."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < hvd.local_size():
        return False
    try:
        return float((torch.zeros(8, device="cuda:%d" % hvd.local_rank()) + 1).sum()) == 8.0
    except RuntimeError:
        return False


def pick_device(no_cuda):
    """One GPU per rank where every rank of the job can have one, else the CPU for all of them."""
    if not all(hvd.allgather_object(not no_cuda and usable_gpu())):
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def sharing(participants):
    """(what the efficiency next to one rank can be at most, sentences why): ranks on CPUs share the cores of their machine.

    All ranks wait for each other at every step, and each trains on as much: the machine with the smallest share limits them all.
    """
    notes, possible = [], 1.0
    machines = {}
    for one in participants:
        machines.setdefault(one["machine"], []).append(one)
    for ranks in machines.values():
        cores = max(one["cores"] for one in ranks)
        threads = sum(one["threads"] for one in ranks)
        share = min(1.0, float(cores) / threads) if ranks[0]["device"] == "cpu" else 1.0
        possible = min(possible, share)
        if share < 1:
            hosts = sorted({one["host"] for one in ranks})
            are = "%s %s" % (" and ".join(hosts), "are one machine" if len(hosts) > 1 else "is a machine")
            counts = ((cores, "core"), (len(ranks), "rank"), (ranks[0]["threads"], "thread"))
            load = "%s for %s of %s" % tuple("%d %s%s" % (count, noun, "" if count == 1 else "s") for count, noun in counts)
            notes.append("%s with %s: %.2f of linear is the most they can reach" % (are, load, share))
    return round(possible, 3), notes


def parse(argv):
    parser = argparse.ArgumentParser(description="MNIST on all ranks, as in Horovod's example.")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="images per rank and step (default: 64)")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="times through the training set (default: 10)")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate of one rank, times their number (default: 0.01)")
    parser.add_argument("--max-lr", type=float, metavar="LR", help="learning rate that many ranks must not exceed (default: none)")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed (default: 42)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches between two progress lines (default: 10)")
    parser.add_argument("--json-lines", action="store_true", help="print progress as JSON")
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="folder with MNIST's four IDX files, .gz or not")
    parser.add_argument("--dataset-name", default="MNIST", metavar="NAME", help="name of the data set in the report")
    parser.add_argument("--bar", type=float, default=0.0, metavar="PERCENT", help="test accuracy that must be reached at the end")
    parser.add_argument("--report", metavar="FILE", help="JSON, written by rank 0 at the end")
    args = parser.parse_args(argv)
    for name in ("batch_size", "epochs", "log_interval"):
        if getattr(args, name) < 1:
            parser.error("--%s must be at least 1" % name.replace("_", "-"))
    return args


def participant(model, device):
    """What this rank contributes to the report."""
    return {
        "rank": hvd.rank(),
        "host": socket.gethostname(),
        "machine": boot_id(),
        "local_rank": hvd.local_rank(),
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "parameter_digest": digest(model),
    }


def run(args, data):
    """The whole job on initialised ranks; returns the report, the same on every rank but for the speed of one rank, which rank 0 knows."""
    begin = time.perf_counter()
    rank, size = hvd.rank(), hvd.size()
    device = pick_device(args.no_cuda)
    train_images, train_labels, test_images, test_labels = (tensor.to(device) for tensor in data)

    # Each rank starts from a seed of its own, for its own dropout and so that only rank 0's state being sent to all makes them equal.
    torch.manual_seed(args.seed + rank)
    model = Net().to(device)
    hvd.barrier()
    one_rank = local_rate(args, model, train_images, train_labels, measure=rank == 0)  # all others warm up, and wait
    hvd.barrier()
    all_ranks = one_rank
    if size > 1:
        own = torch.tensor(local_rate(args, model, train_images, train_labels), dtype=torch.float64)
        all_ranks = float(hvd.allreduce(own, op=hvd.Sum))

    learning_rate = args.lr * size if args.max_lr is None else min(args.lr * size, max(args.lr, args.max_lr))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)

    epochs = []
    trained, training_seconds = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        loss, seconds, images = train(args, epoch, model, optimizer, train_images, train_labels)
        test_loss, accuracy = test(model, test_images, test_labels)
        trained, training_seconds = trained + images, training_seconds + seconds
        epochs.append(
            {
                "epoch": epoch,
                "loss": loss,
                "test_loss": test_loss,
                "test_accuracy_percent": round(accuracy, 2),
                "seconds": round(seconds, 3),
                "images_per_second": round(images / seconds, 1),
            }
        )
        if rank == 0:
            text = "Test set: Average loss: %.4f, Accuracy: %.2f%% (epoch %d, %.0f images/s)"
            say(args, text % (test_loss, accuracy, epoch, images / seconds), epoch, 1.0, loss, accuracy)

    participants = sorted(hvd.allgather_object(participant(model, device)), key=lambda one: one["rank"])
    hosts = {}
    for one in participants:
        hosts.setdefault(one["host"], []).append(one["rank"])
    rate = trained / training_seconds
    accuracy = epochs[-1]["test_accuracy_percent"]
    efficiency_limit, notes = sharing(participants)
    return {
        "schema": REPORT_SCHEMA,
        "dataset": args.dataset_name,
        "train_images": len(train_images),
        "test_images": len(test_images),
        "np": size,
        "hosts": hosts,
        "participants": participants,
        "device": device.type,
        "batch_size": args.batch_size,
        "learning_rate": learning_rate,
        "epochs": epochs,
        "test_accuracy_percent": accuracy,
        "bar_percent": args.bar,
        "passed_bar": accuracy >= args.bar,
        "parameters_identical": len({one["parameter_digest"] for one in participants}) == 1,
        "parameter_digest": participants[0]["parameter_digest"],
        "images_per_second": round(rate, 1),
        "one_rank_images_per_second": round(one_rank, 1) if one_rank else None,
        "speedup": round(rate / one_rank, 3) if one_rank and size > 1 else None,  # one rank has nothing to be faster than
        "efficiency": round(rate / one_rank / size, 3) if one_rank and size > 1 else None,
        "efficiency_limit": efficiency_limit if size > 1 else None,
        "without_communication_images_per_second": round(all_ranks, 1) if size > 1 else None,
        "efficiency_of_communication": round(rate / all_ranks, 3) if size > 1 else None,
        "how_measured": "one rank: rank 0 alone on %s, same batch size and threads, no communication, after a warm-up, the middle of three "
        "short times; without communication: the sum over all ranks, which do so at the same time; all ranks: every image of all epochs "
        "over the time from a barrier before to a barrier after each epoch" % participants[0]["host"],
        "notes": notes,
        "seconds": round(time.perf_counter() - begin, 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def main(argv=None):
    args = parse(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a data set's name must not end the job on a host without UTF-8
    try:
        data = (*load(args.data_dir, "train"), *load(args.data_dir, "t10k"))
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error) as error:
        print("%s: --data-dir: %s" % (socket.gethostname(), error), file=sys.stderr)
        return 2

    leave_compiler_out()
    hvd.init()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(MAX_THREADS, max(1, cores() // hvd.local_size())))
    report = run(args, data)
    if hvd.rank() == 0 and args.report:
        with open(args.report, "w") as file:
            json.dump(report, file, indent=1)
    hvd.shutdown()
    return 0 if report["parameters_identical"] and report["passed_bar"] else 1


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        # The interpreter's normal end would wait in MPI_Finalize for ranks that wait for this one. mpirun ends them when it sees the code.
        sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(code)
