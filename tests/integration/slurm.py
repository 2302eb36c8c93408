"""A real Slurm on sandbox hosts: slurmctld on the first, slurmd on all, munge between them; no cgroups, which containers lack."""

from __future__ import annotations

import re
import subprocess

from hosts import container, root, wait_until

from provision.sandbox import Sandbox, SandboxHost

PACKAGES = "munge slurm-client slurmd"
INSTALL = """
export DEBIAN_FRONTEND=noninteractive
(apt-get update -qq && apt-get install -o DPkg::Lock::Timeout=300 -y -qq --no-install-recommends {}) >/tmp/slurm.log 2>&1
echo $? >/tmp/slurm.done
"""
CONF = """
ClusterName=sandbox
SlurmctldHost={first}
SlurmUser=slurm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ReturnToService=2
NodeName={names} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def begin_to_install(sandbox: Sandbox) -> None:
    """In the background: it takes longer than all the rest."""
    for at, host in enumerate(sandbox.hosts):
        container(host).exec_run(["sh", "-c", INSTALL.format(PACKAGES + ("" if at else " slurmctld"))], detach=True)


def start(sandbox: Sandbox) -> None:
    """Wait for the packages, configure, and start; all nodes are idle then."""
    for host in sandbox.hosts:
        wait_until(lambda host=host: root(host, "cat /tmp/slurm.done 2>/dev/null || true"))
        assert root(host, "cat /tmp/slurm.done") == "0", root(host, "tail -n 20 /tmp/slurm.log")
    names = [host.name for host in sandbox.hosts]
    conf = CONF.format(first=names[0], names=",".join(names))
    key = root(sandbox.hosts[0], "head -c 64 /dev/urandom | base64 -w 0")
    for host in sandbox.hosts:
        root(host, f"cat > /etc/slurm/slurm.conf <<'E'\n{conf}\nE")
        root(host, f"printf %s {key} > /etc/munge/munge.key && chown munge: /etc/munge/munge.key && chmod 400 /etc/munge/munge.key")
        root(host, "mkdir -p /run/munge /var/lib/slurm/slurmd && chown munge: /run/munge && runuser -u munge -- /usr/sbin/munged")
    root(sandbox.hosts[0], "install -d -o slurm /var/lib/slurm/slurmctld && slurmctld")
    for host in sandbox.hosts:
        root(host, "slurmd")
    wait_until(lambda: root(sandbox.hosts[0], "sinfo -h -o %D,%t") == f"{len(names)},idle")


def end_of(host: SandboxHost, job: str) -> str:
    """What Slurm says of a job when it has ended."""
    show = f"scontrol show job -o {job} || true"  # slurmctld may be too busy to answer
    wait_until(lambda: re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", root(host, show)))
    return root(host, f"scontrol show job -o {job}")


def stop(sandbox: Sandbox) -> None:
    """End its daemons."""
    for host in sandbox.hosts:
        root(host, "pkill -x slurmctld; pkill -x slurmd; pkill -x munged; true")


def toolkit(host: SandboxHost, wheel: bytes, name: str) -> str:
    """Install a wheel of the toolkit on a host; its `provision` there."""
    subprocess.run(["docker", "exec", "-i", host.container, "sh", "-c", f"cat > /root/{name}"], input=wheel, check=True)
    install = "apt-get install -o DPkg::Lock::Timeout=300 -y -qq --no-install-recommends python3-venv"  # Slurm is being installed, too
    root(host, f"DEBIAN_FRONTEND=noninteractive {install} >/dev/null")
    root(host, f"python3 -m venv /opt/toolkit && /opt/toolkit/bin/pip install -q /root/{name}")
    return "/opt/toolkit/bin/provision"
