"""Measurements of `provision certify` on one host: its cores, GPUs and memory, or its network to one peer. It judges nothing.

Python 3.6+, standard library only; PyTorch is used where the Python that runs this has it. The order is JSON on standard input, with
``seconds`` after which the process is ended by the kernel, and one of::

    {"task": "host", "address": …, "torch": bool, "times": n}
    {"task": "pair", "call": bool, "key": hex, "me": name, "peer": name, "address": …, "peer_address": …, "ports": [n, …], "mtu": n,
     "wait": s, "times": n}

``times``: how long, or often, is measured; the best counts.

What it prints of a host: ``mtu``, ``mbps``, ``memory_gbs``, ``cores`` and ``devices`` (see `doctor/certify/model.py`); of a pair:
``latency_us``, ``sent``, ``lost``, ``big_sent``, ``big_lost``, ``up_mbps`` and ``down_mbps``, or ``error``. The side that calls measures.

Times of cores are processor time and the best of several samples: what else runs on the host does not make a core slow.
"""

import fcntl
import json
import os
import platform
import select
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from operator import mul

from .proof import proof, receive

BEGIN, END = "===PROVISION-CERTIFY-BEGIN===", "===END==="
SIZE, CHECKSUM = 40, 2434074165  # of the matrices that Python multiplies; crc32 of their product
CORE_S, DEVICE_S = 0.4, 3.0
MAX_CORES = 1024
COPIED = 32 << 20  # bytes: more than caches hold
PINGS, BIG_PINGS, IN_FLIGHT = 500, 10, 8
LATE_S, LOST_S = 0.1, 2.0  # after which another ping is sent, and the last one is lost
FLOOD_S, WARM_S = 1.0, 0.3  # of one direction; the begin does not count
STALL_S = 6
BLOCK = 1 << 18
MTU_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
PROBE = 3  # IP_PMTUDISC_PROBE: do not fragment, whatever the path is said to take
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921


def processor_time():
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# One host.


def matrices():
    numbers = [(7 * at * at + 13 * at) % 2039 for at in range(2 * SIZE * SIZE)]
    rows = [numbers[at : at + SIZE] for at in range(0, 2 * SIZE * SIZE, SIZE)]
    return rows[:SIZE], rows[SIZE:]  # the second one by its columns


def product():
    """The checksum of a product of whole numbers: every Python has the same."""
    left, right = matrices()
    return zlib.crc32(repr([[sum(map(mul, row, column)) for column in right] for row in left]).encode())


def python_core(core, seconds):
    """Products of one core per second of processor time, and how many were wrong."""
    os.sched_setaffinity(0, {core})
    best, wrong, made, end = 1e9, 0, 0, processor_time() + seconds
    while processor_time() < end or made < 5:
        begin = processor_time()
        wrong += product() != CHECKSUM
        made += 1
        best = min(best, processor_time() - begin)
    return {"core": core, "speed": 1 / max(best, 1e-9), "wrong": wrong, "nan": 0, "made": made}


