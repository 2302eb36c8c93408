"""The verdict on the training job that ends every run: did every host and rank take part, and is what they trained right? Pure.

It believes no verdict of the job's own: each is derived again from the ranks' digests and the accuracies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from provision.base.documents import Document
from provision.base.problems import Problem
from provision.base.text import counted, few, grouped
from provision.base.validation import problems

_TOLERANCE = 1.1  # by which a measured share may exceed what is possible, and is still believed: both measurements take seconds
_DISTURBED = "cannot be told from this run: a measurement was disturbed"

Verdict = tuple[str | None, list[Problem]]  # a summary for people, and why the job did not succeed: none when it did


class Participant(BaseModel):
    """One rank, as it describes itself."""

    rank: NonNegativeInt
    host: str
    local_rank: NonNegativeInt
    parameter_digest: str
    device: str = "cpu"


class Epoch(BaseModel):
    """One pass through the training images."""

    epoch: int
    test_accuracy_percent: float
    loss: float | None = None
    test_loss: float | None = None


class TrainingReport(BaseModel):
    """What rank 0 of hostside/train_mnist.py writes, as far as it is read here."""

    schema_: Literal[1] = Field(alias="schema")
    dataset: str
    np: int
    hosts: dict[str, list[int]]
    participants: list[Participant]
    epochs: list[Epoch] = Field(min_length=1)
    bar_percent: float
    images_per_second: float
    one_rank_images_per_second: float | None
    efficiency: float | None
    efficiency_limit: float | None = None
    without_communication_images_per_second: float | None
    efficiency_of_communication: float | None
    notes: list[str] = []


class CheckHost(BaseModel):
    """One host of the engine's own check."""

    host: str


class CheckReport(BaseModel):
    """What ``python -m collective_core.check --report`` writes, as far as it is read here."""

    size: int
    hosts: list[CheckHost]
    failures: list[str]
    transport: str


def evaluate_training(document: Document, hosts: Mapping[str, str], np: int, bar: float, *, on_gpus: bool = False) -> Verdict:
    """The verdict on a training job.

    Args:
        document: the job's report.
        hosts: name in the inventory → host name that the host itself uses.
        np: number of ranks that were started.
        bar: test accuracy in percent that the last epoch must have reached.
        on_gpus: whether every rank must have had a GPU.
    """
    try:
        report = TrainingReport.model_validate(document)
    except ValidationError as error:
        return None, [fault("report-unreadable", f"the training job's report cannot be read: {problems(error)[0][1]}")]
    ranks = sorted(report.participants, key=lambda one: one.rank)
    last = report.epochs[-1]
    faults = [*_wrong_ranks([one.rank for one in ranks], np), *_wrong_hosts(ranks, hosts), *_differing_parameters(ranks)]
    if not last.test_accuracy_percent >= bar:  # also catches NaN
        what = f"test accuracy after epoch {last.epoch} is {last.test_accuracy_percent:.2f} %, the bar is {bar:g} %"
        faults.append(fault("accuracy-too-low", what))
    if on_gpus and (without := [one.rank for one in ranks if one.device == "cpu"]):
        why = "PyTorch cannot use a GPU for each rank; a host needs as many as it has slots"
        faults.append(fault("gpu-unused", f"rank {_list(without)} trained on a CPU: {why}"))
    return _summary(report), faults


def evaluate_check(document: Document, hosts: Mapping[str, str], np: int) -> Verdict:
    """The verdict on the engine's own check, with arguments as of `evaluate_training`."""
    try:
        report = CheckReport.model_validate(document)
    except ValidationError as error:
        return None, [fault("report-unreadable", f"the engine check's report cannot be read: {problems(error)[0][1]}")]
    faults = [fault("engine-wrong", f"the engine is wrong: {failure}") for failure in report.failures]
    if report.size != np:
        faults.append(fault("ranks-missing", f"{counted(np, 'rank')} should have taken part, but {report.size} did"))
    seen = {each.host for each in report.hosts}
    absent = [name for name, hostname in hosts.items() if hostname not in seen]
    faults += [fault("host-missing", f"{name} did not take part: no rank ran there") for name in absent]
    if len(report.hosts) < len(hosts):
        faults.append(fault("hosts-missing", f"{counted(len(hosts), 'host')} should have taken part, but {len(report.hosts)} did"))
    result = "all collectives are right" if not report.failures else f"{len(report.failures)} collectives are WRONG"
    over = "" if report.transport == "none" else f" over {report.transport}"
    return f"engine check: {counted(report.size, 'rank')} on {counted(len(report.hosts), 'host')}{over}: {result}", faults


