"""Ranks that no mpirun started: torchrun itself, the variables of Slurm, a store with the job's secret."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from collective_core.errors import CollectiveError
from collective_core.runtime import handshake, store
from collective_core.runtime.config import from_environment
from collective_core.runtime.launchers import Single, first_host, read, read_secret
from collective_core.runtime.rendezvous import meet, session_secret
from eavesdropper import Eavesdropper, play
from leftovers import own_sockets

from collective_core import _native

WORKER = Path(__file__).parent / "workers" / "without_mpi.py"
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "COLLECTIVE_", "SLURM_", "TORCHELASTIC_")
SHARED = "a secret that all ranks of this job know"


def clean(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return {**kept, "COLLECTIVE_START_TIMEOUT": "20", **more}


def reports(outputs):
    found = [json.loads(line.split("REPORT ", 1)[1]) for text in outputs for line in text.splitlines() if "REPORT " in line]
    return {entry["rank"]: entry for entry in found}


def run_ranks(environments, worker=(str(WORKER),)):
    processes = [
        subprocess.Popen([sys.executable, *worker], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in environments
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    return reports([out for out, _ in outputs]), [process.returncode for process in processes], "\n".join(err for _, err in outputs)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def store_environments(n, port, hosts=1, secrets=None):
    return [
        clean(
            COLLECTIVE_RANK=str(r),
            COLLECTIVE_SIZE=str(n),
            COLLECTIVE_STORE=f"127.0.0.1:{port}",
            COLLECTIVE_SECRET=(secrets or {}).get(r, SHARED),
            COLLECTIVE_HOST_ID=f"host{r * hosts // n}",
            COLLECTIVE_ADDRESS="127.0.0.1",
        )
        for r in range(n)
    ]


def all_well(found, codes, errors, n):
    assert codes == [0] * n, errors
    assert set(found) == set(range(n))
    assert all(entry["sum"] == n for entry in found.values())


def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(WORKER)]
    done = subprocess.run(command, env=clean(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=110)
    all_well(reports([done.stdout]), [done.returncode] * 3, done.stderr, 3)


def test_torchrun_inside_mpi_and_slurm():
    outer = {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, env=clean(OMP_NUM_THREADS="1", **outer), capture_output=True, text=True, timeout=110)
    all_well(reports([done.stdout]), [done.returncode] * 2, done.stderr, 2)


def test_torchrun_inside_a_job_of_ours():
    """Its ranks are another job: each of two hosts' agents has two of four, say, and knows which better than we do."""
    outer = {"COLLECTIVE_RANK": "1", "COLLECTIVE_SIZE": "2", "COLLECTIVE_STORE": "10.0.0.1:4711"}
    inner = {"TORCHELASTIC_RUN_ID": "a", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "9"}
    assert read({**outer, **inner})[:4] == ("torchrun", 3, 4, False)
    assert read({**outer, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "9"})[:3] == ("COLLECTIVE_RANK", 1, 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", "-np", "1", *command],
        env=clean(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    all_well(reports([done.stdout]), [done.returncode] * 2, done.stderr, 2)


@pytest.mark.slow
def test_torchrun_inside_an_elastic_job_of_ours():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", "--min-np", "1", "-np", "1", *command],
        env=clean(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    all_well(reports([done.stdout]), [done.returncode] * 2, done.stderr, 2)


def test_slurm_with_variables_of_mpi_but_without_mpi4py(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not installed')")
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "here"}
    environments = [clean(PMI_SIZE="2", PMI_RANK=str(r), SLURM_PROCID=str(r), PYTHONPATH=str(tmp_path), **shared) for r in range(2)]
    all_well(*run_ranks(environments), 2)
    found, codes, _ = run_ranks([clean(PMI_SIZE="2", PYTHONPATH=str(tmp_path))])
    assert codes == [3]
    assert "pip install mpi4py" in found[0]["error"]


def test_slurm_variables_on_one_host():
    shared = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "here"}
    all_well(*run_ranks([clean(SLURM_PROCID=str(r), **shared) for r in range(3)]), 3)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_store_with_a_secret_among_strangers(hosts):
    port = free_port()
    held, knocked, stop = [], threading.Event(), threading.Event()

    def knock():
        payloads = [b"", b"GET / HTTP/1.0\r\n\r\n" * 20, os.urandom(3000), b"ccstore2\0\0\0\1" + os.urandom(64), b"ccstore2"]
        while not stop.is_set() and len(held) < 600:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
                stranger.sendall(payloads[len(held) % len(payloads)])
                held.append(stranger)
                knocked.set()
            except OSError:
                stop.wait(0.02)

    def one_after_a_stranger():
        """The store is closed once all ranks have met, which takes less than a moment: the last one waits for a stranger."""
        *first, last = store_environments(4, port, hosts)
        yield from first
        assert knocked.wait(20), "no stranger reached the store"
        yield last

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        all_well(*run_ranks(one_after_a_stranger()), 4)
    finally:
        stop.set()
        thread.join()
        for stranger in held:
            stranger.close()


@pytest.mark.parametrize("rank_0", ["its-own-name", "192.0.2.1"])
def test_rank_0_is_reached_although_it_does_not_know_its_own_address(rank_0, monkeypatch):
    """Its name leads itself to 127.0.1.1, as on Debian, or its address is one that a router translates; others reach it at another."""
    look_up = socket.getaddrinfo

    def of_rank_0(host, *arguments, **options):
        if host == "its-own-name" and options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        return look_up("127.0.1.1" if host == "its-own-name" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_rank_0)
    port = free_port()
    with ThreadPoolExecutor(3) as ranks:
        coming = [
            ranks.submit(store.enter, rank, 3, store.Endpoint((address, port)), SHARED.encode(), 5.0)
            for rank, address in enumerate((rank_0, "127.0.0.1", "127.0.1.1"))
        ]
        there = [each.result() for each in coming]
        heard = [ranks.submit(each.exchange, b"of rank %d" % rank) for rank, each in enumerate(there)]
        assert [each.result() for each in heard] == [[b"of rank %d" % rank for rank in range(3)]] * 3
        for each in there:
            each.finish(True)


def test_another_secret_is_refused_on_both_sides():
    environments = store_environments(2, free_port(), secrets={1: SHARED[::-1]})
    for environment, seconds in zip(environments, ("8", "20"), strict=True):
        environment["COLLECTIVE_START_TIMEOUT"] = seconds
    found, codes, _ = run_ranks(environments)
    assert codes == [3, 3]
    assert "ranks [1] did not come" in found[0]["error"]
    assert "does not know this job's secret" in found[1]["error"]


def test_who_listens_learns_no_secret_and_who_changes_something_is_noticed():
    greeting = 12 + 32 + 32  # and the proof: what follows is the first message
    for change in (None, greeting + 8 + 5):
        port = free_port()
        middle = Eavesdropper(port, change)
        environments = store_environments(2, port, hosts=2)
        environments[1]["COLLECTIVE_STORE"] = f"127.0.0.1:{middle.port}"
        seconds = "20" if change is None else "6"
        found, codes, errors = run_ranks([{**e, "COLLECTIVE_START_TIMEOUT": seconds} for e in environments])
        assert b'"interfaces"' in middle.heard, "nothing was heard"
        if change is None:
            all_well(found, codes, errors, 2)
            assert b'"nonce"' in middle.heard
            assert b'"secret"' not in middle.heard
            continue
        assert codes == [3, 3], errors
        assert "was changed on its way" in found[0]["error"]


def test_a_recorded_start_cannot_be_played_again():
    def enter(rank, port, timeout):
        return store.enter(rank, 2, store.Endpoint(("127.0.0.1", port)), SHARED.encode(), timeout)

    first, second = free_port(), free_port()
    middle = Eavesdropper(first)
    with ThreadPoolExecutor(2) as ranks:
        coming = [ranks.submit(enter, rank, port, 20.0) for rank, port in enumerate((first, middle.port))]
        both = [each.result() for each in coming]
        heard = [ranks.submit(each.exchange, b"of rank %d" % rank) for rank, each in enumerate(both)]
        assert [each.result() for each in heard] == [[b"of rank 0", b"of rank 1"]] * 2
        for each in both:
            each.finish(True)
        (said,) = middle.said
        assert b"of rank 1" in said
        again = ranks.submit(enter, 0, second, 5.0)
        answered = play(second, said)
        assert len(answered) == handshake.CHALLENGE_BYTES + handshake.PROOF_BYTES, "its own challenge and proof, and not a word more"
        with pytest.raises(CollectiveError, match=r"ranks \[1\] did not come"):
            again.result()


def test_ctrl_c_in_the_last_thing_that_the_store_had_to_do_stays_one():
    """A handler runs within whatever Python does at the time, here within the only task, which is over then."""

    class Interrupted(store.Endpoint):
        def listen(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.enter(0, 2, Interrupted(("127.0.0.1", 0)), SHARED.encode(), 5.0)


def test_the_secret_of_a_session_never_travels(monkeypatch):
    travelled, kept = b"", []

    class Alone(Single):
        secret = SHARED.encode()

        def exchange(self, mine):
            nonlocal travelled
            travelled += mine
            return [mine]

    monkeypatch.setattr(_native, "open_listeners", lambda *_addresses: (0, "nobody listens"))
    monkeypatch.setattr(_native, "connect", lambda *arguments: kept.append(arguments[2]))
    settings = from_environment()
    for process_set in (0, 0, 1):
        meet(Alone(), settings, process_set)
    nonces = [bytes.fromhex(text) for text in re.findall(r'"nonce": "([0-9a-f]{64})"', travelled.decode())]
    assert len(set(nonces)) == len(set(kept)) == 3, "every session has its own"
    assert session_secret(SHARED.encode(), nonces[0], 0) == kept[0]
    assert session_secret(SHARED.encode(), nonces[0], 1) != kept[0]
    for secret in (*kept, SHARED.encode()):
        assert secret not in travelled
        assert secret.hex().encode() not in travelled


def test_who_failed_to_meet_does_not_listen():
    class Interrupted(Single):
        rounds = 0

        def exchange(self, mine):
            self.rounds += 1
            if self.rounds == 2:
                raise CollectiveError("rank 1 is gone", "peer_lost", (1,))
            return [mine]

    before = own_sockets()
    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        meet(Interrupted(), from_environment())
    assert own_sockets() == before


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dies", "ranks .1. went away"),
        ("fails", "no route to host"),
        pytest.param("stops", "ranks .1. said nothing", marks=pytest.mark.slow),
    ],
)
def test_who_did_not_connect_is_known_to_those_that_did(how, why):
    """Rank 2 is on another host and needs rank 0 alone, which waits in vain for rank 1 and must not be blamed for going away."""
    seconds = "3" if how == "stops" else "20"
    environments = [{**e, "COLLECTIVE_START_TIMEOUT": seconds} for e in store_environments(3, free_port(), hosts=2)]
    found, _, errors = run_ranks(environments, (str(WORKER.with_name("connecting.py")), how))
    assert "did not connect to rank 0" in found[0]["error"]
    assert found[0]["ranks"] == [1]
    assert re.search(why, found[2]["error"]), errors
    assert found[2]["ranks"] == [1]


def test_several_hosts_without_a_secret_are_refused():
    environment = clean(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    found, codes, _ = run_ranks([environment])
    assert codes == [3]
    assert "COLLECTIVE_SECRET_FILE" in found[1]["error"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node[03-05,9],other", "node03"), ("a,b", "a"), ("gpu[7]", "gpu7"), ("n[1-2]-ib,x", "n1-ib")],
)
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_variables_that_contradict_each_other():
    assert read({}) is None
    with pytest.raises(CollectiveError, match="COLLECTIVE_STORE"):
        read({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2"})
    with pytest.raises(CollectiveError, match="not host:port"):
        read({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2", "COLLECTIVE_STORE": "nowhere"})
    with pytest.raises(CollectiveError, match="not a number"):
        read({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_the_file_of_the_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SHARED + "\n")
    path.chmod(0o600)
    assert read_secret({"COLLECTIVE_SECRET_FILE": str(path)}) == SHARED.encode()
    path.chmod(0o644)
    with pytest.raises(CollectiveError, match="chmod 600"):
        read_secret({"COLLECTIVE_SECRET_FILE": str(path)})
    with pytest.raises(CollectiveError, match="cannot be read"):
        read_secret({"COLLECTIVE_SECRET_FILE": str(path) + "x"})
    with pytest.raises(CollectiveError, match="shorter"):
        read_secret({"COLLECTIVE_SECRET": "short"})
