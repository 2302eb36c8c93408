"""Files of `provision export` that train on a real Slurm and a real Ray of this machine, and go on when a node dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from collective_core.runtime import network
from collective_core.version import __version__ as engine_version
from test_slurm import CONF
from test_train_mnist import REPOSITORY, SCRIPT, digits, toolkit  # noqa: F401  the fixture

pytestmark = pytest.mark.slow

TIME_LIMIT_S = 400  # the jobs take half a minute; a busy machine may take many times that
#: Writes the files of two invented hosts, of which TARGET's only know what the arguments say.
EXPORT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from provision.export import pools, render
from provision.image.render import write
target, folder, prefix, engine, nodes, slots = sys.argv[1:7]
host = SimpleNamespace(name="a", hostname="a", login="trainer", ssh_port=22, root=True, network=SimpleNamespace(address="127.0.0.1"))
versions = {"engine": engine, "python": "%d.%d" % sys.version_info[:2], "numpy": sys.argv.pop()}
place = {"prefix": prefix, "hosts": (host,), "variables": {"PYTHONUNBUFFERED": "1", "PATH": prefix + "/venv/bin:{inherited}"}}
pool = pools.Pool("a test", versions, {"engine": engine}, False, int(nodes), int(slots), **place)
write(Path(folder), render.files(target, [pool]))
print(json.dumps(versions))
"""


def exported(target: str, folder: Path, nodes: int, slots: int) -> Path:
    """The folder of the files; the prefix that they are for has this environment and a manifest."""
    (folder / "prefix").mkdir(parents=True)
    (folder / "prefix/venv").symlink_to(Path(sys.executable).parents[1])
    (folder / "prefix/uv").symlink_to(REPOSITORY / ".venv/bin/uv")
    held = toolkit(EXPORT, target, str(folder / "job"), str(folder / "prefix"), engine_version, str(nodes), str(slots), numpy.__version__)
    hold(folder, held)
    return folder / "job"


def hold(folder: Path, versions: dict[str, str]) -> None:
    (folder / "prefix/manifest.json").write_text(json.dumps({"host": {name: {"version": each} for name, each in versions.items()}}))


