"""Decisions of a certification: what is measured next, and what is wrong. Pure: measurements in, rounds and findings out.

After the hosts themselves, rounds of a tournament pair every host with log2(n) others, of three to five hosts with all. A host that is
bad is bad with most of them, a link with one only: two more rounds measure slow hosts again, and pair suspect hosts with good ones, and the
ends of suspect links again, before anything is accused.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

from provision.base.problems import Problem
from provision.base.text import folded, grouped, joined
from provision.catalog import OURS, Catalog
from provision.doctor.certify.model import Group, HostMeasured, Pair, Target

EXTRA_ROUNDS = 2  # that pin down what the tournament has shown
_SHARE_BAD = 0.6  # of a guilty host's partners; noise of a busy machine meets some pairs
_ENOUGH = 3  # cores, hosts or devices of a kind: of fewer none is an outlier
_SLOW_ALLREDUCE, _SLOW_ALLREDUCE_US = 5.0, 5000.0  # times what is usual for as many hosts, and that much more: they may share cores
_MEASURED_AGAIN = ("slow-core", "slow-memory", "slow-gpu", "slow-gpu-memory", "slow-pcie", "core-failed")
_LOW = {  # figure → what is wrong where it is low, unit
    "core": ("slow-core", "matrix products/s"),
    "copied_gbs": ("slow-memory", "GB/s copied"),
    "tf32_tflops": ("slow-gpu", "TFLOPS of a matrix product"),
    "memory_gbs": ("slow-gpu-memory", "GB/s of memory"),
    "pcie_gbs": ("slow-pcie", "GB/s over PCI Express"),
}
_HINTS = {
    **dict.fromkeys(("no-answer", "no-connection"), "check cable, switch port, address and firewall: provision doctor HOSTS"),
    **dict.fromkeys(("gpu-failed", "slow-gpu", "slow-gpu-memory", "slow-pcie"), "provision doctor HOSTS --gpu"),
    **dict.fromkeys(("wrong-sums", "slow-allreduce"), "take the host out of use; replace the part, or ask its vendor"),
    "core-failed": "check limits of memory and processes, and the cpuset: dmesg, ulimit -u, taskset -p 1",
    "slow-core": "check cooling, power and the governor: grep MHz /proc/cpuinfo",
    "slow-memory": "check its modules: dmidecode -t memory",
    "slow-network": "check cable and transceiver, the interface's speed (ethtool), its errors and the switch port",
    "packet-loss": "check cable and transceiver, and the counters of interface and switch port (ethtool -S)",
    "path-mtu": "set the MTU of the switch ports to that of the hosts, or that of the hosts to the network's",
    "mtu-differs": "ip link set INTERFACE mtu N",
    "high-latency": "check the path through the switches, and the interface's settings (ethtool -c)",
}
_Hosts = tuple[str, ...]  # of a culprit: a host, the two of a link, or none where it is the cluster
_Measured = TypeVar("_Measured", Pair, Group)


class Round(NamedTuple):
    """What is measured at the same time: hosts by themselves, and pairs (the side that calls, the other one)."""

    hosts: _Hosts
    pairs: tuple[tuple[str, str], ...]


@dataclass
class State:
    """All measurements so far.

    Attributes:
        hosts: those that can be measured, in the order of the inventory.
        seed: of the choice of partners.
        catalog: with what GPUs and networks are expected to reach.
        measured: host → its measurements; hosts that gave none have no part in later rounds.
        lost: host → why it did not answer.
    """

    hosts: dict[str, Target] = field(default_factory=dict)
    seed: int = 0
    catalog: Catalog = OURS
    measured: dict[str, list[HostMeasured]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    rounds: int = 0

    @property
    def planned(self) -> int:
        """Rounds of hosts and tournament; what comes later is measured because of a suspicion."""
        count = len(self.measured or self.hosts)
        return 1 + (count - 1 + count % 2 if 2 < count < 6 else (count - 1).bit_length())

    def mtu(self, hosts: _Hosts) -> int:
        """The smallest MTU that these hosts say they have."""
        return min((self.hosts[host].mtu for host in hosts if self.hosts[host].mtu), default=1500)


def next_round(state: State) -> Round | None:
    """What to measure next; None when everything is decided."""
    if state.rounds == 0:
        return Round(tuple(state.hosts), ())
    if state.measured and state.rounds < state.planned:
        return Round((), tuple(_tournament(state)))
    if state.rounds >= state.planned + EXTRA_ROUNDS:
        return None
    slow = [host for each in _of_hosts(state) if (host := each.host) and each.id in _MEASURED_AGAIN and len(state.measured[host]) == 1]
    planned = Round(tuple(dict.fromkeys(slow)), tuple(_pins(state, set(slow))))
    return planned if any(planned) else None


def _tournament(state: State) -> Iterator[tuple[str, str]]:
    """A round of a tournament in which every two hosts meet once; which of its rounds come first depends on the seed."""
    seats: list[str | None] = [*state.measured, *([None] * (len(state.measured) % 2))]
    turn = random.Random(state.seed).sample(range(len(seats) - 1), len(seats) - 1)[state.rounds - 1]  # noqa: S311  no secret
    circle = [seats[0], *seats[1 + turn :], *seats[1 : 1 + turn]]
    for one, other in zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True):
        if one and other:
            yield (one, other) if state.rounds % 2 else (other, one)


def _pins(state: State, busy: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs that tell more of suspects: links once more, hosts with good ones, as also ends of links that have met no other good one."""
    wanted, suspects = dict[_Hosts, int](), set(busy)
    for symptom in _symptoms(state):
        fine = {host for pair in state.pairs if pair not in symptom.bad for host in pair.hosts}
        for culprit, pairs in _culprits(state.pairs, symptom.bad):
            suspects |= set(culprit)
            lonely = [(host,) for host in culprit if host not in fine]
            wanted.update(dict.fromkeys(lonely if len(culprit) > 1 and lonely else [culprit], len(pairs)))
    met = Counter(pair.hosts for pair in state.pairs)
    clean = [host for host in state.measured if host not in suspects] or list(state.measured)
    for hosts in sorted(filter(None, wanted), key=lambda each: -wanted[each] if len(each) > 1 else 0):  # links that were bad again first
        others = [other for other in clean if other not in {*busy, *hosts}]
        if not busy & set(hosts) and (len(hosts) > 1 or others):
            one, other = hosts if len(hosts) > 1 else (*hosts, min(others, key=lambda other: met[tuple(sorted((*hosts, other)))]))
            busy |= {one, other}
            yield one, other


