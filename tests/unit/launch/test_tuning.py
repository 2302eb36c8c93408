"""What is set for training on processors."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provision import inventory as inventories
from provision.base.errors import UsageError
from provision.cli.run_options import run_options
from provision.launch import forwarded_variables, program, tuning
from provision.launch.option_table import ELASTIC, HOROVOD, HOST_OPTIONS, JOB_OPTIONS, TUNING
from provision.launch.tuning import BF16, ENGINE, MEMORY, OFF, Choice, Processors
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session

ANSWER = """libc glibc 2.36
pages always [madvise] never
flags flags\t\t: fpu avx2 avx512_bf16 rdpid
kib 33554432
bytes 17179869184
bytes 9223372036854771712
"""
HOST = Processors("2.36", "madvise", "avx512_bf16", 16.0)
KEPT = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}


def test_what_a_host_says_is_read() -> None:
    assert Processors.of(ANSWER) == HOST, "the control group's limit counts"
    assert Processors.of(ANSWER + "gpu /dev/nvidia0\n").has_gpus
    assert Processors.of("libc \npages \nflags Features : fp asimd bf16 sve\nkib 4194304\nbytes max\n") == Processors("", "", "bf16", 4.0)
    assert Processors.of("") == Processors()


def test_this_machine_answers() -> None:
    done = subprocess.run(["sh", "-c", tuning.PROBE], capture_output=True, text=True, check=True)
    found = Processors.of(done.stdout.partition(ssh.ANSWER)[2])
    assert found.memory_gib > 0
    assert not done.stderr


@pytest.mark.parametrize(
    ("host", "ranks", "level", "environment", "names"),
    [
        (HOST, 2, MEMORY, {}, KEPT | {"GLIBC_TUNABLES"}),
        (HOST, 3, MEMORY, {}, set()),  # too little memory for each
        (HOST, 2, OFF, {}, set()),
        (replace(HOST, has_gpus=True), 2, BF16, {}, set()),
        (replace(HOST, libc=""), 2, MEMORY, {}, set()),
        (replace(HOST, libc="2.34"), 2, MEMORY, {}, KEPT),
        (replace(HOST, huge_pages="always"), 2, MEMORY, {}, KEPT),
        (HOST, 2, MEMORY, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, set()),
        (HOST, 2, MEMORY, {"LD_PRELOAD": "libjemalloc.so.2"}, set()),
        (HOST, 3, ENGINE, {}, {"COLLECTIVE_FOR_GLOO"}),
        (HOST, 3, BF16, {}, {"COLLECTIVE_FOR_GLOO", "COLLECTIVE_AUTOCAST"}),
        (HOST, 3, BF16, {"COLLECTIVE_AUTOCAST": "0"}, {"COLLECTIVE_FOR_GLOO"}),
    ],
)
def test_a_host_gets_what_fits_it(host: Processors, ranks: int, level: str, environment: dict[str, str], names: set[str]) -> None:
    chosen = tuning.choose(host, ranks, level, environment)
    assert set(chosen.variables) == names
    assert bool(chosen.reasons) == bool(names)


def test_older_glibc_takes_thresholds_up_to_half_of_its_largest_heap() -> None:
    assert tuning.choose(replace(HOST, libc="2.28"), 1, MEMORY, {}).variables["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)


def test_alike_hosts_share_a_sentence() -> None:
    alike, other = tuning.choose(HOST, 2, BF16, {}), tuning.choose(HOST, 2, MEMORY, {})
    first, second = tuning.sentences({"a": alike, "b": other, "c": alike, "d": Choice(), "e": alike, "f": alike, "g": alike})
    assert first == (
        "a, c, e and 2 more: freed memory is kept in huge pages; the engine takes the place of Gloo in "
        "PyTorch; autocast multiplies in bfloat16 (avx512_bf16) (not with --tune off)"
    )
    assert second == "b: freed memory is kept in huge pages (not with --tune off)"


def test_all_hosts_of_a_job_compute_alike() -> None:
    other, gpus = replace(HOST, bf16=""), replace(HOST, has_gpus=True)
    assert tuning.common_level(BF16, {"a": HOST, "b": HOST}) == (BF16, "")
    assert tuning.common_level(BF16, {"a": HOST, "b": other}) == (ENGINE, "--tune bf16: no rank uses it: no instructions for bfloat16: b")
    assert tuning.common_level(ENGINE, {"a": gpus, "b": None})[0] == MEMORY
    assert tuning.common_level(MEMORY, {"a": gpus, "b": None}) == (MEMORY, "")


def test_an_endless_answer_is_none() -> None:
    assert Processors.of(f"libc glibc 2.{'9' * 5000}\n").libc == ""


@pytest.mark.parametrize(("gpu", "level"), [("", ENGINE), ("gpu /dev/kfd\n", MEMORY)])
def test_one_host_with_gpus_keeps_gloo_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, level: str) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    (tmp_path / "hosts.ini").write_text("a ansible_host=10.0.0.1\nb ansible_host=10.0.0.2\n")
    answers = {"a": ssh.Answer(0, ssh.ANSWER + "\n" + ANSWER, ""), "b": ssh.Answer(0, ssh.ANSWER + "\n" + ANSWER + gpu, "")}
    monkeypatch.setattr(ssh, "run", lambda *_, **__: answers)
    placed = [("10.0.0.1", 1), ("10.0.0.2", 1)]
    with Session(inventories.load(str(tmp_path / "hosts.ini")), Progress(), {}) as session:
        seats = [program._Seat(host, host.address, 1, "") for host in session.inventory.hosts]
        tuned = program._tune(session, seats, placed, run_options(["true"], tune=ENGINE))
        assert program._tune(session, seats, placed, run_options(["true"], tune=OFF)) == {}
    assert set(tuned) == {"", "10.0.0.2"}
    assert ("COLLECTIVE_FOR_GLOO" in tuned[""]) == (level == ENGINE)
    assert bool(tuned["10.0.0.2"]) == (not gpu)


def test_elastic_jobs_are_refused_what_must_be_the_same_everywhere() -> None:
    elastic: dict[str, Any] = {"np": 2, "min_np": 1}
    assert run_options(["true"], **elastic).tune == MEMORY
    with pytest.raises(UsageError, match="--tune bf16: it is the same on all hosts"):
        run_options(["true"], tune=BF16, **elastic)


def test_the_users_choices_reach_the_ranks() -> None:
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "MALLOC_ARENA_MAX": "1"}
    assert forwarded_variables.select(own, forwarded_variables.KNOWN) == own


def test_the_help_is_short_enough_to_read() -> None:
    shown = [option for option in (*HOST_OPTIONS, *JOB_OPTIONS) if option.panel not in (None, ELASTIC, HOROVOD, TUNING)]
    assert "tune" in {option.parameter for option in shown}
    assert len(shown) <= 40
