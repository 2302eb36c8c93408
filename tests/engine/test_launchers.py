"""Ranks that no mpirun started: torchrun itself, the variables of Slurm, a store with the job's secret."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from collective_core.errors import CollectiveError
from collective_core.launchers import first_host, read, read_secret

WORKER = Path(__file__).parent / "workers" / "without_mpi.py"
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "COLLECTIVE_", "SLURM_", "TORCHELASTIC_")
SHARED = "a secret that all ranks of this job know"


def clean(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return {**kept, "COLLECTIVE_START_TIMEOUT": "20", **more}


def reports(outputs):
    found = [json.loads(line.split("REPORT ", 1)[1]) for text in outputs for line in text.splitlines() if "REPORT " in line]
    return {entry["rank"]: entry for entry in found}


def run_ranks(environments):
    processes = [
        subprocess.Popen([sys.executable, str(WORKER)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


def test_slurm_variables_on_one_host():
    shared = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "here"}
    all_well(*run_ranks([clean(SLURM_PROCID=str(r), **shared) for r in range(3)]), 3)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_store_with_a_secret_among_strangers(hosts):
    port = free_port()
    held, stop = [], threading.Event()

    def knock():
        payloads = [b"", b"GET / HTTP/1.0\r\n\r\n" * 20, os.urandom(3000), b"ccstore1\0\0\0\1" + os.urandom(64), b"ccstore1"]
        while not stop.is_set() and len(held) < 600:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
                stranger.sendall(payloads[len(held) % len(payloads)])
                held.append(stranger)
            except OSError:
                stop.wait(0.02)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        all_well(*run_ranks(store_environments(4, port, hosts)), 4)
    finally:
        stop.set()
        thread.join()
        for stranger in held:
            stranger.close()
    assert held, "no stranger reached the store"


def test_another_secret_is_refused_on_both_sides():
    environments = [{**e, "COLLECTIVE_START_TIMEOUT": "4"} for e in store_environments(2, free_port(), secrets={1: SHARED[::-1]})]
    found, codes, _ = run_ranks(environments)
    assert codes == [3, 3]
    assert "ranks [1] did not come" in found[0]["error"]
    assert "does not know this job's secret" in found[1]["error"]


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