class Symptom(NamedTuple):
    """What can be wrong between two hosts. ``bad``: the measurements that show it; ``says``: some of them in words; ``enough``: bad
    measurements of a guilty link, the more the more often a healthy one shows it, too."""

    id: str
    enough: int
    bad: Collection[Pair]
    says: Callable[[Sequence[Pair]], str]


def _symptoms(state: State) -> Iterator[Symptom]:
    """All that can be wrong, first what chance shows least."""
    limits, answered = state.catalog.gpu_health().network, [pair for pair in state.pairs if pair.measured.lost < pair.measured.sent]
    yield Symptom("no-connection", 2, {*state.pairs} - {*answered}, lambda pairs: pairs[0].measured.error or "no packet came back")
    lossy = {pair for pair in answered if pair.measured.lost > max(1, limits.loss_share * pair.measured.sent)}
    yield Symptom("packet-loss", 2, lossy, lambda pairs: f"{_shown(pairs, 'lost')} of {pairs[0].measured.sent} packets lost")
    cut = {pair for pair in answered if 2 * pair.measured.big_lost > pair.measured.big_sent}
    words = "packets of {} bytes do not arrive, smaller ones do"
    yield Symptom("path-mtu", 2, cut, lambda pairs: words.format(state.mtu(pairs[0].hosts)))
    nominal_of = {pair: min(state.hosts[host].mbps for host in pair.hosts) for pair in answered}  # of the interfaces; 0: not known of both
    alike, slow = defaultdict[float, list[Pair]](list), set[Pair]()
    for pair in (pair for pair in answered if pair not in cut):  # to the others nothing was sent
        alike[nominal_of[pair]].append(pair)
    usual = {nominal: _usual(pairs, "mbps", max) for nominal, pairs in alike.items()}
    for nominal, pairs in alike.items():
        least = max(limits.slow_share * usual[nominal], limits.tcp_share * min(nominal, limits.tcp_max_mbps))
        slow |= {pair for pair in pairs if pair.measured.mbps < least}
    slowly = "{} Mbit/s, where {:.4g} are usual"
    yield Symptom("slow-network", 3, slow, lambda pairs: slowly.format(_shown(pairs, "mbps"), usual[nominal_of[pairs[0]]]))
    soon = _usual(answered, "latency_us", min)
    late = {pair for pair in answered if pair.measured.latency_us > limits.late_times * soon + limits.late_us}
    yield Symptom("high-latency", 3, late, lambda pairs: f"{_shown(pairs, 'latency_us')} µs there and back, where {soon:.4g} are usual")