def in_process(core, seconds):
    """The same in a process of its own: (its number, the pipe with the answer)."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(sink, json.dumps(python_core(core, seconds)).encode())
        finally:
            os._exit(0)
    os.close(sink)
    return child, source


def python_cores(cores, seconds):
    running = [(core,) + in_process(core, seconds) for core in cores]
    found = []
    for core, child, source in running:
        with os.fdopen(source, "rb") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        found.append(json.loads(text.decode()) if text else {"core": core, "speed": 0.0, "wrong": 1, "nan": 0, "made": 1})
    return found


def torch_product(torch, device, size, seconds, clock=processor_time):
    """Products of whole numbers, which float32 and TF32 hold exactly: GFLOPS of the best and the median one, and how many were wrong."""
    numbers = torch.Generator().manual_seed(7)
    left, right = (torch.randint(-2, 3, (size, size), generator=numbers).float() for _ in range(2))
    rows, columns = left.double() @ right.double().sum(1), left.double().sum(0) @ right.double()
    left, right = left.to(device), right.to(device)
    wrong, nan, took, end = 0, 0, [], clock() + seconds
    while clock() < end or len(took) < 5:
        begin = clock()
        made = left @ right
        if device != "cpu":
            torch.cuda.synchronize(device)
        took.append(max(clock() - begin, 1e-9))
        nan += bool(torch.isnan(made).any())
        made = made.double()
        wrong += not (torch.equal(made.sum(1).cpu(), rows) and torch.equal(made.sum(0).cpu(), columns))
    speeds = [2e-9 * size**3 / each for each in sorted(took)]
    return {"speed": speeds[0], "median": speeds[len(speeds) // 2], "wrong": wrong, "nan": nan, "made": len(took)}


def torch_cores(torch, cores, seconds):
    torch.set_num_threads(1)

    def one(core):
        os.sched_setaffinity(0, {core})  # of this thread
        return dict(torch_product(torch, "cpu", 256, seconds), core=core)

    with ThreadPoolExecutor(len(cores)) as pool:
        return list(pool.map(one, cores))


def copies(torch, source, target, device):
    """GB/s of copies of one array into another, the best of five."""
    best = 1e9
    for _ in range(6):  # the first one is warm-up, and never the best
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return source.numel() * source.element_size() / best / 1e9


def torch_device(torch, number):
    device = "cuda:%d" % number
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        found = torch_product(torch, device, 8192, DEVICE_S, time.perf_counter)
        here, there, pinned = (
            torch.empty(1 << 28, dtype=torch.uint8, **where) for where in ({"device": device},) * 2 + ({"pin_memory": True},)
        )
        memory = 2 * copies(torch, here, there, device)  # each byte is read and written
        host = {"to_gbs": copies(torch, pinned, here, device), "from_gbs": copies(torch, here, pinned, device)}
        return dict(found, name=torch.cuda.get_device_name(number), memory_gbs=memory, **host)
    except RuntimeError as error:  # CUDA's errors are
        return {"name": torch.cuda.get_device_name(number), "error": str(error)[:300]}


def copy_speed(times):
    """GB/s of a copy in memory by one core, the best one."""
    source, target, best = memoryview(bytearray(COPIED)), memoryview(bytearray(COPIED)), 1e9
    for _ in range(8 * times):
        begin = processor_time()
        target[:] = source
        best = min(best, processor_time() - begin)
    return COPIED / max(best, 1e-9) / 1e9


def kind_of(core, by):
    """Cores of the same kind are as fast as each other, also those of different hosts."""
    lines = [line.partition(":") for line in read("/proc/cpuinfo").splitlines()]
    models = sorted({value.strip() for name, _, value in lines if name.strip() in ("model name", "CPU part", "cpu")})
    place = "/sys/devices/system/cpu/cpu%d/" % core
    highest = read(place + "cpufreq/cpuinfo_max_freq").strip() or read(place + "cpu_capacity").strip()
    return ", ".join([platform.machine()] + models + [highest, by])[:200]


def interface_of(address):
    """MTU and Mbit/s of the interface with this address; 0 where it is not known, the speed also where it is not of a device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(link, SIOCGIFADDR, request)[20:24]) != address:
                    continue
                place = "/sys/class/net/%s/" % name
                speed = read(place + "speed").strip() if os.path.exists(place + "device") else ""
                return struct.unpack("i", fcntl.ioctl(link, SIOCGIFMTU, request)[16:20])[0], int(speed) if speed.isdigit() else 0
            except OSError:
                continue
    return 0, 0


def host(order):
    torch = None
    if order["torch"]:
        try:
            import torch
        except ImportError:
            pass
    cores = sorted(os.sched_getaffinity(0))[:MAX_CORES]
    by = "PyTorch %s" % torch.__version__ if torch else "Python %s" % platform.python_version()
    seconds = CORE_S * order["times"]
    found = torch_cores(torch, cores, seconds) if torch else python_cores(cores, seconds)
    devices = range(torch.cuda.device_count()) if torch and torch.cuda.is_available() else ()
    with ThreadPoolExecutor(max(len(devices), 1)) as pool:
        gpus = list(pool.map(lambda number: torch_device(torch, number), devices))
    cores = [dict(each, kind=kind_of(each["core"], by)) for each in found]
    mtu, mbps = interface_of(order["address"])
    return {"mtu": mtu, "mbps": mbps, "memory_gbs": copy_speed(order["times"]), "cores": cores, "devices": gpus}


# Two hosts.


def family(order):
    return socket.AF_INET6 if ":" in order["address"] else socket.AF_INET


def bound(order, kind, port):
    link = socket.socket(family(order), kind)
    try:
        link.bind((order["address"], port))
        if kind == socket.SOCK_DGRAM:
            level, option = MTU_DISCOVER[family(order)]
            link.setsockopt(level, option, PROBE)
    except OSError:
        link.close()
        raise
    return link


def called(order, what):
    """What the side that calls proves with, and what it gets."""
    caller, other = (order["me"], order["peer"]) if order["call"] else (order["peer"], order["me"])
    return proof(order["key"], what, caller, other), proof(order["key"], what + " answer", other, caller)


def flood(link):
    block, end = bytes(BLOCK), time.monotonic() + FLOOD_S
    while time.monotonic() < end:
        link.sendall(block)
    link.shutdown(socket.SHUT_WR)


