"""``provision run`` inside the allocation of a scheduler: Slurm, and Kubernetes' MPI operator."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from hosts import root

from provision.sandbox import Sandbox

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("schedulers")


SAYS_WHERE = """
import os, socket, sys
import numpy
import collective_core as cc
cc.init()
total = cc.allreduce(numpy.ones(1), op=cc.Sum)[0]
print(f"rank {cc.rank()} sums to {total:g}, {os.environ['WORD']}, {socket.gethostname()}", flush=True)
if cc.rank() == int(sys.argv[1]):
    raise ValueError("a bad batch")
"""


@pytest.fixture(scope="module")
def launcher_host(cluster, tmp_path_factory) -> Sandbox:
    """The cluster with the toolkit and a Slurm on it; node1 is where jobs are submitted."""
    slurm.begin_to_install(cluster)
    folder = tmp_path_factory.mktemp("wheel")
    checkout = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout)], check=True)
    wheel = next(folder.glob("provision_cluster-*.whl"))
    slurm.toolkit(cluster.hosts[0], wheel.read_bytes(), wheel.name)
    root(cluster.hosts[0], f"install -d -o trainer /home/trainer/job && cat > /home/trainer/job/train.py <<'E'\n{SAYS_WHERE}\nE")
    return cluster


#: Two ranks on each host, in order.
PLACED = [f"rank {rank} sums to 4, pear, node{1 + rank // 2}" for rank in range(4)]


def test_ranks_are_placed_by_slurm(launcher_host, ssh):
    """Real slurmctld and slurmd; the job is a batch script that runs on the first node."""
    slurm.start(launcher_host)
    one = launcher_host.hosts[0]
    try:
        for failing, code in ((-1, "0:0"), (2, "1:0")):
            job = f"WORD=pear /opt/toolkit/bin/provision run --gloo -x WORD python train.py {failing}"
            asked = f"cd job && sbatch --parsable -N 2 --ntasks-per-node=2 -o job.txt --wrap {shlex.quote(job)}"
            ended = slurm.end_of(one, ssh(launcher_host, one, asked).stdout.strip())
            said = root(one, "cat /home/trainer/job/job.txt")
            assert f"ExitCode={code}" in ended, said
            assert sorted(re.findall(r"rank \d sums to 4, pear, node\d", said)) == PLACED
            assert failing < 0 or "rank 2 on node2 failed first: ValueError: a bad batch" in said
    finally:
        slurm.stop(launcher_host)


def test_ranks_are_on_the_workers_of_an_mpi_job(launcher_host, ssh):
    """What Kubernetes' MPI operator gives a launcher: its variables and hostfile, names as its service has them, ssh without questions."""
    workers = [f"train-worker-{at}.train.team.svc" for at in range(2)]
    names = "".join(f"{host.address} {name}\n" for host, name in zip(launcher_host.hosts, workers, strict=True))
    login = (
        "Host *.svc\n IdentityFile ~/.ssh/provision_ed25519\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    for host in launcher_host.hosts:
        root(host, f"printf {shlex.quote(names)} >> /etc/hosts; printf {shlex.quote(login)} > /home/trainer/.ssh/config")
    root(
        launcher_host.hosts[0],
        "mkdir -p /etc/mpi && printf " + shlex.quote("".join(f"{name} slots=2\n" for name in workers)) + " > /etc/mpi/hostfile",
    )
    given = "K_MPI_JOB_ROLE=launcher OMPI_MCA_orte_keep_fqdn_hostnames=true OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile "
    given += "OMPI_MCA_plm_rsh_args='-o ConnectionAttempts=10' OMPI_MCA_orte_set_default_slots=2 WORD=pear"
    for way in ("--gloo --python /opt/provision/venv/bin/python", "--mpi"):
        done = ssh(
            launcher_host, launcher_host.hosts[0], f"cd job && {given} /opt/toolkit/bin/provision run {way} -x WORD python train.py -1"
        )
        assert done.returncode == 0, done.stderr
        assert sorted(re.findall(r"rank \d sums to 4, pear, node\d", done.stdout)) == PLACED
