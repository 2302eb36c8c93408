"""What the smoke job's report must show before a run counts as a success."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import host, plan_for

from provision import inventory
from provision.launch.smoke import evaluation, training_job
from provision.plan.options import SmokeOptions
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session

Report = dict[str, Any]


def good() -> Report:
    """Two hosts, two ranks each, as rank 0 writes it."""
    return {
        "schema": 1,
        "dataset": "MNIST",
        "np": 4,
        "hosts": {"node1": [0, 1], "node2": [2, 3]},
        "participants": [
            {
                "rank": rank,
                "host": f"node{1 + rank // 2}",
                "local_rank": rank % 2,
                "pid": 100 + rank,
                "device": "cpu",
                "cores": 2,
                "threads": 1,
                "parameter_digest": "ab" * 32,
            }
            for rank in range(4)
        ],
        "epochs": [
            {"epoch": 1, "loss": 0.9, "test_accuracy_percent": 91.0, "seconds": 4.0, "images_per_second": 15000.0},
            {"epoch": 2, "loss": 0.4, "test_accuracy_percent": 93.84, "seconds": 4.0, "images_per_second": 15000.0},
        ],
        "test_accuracy_percent": 93.84,
        "bar_percent": 92.0,
        "passed_bar": True,
        "parameters_identical": True,
        "images_per_second": 15000.0,
        "one_rank_images_per_second": 7500.0,
        "speedup": 2.0,
        "efficiency": 0.5,
        "efficiency_limit": 0.5,
        "without_communication_images_per_second": 16000.0,
        "efficiency_of_communication": 0.938,
        "notes": ["node1 and node2 share one machine with 2 cores"],
    }


EXPECTED = {"first": "node1", "node2": "node2"}


def judged(report: Report, **changes: Any) -> list[str]:
    faults = evaluation.evaluate_training(report, **{"hosts": EXPECTED, "np": 4, "bar": 92.0, **changes})[1]
    assert all(fault.id for fault in faults)
    return [fault.what for fault in faults]


def test_ranks_that_must_have_had_gpus_did_not_train_on_cpus() -> None:
    """Whatever the job says of itself: its ranks say on what they trained."""
    report = {**good(), "device": "cuda"}
    assert judged(report) == []
    without = ["rank 0, 1, 2, 3 trained on a CPU: PyTorch cannot use a GPU for each rank; a host needs as many as it has slots"]
    assert judged(report, on_gpus=True) == without
    for one in report["participants"]:
        del one["device"]
    assert judged(report, on_gpus=True) == without
    for one in report["participants"]:
        one["device"] = "NVIDIA H100 80GB HBM3"
    assert judged(report, on_gpus=True) == []


def summary(report: Report) -> str:
    return str(evaluation.evaluate_training(report, EXPECTED, 4, 92.0)[0])


def test_a_good_report_has_no_fault() -> None:
    assert judged(good()) == []


def lose_a_host(report: Report) -> None:
    report["participants"] = report["participants"][:2]


def lose_a_rank(report: Report) -> None:
    del report["participants"][3]


def double_a_rank(report: Report) -> None:
    report["participants"][3]["rank"] = 2


def run_elsewhere(report: Report) -> None:
    report["participants"][3].update(host="stranger", local_rank=0)


def differ(report: Report) -> None:
    report["participants"][1]["parameter_digest"] = "cd" * 32
    report["parameters_identical"] = True  # the job's own verdict is not believed


def learn_too_little(report: Report) -> None:
    report["epochs"][-1]["test_accuracy_percent"] = 91.99
    report["passed_bar"] = True


def learn_nothing(report: Report) -> None:
    report["epochs"][-1]["test_accuracy_percent"] = math.nan


def train_nothing(report: Report) -> None:
    report["epochs"] = []


def forget_the_ranks(report: Report) -> None:
    del report["participants"]


def come_from_the_future(report: Report) -> None:
    report["schema"] = 2


@pytest.mark.parametrize(
    ("spoil", "sentences"),
    [
        (
            lose_a_host,
            ["4 ranks should have trained, but rank 2, 3 did not take part", "node2 did not take part: no rank ran there"],
        ),
        (lose_a_rank, ["4 ranks should have trained, but rank 3 did not take part"]),
        (
            double_a_rank,
            ["4 ranks should have trained, but rank 3 did not take part", "rank 2 is in the report more than once"],
        ),
        (run_elsewhere, ["rank 3 ran on stranger, which is not a host of this run"]),
        (differ, ["the parameters are not the same on all ranks at the end: abababababab on rank 0, 2, 3; cdcdcdcdcdcd on rank 1"]),
        (learn_too_little, ["test accuracy after epoch 2 is 91.99 %, the bar is 92 %"]),
        (learn_nothing, ["test accuracy after epoch 2 is nan %, the bar is 92 %"]),
        (train_nothing, ["the training job's report cannot be read: `epochs` must be longer: at least 1"]),
        (forget_the_ranks, ["the training job's report cannot be read: `participants` is missing"]),
        (come_from_the_future, ["the training job's report cannot be read: `schema` must be 1, not 2"]),
    ],
)
def test_each_fault_has_its_sentence(spoil: Callable[[Report], None], sentences: list[str]) -> None:
    report = good()
    spoil(report)
    assert judged(report) == sentences


def test_missing_host_is_named_with_its_host_name() -> None:
    report = good()
    report["participants"] = report["participants"][2:]
    assert "first (node1) did not take part: no rank ran there" in judged(report)


def test_too_many_ranks_are_named_too() -> None:
    assert judged(good(), np=2) == ["2 ranks should have trained, but rank 2, 3 took part as well"]


def test_hosts_with_the_same_host_name_are_counted() -> None:
    report = good()
    for one in report["participants"]:
        one["host"] = "debian"
    expected = {"a": "debian", "b": "debian"}
    assert judged(report, hosts=expected) == []
    for rank, one in enumerate(report["participants"]):
        one["local_rank"] = rank
    assert judged(report, hosts=expected) == ["ranks ran on fewer than 2 hosts; give each host its own host name to see which is missing"]


def test_a_long_list_of_missing_ranks_is_cut() -> None:
    (sentence,) = judged(good(), np=1004)
    assert sentence == "1,004 ranks should have trained, but rank 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 990 more did not take part"


def test_evaluation_changes_nothing() -> None:
    report = good()
    before = copy.deepcopy(report)
    judged(report)
    summary(report)
    assert report == before


def test_the_summary_says_data_ranks_accuracy_and_speed() -> None:
    assert summary(good()).splitlines() == [
        "MNIST: 4 ranks on 2 hosts, 2 epochs: test accuracy 93.84 % (bar 92 %), parameters bit-identical on all ranks",
        "15,000 images/s; one rank alone 7,500: speed-up 2.00 with 4 ranks, parallel efficiency 50 % (the cores allow 50 %)",
        "the same ranks without communication 16,000 images/s: communication leaves 94 % of it",
        "node1 and node2 share one machine with 2 cores",
    ]


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            {"efficiency": 0.51},
            ["speed-up 2.00 with 4 ranks, parallel efficiency 50 % (the cores allow 50 %)", "communication leaves 94 % of it"],
        ),
        (
            {"efficiency": 1.21},
            ["the speed-up cannot be told from this run: a measurement was disturbed", "communication leaves 94 % of it"],
        ),
        ({"efficiency_of_communication": 1.03}, ["parallel efficiency 50 % (the cores allow 50 %)", "communication leaves 100 % of it"]),
        (
            {"efficiency_of_communication": 1.69},
            ["speed-up 2.00", "what communication leaves cannot be told from this run: a measurement was disturbed"],
        ),
        ({"efficiency": math.nan}, ["the speed-up cannot be told", "communication leaves 94 % of it"]),
    ],
)
def test_a_share_beyond_what_is_possible_is_not_told_as_a_fact(measured: Report, said: list[str]) -> None:
    """Other work slowed the short measurement that the training is compared with."""
    lines = summary({**good(), **measured}).splitlines()[1:3]
    for line, part in zip(lines, said, strict=True):
        assert part in line
    assert "121 %" not in " ".join(lines)
    assert "169 %" not in " ".join(lines)


def test_ranks_with_cores_of_their_own_have_no_limit_of_the_cores() -> None:
    assert summary({**good(), "efficiency_limit": 1.0}).splitlines()[1].endswith("parallel efficiency 50 %")


def test_the_summary_says_when_no_bar_was_set() -> None:
    assert "(no bar for so few epochs)" in summary({**good(), "bar_percent": 0.0})


PROGRESS = '{"epoch": 15, "epochs": 15, "part": 0.9375, "loss": 0.04123, "accuracy": null}'


@pytest.mark.parametrize(
    ("line", "noted", "shown"),
    [
        (f"[1,0]<stdout>:{PROGRESS}", "[1,0]<stdout>: 94 %  epoch 15 of 15: loss 0.0412", [15]),
        (
            f"[1,0]<stdout>:{PROGRESS}[1,1]<stderr>:warning: slow",
            "[1,0]<stdout>: 94 %  epoch 15 of 15: loss 0.0412[1,1]<stderr>:warning: slow",
            [15, "    rank 1: warning: slow"],
        ),
        (
            f"[1,1]<stderr>:w[1,0]<stdout>:{PROGRESS}",
            "[1,1]<stderr>:w[1,0]<stdout>: 94 %  epoch 15 of 15: loss 0.0412",
            ["    rank 1: w", 15],
        ),
        ("mpirun: a message", "mpirun: a message", ["    mpirun: a message"]),
        (f"[1,1]<stdout>:{PROGRESS}", f"[1,1]<stdout>:{PROGRESS}", [f"    rank 1: {PROGRESS}"]),
    ],
)
def test_how_far_the_job_is_is_read_where_lines_are_glued_and_is_in_words_in_the_log(
    line: str, noted: str, shown: list[int | str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the job on the hosts is stated: the end of an ssh connection."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    plan = plan_for({"a": host()})
    plan = replace(plan, hosts={name: replace(each, torch=None) for name, each in plan.hosts.items()})
    said: list[int | str] = []

    def stream(_: Session, __: str, ___: str, ____: object, take: Callable[[str], None], _____: object) -> int:
        take(line)
        return 1

    monkeypatch.setattr(ssh, "stream", stream)
    with Session(inventory.load("a,"), Progress()) as session:
        monkeypatch.setattr(session.progress, "training", lambda now: said.append(now.epoch))
        monkeypatch.setattr(session.progress, "line", lambda text, *_: said.append(text))
        training_job.run(session, plan, SmokeOptions())
    assert (session.folder / "smoke.log").read_text() == f"{noted}\n"
    assert said == shown