def _shown(pairs: Sequence[Pair], figure: str) -> str:
    return ", ".join(f"{getattr(pair.measured, figure):.4g}" for pair in pairs[:8])


def _usual(pairs: Sequence[Pair], figure: str, best: Callable[..., float]) -> float:
    """The median; of few hosts, without the one whose absence makes it best: a bad one has half of the pairs."""
    hosts = {host for pair in pairs for host in pair.hosts}
    left_out = ("", *(hosts if len(hosts) < 6 else ()))
    those = ([getattr(pair.measured, figure) for pair in pairs if host not in pair.hosts] for host in left_out)
    return best((median(each) for each in those if each), default=0.0)


def _culprits(measured: Sequence[_Measured], bad: Collection[_Measured]) -> Iterator[tuple[_Hosts, list[_Measured]]]:
    """Who explains bad measurements of pairs, and with which of them: a host that is bad with most of its partners, or a link that was
    always bad; none of them where most measurements are bad, whichever host is left out."""
    links: dict[_Hosts, list[_Measured]] = grouped((each.hosts, each) for each in measured)
    surplus = Counter(dict.fromkeys(("", *(host for link in links for host in link)), 2 * len(bad) - len(measured)))  # without a host
    for each in measured:
        surplus.subtract(dict.fromkeys(each.hosts, 2 * (each in bad) - 1))
    if len(surplus) > 3 and min(surplus.values()) > 0:
        yield (), [each for each in measured if each in bad]
        return
    suspects = {link: those for link, those in links.items() if all(each in bad for each in those)}
    while True:
        met, hit = (Counter([host for link in those for host in link]) for those in (links, suspects))
        worst = max((host for host in hit if hit[host] > 1), key=lambda host: hit[host] / met[host], default="")
        if not worst or hit[worst] < _SHARE_BAD * met[worst]:
            break
        yield (worst,), [each for link in suspects if worst in link for each in suspects[link]]
        links = {link: those for link, those in links.items() if worst not in link}
        suspects = {link: those for link, those in suspects.items() if worst not in link}
    yield from suspects.items()


def findings(state: State) -> list[Problem]:
    """What is wrong, with evidence: of hosts alone, then of the network."""
    silent = [host for host in state.hosts if host in state.lost]  # while they were measured, though the survey had reached them
    if len(silent) >= _ENOUGH and 2 * len(silent) > len(state.hosts):
        what = f"{folded(silent)}: {len(silent)} of {len(state.hosts)} hosts did not answer the measurement: {state.lost[silent[0]]}"
        found = [Problem("error", what, "is this machine overloaded, or its network? then certify again", id="no-answer", where="cluster")]
    else:
        found = [_problem("no-answer", (host,), state.lost[host]) for host in silent]
    found += [_problem("no-answer", (host,), why) for host, why in state.lost.items() if host not in state.hosts]
    found += [each for each in _of_hosts(state) if each.id not in _MEASURED_AGAIN or len(state.measured[str(each.host)]) > 1]
    mtus = Counter(state.hosts[host].mtu for host in state.measured)
    usual, count = max(mtus.items(), key=lambda each: each[1], default=(0, 0))
    for host in state.measured if 2 * count > len(state.measured) else ():
        if usual and state.hosts[host].mtu not in (0, usual):
            found.append(_problem("mtu-differs", (host,), f"its MTU is {state.hosts[host].mtu}; {count} other hosts have {usual}"))
    for symptom in _symptoms(state):
        for hosts, pairs in _culprits(state.pairs, symptom.bad):
            again = any(pair.round > state.planned for pair in pairs)
            if len(pairs) >= symptom.enough if len(hosts) == 2 else again or not hosts:
                others = joined(sorted({name for pair in pairs for name in pair.hosts} - {*hosts}))
                said = (f"{len(pairs)} of {len(state.pairs)} pairs", f"with {others}", f"measured {len(pairs)} times")[len(hosts)]
                found.append(_problem(symptom.id, hosts, f"{symptom.says(pairs)} ({said})", found))
    return list(dict.fromkeys(found))


