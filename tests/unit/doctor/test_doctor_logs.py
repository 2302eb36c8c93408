"""Findings in logs: known errors alone, in other versions' words, mixed, and behind prefixes; unknown errors; harmless logs."""

import io
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provision.catalog import OURS
from provision.diagnosis.findings import UNKNOWN
from provision.diagnosis.logs import Scanner, findings
from provision.diagnosis.logs.lines import BLOCK
from provision.diagnosis.logs.scanner import KEPT_MATCHES


def roots(found):
    return [each.id for each in found if each.is_root_cause]


def test_every_sample_is_recognised(explain, load) -> None:
    missed = {name for name, logs in load("samples.yaml").items() for log in logs if name not in {each.id for each in explain(log)}}
    assert not missed


def test_nearly_every_variant_of_other_versions_is_recognised(explain, load) -> None:
    variants = load("variants.yaml")
    missed = {name for name, log in variants.items() if name not in {each.id for each in explain(log)}}
    assert len(missed) <= 0.05 * len(variants), missed


def harmless_logs(load) -> list[str]:
    return [*(each["log"] for each in load("harmless.yaml")), *load("fresh.yaml")["harmless"]]


def test_harmless_logs_have_no_findings(explain, load) -> None:
    logs = harmless_logs(load)
    told = {log[:80]: found for log in logs if (found := [(each.id, each.evidence[0].text) for each in explain(log)])}
    assert not told
    assert len(logs) >= 200


def test_harmless_logs_together_have_no_findings(explain, load) -> None:
    assert explain("\n".join(harmless_logs(load))) == []


def of_lines(prefix: Callable[[int, str], str]) -> Callable[[str], str]:
    return lambda log: "\n".join(prefix(number, line) for number, line in enumerate(log.splitlines(), 12))


