"""Decisions of a certification: what is measured next, and what is wrong. Pure: measurements in, rounds and findings out.

After the hosts themselves, rounds of a tournament pair every host with log2(n) others, of three to five hosts with all. A host that is
bad is bad with all of them, a link with one only: two more rounds pair suspect hosts with good ones, and the ends of suspect links again,
before anything is accused.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

from provision.base.text import joined
from provision.catalog import OURS, Catalog
from provision.catalog.models import GpuHealth
from provision.doctor.certify.model import Device, Found, Group, HostMeasured, Pair

EXTRA_ROUNDS = 2  # that pin down what the tournament has shown
_SHARE_BAD = 0.6  # of a guilty host's partners; noise of a busy machine meets some pairs
_ENOUGH = 3  # cores, hosts or devices of a kind: of fewer none is an outlier
_SLOW_ALLREDUCE, _SLOW_ALLREDUCE_US = 5.0, 5000.0  # times what is usual for as many hosts, and that much more: they may share cores
_MEASURED_AGAIN = ("slow-core", "slow-memory", "slow-gpu", "slow-gpu-memory", "slow-pcie", "core-failed")
_REPLACE = "take the host out of use; replace the part, or ask its vendor"
_Key = TypeVar("_Key")
_Link = tuple[str, str]
_Place = tuple[str, int]  # host, number of its core or GPU


class Round(NamedTuple):
    """What is measured at the same time: hosts by themselves, and pairs (the side that calls, the other one)."""

    hosts: tuple[str, ...]
    pairs: tuple[_Link, ...]


@dataclass
class State:
    """All measurements so far.

    Attributes:
        hosts: in the order of the inventory.
        seed: of the choice of partners.
        catalog: with what GPUs and networks are expected to reach.
        measured: host → its measurements.
        lost: host → why it did not answer.
    """

    hosts: Sequence[str]
    seed: int = 0
    catalog: Catalog = OURS
    measured: dict[str, list[HostMeasured]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    rounds: int = 0

    @property
    def able(self) -> list[str]:
        """The hosts that have answered."""
        return [host for host in self.hosts if host in self.measured and host not in self.lost]

    @property
    def planned(self) -> int:
        """Rounds of hosts and tournament; what comes later is measured because of a suspicion."""
        count = len(self.hosts)
        return 1 + (count - 1 + count % 2 if 2 < count < 6 else (count - 1).bit_length())

    def mtu(self, *hosts: str) -> int:
        """The smallest MTU that these hosts say they have."""
        return min((each.mtu for host in hosts for each in self.measured.get(host, ())[-1:] if each.mtu), default=0) or 1500

    @property
    def answered(self) -> list[Pair]:
        """The pairs that have figures."""
        return [pair for pair in self.pairs if pair.figures]


def next_round(state: State) -> Round | None:
    """What to measure next; None when everything is decided."""
    if state.rounds == 0:
        return Round(tuple(host for host in state.hosts if host not in state.lost), ())
    if state.rounds < state.planned:
        return Round((), tuple(_tournament(state.hosts, state.rounds - 1, state.seed, set(state.able))))
    if state.rounds >= state.planned + EXTRA_ROUNDS:
        return None
    slow = {each.host: None for each in _of_hosts(state) if each.host and each.id in _MEASURED_AGAIN}
    busy = {host for host in slow if state.rounds > state.planned and len(state.measured[host]) == 1}  # it is their last occasion
    pairs = tuple(_pins(state, slow, busy))
    again = tuple(host for host in slow if all(host not in pair for pair in pairs))
    return Round(again, pairs) if again or pairs else None


def _tournament(hosts: Sequence[str], number: int, seed: int, able: Collection[str]) -> Iterator[_Link]:
    """A round of a tournament in which every two hosts meet once; which of its rounds come first depends on the seed."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    turn = random.Random(seed).sample(range(len(seats) - 1), len(seats) - 1)[number]  # noqa: S311  no secret
    circle = [seats[0], *seats[1 + turn :], *seats[1 : 1 + turn]]
    for one, other in zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True):
        if one in able and other in able and one and other:
            yield (one, other) if (number + seats.index(one)) % 2 else (other, one)


