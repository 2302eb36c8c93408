"""Measurements of `provision certify` on one host: its cores, GPUs and memory, or its network to one peer. It judges nothing.

Python 3.6+, standard library only, and for GPUs PyTorch where the Python that runs this has it. The order is JSON on standard input, with
``seconds`` after which the kernel ends the process, ``times``, how long or often is measured, as the best counts, and one of::

    {"task": "host", "address": …, "torch": bool}
    {"task": "pair", "call": bool, "key": hex, "me": name, "peer": name, "address": …, "peer_address": …, "ports": [n, …], "mtu": n,
     "wait": s}

It prints what `HostMeasured` and `PairMeasured` of `doctor/certify/model.py` read; of a pair the side that calls measures. Speeds of
cores are by processor time, of the best of many samples: what else runs on the host does not make a core slow.
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
CORE_S, DEVICE_S, MAX_CORES = 0.4, 3.0, 1024
UNKNOWN = "unknown"  # model of a GPU that does not start
COPIED, GPU_COPIED = 32 << 20, 1 << 28  # bytes: more than caches hold
PINGS, BIG_PINGS, IN_FLIGHT = 500, 10, 8
LATE_S, LOST_S = 0.1, 2.0  # after which another ping is sent, and the last one is lost
FLOOD_S, WARM_S, STALL_S, BLOCK = 1.0, 0.3, 6, 1 << 18  # of one direction, whose begin does not count
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
# Family → level and number of its MTU_DISCOVER, bytes of its headers. PROBE: do not fragment, and do not ask what is known of the path.
DISCOVER, PROBE = {socket.AF_INET: (socket.IPPROTO_IP, 10, 28), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 48)}, 3


def processor_time():
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def matrices():
    numbers = [(7 * at * at + 13 * at) % 2039 for at in range(2 * SIZE * SIZE)]
    rows = [numbers[at : at + SIZE] for at in range(0, 2 * SIZE * SIZE, SIZE)]
    return rows[:SIZE], rows[SIZE:]  # the second one by its columns


def product():
    """The checksum of a product of whole numbers: every Python has the same."""
    left, right = matrices()
    return zlib.crc32(repr([[sum(map(mul, row, column)) for column in right] for row in left]).encode())


def core_speed(core, seconds):
    """Products of one core per second of its time, and how many were wrong."""
    os.sched_setaffinity(0, {core})
    best, wrong, made, end = 1e9, 0, 0, processor_time() + seconds
    while processor_time() < end or made < 5:
        begin = processor_time()
        wrong += product() != CHECKSUM
        made, best = made + 1, min(best, processor_time() - begin)
    return {"speed": 1 / max(best, 1e-9), "wrong": wrong, "made": made}


def core_speeds(seconds):
    """All cores at the same time, in a process each."""
    running = []
    for core in sorted(os.sched_getaffinity(0))[:MAX_CORES]:
        source, sink = os.pipe()
        if not os.fork():
            try:
                os.write(sink, json.dumps(core_speed(core, seconds)).encode())
            finally:
                os._exit(0)
        os.close(sink)
        running.append((core, source))
    for core, source in running:
        with os.fdopen(source, "rb") as pipe:
            found = json.loads(pipe.read().decode() or "{}")  # its process was ended, or may not run there
        place = "/sys/devices/system/cpu/cpu%d/" % core
        lines = [line.partition(":") for line in read("/proc/cpuinfo").splitlines()]
        models = sorted({value.strip() for name, _, value in lines if name.strip() in ("model name", "CPU part", "cpu")})
        kind = [platform.machine(), read(place + "cpufreq/cpuinfo_max_freq") or read(place + "cpu_capacity"), platform.python_version()]
        yield dict(found, core=core, kind=", ".join(kind + models)[:200])


def copy_speed(times):
    """GB/s of a copy in memory by one core."""
    source, target, best = memoryview(bytearray(COPIED)), memoryview(bytearray(COPIED)), 1e9
    for _ in range(8 * times):
        begin = processor_time()
        target[:] = source
        best = min(best, processor_time() - begin)
    return COPIED / max(best, 1e-9) / 1e9


def torch_product(torch, device, size, seconds):
    """Products of whole numbers, which float32 and TF32 hold exactly: the median in GFLOPS, and how many were wrong."""
    numbers = torch.Generator().manual_seed(7)
    left, right = (torch.randint(-2, 3, (size, size), generator=numbers).float() for _ in range(2))
    rows, columns = left.double() @ right.double().sum(1), left.double().sum(0) @ right.double()
    left, right = left.to(device), right.to(device)
    wrong, nan, took, end = 0, 0, [], time.monotonic() + seconds
    while time.monotonic() < end or len(took) < 5:
        begin = time.perf_counter()
        made = left @ right
        if device != "cpu":
            torch.cuda.synchronize(device)
        took.append(max(time.perf_counter() - begin, 1e-9))
        nan += bool(torch.isnan(made).any())
        made = made.double()
        wrong += not (torch.equal(made.sum(1).cpu(), rows) and torch.equal(made.sum(0).cpu(), columns))
    return {"speed": 2e-9 * size**3 / sorted(took)[len(took) // 2], "wrong": wrong, "nan": nan, "made": len(took)}


def torch_device(torch, number):
    device, name = "cuda:%d" % number, UNKNOWN
    torch.backends.cuda.matmul.allow_tf32 = True

    def copied(source, target):
        best = 1e9
        for _ in range(6):  # the first one is warm-up
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return GPU_COPIED / best / 1e9

    try:
        name = torch.cuda.get_device_name(number)
        found = torch_product(torch, device, 8192, DEVICE_S)
        here, there = (torch.empty(GPU_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
        pinned = torch.empty(GPU_COPIED, dtype=torch.uint8, pin_memory=True)
        memory = 2 * copied(here, there)  # each byte is read and written
        return dict(found, name=name, memory_gbs=memory, to_gbs=copied(pinned, here), from_gbs=copied(here, pinned))
    except Exception as error:  # CUDA's errors are of several types
        return {"name": name, "error": str(error)[:300]}


def torch_devices():
    try:
        import torch

        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(lambda number: torch_device(torch, number), range(torch.cuda.device_count())))
    except ModuleNotFoundError:
        return []
    except Exception as error:
        return [{"name": UNKNOWN, "error": str(error)[:300]}]


def interface_of(address):
    """MTU and Mbit/s of the interface with this address; 0 where it is not known, the speed also where it is not of a device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            request, place = struct.pack("256s", name.encode()[:15]), "/sys/class/net/%s/" % name
            try:
                if socket.inet_ntoa(fcntl.ioctl(link, SIOCGIFADDR, request)[20:24]) == address:
                    speed = read(place + "speed") if os.path.exists(place + "device") else ""
                    return struct.unpack("i", fcntl.ioctl(link, SIOCGIFMTU, request)[16:20])[0], int(speed) if speed.isdigit() else 0
            except OSError:
                continue
    return 0, 0