PREFIXES = {
    "none": lambda log: log,
    "kubectl logs --prefix": of_lines(lambda _, line: f"[pod/train-0/worker] {line}"),
    "kubectl logs --timestamps": of_lines(lambda _, line: f"2026-01-02T03:04:05.678901234Z {line}"),
    "Docker": of_lines(lambda _, line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-02T03:04:05.678901234Z"})),
    "journalctl": of_lines(lambda _, line: f"Jan 02 03:04:05 node1 train.sh[4711]: {line}"),
    "journalctl -o short-iso": of_lines(lambda _, line: f"2026-01-02T03:04:05+0000 node1 train[4711]: {line}"),
    "Ansible": of_lines(lambda _, line: f"        {json.dumps(line)},"),
    "logging": of_lines(lambda _, line: f"2026-01-02 03:04:05,678 - launcher - INFO - {line}"),
    "logging.basicConfig": of_lines(lambda _, line: f"INFO:launcher:{line}"),
    "loguru": of_lines(lambda _, line: f"2026-01-02 03:04:05.678 | INFO     | launcher:stream:88 - {line}"),
    "grep -n": of_lines(lambda number, line: f"{number}:{line}"),
    "grep -Hn": of_lines(lambda number, line: f"logs/rank-0.log:{number}:{line}"),
    "GitHub": of_lines(lambda _, line: f"train\tRun training\t2026-01-02T03:04:05.6789012Z {line}"),
    "GitLab": of_lines(lambda _, line: f"2026-01-02T03:04:05.678901Z 01O {line}"),
    "mpirun": of_lines(lambda _, line: f"[1,0]<stderr>:{line}"),
    "torchrun": of_lines(lambda _, line: f"[rank0]:{line}"),
    "torchrun --role": of_lines(lambda _, line: f"[default0]:{line}"),
    "srun --label": of_lines(lambda _, line: f"0: {line}"),
    "Ray": of_lines(lambda _, line: f"(RayTrainWorker pid=1234, ip=10.0.0.4) {line}"),
    "BuildKit": of_lines(lambda _, line: f"#12 3.456 {line}"),
}


def in_turn(cases: list, prefix: str) -> list:
    """All of them without a prefix, one in four behind a prefix: another one behind the next."""
    return cases if prefix == "none" else cases[list(PREFIXES).index(prefix) % 4 :: 4]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_unlisted_errors_are_named_or_quoted_by_the_decisive_line_behind_any_prefix(explain, load, prefix: str) -> None:
    cases = load("unlisted.yaml")
    assert len(cases) >= 250
    missed = []
    for case in in_turn(cases, prefix):
        found = explain(PREFIXES[prefix](case["log"]))
        quoted = [" ".join(each.text.split()) for finding in found if finding.id == UNKNOWN for each in finding.evidence]
        line = " ".join(case.get("line", case["log"]).split())  # a header is quoted with the line that it announces
        decisive = not quoted or any(line in text or (text in line and "line" not in case) for text in quoted)
        if not decisive or not found or found[0].severity == "note":
            missed.append((line, quoted))
    assert len(missed) <= 0.02 * len(cases), missed


@pytest.mark.parametrize("prefix", PREFIXES)
def test_samples_are_recognised_behind_any_prefix(explain, load, prefix: str) -> None:
    samples = [(name, log) for name, logs in load("samples.yaml").items() for log in logs[:1]]
    missed = [name for name, log in in_turn(samples, prefix) if name not in {each.id for each in explain(PREFIXES[prefix](log))}]
    assert len(missed) <= 0.05 * len(samples), missed


def test_an_error_in_a_field_of_ansibles_answer_is_quoted_alone(explain) -> None:
    log = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\nKeyError: 'lr'"
    (found,) = explain("fatal: [node1]: FAILED! => " + json.dumps({"changed": True, "rc": 1, "stderr": log, "stdout": ""}))
    assert found.evidence[0].line == 1
    assert found.evidence[0].text.startswith("KeyError: 'lr'")


def test_updates_of_a_progress_bar_are_lines_of_their_own_but_not_of_the_file(explain) -> None:
    bar = "".join(f"\r {number % 100}%|####      | {number}/100 [00:01<00:02, 4.5it/s]" for number in range(4000))
    (found,) = explain(f"begin\r\nEpoch 1{bar}\rFATAL: the data server is gone\nend\n")
    assert (found.evidence[0].line, found.evidence[0].text) == (2, "FATAL: the data server is gone")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_mark_says_the_encoding(explain, encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith("e") else ""
    log = f"{mark}Début\r\n" + "ordinary\r\n" * BLOCK + f"{REFUSED}\r\n"
    (found,) = explain(log.encode(encoding))
    assert (found.id, found.evidence[0].line) == ("ssh-host-key-verification", BLOCK + 2)


@pytest.mark.parametrize("width", [72, 80, 100, 120])
def test_a_word_that_a_terminal_folded_is_read(explain, width: int) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    for at in (5, 13, 24, 39):  # the letter at which it is folded
        log = "an ordinary line\n" + "x" * (width - at - 1) + f" {said}"[:at] + "\n" + f" {said}"[at:] + "\nanother one\n"
        log = "\n".join(line[begin : begin + width] for line in log.split("\n") for begin in range(0, max(1, len(line)), width))
        found = explain(log)
        assert [each.id for each in found][:1] == ["cuda-oom"], log
        assert found[0].evidence[0].line == 2


def test_a_message_goes_on_behind_the_longest_line(explain) -> None:
    found = explain("WARNING: the cards of this machine were looked at, and there are\nno active ports detected (of any).\n")
    assert [each.id for each in found] == ["openib-no-active-ports"]


def test_an_error_far_inside_a_long_line_is_found(explain) -> None:
    (found,) = explain("one\n" + "step " * 300_000 + f"{REFUSED} " + "step " * 300_000 + "\nthree\n")
    assert (found.id, found.evidence[0].line) == ("ssh-host-key-verification", 2)


def test_fresh_logs_of_known_errors_are_recognised_and_named_first(explain, load) -> None:
    known = load("fresh.yaml")["known"]
    missed = [(name, said) for name, log in known if (said := [each.id for each in explain(log)])[:1] != [name]]
    assert len(missed) <= 0.05 * len(known), missed


REFUSED = "Host key verification failed."
UNABLE = "ORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n\n* not finding the required libraries"
CLOSING = "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted."


@pytest.mark.parametrize(
    "disguise",
    [
        lambda line: f"[1,3]<stderr>:{line}",
        lambda line: f"[3]<stderr>:{line}",
        lambda line: f"[rank3]:{line}",
        lambda line: f"[default3]:{line}",
        lambda line: f"\x1b[31m\x1b[1m{line}\x1b[0m",
        lambda line: f"2025-03-01T10:11:12.123Z {line}",
        lambda line: f"[1,3]<stderr>:[2025-03-01 10:11:12] \x1b[31m{line}\x1b[0m\r",
        lambda line: f"worker-1  | {line}",
    ],
)
def test_prefixes_colours_and_line_ends_do_not_hide_a_message_of_several_lines(explain, disguise) -> None:
    log = "There are not enough slots available in the\nsystem to satisfy the 2 slots that were requested"
    found = explain("\n".join(disguise(line) for line in log.splitlines()))
    assert roots(found) == ["mpi-not-enough-slots"]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "[ERROR] cannot start the worker\n[ERROR] open /data/a.bin: 3 bytes are missing\n",
            "[ERROR] open /data/a.bin: 3 bytes are missing",
        ),
        ("ERROR: worker 3 stopped\nFATAL: the mesh has no root\n", "FATAL: the mesh has no root"),
        ("FATAL: the mesh has no root\nmesh.errors.MeshError: node 7 is gone\n", "mesh.errors.MeshError: node 7 is gone"),
        ("slurmstepd: error: task 3 exited with code 9\nerror: the mesh has 3 roots\n", "error: the mesh has 3 roots"),
        ("error: while the mesh was built:\n  node 7 has no neighbour\n", "error: while the mesh was built: node 7 has no neighbour"),
        ("*** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\nerror: the mesh has 3 roots\n", "error: the mesh has 3 roots"),
        ("error: the option `mesh` is deprecated\nerror: the mesh has 3 roots\n", "error: the mesh has 3 roots"),
        ("xe 0000:03:00.0: [drm] GT0: reset failed\n", "xe 0000:03:00.0: [drm] GT0: reset failed"),
        ("habanalabs hl4: heartbeat was lost\n", "habanalabs hl4: heartbeat was lost"),
        ("MPIR_Init_thread(99)....:\nMPIDI_mesh_init(7): no provider for the mesh\n", "MPIDI_mesh_init(7): no provider for the mesh"),
        ("==71==ERROR: MemorySanitizer: use-of-uninitialized-value\n", "==71==ERROR: MemorySanitizer: use-of-uninitialized-value"),
        ("mesh.RemoteTask(ValueError): node 7\n", "mesh.RemoteTask(ValueError): node 7"),
    ],
)
def test_the_line_that_says_most_is_quoted(explain, log: str, line: str) -> None:
    (found,) = explain(log)
    assert (found.severity, found.evidence[0].text) == ("error", line)