def drain(link):
    """Mbit/s of what arrives until the other side ends; the begin does not count."""
    buffer, count, begin, last = bytearray(BLOCK), 0, None, 0.0
    started = time.monotonic()
    while True:
        got = link.recv_into(buffer)
        now = time.monotonic()
        if not got:
            return 8e-6 * count / max(last - begin, 1e-6) if count else 0.0
        if begin is None and now - started > WARM_S:
            begin = now
        elif begin is not None:
            count, last = count + got, now


def answer(order):
    """Answer the peer until it says that it is done."""
    listening = datagrams = None
    for port in order["ports"]:
        try:
            listening, datagrams = bound(order, socket.SOCK_STREAM, port), bound(order, socket.SOCK_DGRAM, port)
            break
        except OSError:
            continue
    if datagrams is None:
        return {"error": "no free port"}
    token = called(order, "ping")[0][:16]

    def echo():
        while True:
            try:
                data, sender = datagrams.recvfrom(1 << 16)
                if data[:16] == token:
                    datagrams.sendto(data, sender)
            except OSError:  # too long for this side
                continue

    threading.Thread(target=echo, daemon=True).start()
    listening.listen(8)
    listening.settimeout(order["wait"])
    steps = {called(order, what)[0]: (what, called(order, what)[1]) for what in ("begin", "up", "down", "end")}
    while True:
        link, _ = listening.accept()
        with link:
            link.settimeout(STALL_S)
            try:
                what, reply = steps.get(receive(link), ("", b""))
                link.sendall(reply)
                if what == "up":
                    link.sendall(b"%.3f\n" % drain(link))
                elif what == "down":
                    flood(link)
                elif what == "end":
                    return {}
            except OSError:
                continue


def connect(order, port, what):
    link = socket.create_connection((order["peer_address"], port), timeout=STALL_S, source_address=(order["address"], 0))
    mine, reply = called(order, what)
    try:
        link.sendall(mine)
        if receive(link) != reply:
            raise OSError("another program answers")
    except OSError:
        link.close()
        raise
    return link


def reached(order):
    """The port at which the peer answers, which may begin later."""
    end, problem = time.monotonic() + order["wait"], "timed out"
    while time.monotonic() < end:
        for port in order["ports"]:
            try:
                connect(order, port, "begin").close()
                return port
            except OSError as error:
                problem = error.strerror or str(error)
        time.sleep(0.1)
    raise OSError("no connection in %d s: %s" % (order["wait"], problem))


def ping(link, token, count, size):
    """(round trips in seconds, pings that were lost). One that comes late is not lost."""
    sent, trips, waiting, number = {}, {}, {}, 0
    padding = bytes(max(size - 20, 0))
    last = time.monotonic()
    while len(trips) < count and (number < count or time.monotonic() - last < LOST_S):
        now = time.monotonic()
        waiting = {each: at for each, at in waiting.items() if now - at < LATE_S}
        while number < count and len(waiting) < IN_FLIGHT:
            sent[number] = waiting[number] = last = time.monotonic()
            try:
                link.send(token + struct.pack("!I", number) + padding)
            except OSError:  # longer than this side's MTU, or refused
                pass
            number += 1
        if select.select([link], [], [], 0.02)[0]:
            try:
                data, now = link.recv(1 << 16), time.monotonic()
            except OSError:
                continue
            if data[:16] == token and len(data) == 20 + len(padding):
                (back,) = struct.unpack("!I", data[16:20])
                waiting.pop(back, None)
                if back in sent:
                    trips.setdefault(back, now - sent[back])
    return sorted(trips.values()), count - len(trips)


def call(order):
    port = reached(order)
    token = called(order, "ping")[0][:16]
    with bound(order, socket.SOCK_DGRAM, 0) as link:
        link.connect((order["peer_address"], port))
        trips, lost = ping(link, token, PINGS, 64)
        _, big_lost = ping(link, token, BIG_PINGS, order["mtu"] - HEADERS[family(order)])
    up = down = 0.0
    for _ in range(order["times"] if 2 * big_lost < BIG_PINGS else 0):  # TCP would wait for packets that never arrive
        with connect(order, port, "up") as link:
            flood(link)
            up = max(up, float(link.makefile().readline(32) or 0))
        with connect(order, port, "down") as link:
            down = max(down, drain(link))
    connect(order, port, "end").close()
    latency = 1e6 * trips[0] if trips else 0.0
    pings = {"latency_us": latency, "sent": PINGS, "lost": lost, "big_sent": BIG_PINGS, "big_lost": big_lost}
    return dict(pings, up_mbps=up, down_mbps=down)


def pair(order):
    try:
        return call(order) if order["call"] else answer(order)
    except (OSError, ValueError) as error:
        return {"error": str(error)[:300]}


if __name__ == "__main__":
    ordered = json.load(sys.stdin)
    signal.alarm(int(ordered["seconds"]))
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps({"host": host, "pair": pair}[ordered["task"]](ordered)), END))
