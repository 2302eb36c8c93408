"""The engine between two hosts, next to Open MPI, Gloo and what iperf3 moves both ways at once over the same link.

    sudo python3 benchmarks/two_hosts.py            # needs root, iperf3 and the engine's environment (make setup)

Two network namespaces with a pair of virtual interfaces between them stand for two hosts, with one rank each. iperf3 and the benchmark
(`python -m benchmarks.engine`, in which engine and peers take turns) run one after the other, again and again; medians count.
Everything shares this machine's cores, so the link is as fast as they copy; `--rate 10gbit` makes it one that is slower than they are. The
bars: 85 % of iperf3 and twice the faster peer from 8 MiB on, faster than both peers at 4 KiB. Nothing of it is left at the end.
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
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self.names = [f"two-hosts-{os.getpid()}-{side}" for side in "ab"]
        self.addresses = [NETWORK.format(number) for number in (1, 2)]

    def make(self, rate: str | None, congestion: str) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        ends = [f"th{os.getpid() % 100000}{side}" for side in "ab"]
        run("ip", "link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", ends[1], "netns", self.names[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/30", "dev", end)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", end, "up")
            self.execute(name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}")
            if rate:
                run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "20ms")

    @staticmethod
    def execute(name: str, *command: str) -> str:
        return run("ip", "netns", "exec", name, *command)

    def remove(self) -> None:
        for name in self.names:
            for pid in subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(int(pid), 9)
            subprocess.run(("ip", "netns", "delete", name), check=False)


def both_ways(hosts: Hosts, streams: int) -> float:
    """GB/s each way that iperf3 moves in both directions at once: the mean, for it often favours one."""
    serve = ("ip", "netns", "exec", hosts.names[1], "iperf3", "-s", "-1", "--forceflush")
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    next(line for line in server.stdout or () if "listening" in line)
    options = ("--bidir", "-J", "-t", str(IPERF_SECONDS), "-O", str(IPERF_OMITTED), "-P", str(streams))
    end = json.loads(hosts.execute(hosts.names[0], "iperf3", "-c", hosts.addresses[1], *options))["end"]
    server.communicate()
    return statistics.mean(end[way]["bits_per_second"] for way in ("sum_received", "sum_received_bidir_reverse")) / 8e9


def collectives(hosts: Hosts, agent: Path, sizes: str, rounds: int) -> list[dict[str, Any]]:
    """The results of one run of the benchmark with a rank on each host."""
    mca = {
        "plm_rsh_agent": str(agent),
        "pml": "ob1",
        "btl": "self,tcp",
        "btl_tcp_if_include": NETWORK.format(0) + "/30",
        "oob_tcp_if_include": NETWORK.format(0) + "/30",
    }
    options = [word for name, value in mca.items() for word in ("--mca", name, value)]
    command = [str(ENGINE / "mpirun"), "--allow-run-as-root", "--bind-to", "none", "--wdir", str(CHECKOUT), *options]
    command += ["-H", ",".join(hosts.addresses), "-np", "2"]
    bench = [str(ENGINE / "python"), "-m", "benchmarks.engine", "--sizes", sizes, "--rounds", str(rounds), "--json"]
    document = json.loads(hosts.execute(hosts.names[0], *command, *bench))
    if document["hosts"] != 2 or document["missing"]:
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


def verdicts(size: int, times: dict[str, float], link: float) -> list[str]:
    """What the bars say of the engine's two memories at this size; empty for sizes between them."""
    peer = min(time for name, time in times.items() if not name.startswith("collective_core"))
    told = []
    for name, spent in times.items():
        if not name.startswith("collective_core"):
            continue
        if size >= LARGE:
            share, ahead = size / spent / 1e3 / link, peer / spent
            good = share >= OF_LINK and ahead >= OF_PEER
            told.append(f"{name}: {share:.0%} of iperf3 ({OF_LINK:.0%}), {ahead:.2f} x the faster peer ({OF_PEER:g} x): {_word(good)}")
        elif size == SMALL:
            told.append(f"{name}: {peer / spent:.2f} x the faster peer (1 x): {_word(peer > spent)}")
    return told


def _word(good: bool) -> str:
    return "reached" if good else "missed"


def main() -> int:
    """Measure, print, and hold against the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4K,1M,8M,64M")
    parser.add_argument("--runs", type=int, default=3, help="of iperf3 and of the benchmark, in turn")
    parser.add_argument("--rounds", type=int, default=7, help="within one run of the benchmark")
    parser.add_argument("--streams", type=int, default=1, help="connections of iperf3 in each direction")
    parser.add_argument("--rate", help="of the link, as tc writes it (10gbit)")
    present = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    parser.add_argument("--congestion", default=present, help="TCP's congestion control, for all sides (this machine's own: %(default)s)")
    wanted = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("two_hosts.py makes network namespaces, which only root may: run it with sudo")
    lacking = [name for name in ("ip", "tc", "iperf3", "unshare") if not shutil.which(name)]
    if lacking or not (ENGINE / "mpirun").exists():
        sys.exit(f"missing: {', '.join(lacking) or 'the environment of the engine'}; apt install iproute2 iperf3, make setup")
    hosts = Hosts()
    try:
        hosts.make(wanted.rate, wanted.congestion)
        with tempfile.TemporaryDirectory() as folder:
            agent = Path(folder) / "agent"  # what mpirun takes for ssh
            agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {hosts.names[1]} unshare --uts sh -c "hostname two-hosts-b; $*"\n')
            agent.chmod(0o700)
            links, runs = [], []
            for _ in range(wanted.runs):
                links.append(both_ways(hosts, wanted.streams))
                runs.append(collectives(hosts, agent, wanted.sizes, wanted.rounds))
    finally:
        hosts.remove()
    link = statistics.median(links)
    print(f"two hosts, one rank each, {os.cpu_count()} processors for all, median of {wanted.runs} runs of {wanted.rounds} rounds")
    print(f"iperf3 --bidir -P {wanted.streams}, TCP {wanted.congestion}: {link:.2f} GB/s each way ({min(links):.2f}–{max(links):.2f})")
    missed = False
    for size, times in medians(runs):
        print(f"{size} bytes")
        for name, spent in times.items():
            print(f"  {name:28} {spent:10.1f} us   {size / spent / 1e3:6.2f} GB/s of bus bandwidth")
        for line in verdicts(size, times, link):
            print(f"  {line}")
            missed = missed or line.endswith("missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