def beside_one_rank(report: TrainingReport) -> str | None:
    """How much faster all ranks were than one alone; None without such a figure: one rank has nothing to be faster than."""
    if report.one_rank_images_per_second is None or report.efficiency is None:
        return None
    most = 1.0 if report.efficiency_limit is None else report.efficiency_limit
    efficiency = _possible(report.efficiency, most)
    if efficiency is None:
        return f"the speed-up {_DISTURBED}"
    speed_up = f"speed-up {report.np * efficiency:.2f} with {counted(report.np, 'rank')}, parallel efficiency {100 * efficiency:.0f} %"
    return speed_up + (f" (the cores allow {100 * most:.0f} %)" if most < 1 else "")


def left_by_communication(report: TrainingReport) -> str | None:
    """What communication leaves of the speed of the same ranks without it; None without such a figure."""
    if report.without_communication_images_per_second is None or report.efficiency_of_communication is None:
        return None
    share = _possible(report.efficiency_of_communication, 1.0)
    return f"what communication leaves {_DISTURBED}" if share is None else f"communication leaves {100 * share:.0f} % of it"


def _possible(share: float, most: float) -> float | None:
    """A measured share, at most ``most``; None where it exceeds that by more than measurements vary."""
    return min(share, most) if 0 <= share <= most * _TOLERANCE else None


def fault(id: str, what: str) -> Problem:
    """Why a job does not count as passed."""
    return Problem("error", what, where="training", id=id)


def _wrong_ranks(ranks: Sequence[int], expected: int) -> Iterator[Problem]:
    if missing := sorted(set(range(expected)) - set(ranks)):
        yield fault("ranks-missing", f"{counted(expected, 'rank')} should have trained, but rank {_list(missing)} did not take part")
    if surplus := sorted(set(ranks) - set(range(expected))):
        yield fault("ranks-unexpected", f"{counted(expected, 'rank')} should have trained, but rank {_list(surplus)} took part as well")
    if doubled := sorted(rank for rank, times in Counter(ranks).items() if times > 1):
        yield fault("ranks-repeated", f"rank {_list(doubled)} is in the report more than once")


def _wrong_hosts(ranks: Sequence[Participant], expected: Mapping[str, str]) -> Iterator[Problem]:
    seen = {one.host for one in ranks}
    for name, hostname in expected.items():
        if hostname not in seen:
            shown = name if name == hostname else f"{name} ({hostname})"
            yield fault("host-missing", f"{shown} did not take part: no rank ran there")
    for hostname in sorted(seen - {*expected.values()}):
        there = _list([one.rank for one in ranks if one.host == hostname])
        yield fault("host-unexpected", f"rank {there} ran on {hostname}, which is not a host of this run")
    # Hosts with the same host name are told apart by their ranks with local rank 0.
    if sum(one.local_rank == 0 for one in ranks) < len(expected) and seen == {*expected.values()}:
        what = f"ranks ran on fewer than {counted(len(expected), 'host')}; give each host its own host name to see which is missing"
        yield fault("hosts-missing", what)


def _differing_parameters(ranks: Sequence[Participant]) -> Iterable[Problem]:
    by_digest = grouped((one.parameter_digest, one.rank) for one in ranks)
    if len(by_digest) > 1:
        groups = "; ".join(f"{digest[:12]} on rank {_list(same)}" for digest, same in by_digest.items())
        yield fault("parameters-differ", f"the parameters are not the same on all ranks at the end: {groups}")


def _summary(report: TrainingReport) -> str:
    bar = f"bar {report.bar_percent:g} %" if report.bar_percent > 0 else "no bar for so few epochs"
    same = "bit-identical on all ranks" if len({one.parameter_digest for one in report.participants}) == 1 else "not the same on all ranks"
    speed = [f"{report.images_per_second:,.0f} images/s"]
    if beside_one := beside_one_rank(report):
        speed[0] += f"; one rank alone {report.one_rank_images_per_second:,.0f}: {beside_one}"
    if left := left_by_communication(report):
        speed.append(f"the same ranks without communication {report.without_communication_images_per_second:,.0f} images/s: {left}")
    size = f"{counted(report.np, 'rank')} on {counted(len(report.hosts), 'host')}, {counted(len(report.epochs), 'epoch')}"
    result = f"test accuracy {report.epochs[-1].test_accuracy_percent:.2f} % ({bar}), parameters {same}"
    return "\n".join([f"{report.dataset}: {size}: {result}", *speed, *report.notes])


def _list(ranks: Sequence[int]) -> str:
    return few([str(rank) for rank in ranks], 10)