def _pins(state: State, slow: Collection[str], busy: Collection[str]) -> Iterator[_Link]:
    """Pairs of suspects: links once more, hosts with good ones, as also the ends of links that have not met another good one."""
    hosts, links, lonely = dict[str, None](), dict[_Link, None](), set[_Link]()
    for symptom in sorted(_SYMPTOMS, key=lambda each: each.enough):  # what chance shows least comes first
        culprits, bad = _culprits(state, symptom, final=False), set(map(id, symptom.bad(state)))
        fine = {host for pair in state.pairs if id(pair) not in bad for host in pair.link}
        hosts |= dict.fromkeys(culprits.guilty)
        links |= dict.fromkeys(culprits.links)
        lonely |= {link for link in culprits.links if not set(link) <= fine}
    times = Counter(pair.link for pair in state.pairs)
    clean = [host for host in state.able if host not in {*slow, *hosts, *(host for link in links for host in link)}]
    paired = set(busy)
    for link in sorted(links, key=lambda link: -times[link]):  # those that were bad again first
        if not paired & set(link) and (link not in lonely or not clean):
            paired |= set(link)
            yield link
    for host in [*hosts, *(host for link in lonely for host in link)]:
        if host not in paired and clean:
            other = min(clean, key=lambda one: times[min(one, host), max(one, host)])
            clean.remove(other)
            paired.add(host)
            yield host, other


class Symptom(NamedTuple):
    """What can be wrong between two hosts. ``bad``: the measurements that show it; ``says``: in words; ``enough``: bad measurements of a
    guilty link, the more the more often a healthy one shows it, too."""

    id: str
    enough: int
    bad: Callable[[State], Iterable[Pair]]
    says: Callable[[State, Sequence[Pair]], str]
    hint: str


class Culprits(NamedTuple):
    """Hosts and links with the bad measurements that they explain; or (``most``) that most are bad, whichever host is left out."""

    guilty: dict[str, list[Pair]]
    links: dict[_Link, list[Pair]]
    most: list[Pair]


def _culprits(state: State, symptom: Symptom, *, final: bool) -> Culprits:
    """Who explains the bad measurements. ``final``: only what was measured again, and was bad again."""
    bad = set(map(id, symptom.bad(state)))
    of, bad_of = (Counter(host for pair in state.pairs if every or id(pair) in bad for host in pair.link) for every in (True, False))
    if len(state.able) > 2 and all(2 * (len(bad) - bad_of[host]) > len(state.pairs) - of[host] for host in ("", *state.able)):
        return Culprits({}, {}, [pair for pair in state.pairs if id(pair) in bad])
    left, guilty = defaultdict[_Link, list[Pair]](list), dict[str, list[Pair]]()
    for pair in state.pairs:
        left[pair.link].append(pair)
    suspect = {link for link, pairs in left.items() if all(id(pair) in bad for pair in pairs)}
    pinned = {pair.link for pair in state.pairs if pair.round > state.planned}
    while True:
        of_host = defaultdict[str, list[_Link]](list)
        for link in left:
            for host in link:
                of_host[host].append(link)
        shares = {
            host: sum(link in suspect for link in links) / len(links)
            for host, links in of_host.items()
            if sum(link in suspect for link in links) > 1
            and any(link in suspect and link in pinned for link in links) >= (final or any(link in pinned for link in links))
        }
        found = max(shares, key=lambda host: shares[host], default=None)
        if found is None or shares[found] < _SHARE_BAD:
            break
        guilty[found] = [pair for link in of_host[found] if link in suspect for pair in left[link]]
        left = defaultdict(list, {link: pairs for link, pairs in left.items() if found not in link})
    return Culprits(guilty, {link: left[link] for link in left if link in suspect and len(left[link]) >= symptom.enough * final}, [])


def _slow(state: State) -> Iterator[Pair]:
    """Compared with other pairs of interfaces of that speed, and with what these are made for; without those to which nothing was sent."""
    limits, alike, cut = state.catalog.gpu_health().network, defaultdict[float, list[Pair]](list), set(map(id, _cut(state)))
    for pair in (pair for pair in state.answered if id(pair) not in cut):
        alike[min(state.measured[host][-1].mbps for host in pair.link)].append(pair)  # 0: not known of both
    for nominal, pairs in alike.items():
        least = limits.slow_share * median(pair.measured.mbps for pair in pairs)
        least = max(least, limits.tcp_share * min(nominal, limits.tcp_max_mbps))
        yield from (pair for pair in pairs if pair.measured.mbps < least)


def _cut(state: State) -> Iterator[Pair]:
    return (pair for pair in state.answered if 2 * pair.measured.big_lost > pair.measured.big_sent)


def _late(state: State) -> Iterator[Pair]:
    limits = state.catalog.gpu_health().network
    least = limits.late_times * median([pair.measured.latency_us for pair in state.answered] or [0.0]) + limits.late_us
    return (pair for pair in state.answered if pair.measured.latency_us > least)


def _lossy(state: State) -> Iterator[Pair]:
    share = state.catalog.gpu_health().network.loss_share
    return (pair for pair in state.answered if pair.measured.lost > max(1, share * pair.measured.sent))


