"""The verdict of a run whose hosts have GPUs: none is ready whose GPUs have not trained, and simulated ones never are.

Only the training job and the search for GPU code are stated; `tests/integration/test_gpu_way.py` has them on simulated hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed, gpu, host, plan_for

from provision import inventory
from provision.base.problems import Problem
from provision.commands.run import Run, train
from provision.launch import jobs
from provision.launch.jobs import JobResult
from provision.launch.smoke import training_job
from provision.plan.options import SmokeOptions
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.report import entries, page, runs
from provision.report.model import Report
from provision.survey import Facts, collect, gpu_code

H100, SIMULATED = {"compute_capability": "9.0"}, {"compute_capability": "9.0", "simulated": True}
WEAK = "installed; GPU not verified: simulated"


def with_gpu(address: str, *gpus: dict[str, Any]) -> Facts:
    return changed(gpu("13.0", "9.0", address), gpus=list(gpus))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the last stage: facts, the device that each rank names, what is wrong with the libraries → the report."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))

    def run(facts: Sequence[Facts], devices: Sequence[str], wrong: Sequence[Problem] = (), **options: Any) -> Report:
        known = dict(zip("ab", facts, strict=True))
        plan = plan_for(known)
        ranks = [
            {"rank": rank, "host": plan.hosts["ab"[rank]].hostname, "local_rank": 0, "parameter_digest": "d", "device": device}
            for rank, device in enumerate(devices)
        ]
        speeds = dict.fromkeys(
            (
                "one_rank_images_per_second",
                "speedup",
                "efficiency",
                "without_communication_images_per_second",
                "efficiency_of_communication",
            )
        )
        said = {"schema": 1, "dataset": "digits", "np": 2, "hosts": {"h": [0, 1]}, "participants": ranks, "bar_percent": 90.0, **speeds}
        said |= {"epochs": [{"epoch": 1, "test_accuracy_percent": 97.0}], "images_per_second": 1.0}

        def ended(_: Session, __: object, ___: str, log: Path, *____: object, **_____: object) -> JobResult:
            log.write_text("the last line\n")
            return JobResult(0, said, interrupted=False)

        monkeypatch.setattr(jobs, "run", ended)
        monkeypatch.setattr(training_job, "_copy", lambda *_: None)
        asked: list[dict[str, str]] = []
        monkeypatch.setattr(gpu_code, "check", lambda _session, pythons, **_: asked.append(pythons) or list(wrong))
        with Session(inventory.load("a,b"), Progress()) as session:
            session.step = "training"
            report = Report(run_id=session.run_id, folder=str(session.folder), inventory="a,b")
            entries.add_survey(report, collect.Survey(known, []))
            entries.add_complete(report, plan)
            train(Run(session, report), plan, SmokeOptions(source="digits", **options))
            session.write("report.json", report.as_dict())
        with_builds = [name for name, each in known.items() if each.gpus]
        assert asked == [{name: f"{plan.hosts[name].prefix}/venv/bin/python" for name in with_builds}]
        return report

    return run


def test_hosts_with_simulated_gpus_are_installed_and_never_ready(trained) -> None:
    simulated = [with_gpu("10.0.0.1", SIMULATED), with_gpu("10.0.0.2", SIMULATED)]
    for facts, devices in (
        (simulated, ("cpu", "cpu")),
        ([simulated[0], with_gpu("10.0.0.2", H100)], ("cpu", "cpu")),
        (simulated, ("NVIDIA H100", "NVIDIA H100")),  # a host that lies about its GPUs gains nothing by another lie
    ):
        report = trained(facts, devices)
        assert (report.verdict, report.ok, report.smoke_faults) == (WEAK, True, [])
        assert {each.state for each in report.hosts} == {"unchanged"}
    found = runs.read(Path(report.folder))
    assert (found.verdict, found.verdict in (*runs.GOOD, *runs.BAD)) == (WEAK, False)
    assert f'<div class="verdict warn">\n<h1>{WEAK}: ' in page.render(found)


def test_hosts_with_real_gpus_never_get_that_verdict(trained) -> None:
    real = [with_gpu("10.0.0.1", H100), with_gpu("10.0.0.2", H100)]
    report = trained(real, ("NVIDIA H100", "NVIDIA H100"))
    assert (report.verdict, {each.state for each in report.hosts}) == ("ready", {"ready"})
    report = trained(real, ("cpu", "cpu"))
    assert (report.verdict, [each.id for each in report.smoke_faults]) == ("not ready", ["gpu-unused"])
    assert trained(real, ("cpu", "cpu"), oversubscribe=True).verdict == "ready"  # more ranks than GPUs were requested
    assert trained([real[0], host("10.0.0.2")], ("cpu", "cpu")).verdict == "ready"  # the ranks of a job have all a GPU, or none


def test_a_library_without_code_for_a_simulated_gpu_is_an_error_all_the_same(trained) -> None:
    simulated = [with_gpu("10.0.0.1", SIMULATED), with_gpu("10.0.0.2", SIMULATED)]
    missing = Problem("error", "libx.so has no code for its H100 (9.0)", "build it again", id=gpu_code.ID, host="a")
    report = trained(simulated, ("cpu", "cpu"), [missing])
    assert (report.verdict, report.smoke, [(each.host, each.where, each.id) for each in report.failures]) == (
        "not ready",
        None,
        [("a", "training", gpu_code.ID)],
    )
    unknown = Problem("warning", "there was no time", id="host-warning", host="b")
    report = trained(simulated, ("cpu", "cpu"), [unknown])
    assert (report.verdict, report.notes) == (WEAK, ["b: there was no time"])
