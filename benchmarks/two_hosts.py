"""The engine between hosts, next to Open MPI, Gloo and what iperf3 moves both ways at once over the same network.

    sudo python3 benchmarks/two_hosts.py            # needs root, iperf3 and the engine's environment (make setup)
    sudo COLLECTIVE_SUM_ORDER=ranks python3 benchmarks/two_hosts.py --hosts 4 --ranks 2 --sizes 64M --peers none --rate 400mbit

Network namespaces on a bridge stand for two hosts or more, with one rank each or more. iperf3, from every host to the next at once, and
the benchmark (`python -m benchmarks.engine`, in which engine and peers take turns) run one after the other, again and again; medians count.
Everything shares this machine's cores, so the network is as fast as they copy; `--rate 4gbit` makes it one that is slower than they are.
Bus bandwidth is that of a host's network: size / time * 2 (H - 1) / H with H hosts, the least that each must send.
The bars: 85 % of iperf3 and twice the faster peer from 8 MiB on, faster than both peers at 4 KiB. Nothing of it is left at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
ENGINE = CHECKOUT / ".venv-engine" / "bin"
NETWORK = "10.213.77.{}"
#: Seconds of one measurement of iperf3, of which the first, in which TCP still grows its windows, does not count.
IPERF_SECONDS, IPERF_OMITTED = 3, 1
LARGE, SMALL = 8 << 20, 4 << 10
OF_LINK, OF_PEER = 0.85, 2.0


def run(*command: str, **more: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


class Hosts:
    """Namespaces, and a bridge in one more between them."""

    def __init__(self, count: int) -> None:
        self.names = [f"two-hosts-{os.getpid()}-{number}" for number in range(count)]
        self.addresses = [NETWORK.format(number + 1) for number in range(count)]
        self.bridge = f"two-hosts-{os.getpid()}-bridge"

    def make(self, rate: str | None, congestion: str) -> None:
        for name in [*self.names, self.bridge]:
            run("ip", "netns", "add", name)
        run("ip", "-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{number}"
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", self.bridge)
            run("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            self.execute(name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}")
            if rate:
                for space, end in ((name, "eth0"), (self.bridge, port)):
                    run("tc", "-n", space, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "20ms")

    @staticmethod
    def execute(name: str, *command: str) -> str:
        return run("ip", "netns", "exec", name, *command)

    def remove(self) -> None:
        for name in [*self.names, self.bridge]:
            for pid in subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(int(pid), 9)
            subprocess.run(("ip", "netns", "delete", name), check=False)


def both_ways(hosts: Hosts, streams: int) -> float:
    """GB/s that iperf3 moves from a host to the next, all of them at the same time: the mean, for it often favours one."""
    servers = []
    for name in hosts.names:
        serve = ("ip", "netns", "exec", name, "iperf3", "-s", "-1", "--forceflush")
        servers.append(subprocess.Popen(serve, stdout=subprocess.PIPE, text=True))
        next(line for line in servers[-1].stdout or () if "listening" in line)
    options = ("-J", "-t", str(IPERF_SECONDS), "-O", str(IPERF_OMITTED), "-P", str(streams))
    clients = []
    for number, name in enumerate(hosts.names):
        to = hosts.addresses[(number + 1) % len(hosts.names)]
        clients.append(subprocess.Popen(("ip", "netns", "exec", name, "iperf3", "-c", to, *options), stdout=subprocess.PIPE, text=True))
    ends = [json.loads(client.communicate()[0]) for client in clients]
    for server in servers:
        server.communicate()
    if failed := [end["error"] for end in ends if "error" in end]:
        sys.exit(f"iperf3: {failed[0]}")
    return statistics.mean(end["end"]["sum_received"]["bits_per_second"] for end in ends) / 8e9


def collectives(hosts: Hosts, agent: Path, ranks: int, bench: list[str]) -> list[dict[str, Any]]:
    """The results of one run of the benchmark with so many ranks on each host."""
    mca = {
        "plm_rsh_agent": str(agent),
        "pml": "ob1",
        "btl": "self,tcp",
        "btl_tcp_if_include": NETWORK.format(0) + "/24",
        "oob_tcp_if_include": NETWORK.format(0) + "/24",
    }
    options = [word for name, value in mca.items() for word in ("--mca", name, value)]
    options += [word for name in os.environ if name.startswith("COLLECTIVE_") for word in ("-x", name)]
    command = [str(ENGINE / "mpirun"), "--allow-run-as-root", "--bind-to", "none", "--wdir", str(CHECKOUT), *options]
    command += ["-H", ",".join(f"{address}:{ranks}" for address in hosts.addresses), "-np", str(ranks * len(hosts.names))]
    document = json.loads(hosts.execute(hosts.names[0], *command, str(ENGINE / "python"), "-m", "benchmarks.engine", *bench, "--json"))
    if document["hosts"] != len(hosts.names) or document["missing"]:
        sys.exit(f"not what was to be measured: {document['hosts']} hosts, missing {document['missing']}")
    results: list[dict[str, Any]] = document["results"]
    return results


def medians(runs: list[list[dict[str, Any]]]) -> Iterator[tuple[int, dict[str, float]]]:
    """By size, the median of the runs' microseconds, by side."""
    for size in dict.fromkeys(result["bytes"] for result in runs[0]):
        sides: dict[str, list[float]] = {}
        for result in (each for results in runs for each in results if each["bytes"] == size):
            name = result["engine"] if result["engine"] != "collective_core" else f"{result['engine']} ({result['memory']})"
            sides.setdefault(name, []).append(result["median_us"])
        yield size, {name: statistics.median(times) for name, times in sides.items()}


