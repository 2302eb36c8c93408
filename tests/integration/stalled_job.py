"""Jobs of torch.distributed over Gloo, one for each shape that is named, that stall in that way, or do not: rank 1 stops going on, the
others go on to the next collective operation. Each rank prints where it has to be found: ``stands RANK FILE:LINE``.

``stalled_job.py FOLDER RANKS PORT SHAPE…``, with the variables RANK=_, WORLD_SIZE=_ and MASTER_PORT=00000 in its environment. It imports
PyTorch once and forks all ranks, which takes a tenth of the time; each then writes its own variables over these three, in the memory that
/proc/PID/environ shows, so that it looks like a process that a launcher has started.
"""

import ctypes
import fcntl
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SHAPE, RANK, RANKS, FIFO, LOCK = "", -1, int(sys.argv[2]), os.path.join(sys.argv[1], "fifo"), os.path.join(sys.argv[1], "lock")
ONES = torch.ones(4)


def here(offset: int = 1) -> None:
    """The next line is where this rank will stand."""
    caller = inspect.stack()[1]
    print(f"stands {RANK} {os.path.basename(caller.filename)}:{caller.lineno + offset}", flush=True)


class Batches(Dataset):
    """The worker of rank 1 waits in the second batch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 3:
            os.open(FIFO, os.O_RDONLY)
        return ONES


class SlowBatches(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(200, 200) @ torch.ones(200, 200)


# Stalls: what rank 1 does.


def fifo() -> None:
    here()
    os.open(FIFO, os.O_RDONLY)


def endless() -> None:
    here(2)
    while True:
        pass


def sleeps() -> None:
    here()
    time.sleep(1000)


def stopped() -> None:
    here()
    os.kill(os.getpid(), signal.SIGSTOP)


def lock() -> None:
    mine = threading.Lock()
    mine.acquire()
    here()
    mine.acquire()


def two_locks() -> None:
    first, second = threading.Lock(), threading.Lock()

    def other() -> None:
        with second:
            time.sleep(0.3)
            with first:
                pass

    threading.Thread(target=other, name="saver", daemon=True).start()
    with first:
        time.sleep(0.3)
        here()
        with second:
            pass


def file_lock() -> None:
    file = os.open(LOCK, os.O_WRONLY | os.O_CREAT)
    here()
    fcntl.flock(file, fcntl.LOCK_EX)


def child() -> None:
    here()
    subprocess.run(["sleep", "1000"])


def empty_queue() -> None:
    here()
    queue.Queue().get()


def pipe() -> None:
    reads, _writes = os.pipe()
    here()
    os.read(reads, 1)


def order() -> None:
    here()
    dist.broadcast(ONES, 0)


def evaluation() -> None:
    """A loop without end that calls: any of its lines."""
    here(3)
    many = torch.ones(400, 400)
    while True:
        (many @ many).sum().item()


def loader() -> None:
    here()
    for _batch in DataLoader(Batches(), batch_size=2, num_workers=1):
        pass


def native_lock() -> None:
    """The lock of the interpreter, held by native code that waits."""
    reads, _writes = os.pipe()
    buffer = ctypes.create_string_buffer(1)
    here()
    ctypes.PyDLL(None).read(reads, buffer, 1)


def swallowed() -> None:
    """An exception that one rank swallows: it goes to its next operation."""
    try:
        raise ValueError("of this rank alone")
    except ValueError:
        here()
        dist.barrier()


def full_pipe() -> None:
    reader = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    here()
    os.write(reader.stdin.fileno(), b"x" * (1 << 20))


def thread_join() -> None:
    """The main thread waits for one that waits for a FIFO."""
    saver = threading.Thread(target=lambda: os.open(FIFO, os.O_RDONLY), name="saver", daemon=True)
    saver.start()
    here()
    saver.join()


def uneven_data() -> None:
    """Rank 1 has no data left and is in the operation at the end of the epoch, the others in another step."""
    here()
    dist.all_gather([torch.ones(4) for _ in range(RANKS)], ONES)


def backward() -> None:
    """The others wait in DDP's reduction of gradients."""
    here()
    time.sleep(1000)


# No stalls: what all ranks do.


def steps(pause: float) -> None:
    """Training. ``pause``: seconds in which the ranks work between two operations."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    while True:
        end = time.monotonic() + pause * (1 + RANK)
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)
        model(torch.ones(8, 64)).sum().backward()


def uneven() -> None:
    """The last rank pauses in every step."""
    while True:
        time.sleep(0.3 * RANK)
        dist.all_reduce(ONES)


def long_steps() -> None:
    """Longer than an examination: rank 1 works all the time, the others wait for it."""
    while True:
        end = time.monotonic() + 100 * RANK
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
        dist.all_reduce(ONES)


def with_loader() -> None:
    while True:
        for batch in DataLoader(SlowBatches(), batch_size=4, num_workers=1):
            dist.all_reduce(batch.sum())


HEALTHY = {
    "quick": lambda: steps(0.01),
    "seconds": lambda: steps(0.4),
    "uneven": uneven,
    "long_steps": long_steps,
    "with_loader": with_loader,
}


def run() -> None:
    if SHAPE == "never_joins" and RANK == 1:
        os._exit(0)
    if SHAPE == "never_joins":
        print("ready", flush=True)
        here()
    dist.init_process_group("gloo")
    if SHAPE == "file_lock" and RANK == 0:
        held = os.open(LOCK, os.O_WRONLY | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)] if SHAPE == "two_groups" else []
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    print("ready", flush=True)
    if SHAPE in HEALTHY:
        HEALTHY[SHAPE]()
    elif SHAPE == "two_groups" and RANK == 1:
        here()
        dist.all_reduce(ONES, group=groups[0])
    elif SHAPE == "two_groups":
        here()
        dist.all_reduce(ONES, group=groups[1])
    elif RANK == 1:
        globals()[SHAPE]()
    if SHAPE == "backward":
        here(4)
    else:
        here()
        dist.all_reduce(ONES)
    model(torch.ones(2, 4)).sum().backward()


def become(variables: dict[str, str]) -> None:
    """Set variables of the environment, also where /proc/self/environ shows them. Each has the length of the one that is there."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end of proc(5), whose fields 1 and 2 are cut off
    shown = b"\0" + ctypes.string_at(start, end - start)
    for name, value in variables.items():
        at = shown.index(f"\0{name}=".encode()) + len(name) + 1
        ctypes.memmove(start + at, value.encode(), len(value))
        os.environ[name] = value


def main() -> None:
    global SHAPE, RANK
    for at, shape in enumerate(sys.argv[4:]):
        for rank in range(RANKS):
            if os.fork() == 0:
                SHAPE, RANK = shape, rank
                become({"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(int(sys.argv[3]) + at)})
                output = os.open(os.path.join(os.path.dirname(FIFO), f"{shape}.{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                run()
                os._exit(0)
    signal.pause()


main()
