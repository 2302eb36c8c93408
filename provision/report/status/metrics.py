"""The status in Prometheus' text format. Its client library writes it, which escapes what hosts say in labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from provision.base.terminal import neutral
from provision.report.status.model import STATES, Gpu, HostStatus, Status

CONTENT_TYPE = CONTENT_TYPE_LATEST
_Samples = Iterable[tuple[tuple[str, ...], float | None]]

_OF_HOSTS: tuple[tuple[str, str, Callable[[HostStatus], float | None]], ...] = (
    ("up", "Whether the host answers.", lambda host: host.load is not None),
    ("installed", "Whether it holds what was installed, and its GPUs answer.", lambda host: host.state == "installed"),
    ("differences", "Differences from the last run and from provision.lock.", lambda host: len(host.drift) if host.checked else None),
    ("uptime_seconds", "Time since the host was started.", lambda host: host.uptime),
    ("load1", "Load average over one minute.", lambda host: host.load),
    ("cores", "Cores that a job may use.", lambda host: host.cores),
    ("memory_total_bytes", "Memory.", lambda host: host.memory.total if host.memory else None),
    ("memory_available_bytes", "Memory that programs can still get.", lambda host: host.memory.available if host.memory else None),
    ("disk_total_bytes", "File system of the installation.", lambda host: host.disk.total if host.disk else None),
    ("disk_available_bytes", "Its room that users can still fill.", lambda host: host.disk.available if host.disk else None),
)
_OF_GPUS: tuple[tuple[str, str, Callable[[Gpu], float | None]], ...] = (
    ("utilization_percent", "Share of time in which a kernel ran.", lambda gpu: gpu.utilization),
    ("memory_used_bytes", "Memory of the GPU in use.", lambda gpu: gpu.memory_used),
    ("memory_total_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_total),
    ("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature),
    ("power_watts", "Power that the GPU draws.", lambda gpu: gpu.power),
)


def render(status: Status) -> bytes:
    """The metrics of a status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(status))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("poll_timestamp_seconds", "When the hosts were asked last.", (), [((), status.when)])
        yield _gauge("poll_duration_seconds", "How long their answers took.", (), [((), status.seconds)])
        yield _gauge("lock_readable", "Whether provision.lock could be read.", (), [((), status.problem is None)])
        states = [((state,), sum(host.state == state for host in status.hosts)) for state in STATES]
        yield _gauge("hosts", "Hosts in each state.", ("state",), states)
        for name, what, value in _OF_HOSTS:
            yield _gauge(f"host_{name}", what, ("host",), [((host.host,), value(host)) for host in status.hosts])
        for name, what, of_gpu in _OF_GPUS:
            samples = [((host.host, str(gpu.index), gpu.uuid, gpu.name), of_gpu(gpu)) for host in status.hosts for gpu in host.gpus]
            yield _gauge(f"gpu_{name}", what, ("host", "gpu", "uuid", "name"), samples)
        ranks = [((job.run, job.program, host), count) for job in status.jobs for host, count in job.hosts.items()]
        yield _gauge("job_ranks", "Ranks of a job on a host.", ("run", "program", "host"), ranks)
        began = [((job.run, job.program), job.began) for job in status.jobs]
        yield _gauge("job_start_timestamp_seconds", "When a job began.", ("run", "program"), began)


def _gauge(name: str, what: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    """A family; what is not known has no sample."""
    family = GaugeMetricFamily(f"provision_{name}", what, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric([neutral(text) for text in values], float(value))
    return family