def test_messages_of_ranks_that_print_at_once_are_kept_apart(explain) -> None:
    mine = ["WARNING: No preset parameters were", "found for the device that Open MPI detected:"]
    log = "\n".join(f"[1,0]<stderr>:{line}\n[1,1]<stdout>:step 7 loss 0.1" for line in mine)
    assert roots(explain(log)) == ["openib-no-preset-params"]


def test_symptoms_are_listed_below_their_cause(explain) -> None:
    found = explain(f"{REFUSED}\n{'-' * 74}\n{UNABLE}\n{'-' * 74}\n{CLOSING}")
    assert [(each.id, each.is_root_cause) for each in found] == [
        ("ssh-host-key-verification", True),
        ("mpi-daemons-failed", False),
        ("mpi-job-aborted", False),
    ]


def test_a_cause_that_is_printed_last_still_comes_first(explain) -> None:
    log = "[0]: RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:41\n"
    log += "kernel: Out of memory: Killed process 71 (python) total-vm:1kB\n"
    found = explain(log)
    assert [(each.id, each.caused_by) for each in found] == [("host-oom-kernel-log", None), ("gloo-peer-closed", "host-oom-kernel-log")]


def test_cause_and_symptom_may_stand_in_different_files(explain) -> None:
    found = explain(
        "[rank0]: ncclRemoteError: A call failed", "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert [(each.id, each.is_root_cause, each.evidence[0].file) for each in found] == [
        ("cuda-oom", True, "log1"),
        ("nccl-remote-error", False, "log0"),
    ]


def test_an_unknown_error_is_quoted_with_its_rank(explain) -> None:
    log = "\n".join(
        [
            "[1,0]<stdout>:epoch 1",
            "[1,2]<stderr>:Traceback (most recent call last):",
            '[1,2]<stderr>:  File "train.py", line 3, in <module>',
            "[1,2]<stderr>:ValueError: batch size must be even",
            "[1,0]<stderr>:RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:41",
            CLOSING,
        ]
    )
    first, *rest = explain(log)
    assert (first.id, first.severity, first.evidence[0].line) == (UNKNOWN, "error", 4)
    assert "rank 2" in first.cause
    assert "ValueError: batch size must be even" in first.cause
    assert {each.id for each in rest} == {"gloo-peer-closed", "mpi-job-aborted"}
    assert all(each.caused_by == UNKNOWN for each in rest)