def _unlike(state: State, pairs: Sequence[Pair], figure: Callable[[Pair], float], unit: str) -> str:
    shown = ", ".join(f"{figure(pair):.4g}" for pair in pairs[:8])
    return f"{shown} {unit}, where {median(map(figure, state.answered)):.4g} are usual"


_SYMPTOMS = (
    Symptom("no-connection", 2, lambda state: (pair for pair in state.pairs if not pair.figures),
            lambda _, pairs: next((pair.measured.error for pair in pairs if pair.measured.error), "no packet came back"),
            "check cable, switch port, address and firewall: provision doctor HOSTS"),
    Symptom("slow-network", 3, _slow, lambda state, pairs: _unlike(state, pairs, lambda pair: pair.measured.mbps, "Mbit/s"),
            "check cable and transceiver, the interface's speed (ethtool), its errors and the switch port"),
    Symptom("packet-loss", 2, _lossy,
            lambda _, pairs: f"{sum(pair.measured.lost for pair in pairs)} of {sum(pair.measured.sent for pair in pairs)} packets lost",
            "check cable and transceiver, and the counters of interface and switch port (ethtool -S)"),
    Symptom("path-mtu", 2, _cut,
            lambda state, pairs: f"packets of {state.mtu(*pairs[0].link)} bytes do not arrive, smaller ones do",
            "set the MTU of the switch ports to that of the hosts, or that of the hosts to the network's"),
    Symptom("high-latency", 3, _late,
            lambda state, pairs: _unlike(state, pairs, lambda pair: pair.measured.latency_us, "µs for a packet there and back"),
            "check the path through the switches, and the interface's settings (ethtool -c)"),
)  # fmt: skip


def findings(state: State) -> list[Found]:
    """What is wrong, with evidence: of hosts alone, then of the network."""
    found = [Found(id="no-answer", host=host, what=why, hint="provision doctor HOSTS") for host, why in state.lost.items()]
    found += [each for each in _of_hosts(state) if each.id not in _MEASURED_AGAIN or len(state.measured[str(each.host)]) > 1]
    mtus = {host: state.measured[host][-1].mtu for host in state.able if state.measured[host][-1].mtu}
    usual, count = next(iter(Counter(mtus.values()).most_common(1)), (0, 0))
    for host, mtu in mtus.items() if 2 * count > len(mtus) else ():
        if mtu != usual:
            what = f"its MTU is {mtu}; {count} other hosts have {usual}"
            found.append(Found(id="mtu-differs", host=host, what=what, hint=f"ip link set INTERFACE mtu {usual}"))
    for symptom in _SYMPTOMS:
        culprits = _culprits(state, symptom, final=True)
        for guilty, pairs in culprits.guilty.items():
            others = joined(sorted({name for pair in pairs for name in pair.link} - {guilty}))
            found.append(Found(id=symptom.id, host=guilty, what=f"{symptom.says(state, pairs)} (with {others})", hint=symptom.hint))
        for link, pairs in culprits.links.items():
            what = f"{symptom.says(state, pairs)} (measured {len(pairs)} times)"
            found.append(Found(id=symptom.id, link=link, what=what, hint=symptom.hint))
        if most := culprits.most:
            what = f"{symptom.says(state, most)} ({len(most)} of {len(state.pairs)} pairs)"
            found.append(Found(id=symptom.id, what=what, hint=symptom.hint))
    return found


def _of_hosts(state: State) -> list[Found]:
    """What is wrong with hosts alone. Of several measurements the best counts, but each wrong result."""
    found, products = dict[Found, None](), state.catalog.gpu_health().products
    cores, memory = defaultdict[str, dict[_Place, float]](dict), defaultdict[str, dict[_Place, float]](dict)
    devices = defaultdict[str, dict[_Place, list[Device]]](dict)

    def check(host: str, id: str, what: str, hint: str) -> None:
        found[Found(id=id, host=host, what=what, hint=hint)] = None

    for host in state.able:
        for measured in state.measured[host]:
            for core in measured.cores:
                cores[core.kind][host, core.core] = max(core.speed, cores[core.kind].get((host, core.core), 0.0))
            kinds = " ".join(sorted({core.kind for core in measured.cores}))
            memory[kinds][host, 0] = max(measured.memory_gbs, memory[kinds].get((host, 0), 0.0))
            for number, device in enumerate(measured.devices):
                devices[device.name].setdefault((host, number), []).append(device)
                if device.error:
                    check(host, "gpu-failed", f"GPU {number} ({device.name}): {device.error}", "provision doctor HOSTS --gpu")
            named = [
                *((f"core {core.core}", core) for core in measured.cores),
                *((f"GPU {n}", gpu) for n, gpu in enumerate(measured.devices)),
            ]
            for where, each in named:
                if each.wrong or each.nan:
                    what = f"{where} computed {each.wrong} of {each.made} matrix products wrong, {each.nan} with nan"
                    check(host, "wrong-sums", what, _REPLACE)
    for of_kind in cores.values():
        for host, number in (place for place, speed in of_kind.items() if not speed):
            check(host, "core-failed", f"core {number} gave no result", "check limits of memory and the cpuset: dmesg, taskset -p 1")
        ran = {place: speed for place, speed in of_kind.items() if speed}
        for (host, number), speed, usual in _outliers(ran, products.slow_core_share):
            what = f"core {number} computes at {speed / usual:.0%} of the usual speed of its kind"
            check(host, "slow-core", what, "check cooling, power and the governor: grep MHz /proc/cpuinfo")
    for of_kind in memory.values():
        for (host, _), speed, usual in _outliers(of_kind, products.slow_memory_share):
            what = f"memory is copied at {speed:.3g} GB/s, where {usual:.3g} are usual"
            check(host, "slow-memory", what, "check its modules: dmidecode -t memory")
    for name, those in devices.items():
        for id, (host, number), what in _of_devices(state.catalog.gpu_health(), name, those):
            check(host, id, f"GPU {number} ({name}): {what}", "provision doctor HOSTS --gpu")
    return list(found)