def verdicts(size: int, times: dict[str, float], link: float, hosts: int) -> list[str]:
    """What the bars say of the engine's two memories at this size; empty for sizes between them."""
    peers = [time for name, time in times.items() if not name.startswith("collective_core")]
    told = []
    for name, spent in times.items():
        if not name.startswith("collective_core"):
            continue
        if size >= LARGE:
            share = bus_bandwidth(size, spent, hosts) / link
            told.append(f"{name}: {share:.0%} of iperf3 ({OF_LINK:.0%}): {_word(share >= OF_LINK)}")
        if peers and (size >= LARGE or size == SMALL):
            least, ahead = OF_PEER if size >= LARGE else 1.0, min(peers) / spent
            told.append(f"{name}: {ahead:.2f} x the faster peer ({least:g} x): {_word(ahead >= least)}")
    return told


def bus_bandwidth(size: int, microseconds: float, hosts: int) -> float:
    """GB/s that each host must send at the least."""
    return size / microseconds / 1e3 * 2 * (hosts - 1) / hosts


def _word(good: bool) -> str:
    return "reached" if good else "missed"


def main() -> int:
    """Measure, print, and hold against the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--sizes", default="4K,1M,8M,64M")
    parser.add_argument("--peers", default="mpi,gloo", help="of the benchmark, or none (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of iperf3 and of the benchmark, in turn")
    parser.add_argument("--rounds", type=int, default=7, help="within one run of the benchmark")
    parser.add_argument("--streams", type=int, default=1, help="connections of iperf3 in each direction")
    parser.add_argument("--rate", help="of the link, as tc writes it (10gbit)")
    present = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    parser.add_argument("--congestion", default=present, help="TCP's congestion control, for all sides (this machine's own: %(default)s)")
    wanted = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("two_hosts.py makes network namespaces, which only root may: run it with sudo")
    if wanted.hosts < 2 or wanted.ranks < 1:
        parser.error("--hosts is 2 or more, --ranks 1 or more")
    lacking = [name for name in ("ip", "tc", "iperf3", "unshare") if not shutil.which(name)]
    if lacking or not (ENGINE / "mpirun").exists():
        sys.exit(f"missing: {', '.join(lacking) or 'the environment of the engine'}; apt install iproute2 iperf3, make setup")
    hosts = Hosts(wanted.hosts)
    bench = ["--sizes", wanted.sizes, "--rounds", str(wanted.rounds), "--peers", wanted.peers]
    try:
        hosts.make(wanted.rate, wanted.congestion)
        with tempfile.TemporaryDirectory() as folder:
            agent = Path(folder) / "agent"  # what mpirun takes for ssh
            name = f"two-hosts-{os.getpid()}-$((${{1##*.}} - 1))"  # the namespace of an address
            agent.write_text(f'#!/bin/sh\nname={name}\nshift\nexec ip netns exec $name unshare --uts sh -c "hostname $name; $*"\n')
            agent.chmod(0o700)
            links, runs = [], []
            for _ in range(wanted.runs):
                links.append(both_ways(hosts, wanted.streams))
                runs.append(collectives(hosts, agent, wanted.ranks, bench))
    finally:
        hosts.remove()
    link = statistics.median(links)
    per_host = f"{wanted.hosts} hosts with {wanted.ranks} rank{'s' * (wanted.ranks > 1)} each"
    print(f"{per_host}, {os.cpu_count()} processors for all, median of {wanted.runs} runs of {wanted.rounds} rounds")
    around = f"iperf3 -P {wanted.streams} from every host to the next, TCP {wanted.congestion}"
    print(f"{around}: {link:.2f} GB/s each ({min(links):.2f}–{max(links):.2f})")
    missed = False
    for size, times in medians(runs):
        print(f"{size} bytes")
        for name, spent in times.items():
            print(f"  {name:28} {spent:10.1f} us   {bus_bandwidth(size, spent, wanted.hosts):6.2f} GB/s of bus bandwidth")
        for line in verdicts(size, times, link, wanted.hosts):
            print(f"  {line}")
            missed = missed or line.endswith("missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