def test_an_error_that_recovered_is_a_note(explain) -> None:
    waited = "Waiting for cache lock: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 21 (apt-get)\n"
    assert [(each.id, each.severity) for each in explain(waited)] == [("apt-lock", "error")]
    assert [(each.id, each.severity) for each in explain(waited + "Setting up hello (2.10) ...\n")] == [("apt-lock", "note")]


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 GiB\n"


@pytest.mark.parametrize(
    ("log", "has", "lacks"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", ("nvidia-smi", "PYTORCH_"), ("rocm-smi", "XLA_", "tf.")),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB\n",
            ("rocm-smi", "torch."),
            ("nvidia-smi", "expandable", "XLA_"),
        ),
        ("jax.errors.JaxRuntimeError: " + OUT_OF_MEMORY, ("nvidia-smi", "XLA_"), ("PYTORCH_", "torch.", "rocm-smi")),
        ('File "/env/tensorflow/python/eager/execute.py", line 53\n' + OUT_OF_MEMORY, ("tf.config",), ("PYTORCH_", "XLA_")),
        ("Temporary failure in name resolution\n", ("/etc/resolv.conf", "docker run"), ("kubectl",)),
        (
            "trainer-0.trainer.default.svc.cluster.local: Temporary failure in name resolution\n",
            ("kubectl",),
            ("/etc/resolv.conf", "docker run"),
        ),
        ("ada is not in the sudoers file.\nfork: retry: Resource temporarily unavailable\n", ("ulimit -u",), ("sudo tee",)),
    ],
)
def test_steps_fit_where_the_job_ran(explain, log: str, has: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    steps = "\n".join(step for finding in explain(log) for step in finding.fix)
    assert all(word in steps for word in has), steps
    assert not any(word in steps for word in lacks), steps


RETRY = (
    "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after connection broken by "
    "'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: "
    "[Errno -2] Name or service not known')': /simple/torch/\n"
)


def test_what_a_log_only_warns_of_is_a_note_if_nothing_failed(explain) -> None:
    (finding,) = explain(RETRY + "Collecting filelock\n")
    assert (finding.severity, finding.is_root_cause) == ("note", True)
    assert "nothing in the log says that it failed" in finding.observed
    assert all(each.severity == "note" for each in explain("[W1009 23:10:07.5 a.cpp:755] Could not load the mesh: KeyError: 3\n"))
    failed, *rest = explain(RETRY + CLOSING)
    assert (failed.severity, failed.id, failed.observed) == ("error", finding.id, "")
    assert rest[0].caused_by == failed.id


@pytest.mark.parametrize(
    "line",
    [
        "DEBUG 03-04 10:11:12 [platforms/select.py:20] CUDA is not there: NVML Shared Library Not Found",
        "26/03/04 10:11:13 DEBUG NativeCodeLoader: Failed to load native-hadoop: java.lang.UnsatisfiedLinkError: no hadoop",
    ],
)
def test_what_is_printed_for_debugging_is_a_note(explain, line: str) -> None:
    assert all(each.severity == "note" for each in explain(f"{line}\nnext\n"))
    assert [each.severity for each in explain(line.replace("DEBUG", "ERROR") + "\nnext\n")] == ["error"]


@pytest.mark.parametrize(
    ("end", "severity"), [("", "error"), ("10:00:05 worker 3 writes elsewhere\n", "note"), ("Retrying in 2 s\n", "note")]
)
def test_what_a_log_warns_of_last_is_what_it_ended_with(explain, end: str, severity: str) -> None:
    log = "[2026-01-02 10:00:00] worker 3: started\n[2026-01-02 10:00:04,251][pool][WARNING] - [Errno 28] No space left on device\n"
    (finding,) = explain(log + end)
    assert (finding.id, finding.severity) == ("disk-full", severity)


CAUGHT = "[rank1]: ValueError: the cache is empty\n"
STEPS = "".join(f"epoch 1 step {number}/400 loss 0.{number} 81.2 samples/s\n" for number in range(100, 300))
IN_PASSING = "node1:71:88 [0] NCCL WARN the tuner is left out\nERROR: the profiler could not be started\n"


@pytest.mark.parametrize(
    "end",
    [
        "Training completed.\n",
        ':::MLLOG {"key": "run_stop", "value": null, "metadata": {"file": "a.py", "status": "success"}}\n',
        "PLAY RECAP ***\nn1 : ok=3 changed=1 unreachable=0 failed=0 rescued=1\nn2 : ok=3 changed=1 unreachable=0 failed=0\n\n",
        "100% tests passed, 0 tests failed out of 31\n",
        "== 31 passed, 2 warnings in 3.10s ==\n",
        STEPS,
    ],
)
def test_what_a_run_overcame_raises_no_alarm(explain, end: str) -> None:
    """An exception that was caught, and what looks like an error in passing."""
    assert explain(CAUGHT + IN_PASSING + end) == []
    for failure in (
        "PLAY RECAP ***\nn1 : ok=3 unreachable=0 failed=1\nn2 : ok=3 unreachable=0 failed=0\n\n",
        "== 1 failed, 3 passed in 3.10s ==\n",
    ):
        assert explain(CAUGHT + IN_PASSING + failure)[0].severity == "error"
    (found,) = explain(CAUGHT + IN_PASSING + end + "[rank0]: TypeError: step() got no batch\n")
    assert (found.severity, found.evidence[0].text) == ("error", "[rank1]: ValueError: the cache is empty".removeprefix("[rank1]: "))


def test_a_few_steps_of_other_ranks_behind_an_exception_do_not_hide_it(explain) -> None:
    (found,) = explain(CAUGHT + "[rank0]: step 7 loss 0.1\n" * 20)
    assert (found.severity, found.evidence[0].text) == ("error", "ValueError: the cache is empty")


def test_what_looks_like_an_error_far_from_the_end_is_an_error_with_a_second_sign_only(explain) -> None:
    ordinary = "".join(f"reading shard {'x' * number}\n" for number in range(150))
    (note,) = explain(IN_PASSING + ordinary)
    assert (note.id, note.severity) == (UNKNOWN, "note")
    for sign in (CLOSING, "slurmstepd: error: the node has no memory\n", "the job exited with code 1\n"):
        assert explain(IN_PASSING + ordinary + sign)[0].severity == "error"
    many = "".join(f"ERROR: shard {'y' * number} is missing\n" for number in range(2, KEPT_MATCHES + 9))
    assert explain(many + ordinary)[0].severity == "error"


@pytest.mark.parametrize("remark", ["Failed to connect to bus", "sh: 1: numactl: not found", "loader: /data/x: No such file or directory"])
def test_a_remark_is_an_error_among_the_last_lines_only(explain, remark: str) -> None:
    assert [each.severity for each in explain(remark + "\n")] == ["error"]
    assert [each.severity for each in explain(remark + "\nloading 12 shards\nmodel has 7 layers\nvocabulary has 32 words\n")] == ["note"]


@pytest.mark.parametrize(
    "remark",
    [
        "Error while asking for the image; will try again",
        "ImportError: no fastattn, falling back",
        "ImportError: no fastattn\nusing the slow attention",
        "*********\n* Failed with: two trees\n* The tree is ignored.\n*********",
        "ls: cannot access '/dev/x': No such file or directory",
    ],
)
def test_what_a_program_says_to_have_overcome_is_no_error(explain, remark: str) -> None:
    assert all(each.severity == "note" for each in explain(remark + "\n"))


FAILED = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\nKeyError: 7\n'
LONG = FAILED.replace("KeyError", '  File "a.py", line 4, in f\n    f()\n' * 10 + "KeyError")


@pytest.mark.parametrize(
    "announced",
    [
        "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + LONG,
        "Exception ignored in: <function Pool.__del__ at 0x7f>\n"
        + LONG
        + "\nDuring handling of the above exception, another one:\n\n"
        + LONG,
        "W0102 10:11:12.131415 1234 cache.py:44] the cache is not available\n" + FAILED,
        "Exception in thread Thread-5:\n" + LONG.replace("a.py", "/v/wandb/sdk/stream.py"),
        "ERROR Cleaner: Exception while deleting a.b\njava.io.IOException: a.b\n\tat a.B.c(B.java:1)\nCaused by: d.E: f\n",
    ],
)
def test_a_traceback_that_words_announce_as_harmless_is_no_error(explain, announced: str) -> None:
    assert all(each.severity == "note" for each in explain(announced))
    # one that follows it is another one
    assert [each.severity for each in explain(announced + FAILED)] == ["error"]
    assert [each.severity for each in explain(FAILED + announced)] == ["error"]


@pytest.mark.parametrize("word", ["locale", "display", "profiler"])
def test_a_word_of_what_programs_do_without_hides_no_error_of_other_things(explain, word: str) -> None:
    assert [each.severity for each in explain(f"ERROR: cannot read the {word} table of the dataset\n")] == ["error"]


def test_an_exception_is_not_overcome_by_its_words(explain) -> None:
    log = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nRuntimeError: peer access is disabled\n'
    assert [each.severity for each in explain(log)] == ["error"]


def test_steps_that_are_not_numbers_are_no_success(explain) -> None:
    (found, *_) = explain("".join(f"iteration {number}/ 250 | lm loss: nan | loss scale: 1.0 | 4.1 samples/s\n" for number in range(9)))
    assert (found.id, found.severity) == ("loss-not-finite", "error")
    log = "iteration 7/ 250 | grad norm: nan | loss scale: 4096\n" + STEPS
    assert [each.severity for each in explain(log)] in ([], ["note"])


def test_tags_that_mpirun_repeats_inside_of_a_line_are_no_part_of_it(explain) -> None:
    tag = "[1,0]<stderr>:"
    trace = [
        f"{tag}Traceback (most recent call last):",
        f'{tag}  File "a.py", line 6, in <module>',
        f"{tag}    {tag}import horovod.torch{tag}",
    ]
    (found,) = explain("\n".join([*trace, f"{tag}ModuleNotFoundError{tag}: {tag}No module named 'horovod'{tag}"]))
    assert found.id == "horovod-names-missing"
    assert not any("<stderr>" in each.text for each in found.evidence)


@pytest.mark.parametrize(
    ("rank", "error", "is_shown"),
    [
        (2, "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.bin'", True),
        (2, "RuntimeError: the group is gone", False),  # it may be a consequence
        (0, "KeyError: 'horovod'", False),
    ],
)
def test_an_unknown_error_of_another_rank_is_shown_next_to_a_known_one(explain, rank: int, error: str, is_shown: bool) -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    logs = [(0, f"{trace}ModuleNotFoundError: No module named 'horovod'"), (rank, trace + error)]
    found = explain("\n".join(f"[1,{of}]<stderr>:{line}" for of, log in logs for line in log.splitlines()))
    expected = [("horovod-names-missing", None), ("unknown", error)][: 1 + is_shown]
    assert [(each.id, each.evidence[0].text if each.id == UNKNOWN else None) for each in found] == expected
    assert all(each.is_root_cause for each in found)


def test_an_error_that_a_log_only_warns_of_hides_no_unknown_one(explain) -> None:
    log = RETRY + 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: batch size must be even\n'
    known, unknown = explain(log)
    assert (known.severity, unknown.id, unknown.is_root_cause) == ("error", UNKNOWN, True)
    assert unknown.evidence[0].text == "ValueError: batch size must be even"


def test_lines_are_numbered_right_across_blocks(explain) -> None:
    filler = "a line that says nothing in particular\n"
    before = 3 * BLOCK // len(filler)
    found = explain(filler * before + f"{REFUSED}\n" + filler * before)
    assert [(each.evidence[0].line, each.evidence[0].text) for each in found] == [(before + 1, REFUSED)]


@pytest.mark.parametrize("offset", range(-60, 8, 4))
def test_a_message_across_the_end_of_a_block_is_found(explain, offset) -> None:
    message = "There are not enough slots available\nin the system"
    assert roots(explain("x" * 99 + "\n" + "y\n" * ((BLOCK - 100 + offset) // 2) + message)) == ["mpi-not-enough-slots"]


def test_an_error_that_is_repeated_is_counted(explain) -> None:
    (found,) = explain(f"{REFUSED}\n" * 50_000)
    assert len(found.evidence) <= 5
    assert found.times >= 50


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=200), st.sampled_from([b"Traceback (most recent call last):", b"NCCL WARN ", b"\x1b[31m", b"\r\n"]))
    )
)
def test_any_bytes_are_read_without_a_crash(parts) -> None:
    scanner = Scanner(OURS)
    scanner.read(io.BytesIO(b"".join(parts)), "log")
    findings(scanner)


def test_a_file_without_line_ends_does_not_fill_the_memory() -> None:
    class Endless(io.RawIOBase):
        left = 64

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return b"\xff" * size if self.left > 0 else b""

    scanner = Scanner(OURS)
    scanner.read(Endless(), "log")  # type: ignore[arg-type]
    assert findings(scanner) == []