def _problem(id: str, culprit: _Hosts, what: str, found: Sequence[Problem] = ()) -> Problem:
    """Of a link, ``host`` is the end that is already to be left out because of what was found, else the second one."""
    host = next((host for host in culprit if any(host == each.host for each in found)), culprit[-1] if culprit else None)
    return Problem("error", what, _HINTS[id], id=id, host=host, where=" – ".join(culprit) or "cluster")


def _of_hosts(state: State) -> Iterator[Problem]:
    """What is wrong with hosts alone. Of several measurements the best counts, but each wrong result."""
    health, best = state.catalog.gpu_health(), defaultdict[tuple[str, str], dict[tuple[str, str], float]](dict)
    for host, measured in ((host, measured) for host, those in state.measured.items() for measured in those):
        for name, part, figures in measured.parts:
            if part.wrong:
                yield _problem("wrong-sums", (host,), f"{name} computed {part.wrong} of {part.made} matrix products wrong")
            if part.error:
                yield _problem("gpu-failed", (host,), f"{name} ({part.kind}): {part.error}")
            for figure, value in figures.items():
                best[figure, part.kind][host, name] = max(value, best[figure, part.kind].get((host, name), 0.0))
    products, others = health.products.model_dump(), health.limits.slowest_gpu_share
    peaks = {each["gpu"]: each for each in products["expected"]}
    for (figure, kind), values in best.items():
        ran, (id, unit) = [value for value in values.values() if value], _LOW[figure]
        usual = median(ran) if len(ran) >= _ENOUGH else 0.0
        peak = products["peak_shares"].get(figure, 0.0) * peaks.get(kind, {}).get(figure, 0.0)
        least = max(peak, usual * products["usual_shares"].get(figure, others))
        for (host, name), value in values.items():
            if figure == "core" and not value:
                yield _problem("core-failed", (host,), f"{name} gave no result")
            elif value < least:
                yield _problem(id, (host,), f"{name}: {value:.4g} {unit}, expected at least {least:.4g}")


def of_groups(groups: Sequence[Group]) -> list[Problem]:
    """What allreduces of growing groups show: the host or link by which pairs are bad, and larger groups that are bad without these."""
    widths, found = defaultdict[int, list[float]](list), list[Problem]()
    for group in groups:
        widths[len(group.hosts)].append(group.us)
    usual = {width: median(times) if len(times) > _ENOUGH else 1e12 for width, times in widths.items()}
    slow = [each for each in groups if each.us > _SLOW_ALLREDUCE * usual[len(each.hosts)] + _SLOW_ALLREDUCE_US]
    for id, bad in (("wrong-sums", [each for each in groups if each.wrong]), ("slow-allreduce", slow)):
        pairs, known = [each for each in groups if len(each.hosts) == 2], list[set[str]]()
        of_pairs = [({*hosts}, hosts, those) for hosts, those in _culprits(pairs, [each for each in bad if each in pairs])]
        for scope, culprit, those in [*of_pairs, *(({*each.hosts}, (), [each]) for each in bad if each not in pairs)]:
            if not any(each <= scope for each in known):
                figures = (f"an allreduce of {joined(each.hosts)} gave {each.wrong} wrong results in {each.us:.4g} µs" for each in those)
                found.append(_problem(id, culprit, "; ".join(figures), found))
                known.append(scope)
    return found