def wait_for(condition: Callable[[], Any], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


def mnist(digits: dict[str, Any], report: Path) -> list[str]:  # noqa: F811
    """The job that `provision up` trains: it fails below an accuracy."""
    return [str(SCRIPT), *digits["flags"], f"--data-dir={digits['folder']}", f"--report={report}"]


def trained(report: Path, digits: dict[str, Any]) -> bool:  # noqa: F811
    found = json.loads(report.read_text())
    return found["np"] == 2 and found["bar_percent"] == digits["bar"]


class Slurm:
    """Three nodes of this machine, each in a PID namespace of its own, so that it can die as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, {}
        (folder / "state").mkdir()
        port, *ports = network.free_ports(4)
        me = socket.gethostname().partition(".")[0]
        names = "\n".join(
            f"NodeName=n{number} NodeHostname={me} NodeAddr=127.0.0.1 Port={each} CPUs=2 State=UNKNOWN"
            for number, each in enumerate(ports, 1)
        )
        text = CONF.format(name=me, port=port, node_port=ports[0], user="root", folder=folder).replace(
            f"{folder}/spool", f"{folder}/spool-%n"
        )
        text = re.sub(r"^NodeName=.*$", names, text, flags=re.MULTILINE).replace("slurmd.pid", "slurmd-%n.pid")
        (folder / "slurm.conf").write_text(text + "SlurmdTimeout=10\n")
        left = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "COLLECTIVE_"))}
        path = os.pathsep.join(["/usr/sbin", os.environ["PATH"]])
        self.environment = {**left, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}
        self.log = (folder / "log").open("w")
        self.controller = self.start("slurmctld", "-D")
        for number in range(1, 4):
            (folder / f"spool-n{number}").mkdir()
            self.nodes[f"n{number}"] = self.start(
                "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "slurmd", "-D", "-N", f"n{number}"
            )
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D,%t") == "3,idle", 60, lambda: (folder / "log").read_text())

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, env=self.environment, stdout=self.log, stderr=self.log)

    def ask(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, cwd=self.folder, check=False).stdout.strip()

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    def stop(self) -> None:
        for each in (*self.nodes.values(), self.controller):
            each.kill()
            each.wait()
        self.log.close()


@pytest.fixture
def slurm(tmp_path: Path):
    if shutil.which("slurmctld", path="/usr/sbin:" + os.environ["PATH"]) is None or shutil.which("sbatch") is None:
        pytest.fail("there is no Slurm: apt install slurmctld slurmd slurm-client", pytrace=False)
    (tmp_path / "slurm").mkdir()
    made = Slurm(tmp_path / "slurm")
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("victim", ["n2", "n1"])
def test_slurm_trains_mnist_and_again_on_other_nodes_when_one_dies(slurm: Slurm, victim: str, digits, tmp_path: Path) -> None:  # noqa: F811
    """n1 runs the batch script, too."""
    job = exported("slurm", tmp_path / "export", nodes=2, slots=1)
    report, log = tmp_path / "report.json", tmp_path / "train.log"
    words = ["sbatch", "--parsable", f"--output={log}", f"--chdir={tmp_path}", str(job / "train.sbatch"), *mnist(digits, report)]
    number = slurm.ask(*words)
    show = lambda: slurm.ask("scontrol", "show", "job", "-o", number)  # noqa: E731
    said = lambda: f"{show()}\n{log.read_text() if log.exists() else ''}\n{(slurm.folder / 'log').read_text()}"  # noqa: E731
    wait_for(lambda: log.exists() and "Epoch" in log.read_text(), TIME_LIMIT_S, said)
    assert "NodeList=n[1-2]" in show()
    slurm.kill(victim)
    wait_for(lambda: re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", show()), TIME_LIMIT_S, said)
    assert "JobState=COMPLETED" in show(), said()
    assert "Restarts=1" in show()
    assert f"NodeList={'n[1,3]' if victim == 'n2' else 'n[2-3]'}" in show()
    assert trained(report, digits)
    assert list(tmp_path.glob(".secret*")) == []


def test_slurm_starts_nothing_on_nodes_that_hold_something_else(slurm: Slurm, tmp_path: Path) -> None:
    job = exported("slurm", tmp_path / "export", nodes=2, slots=2)
    hold(tmp_path / "export", {"engine": "0.0.9"})
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    number = slurm.ask("sbatch", "--parsable", "--wait", f"--output={tmp_path}/log", str(job / "train.sbatch"), str(tmp_path / "train.py"))
    assert "JobState=FAILED" in slurm.ask("scontrol", "show", "job", "-o", number)
    said = (tmp_path / "log").read_text()
    assert len(re.findall(r"RuntimeError: \S+ holds \{'engine': '0\.0\.9', .*\}, and the job was exported for", said)) == 2, "once per node"
    assert "Traceback" not in said
    assert "started" not in said


def raylet_of(pid: int) -> int:
    """The raylet that has started a process: its parent's parent and so on; 0 for one that has ended."""
    try:
        while pid > 1 and b"raylet/raylet" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
    return pid


@pytest.fixture
def ray_nodes():
    """A cluster whose head trains nothing, with three nodes that have room for two ranks each."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    for _ in range(3):
        made.add_node(num_cpus=2, **memory)
    yield made
    made.shutdown()


def ray_job(job: Path, cluster: Any, log: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1", "HOME": str(log.parent)}
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(job / "train_ray.py"), *words], env=environment, stdout=file, stderr=file, cwd=log.parent
        )


def test_ray_trains_mnist_and_again_on_other_nodes_when_one_dies(ray_nodes, digits, tmp_path: Path) -> None:  # noqa: F811
    job, report, log = exported("ray", tmp_path / "export", nodes=2, slots=1), tmp_path / "report.json", tmp_path / "log"
    with ray_job(job, ray_nodes, log, *mnist(digits, report)) as driver:
        try:
            wait_for(lambda: "Epoch" in log.read_text(), TIME_LIMIT_S, log.read_text)
            ranks = subprocess.run(["pgrep", "-f", str(report)], capture_output=True, text=True, check=True).stdout.split()
            raylets = {raylet_of(int(each)) for each in ranks} - {0, 1}
            assert len(raylets) == 2, "the ranks are spread over the nodes"
            (victim, *_) = [node for node in ray_nodes.worker_nodes if node.all_processes["raylet"][0].process.pid in raylets]
            ray_nodes.remove_node(victim, allow_graceful=False)
            assert driver.wait(TIME_LIMIT_S) == 0, log.read_text()
        finally:
            driver.kill()
    assert trained(report, digits)
    assert len(re.findall(r"Train Epoch: 1 \[0/", log.read_text())) == 2, "it has begun twice"


def test_ray_accepts_the_clusters_file_and_its_setup_makes_an_environment(tmp_path: Path) -> None:
    """Over one of uv, which has no pip."""
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (exported("ray", tmp_path / "export", nodes=2, slots=1) / "cluster.yaml").read_text()
    validate_config(prepare_config(yaml.safe_load(text)))
    with pytest.raises(Exception, match="ssh_users"):
        validate_config(prepare_config(yaml.safe_load(text.replace("ssh_user:", "ssh_users:"))))
    (setup,) = yaml.safe_load(text)["setup_commands"]
    subprocess.run(["bash", "-c", setup], env={**os.environ, "HOME": str(tmp_path)}, check=True, timeout=TIME_LIMIT_S)
    (made,) = tmp_path.glob("provision-ray-*")
    shows = "import ray, numpy, collective_core, torch; print(ray.__version__, numpy.__version__)"
    done = subprocess.run([str(made / "bin/python"), "-c", shows], capture_output=True, text=True, check=True, timeout=TIME_LIMIT_S)
    assert done.stdout.split() == ["2.40.0", numpy.__version__]
