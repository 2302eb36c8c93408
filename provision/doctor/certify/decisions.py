"""Decisions of a certification: what is measured next, and what is wrong. Pure: measurements in, rounds and findings out.

After the hosts themselves, rounds of a tournament pair every host with log2(n) others. A host that is bad is bad with all of them, a link
with one only: two more rounds pair suspect hosts with good ones, and the ends of suspect links again, before anything is accused.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from provision import catalog
from provision.base.text import joined
from provision.doctor.certify.model import Core, Device, Found, Group, HostMeasured, Pair, PairMeasured

EXTRA_ROUNDS = 2  # that pin down what the tournament has shown
_SHARE_BAD = 0.6  # of a guilty host's pairs; noise of a busy machine meets some pairs
_ENOUGH = 3  # cores, hosts or devices of a kind: of fewer none is an outlier
_SLOW_ALLREDUCE, _SLOW_ALLREDUCE_US = 5.0, 5000.0  # times what is usual for as many hosts, and that much more: they share cores
_REPLACE = "take the host out of use; replace the part, or ask its vendor"
_Key = TypeVar("_Key")


class Round(NamedTuple):
    """What is measured at the same time: hosts by themselves, and pairs (the side that calls, the other one)."""

    hosts: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


@dataclass
class State:
    """All measurements so far.

    Attributes:
        hosts: in the order of the inventory.
        seed: of the choice of partners.
        measured: host → its measurements; none where it did not answer.
        lost: host → why it did not answer.
    """

    hosts: Sequence[str]
    seed: int = 0
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
        """Rounds of hosts and tournament."""
        return 1 + (len(self.hosts) - 1).bit_length()

    def pinning(self, pair: Pair) -> bool:
        """Whether it was measured because of a suspicion."""
        return pair.round > self.planned

    def mtu(self, *hosts: str) -> int:
        """The smallest MTU that these hosts say they have."""
        return min((each.mtu for host in hosts for each in self.measured.get(host, ())[-1:] if each.mtu), default=0) or 1500


def next_round(state: State) -> Round | None:
    """What to measure next; None when everything is decided."""
    if state.rounds == 0:
        return Round(tuple(host for host in state.hosts if host not in state.lost), ())
    able = state.able
    if state.rounds < state.planned:
        return Round((), tuple(_tournament(state.hosts, state.rounds - 1, state.seed, set(able))))
    extra = state.rounds - state.planned
    if extra >= EXTRA_ROUNDS or not able:
        return None
    slow = {each.host: None for each in _of_hosts(state) if each.host and each.id in _MEASURED_AGAIN}
    pairs = tuple(_pins(state, set(slow)))
    again = tuple(host for host in slow if all(host not in pair for pair in pairs))
    return Round(again, pairs) if again or pairs else None


def _tournament(hosts: Sequence[str], number: int, seed: int, able: set[str]) -> Iterator[tuple[str, str]]:
    """A round of a tournament in which every two hosts meet once; which of its rounds come first depends on the seed."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    turn = random.Random(seed).sample(range(len(seats) - 1), len(seats) - 1)[number]  # noqa: S311  no secret
    circle = [seats[0], *seats[1 + turn :], *seats[1 : 1 + turn]]
    for one, other in zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True):
        if one is not None and other is not None and {one, other} <= able:
            yield (one, other) if (number + seats.index(one)) % 2 else (other, one)


