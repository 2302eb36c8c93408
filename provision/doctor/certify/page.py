"""The certificate as one page that opens from disk; nothing is fetched and nothing runs."""

from __future__ import annotations

from provision.base import pages
from provision.bench.results import number
from provision.doctor.certify.model import Certificate, HostMeasured, PairMeasured


def render(made: Certificate) -> str:
    """The page's HTML."""
    hosts = [(name, *_host(each)) for name, each in made.measured.items()]
    pairs = [(" – ".join(each.link), each.round, *_pair(each.measured)) for each in made.pairs]
    groups = [(f"{len(each.hosts)}: {', '.join(each.hosts[:4])}", number(each.us), each.wrong) for each in made.groups]
    tables = [
        ("Hosts", ("host", "cores", "products", "wrong", "memory, GB/s", "MTU", "GPUs: TFLOPS; GB/s of memory, to and from it"), hosts),
        ("Pairs", ("hosts", "round", "µs", "lost", "long ones lost", "Mbit/s to", "from"), pairs),
        ("Allreduce of growing groups", ("hosts", "µs", "wrong results"), groups),
    ]
    return pages.template("provision.doctor.certify").render(made=made, tables=tables, number=number)


def _host(each: HostMeasured) -> tuple[object, ...]:
    of_all = [*each.cores, *each.devices]
    gpus = (
        f"{gpu.name}: {number(gpu.speed / 1e3)}; {', '.join(map(number, (gpu.memory_gbs, gpu.to_gbs, gpu.from_gbs)))}"
        for gpu in each.devices
    )
    made, wrong = sum(one.made for one in of_all), sum(one.wrong for one in of_all)
    return len(each.cores), made, wrong, number(each.memory_gbs), each.mtu or "", " | ".join(gpus)


def _pair(each: PairMeasured) -> tuple[object, ...]:
    if each.error is not None:
        return "", "", "", "", each.error
    shares = (f"{each.lost} of {each.sent}", f"{each.big_lost} of {each.big_sent}")
    return number(each.latency_us), *shares, number(each.up_mbps), number(each.down_mbps)