def host(order):
    mtu, mbps = interface_of(order["address"])
    found = {"mtu": mtu, "mbps": mbps, "cores": list(core_speeds(CORE_S * order["times"])), "memory_gbs": copy_speed(order["times"])}
    return dict(found, devices=torch_devices() if order["torch"] else [])


def bound(order, kind, port):
    link = socket.socket(socket.AF_INET6 if ":" in order["address"] else socket.AF_INET, kind)
    try:
        link.bind((order["address"], port))
        if kind == socket.SOCK_DGRAM:
            link.setsockopt(*DISCOVER[link.family][:2], PROBE)
    except OSError:
        link.close()
        raise
    return link


def proofs(order, what):
    """What the side that calls proves with, and what it gets."""
    caller, other = (order["me"], order["peer"]) if order["call"] else (order["peer"], order["me"])
    return proof(order["key"], what, caller, other), proof(order["key"], what + " answer", other, caller)


def flood(link):
    end = time.monotonic() + FLOOD_S
    while time.monotonic() < end:
        link.sendall(bytes(BLOCK))
    link.shutdown(socket.SHUT_WR)


def drain(link):
    """Mbit/s of what arrives until the other side ends; the begin does not count."""
    buffer, count, begin, started = bytearray(BLOCK), 0, None, time.monotonic()
    while True:
        got, now = link.recv_into(buffer), time.monotonic()
        if not got:
            return 8e-6 * count / max(last - begin, 1e-6) if count else 0.0
        if begin is not None:
            count, last = count + got, now
        elif now - started > WARM_S:
            begin = now


def answer(order):
    """Answer the peer until it says that it is done."""
    for port in order["ports"]:
        try:
            listening, datagrams = bound(order, socket.SOCK_STREAM, port), bound(order, socket.SOCK_DGRAM, port)
            break
        except OSError as error:
            problem = error
    else:
        raise problem
    token = proofs(order, "ping")[0][:16]

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
    steps = {proofs(order, what)[0]: (what, proofs(order, what)[1]) for what in ("begin", "up", "down", "end")}
    what = ""
    while what != "end":
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
            except OSError:
                continue
    return {}


def connect(order, port, what):
    link = socket.create_connection((order["peer_address"], port), timeout=STALL_S, source_address=(order["address"], 0))
    mine, reply = proofs(order, what)
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
    """(The shortest time there and back in µs, pings that were lost). One that comes late is not lost."""
    sent, best, back, waiting, number, padding = {}, 1e12, set(), {}, 0, bytes(max(size - 20, 0))
    last = time.monotonic()
    while len(back) < count and (number < count or time.monotonic() - last < LOST_S):
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
            which = struct.unpack("!I", data[16:20])[0] if data[:16] == token and len(data) == 20 + len(padding) else None
            if which in sent:
                waiting.pop(which, None)
                back.add(which)
                best = min(best, 1e6 * (now - sent[which]))
    return best if back else 0.0, count - len(back)


def call(order):
    port, token, up, down = reached(order), proofs(order, "ping")[0][:16], 0.0, 0.0
    with bound(order, socket.SOCK_DGRAM, 0) as link:
        link.connect((order["peer_address"], port))
        latency, lost = ping(link, token, PINGS, 64)
        _, big_lost = ping(link, token, BIG_PINGS, order["mtu"] - DISCOVER[link.family][2])
    for _ in range(order["times"] if 2 * big_lost < BIG_PINGS else 0):  # TCP would wait for packets that never arrive
        with connect(order, port, "up") as link:
            flood(link)
            up = max(up, float(link.makefile().readline(32) or 0))
        with connect(order, port, "down") as link:
            down = max(down, drain(link))
    connect(order, port, "end").close()
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