def _pins(state: State, slow: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs of suspects: links once more, hosts with good ones, as also the ends of links that have not met another good one."""
    hosts, links, lonely = dict[str, None](), dict[tuple[str, str], None](), set[tuple[str, str]]()
    for symptom in sorted(_SYMPTOMS, key=lambda each: each.enough):  # what chance shows least comes first
        culprits, bad = _culprits(state, symptom, final=False), {id(pair) for pair in symptom.bad(state)}
        fine = {host for pair in state.pairs if id(pair) not in bad for host in pair.hosts}
        hosts |= dict.fromkeys(culprits.guilty)
        links |= dict.fromkeys(culprits.links)
        lonely |= {link for link in culprits.links if not set(link) <= fine}
    met = {pair.link for pair in state.pairs}
    taken = {*slow, *hosts, *(host for link in links for host in link)}
    clean = [host for host in state.able if host not in taken]
    paired = set[str]()
    for link in sorted(links, key=lambda link: -sum(pair.link == link for pair in state.pairs)):  # those that were bad again first
        if not paired & set(link) and (link not in lonely or not clean):
            paired |= set(link)
            yield link
    for host in [*hosts, *(host for link in lonely for host in link)]:
        if host not in paired and clean:
            other = next((one for one in clean if tuple(sorted((one, host))) not in met), clean[0])
            clean.remove(other)
            paired.add(host)
            yield host, other


class Symptom(NamedTuple):
    """What can be wrong between two hosts. ``bad``: the measurements that show it; ``says``: in words; ``enough``: bad measurements of a
    guilty link, the more the more often a healthy one shows it, too."""

    id: str
    bad: Callable[[State], Iterable[Pair]]
    says: Callable[[State, Sequence[Pair]], str]
    hint: str
    enough: int = 2


class Culprits(NamedTuple):
    """Hosts and links with the bad measurements that they explain; or that most of all measurements are bad."""

    guilty: dict[str, list[Pair]]
    links: dict[tuple[str, str], list[Pair]]
    most: list[Pair]


def _culprits(state: State, symptom: Symptom, *, final: bool) -> Culprits:
    """Who explains the bad measurements. ``final``: only what was measured again, and was bad again."""
    bad = {id(pair) for pair in symptom.bad(state)}
    if len(state.able) > 2 and 2 * len(bad) > len(state.pairs):
        return Culprits({}, {}, [pair for pair in state.pairs if id(pair) in bad])
    left, guilty = defaultdict[tuple[str, str], list[Pair]](list), dict[str, list[Pair]]()
    for pair in state.pairs:
        left[pair.link].append(pair)
    suspect = {link for link, pairs in left.items() if all(id(pair) in bad for pair in pairs)}
    while True:
        of_host = defaultdict[str, list[tuple[str, str]]](list)
        for link in left:
            for host in link:
                of_host[host].append(link)
        shares = {host: sum(link in suspect for link in links) / len(links) for host, links in of_host.items()}
        worst = sorted((host for host in shares if shares[host] >= _SHARE_BAD), key=lambda host: -shares[host])
        found = next((host for host in worst if _is_guilty(state, {link: left[link] for link in of_host[host]}, suspect, final)), None)
        if found is None:
            break
        guilty[found] = [pair for link in of_host[found] if link in suspect for pair in left[link]]
        left = defaultdict(list, {link: pairs for link, pairs in left.items() if found not in link})
    links = {link: pairs for link, pairs in left.items() if link in suspect and (not final or len(pairs) >= symptom.enough)}
    return Culprits(guilty, links, [])


def _is_guilty(state: State, links: Mapping[tuple[str, str], Sequence[Pair]], suspect: set[tuple[str, str]], final: bool) -> bool:
    """Whether a host with these links is bad with several others, also with one with which it was measured because of the suspicion."""
    pinned = [link in suspect for link, pairs in links.items() if any(state.pinning(pair) for pair in pairs)]
    return sum(link in suspect for link in links) > 1 and (any(pinned) if pinned else not final)


def _answered(state: State) -> list[Pair]:
    return [pair for pair in state.pairs if pair.measured.error is None and pair.measured.lost < pair.measured.sent]


def _silent(state: State) -> Iterable[Pair]:
    there = {id(pair) for pair in _answered(state)}
    return (pair for pair in state.pairs if id(pair) not in there)


def _slow(state: State) -> Iterator[Pair]:
    """Compared with other pairs of interfaces of that speed, and with what these are made for."""
    limits, alike, cut = catalog.gpu_health().network, defaultdict[float, list[Pair]](list), set(map(id, _cut(state)))
    for pair in (pair for pair in _answered(state) if id(pair) not in cut):  # of which nothing was sent
        alike[min(state.measured[host][-1].mbps for host in pair.hosts)].append(pair)  # 0: not known of both
    for nominal, pairs in alike.items():
        usual = statistics.median(pair.measured.mbps for pair in pairs)
        least = max(limits.slow_share * usual, limits.tcp_share * min(nominal, limits.tcp_max_mbps))
        yield from (pair for pair in pairs if pair.measured.mbps < least)


def _lossy(state: State) -> Iterator[Pair]:
    share = catalog.gpu_health().network.loss_share
    return (pair for pair in _answered(state) if pair.measured.lost > max(1, share * pair.measured.sent))


def _cut(state: State) -> Iterator[Pair]:
    return (pair for pair in _answered(state) if pair.measured.big_lost > pair.measured.big_sent / 2)


def _late(state: State) -> Iterator[Pair]:
    limits, usual = catalog.gpu_health().network, _usual(state, lambda each: each.latency_us)
    return (pair for pair in _answered(state) if pair.measured.latency_us > limits.late_times * usual + limits.late_us)


def _usual(state: State, figure: Callable[[PairMeasured], float]) -> float:
    return statistics.median([figure(pair.measured) for pair in _answered(state)] or [0.0])


def _next_to(state: State, pairs: Sequence[Pair], figure: Callable[[PairMeasured], float], unit: str) -> str:
    shown = ", ".join(f"{figure(pair.measured):.4g}" for pair in pairs[:8])
    return f"{shown} {unit}, where {_usual(state, figure):.4g} are usual"


_SYMPTOMS = (
    Symptom(
        "no-connection",
        _silent,
        lambda _, pairs: f"no connection: {next((pair.measured.error for pair in pairs if pair.measured.error), 'no ping came back')}",
        "check cable, switch port, address and firewall: provision doctor",
    ),
    Symptom(
        "slow-network",
        _slow,
        lambda state, pairs: _next_to(state, pairs, lambda each: each.mbps, "Mbit/s"),
        "check cable and transceiver, the interface's speed (ethtool), its errors and the switch port",
        enough=3,
    ),
    Symptom(
        "packet-loss",
        _lossy,
        lambda _, pairs: f"{sum(each.measured.lost for each in pairs)} of {sum(each.measured.sent for each in pairs)} packets lost",
        "check cable and transceiver, and the counters of interface and switch port (ethtool -S, ip -s link)",
    ),
    Symptom(
        "path-mtu",
        _cut,
        lambda state, pairs: f"packets of {state.mtu(*pairs[0].hosts)} bytes do not arrive, smaller ones do",
        "set the MTU of the switch ports to that of the hosts, or that of the hosts to the network's",
    ),
    Symptom(
        "high-latency",
        _late,
        lambda state, pairs: _next_to(state, pairs, lambda each: each.latency_us, "µs for a packet to and back"),
        "check the path through the switches, and the interface's settings (ethtool -c)",
        enough=3,
    ),
)


def findings(state: State) -> list[Found]:
    """What is wrong, with evidence: of hosts alone, then of the network."""
    found = [Found(id="no-answer", host=host, what=why, hint="provision doctor HOSTS") for host, why in state.lost.items()]
    again = {host for host, those in state.measured.items() if len(those) > 1}
    found += [each for each in _of_hosts(state) if each.id not in _MEASURED_AGAIN or each.host in again]
    found += _of_mtus(state)
    for symptom in _SYMPTOMS:
        culprits = _culprits(state, symptom, final=True)
        for host, pairs in culprits.guilty.items():
            others = sorted({name for pair in pairs for name in pair.hosts} - {host})
            found.append(_found(state, symptom, pairs, f"with {joined(others)}", host=host))
        for link, pairs in culprits.links.items():
            found.append(_found(state, symptom, pairs, f"measured {len(pairs)} times", link=link))
        if culprits.most:
            found.append(_found(state, symptom, culprits.most, f"{len(culprits.most)} of {len(state.pairs)} pairs"))
    return found


def _found(state: State, symptom: Symptom, pairs: Sequence[Pair], where: str, **whose: object) -> Found:
    return Found.model_validate({"id": symptom.id, "what": f"{symptom.says(state, pairs)} ({where})", "hint": symptom.hint, **whose})


_MEASURED_AGAIN = ("slow-core", "slow-memory", "slow-gpu", "slow-gpu-memory", "slow-pcie")


def _of_mtus(state: State) -> Iterator[Found]:
    """Hosts whose MTU is another one than that of most."""
    mtus = {host: state.measured[host][-1].mtu for host in state.able if state.measured[host][-1].mtu}
    usual, count = next(iter(Counter(mtus.values()).most_common(1)), (0, 0))
    for host, mtu in mtus.items() if count > len(mtus) / 2 else ():
        if mtu != usual:
            yield Found(
                id="mtu-differs", host=host, what=f"its MTU is {mtu}; {count} other hosts have {usual}", hint=f"ip link set mtu {usual}"
            )


def _of_hosts(state: State) -> list[Found]:
    """What is wrong with hosts alone. Of several measurements the best counts, but each wrong result."""
    found = list[Found]()
    cores: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    memory: dict[frozenset[str], dict[str, float]] = defaultdict(dict)
    devices: dict[str, dict[tuple[str, int], Device]] = defaultdict(dict)
    for host in state.able:
        for measured in state.measured[host]:
            for core in measured.cores:
                cores[core.kind][host, core.core] = max(core.speed, cores[core.kind].get((host, core.core), 0.0))
                found += _wrong(host, f"core {core.core}", core)
            kinds = frozenset(core.kind for core in measured.cores)
            memory[kinds][host] = max(measured.memory_gbs, memory[kinds].get(host, 0.0))
            for number, device in enumerate(measured.devices):
                devices[device.name][host, number] = _best(device, devices[device.name].get((host, number), device))
                found += _wrong(host, f"GPU {number} ({device.name})", device)
    limits = catalog.gpu_health()
    hint = "check cooling, power and the governor: cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_cur_freq"
    for of_kind in cores.values():
        for (host, number), speed, usual in _outliers(of_kind, limits.products.slow_core_share):
            found.append(
                Found(
                    id="slow-core",
                    host=host,
                    what=f"core {number} computes at {speed / usual:.0%} of the usual speed of its kind",
                    hint=hint,
                )
            )
    for of_hosts in memory.values():
        for host, speed, usual in _outliers(of_hosts, limits.products.slow_memory_share):
            found.append(
                Found(
                    id="slow-memory",
                    host=host,
                    what=f"memory is copied at {speed:.3g} GB/s, where {usual:.3g} are usual",
                    hint="check its modules: dmidecode -t memory",
                )
            )
    for name, those in devices.items():
        found += _of_devices(name, those)
    return list(dict.fromkeys(found))


def _wrong(host: str, where: str, each: Core | Device) -> Iterator[Found]:
    if each.wrong or each.nan:
        what = f"{where} computed {each.wrong} of {each.made} matrix products wrong" + (f", {each.nan} with nan" if each.nan else "")
        yield Found(id="wrong-sums", host=host, what=what, hint=_REPLACE)
    if each.error:
        yield Found(id="gpu-failed", host=host, what=f"{where}: {each.error}", hint=f"provision doctor {host} --gpu")


def _best(one: Device, other: Device) -> Device:
    names = ("median", "memory_gbs", "to_gbs", "from_gbs")
    return one.model_copy(update={name: max(getattr(one, name), getattr(other, name)) for name in names})


def _of_devices(name: str, those: Mapping[tuple[str, int], Device]) -> Iterator[Found]:
    """GPUs of one model that are slower than the catalogue expects, or than the others."""
    products, others = catalog.gpu_health().products, catalog.gpu_health().limits.slowest_gpu_share
    peak = next((each for each in products.expected if each.gpu == name), None)
    tflops, memory, pcie = (peak.tf32_tflops, peak.memory_gbs, peak.pcie_gbs) if peak else (0.0, 0.0, 0.0)
    figures: tuple[tuple[str, str, Callable[[Device], float], float], ...] = (
        ("slow-gpu", "TFLOPS of a matrix product", lambda each: each.median / 1e3, products.product_share * tflops),
        ("slow-gpu-memory", "GB/s of memory", lambda each: each.memory_gbs, products.memory_share * memory),
        ("slow-pcie", "GB/s over PCI Express", lambda each: min(each.to_gbs, each.from_gbs), products.pcie_share * pcie),
    )
    for kind, unit, figure, least in figures:
        values = {where: figure(each) for where, each in those.items() if each.error is None}
        below = {where: f"expected at least {least:.4g}" for where, value in values.items() if value < least}
        below |= {where: f"{usual:.4g} are usual" for where, _, usual in _outliers(values, others)}
        for (host, number), why in below.items():
            what = f"GPU {number} ({name}): {values[host, number]:.4g} {unit}; {why}"
            yield Found(id=kind, host=host, what=what, hint="provision doctor HOSTS --gpu")


def _outliers(values: Mapping[_Key, float], share: float) -> Iterator[tuple[_Key, float, float]]:
    """(key, its value, the median) of those below this share of the median."""
    usual = statistics.median(values.values()) if len(values) >= _ENOUGH else 0.0
    for key, value in values.items():
        if value < share * usual:
            yield key, value, usual


def of_groups(groups: Sequence[Group]) -> list[Found]:
    """What allreduces of growing groups show: the smallest bad groups, and of pairs the host that two of them share."""
    widths = defaultdict[int, list[float]](list)
    for group in groups:
        widths[len(group.hosts)].append(group.us)
    usual = {width: statistics.median(times) for width, times in widths.items() if len(times) > _ENOUGH}
    slow = [each for each in groups if each.us > _SLOW_ALLREDUCE * usual.get(len(each.hosts), 1e12) + _SLOW_ALLREDUCE_US]
    found = []
    for kind, bad in (("wrong-sums", [each for each in groups if each.wrong]), ("slow-allreduce", slow)):
        smallest = [each for each in bad if not any(set(other.hosts) < set(each.hosts) for other in bad)]
        met = Counter(host for each in smallest for host in each.hosts)
        guilty = [
            host
            for host in met
            if met[host] > 1 and not any(met[other] > met[host] for each in smallest if host in each.hosts for other in each.hosts)
        ]
        for host in guilty:
            with_it = [each for each in smallest if host in each.hosts]
            found.append(Found(id=kind, host=host, what=_group(with_it, usual), hint=_REPLACE))
        for each in smallest:
            if not set(guilty) & set(each.hosts):
                link = (each.hosts[0], each.hosts[1]) if len(each.hosts) == 2 else None
                found.append(
                    Found(id=kind, link=link, what=_group([each], usual), hint="provision doctor HOSTS; certify its halves alone: --limit")
                )
    return found


def _group(groups: Sequence[Group], usual: Mapping[int, float]) -> str:
    said = [
        f"an allreduce of {joined(each.hosts)} "
        + (f"gave {each.wrong} wrong results" if each.wrong else f"took {each.us:.4g} µs, where {usual[len(each.hosts)]:.4g} are usual")
        for each in groups[:4]
    ]
    return "; ".join(said)
