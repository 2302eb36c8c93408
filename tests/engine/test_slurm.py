"""Ranks that a real Slurm of this machine starts: its daemons, without munge and without root's configuration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from collective_core.runtime import network
from test_examples import EXAMPLES, ranks_agree

pytestmark = pytest.mark.slow

CONF = """
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ReturnToService=2
NodeName={name} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment for Slurm's commands; one node, this machine, with four cores as far as Slurm knows."""
    sbin = os.pathsep.join(["/usr/sbin", os.environ["PATH"]])
    if shutil.which("slurmctld", path=sbin) is None or shutil.which("sbatch") is None:
        pytest.fail("there is no Slurm: apt install slurmctld slurmd slurm-client", pytrace=False)
    folder, name = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    port, node_port = network.free_ports(2)
    user = "root" if os.geteuid() == 0 else os.environ["USER"]
    (folder / "slurm.conf").write_text(CONF.format(name=name, port=port, node_port=node_port, user=user, folder=folder))
    left = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "COLLECTIVE_"))}
    environment = {**left, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": sbin, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(["slurmctld", "-D"], env=environment, stdout=log, stderr=log) as controller,
        subprocess.Popen(["slurmd", "-D", "-N", name], env=environment, stdout=log, stderr=log) as node,
    ):
        try:
            end = time.monotonic() + 60
            while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True).stdout:
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.2)
            yield environment
        finally:
            node.terminate()
            controller.terminate()


def submit(slurm: dict[str, str], log: Path, *words: str) -> str:
    """What a batch job on this one node has printed when it has ended well."""
    command = ["sbatch", "--wait", "-N", "1", "--ntasks-per-node=2", "-o", str(log), *words]
    done = subprocess.run(command, cwd=log.parent, env=slurm, capture_output=True, text=True, timeout=240)
    printed = log.read_text() if log.exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{printed}"
    return printed


def test_the_batch_file_of_the_examples(slurm, tmp_path):
    ranks_agree(submit(slurm, tmp_path / "log", str(EXAMPLES / "slurm.sbatch"), str(EXAMPLES / "pytorch_ddp.py")))
    assert list(tmp_path.glob(".secret*")) == []


@pytest.mark.parametrize("script", ["pytorch_ddp.py", "pytorch_mnist.py"])
def test_srun_alone_is_enough(slurm, script, tmp_path):
    """Nothing tells the ranks who they are but Slurm's own variables."""
    ranks_agree(submit(slurm, tmp_path / "log", "--wrap", f"srun {sys.executable} {EXAMPLES / script}"))
