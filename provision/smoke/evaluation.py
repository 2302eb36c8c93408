"""Judges the training job that ends every run: did every listed host and rank take part, and is what they trained right?

Pure: reads the report that hostside/train_mnist.py wrote, starts and fetches nothing. It believes no verdict of the job's own; each is
drawn again from the ranks' digests and the accuracies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REPORT_SCHEMA = 1


def judge(report: Mapping[str, Any], *, expected_hosts: Mapping[str, str], expected_np: int, bar: float) -> list[str]:
    """Why the job did not succeed, a sentence each; empty when it did.

    Args:
        report: what rank 0 wrote.
        expected_hosts: name in the inventory → host name that the host calls itself.
        expected_np: number of ranks that were asked for.
        bar: test accuracy in percent that the last epoch must have reached.
    """
    if report.get("schema") != REPORT_SCHEMA:
        return [f"the training job's report has schema {report.get('schema')!r}, this version reads {REPORT_SCHEMA}"]
    try:
        participants = sorted(report["participants"], key=lambda one: int(one["rank"]))
        return [
            *_missing_ranks([int(one["rank"]) for one in participants], expected_np),
            *_missing_hosts(participants, expected_hosts),
            *_differing_parameters(participants),
            *_too_inaccurate(report["epochs"], bar),
        ]
    except (KeyError, TypeError, ValueError) as error:
        return [f"the training job's report cannot be understood: {type(error).__name__} {error}"]


def _missing_ranks(ranks: Sequence[int], expected: int) -> Iterable[str]:
    if missing := sorted(set(range(expected)) - set(ranks)):
        yield f"{_plural(expected, 'rank')} should have trained, but rank {_list(missing)} did not take part"
    if surplus := sorted(set(ranks) - set(range(expected))):
        yield f"{_plural(expected, 'rank')} should have trained, but rank {_list(surplus)} took part as well"
    if doubled := sorted(rank for rank, times in Counter(ranks).items() if times > 1):
        yield f"rank {_list(doubled)} is in the report more than once"


def _missing_hosts(participants: Sequence[Mapping[str, Any]], expected: Mapping[str, str]) -> Iterable[str]:
    # Hosts that call themselves the same can still be counted: each has one rank with local rank 0.
    seen = Counter(str(one["host"]) for one in participants if int(one["local_rank"]) == 0)
    for one in participants:
        seen.setdefault(str(one["host"]), 1)
    names: dict[str, list[str]] = {}
    for name, hostname in expected.items():
        names.setdefault(hostname, []).append(name)
    for hostname, of_inventory in names.items():
        if hostname not in seen:
            for name in of_inventory:
                yield f"{_called(name, hostname)} did not take part: no rank ran there"
        elif seen[hostname] < len(of_inventory):
            yield (
                f"{_list(of_inventory)} all call themselves {hostname}, and ranks ran on {seen[hostname]} of these {len(of_inventory)}; "
                "give each host a name of its own"
            )
    for hostname in sorted(set(seen) - set(names)):
        ranks = [int(one["rank"]) for one in participants if one["host"] == hostname]
        yield f"rank {_list(ranks)} ran on {hostname}, which is no host of this run"


def _differing_parameters(participants: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    by_digest: dict[str, list[int]] = {}
    for one in participants:
        by_digest.setdefault(str(one["parameter_digest"]), []).append(int(one["rank"]))
    if len(by_digest) > 1:
        groups = "; ".join(f"{digest[:12]} on rank {_list(ranks)}" for digest, ranks in by_digest.items())
        yield f"the parameters are not the same on all ranks at the end: {groups}"


def _too_inaccurate(epochs: Sequence[Mapping[str, Any]], bar: float) -> Iterable[str]:
    if not epochs:
        yield "no epoch was trained"
        return
    reached, epoch = float(epochs[-1]["test_accuracy_percent"]), int(epochs[-1]["epoch"])
    if not reached >= bar:  # also catches NaN
        yield f"test accuracy after epoch {epoch} is {reached:.2f} %, the bar is {bar:g} %"


def summary(report: Mapping[str, Any]) -> str:
    """The job in a few lines: data, ranks, accuracy, sameness, speed, and what limited it."""
    epochs = report["epochs"]
    bar = f" (bar {report['bar_percent']:g} %)" if report["bar_percent"] > 0 else " (no bar for so few epochs)"
    same = "bit-identical on all ranks" if report["parameters_identical"] else "not the same on all ranks"
    speed = f"{report['images_per_second']:,.0f} images/s"
    if report["speedup"] is not None:  # one rank has nothing to be faster than
        speed += (
            f"; one rank alone {report['one_rank_images_per_second']:,.0f}: "
            f"speed-up {report['speedup']:.2f}, parallel efficiency {100 * report['efficiency']:.0f} %"
        )
    lines = [
        f"{report['dataset']}: {_plural(report['np'], 'rank')} on {_plural(len(report['hosts']), 'host')}, "
        f"{_plural(len(epochs), 'epoch')}: test accuracy {report['test_accuracy_percent']:.2f} %{bar}, parameters {same}",
        speed,
    ]
    return "\n".join([*lines, *(str(note) for note in report.get("notes", ()))])


def _called(name: str, hostname: str) -> str:
    return name if name == hostname else f"{name} ({hostname})"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _list(items: Sequence[object]) -> str:
    """``1, 2 and 3``; long lists are cut."""
    words = [str(item) for item in items]
    if len(words) > 12:
        words = [*words[:10], f"{len(words) - 10} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def judge_check(report: Mapping[str, Any], expected_hosts: Mapping[str, str], expected_np: int) -> list[str]:
    """Why the engine's own check (``collective_core.check --report``) did not succeed; empty when it did."""
    faults = [f"the engine is wrong: {failure}" for failure in report["failures"]]
    if report["size"] != expected_np:
        faults.append(f"{_plural(expected_np, 'rank')} should have taken part, but {report['size']} did")
    seen = Counter(str(host["host"]) for host in report["hosts"])
    for name, called in expected_hosts.items():
        if not seen[called]:
            faults.append(f"{name} did not take part: no rank ran there")
    if len(report["hosts"]) < len(expected_hosts):
        faults.append(f"{_plural(len(expected_hosts), 'host')} should have taken part, but {len(report['hosts'])} did")
    return faults


def check_summary(report: Mapping[str, Any]) -> str:
    """One line for people about the engine's own check."""
    hosts = _plural(len(report["hosts"]), "host")
    verdict = "all collectives are right" if not report["failures"] else f"{len(report['failures'])} collectives are WRONG"
    over = "" if report["transport"] == "none" else f" over {report['transport']}"
    return f"engine check: {_plural(report['size'], 'rank')} on {hosts}{over}: {verdict}"
