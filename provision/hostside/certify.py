"""Measurements of `provision certify` on one host: its cores, GPUs and memory, or its network to one peer. It judges nothing.

Python 3.6+, standard library only, and for GPUs PyTorch where the Python that runs this has it. The order is JSON on standard input, with
``seconds`` after which the kernel ends the process, ``times``, how long or often is measured, as the best counts, and one of::

    {"task": "host", "torch": bool}
    {"task": "pair", "call": bool, "key": hex, "me": name, "address": …, "ports": [n, …], "peer": {"name": …, "address": …}, "mtu": n,
     "wait": s}

It prints what `HostMeasured` and `PairMeasured` of `doctor/certify/model.py` read; of a pair the side that calls measures, over one TCP
connection, and a UDP socket whose port that tells. Speeds of cores are by processor time, of the best of many samples: what else runs on
the host does not make a core slow.
"""

import contextlib
import json
import mmap
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from operator import mul

from .proof import call, caller_of, listen, proof, receive

BEGIN, END = "===PROVISION-CERTIFY-BEGIN===", "===END==="
SIZE, CHECKSUM = 40, 2434074165  # of the matrices that Python multiplies; crc32 of their product
CORE_S, DEVICE_S, MAX_CORES = 0.4, 3.0, 1024
CORE = struct.Struct("dqq")  # speed, wrong, made
COPIED, GPU_COPIED = 32 << 20, 1 << 28  # bytes: more than caches hold
PINGS, BIG_PINGS, GAP_S, LOST_S = 500, 10, 0.01, 2.0  # after the gap another ping is sent, after that time the last one is lost
FLOOD_S, BLOCK = 1.0, 1 << 16  # of one direction; bytes
CONNECT_S, STALL_S = 4, 15
MTU_DISCOVER, PROBE, HEADERS = 10, 3, 28  # of IPv4: do not fragment, and do not ask what is known of the path


def processor_time():
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def product():
    """The checksum of a product of whole numbers: every Python has the same."""
    numbers = [(7 * at * at + 13 * at) % 2039 for at in range(2 * SIZE * SIZE)]
    rows = [numbers[at : at + SIZE] for at in range(0, 2 * SIZE * SIZE, SIZE)]  # the second matrix by its columns
    return zlib.crc32(repr([[sum(map(mul, row, column)) for column in rows[SIZE:]] for row in rows[:SIZE]]).encode())


def core_speed(core, seconds):
    """Products of one core per second of its time, how many were wrong, and how many there were."""
    os.sched_setaffinity(0, {core})
    best, wrong, made, end = 1e9, 0, 0, processor_time() + seconds
    while processor_time() < end or made < 5:
        begin = processor_time()
        wrong += product() != CHECKSUM
        made, best = made + 1, min(best, processor_time() - begin)
    return 1 / max(best, 1e-9), wrong, made


def core_speeds(seconds):
    """All cores at the same time, in a process each; zeros of one whose process cannot start, or is ended."""
    cores, running = sorted(os.sched_getaffinity(0))[:MAX_CORES], []
    figures = mmap.mmap(-1, CORE.size * len(cores))
    for place, core in enumerate(cores):
        try:
            child = os.fork()
        except OSError:  # a limit of processes
            break
        if not child:
            try:
                CORE.pack_into(figures, place * CORE.size, *core_speed(core, seconds))
            finally:
                os._exit(0)
        running.append(child)
    for child in running:
        os.waitpid(child, 0)
    models = sorted(set(re.findall(r"(?m)^(?:model name|CPU part|cpu)[ \t]*: *(.+)$", read("/proc/cpuinfo"))))
    for core, (speed, wrong, made) in zip(cores, CORE.iter_unpack(figures[:])):
        place = "/sys/devices/system/cpu/cpu%d/" % core
        kind = [platform.machine(), read(place + "cpufreq/cpuinfo_max_freq") or read(place + "cpu_capacity"), platform.python_version()]
        yield {"core": core, "kind": ", ".join(kind + models)[:200], "speed": speed, "wrong": wrong, "made": made}


def copy_speed(times, size, clock, copy):
    """GB/s of the fastest copy."""
    took = []
    for _ in range(times):
        begin = clock()
        copy()
        took.append(clock() - begin)
    return size / max(min(took), 1e-9) / 1e9