def _of_devices(health: GpuHealth, name: str, those: Mapping[_Place, Sequence[Device]]) -> Iterator[tuple[str, _Place, str]]:
    """GPUs of one model that are slower than the catalogue expects, or than the others."""
    products, others = health.products, health.limits.slowest_gpu_share
    peak = next((each for each in products.expected if each.gpu == name), None)
    tflops, memory, pcie = (peak.tf32_tflops, peak.memory_gbs, peak.pcie_gbs) if peak else (0.0, 0.0, 0.0)
    figures: tuple[tuple[str, str, Callable[[Device], float], float], ...] = (
        ("slow-gpu", "TFLOPS of a matrix product", lambda each: each.speed / 1e3, products.product_share * tflops),
        ("slow-gpu-memory", "GB/s of memory", lambda each: each.memory_gbs, products.memory_share * memory),
        ("slow-pcie", "GB/s over PCI Express", lambda each: min(each.to_gbs, each.from_gbs), products.pcie_share * pcie),
    )
    for id, unit, figure, least in figures:
        values = {where: max(map(figure, each)) for where, each in those.items() if each[-1].error is None}
        below = {where: f"expected at least {least:.4g}" for where, value in values.items() if value < least}
        below |= {where: f"{usual:.4g} are usual" for where, _, usual in _outliers(values, others)}
        for where, why in below.items():
            yield id, where, f"{values[where]:.4g} {unit}; {why}"


def _outliers(values: Mapping[_Key, float], share: float) -> Iterator[tuple[_Key, float, float]]:
    """(key, its value, the median) of those below this share of the median."""
    usual = median(values.values()) if len(values) >= _ENOUGH else 0.0
    return ((key, value, usual) for key, value in values.items() if value < share * usual)


def of_groups(groups: Sequence[Group]) -> list[Found]:
    """What allreduces of growing groups show: the smallest bad groups, and of pairs the host that two of them share."""
    widths = defaultdict[int, list[float]](list)
    for group in groups:
        widths[len(group.hosts)].append(group.us)
    usual = {width: median(times) if len(times) > _ENOUGH else 1e12 for width, times in widths.items()}
    slow = [each for each in groups if each.us > _SLOW_ALLREDUCE * usual[len(each.hosts)] + _SLOW_ALLREDUCE_US]
    found = []
    for id, bad in (("wrong-sums", [each for each in groups if each.wrong]), ("slow-allreduce", slow)):
        sets = {frozenset(each.hosts): each for each in bad}
        smallest = [each for hosts, each in sets.items() if not any(other < hosts for other in sets)]
        met = Counter(host for each in smallest for host in each.hosts)
        said = dict[tuple[str, ...], list[str]]()  # the guilty host, or the hosts of the group
        for each in smallest:
            figures = f"gave {each.wrong} wrong results" if each.wrong else f"took {each.us:.4g} µs; {usual[len(each.hosts)]:.4g} are usual"
            guilty: list[tuple[str, ...]] = [(host,) for host in each.hosts if met[host] > 1] or [each.hosts]
            for hosts in guilty:
                said.setdefault(hosts, []).append(f"an allreduce of {joined(each.hosts)} {figures}")
        for hosts, whats in said.items():
            host, link = hosts[0] if len(hosts) == 1 else None, (hosts[0], hosts[1]) if len(hosts) == 2 else None
            found.append(Found(id=id, host=host, link=link, what="; ".join(whats), hint=_REPLACE))
    return found