def torch_product(torch, device, size, seconds):
    """Products of whole numbers, which float32 and TF32 hold exactly: the median in GFLOPS, and how many were wrong (nan is)."""
    numbers = torch.Generator().manual_seed(7)
    left, right = (torch.randint(-2, 3, (size, size), generator=numbers).float() for _ in range(2))
    rows, columns = left.double() @ right.double().sum(1), left.double().sum(0) @ right.double()
    left, right = left.to(device), right.to(device)
    wrong, took, end = 0, [], time.monotonic() + seconds
    while time.monotonic() < end or len(took) < 5:
        begin = time.perf_counter()
        made = left @ right
        if device != "cpu":
            torch.cuda.synchronize(device)
        took.append(max(time.perf_counter() - begin, 1e-9))
        made = made.double()
        wrong += not (torch.equal(made.sum(1).cpu(), rows) and torch.equal(made.sum(0).cpu(), columns))
    return {"speed": 2e-9 * size**3 / sorted(took)[len(took) // 2], "wrong": wrong, "made": len(took)}


def torch_device(torch, number):
    device, found = "cuda:%d" % number, {"kind": "unknown"}
    torch.backends.cuda.matmul.allow_tf32 = True

    def copied(source, target):
        def copy():
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return copy_speed(6, GPU_COPIED, time.perf_counter, copy)

    try:
        found["kind"] = torch.cuda.get_device_name(number)
        found.update(torch_product(torch, device, 8192, DEVICE_S))
        here, there = (torch.empty(GPU_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
        pinned = torch.empty(GPU_COPIED, dtype=torch.uint8, pin_memory=True)
        found["memory_gbs"] = 2 * copied(here, there)  # each byte is read and written
        return dict(found, to_gbs=copied(pinned, here), from_gbs=copied(here, pinned))
    except Exception as error:  # CUDA's errors are of several types
        return dict(found, error=str(error)[:300])


def torch_devices():
    try:
        import torch

        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(lambda number: torch_device(torch, number), range(torch.cuda.device_count())))
    except Exception as error:
        return [] if isinstance(error, ModuleNotFoundError) else [{"kind": "unknown", "error": str(error)[:300]}]


def host(order):
    source, target = memoryview(bytearray(COPIED)), memoryview(bytearray(COPIED))
    memory = copy_speed(8 * order["times"], COPIED, processor_time, lambda: target.__setitem__(slice(None), source))
    cores = list(core_speeds(CORE_S * order["times"]))
    return {"cores": cores, "memory_gbs": memory, "devices": torch_devices() if order["torch"] else []}


def flood(link):
    """Mbit/s until the other side has all that is sent for a while, of which the last block is marked."""
    begin, count = time.monotonic(), 0
    while time.monotonic() - begin < FLOOD_S:
        link.sendall(bytes(BLOCK))
        count += BLOCK
    link.sendall(b"\1" * BLOCK)
    receive(link, 1)
    return 8e-6 * count / (time.monotonic() - begin)


def drain(link):
    buffer, count = bytearray(BLOCK), 0
    while not count or count % BLOCK or not buffer[got - 1]:
        got = link.recv_into(buffer)
        if not got:
            raise OSError("closed")
        count += got
    link.sendall(b"\1")


def datagrams(order):
    """A UDP socket of this host, and what pings of this pair begin with."""
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.bind((order["address"], 0))
    link.setsockopt(socket.IPPROTO_IP, MTU_DISCOVER, PROBE)
    return link, proof(order["key"], "ping", "", "")[:16]


def answer(order):
    """Answer the peer, which calls again where a call was lost."""
    pings, token = datagrams(order)
    with listen(order) as listening:
        listening.settimeout(order["wait"])
        while True:
            link, _ = listening.accept()
            with link, contextlib.suppress(OSError):
                link.settimeout(CONNECT_S)
                if caller_of(order, link, [order["peer"]["name"]]) is not None:
                    link.settimeout(STALL_S)
                    link.sendall(struct.pack("!H", pings.getsockname()[1]))
                    while link not in select.select([link, pings], [], [])[0]:
                        with contextlib.suppress(OSError):  # too long for this side
                            data, sender = pings.recvfrom(1 << 16)
                            if data[:16] == token:
                                pings.sendto(data, sender)
                    for _ in range(receive(link, 1)[0]):
                        drain(link)
                        link.sendall(struct.pack("!d", flood(link)))
                    return {}


def reached(order):
    """A connection to the peer, which may begin later."""
    end, problem = time.monotonic() + order["wait"], "timed out"
    while time.monotonic() < end:
        for port in order["ports"]:
            try:
                return call(order, order["peer"], port, CONNECT_S)
            except OSError as error:
                problem = error.strerror or str(error)
        time.sleep(0.1)
    raise OSError("no connection in %d s: %s" % (order["wait"], problem))


def ping(link, token, count, size):
    """(The shortest time there and back in µs, pings that were lost). One that comes late is not lost."""
    sent, best, back, padding = [], 0.0, set(), bytes(max(size - 20, 0))
    while len(sent) < count or (len(back) < count and time.monotonic() - sent[-1] < LOST_S):
        if len(sent) < count:
            sent.append(time.monotonic())
            with contextlib.suppress(OSError):  # longer than this side's MTU, or refused
                link.send(token + struct.pack("!I", len(sent) - 1) + padding)
        try:
            data = link.recv(1 << 16) if select.select([link], [], [], GAP_S)[0] else b""
        except OSError:
            continue
        which = struct.unpack("!I", data[16:20])[0] if data[:16] == token and len(data) == 20 + len(padding) else count
        if which < len(sent):
            took = 1e6 * (time.monotonic() - sent[which])
            best = min(best or took, took)
            back.add(which)
    return best, count - len(back)


def measure(order):
    """Call the peer, and measure."""
    up = down = 0.0
    with reached(order) as link:
        link.settimeout(STALL_S)
        pings, token = datagrams(order)
        pings.connect((order["peer"]["address"], struct.unpack("!H", receive(link, 2))[0]))
        latency, lost = ping(pings, token, PINGS, 64)
        _, big_lost = ping(pings, token, BIG_PINGS, order["mtu"] - HEADERS)
        times = order["times"] if 2 * big_lost <= BIG_PINGS else 0  # TCP would wait for packets that never arrive
        link.sendall(bytes([times]))
        for _ in range(times):
            up = max(up, flood(link))
            drain(link)
            down = max(down, struct.unpack("!d", receive(link, 8))[0])
    found = {"latency_us": latency, "sent": PINGS, "lost": lost, "big_sent": BIG_PINGS, "big_lost": big_lost}
    return dict(found, up_mbps=up, down_mbps=down)


def document(order):
    try:
        return host(order) if order["task"] == "host" else measure(order) if order["call"] else answer(order)
    except Exception as error:  # a host always answers
        return {"error": (getattr(error, "strerror", None) or "%s: %s" % (type(error).__name__, error))[:200]}


if __name__ == "__main__":
    ordered = json.load(sys.stdin)
    signal.alarm(int(ordered["seconds"]))
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(document(ordered)), END))
