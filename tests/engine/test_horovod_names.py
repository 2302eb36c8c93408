"""The package ``horovod`` that renames: installed beside the engine, it runs scripts written for Horovod as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import LAUNCH_LIMIT, find_mpirun

pytest.importorskip("torch")

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "collective_core" / "horovod"
SCRIPTS = HERE / "horovod_scripts"
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation", "--no-index")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A folder with the package, as pip installs it."""
    folder = tmp_path_factory.mktemp("names")
    done = subprocess.run(
        [sys.executable, *PIP, "--target", str(folder), str(SOURCES)], capture_output=True, text=True, timeout=LAUNCH_LIMIT
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(names, command, *, fails=False):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "COLLECTIVE_", "HOROVOD_"))}
    environment.update(PYTHONPATH=str(names), OMP_NUM_THREADS="1")
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=LAUNCH_LIMIT)
    assert (done.returncode != 0) is fails, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr if fails else done.stdout


def test_a_training_script_runs_as_it_is(names):
    command = [find_mpirun(), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", 2, sys.executable, SCRIPTS / "mnist.py"]
    said = sorted(re.findall(r"(rank \d of 2) accuracy (\d\.\d+)", run(names, command)))  # ranks may print into one line
    assert [rank for rank, _ in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(float(accuracy) > 0.9 for _, accuracy in said), said


@pytest.mark.slow
def test_an_elastic_script_runs_as_it_is(names):
    said = run(names, [sys.executable, "-m", "collective_core.launch", "-np", 2, "--min-np", 1, sys.executable, SCRIPTS / "elastic.py"])
    assert "rank 0 of 2 epoch 1" in said
    assert "rank 1 of 2 epoch 1" in said


def test_a_function_runs_with_horovods_run(names):
    assert "0.28.1 [(6.0, 2), (6.0, 2)]" in run(names, [sys.executable, SCRIPTS / "function.py"])


def test_the_launchers_module_is_a_program(names):
    program = "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()} of {hvd.size()}')"
    launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", 2, "-H", "localhost:2"]
    said = run(names, [*launcher, sys.executable, "-c", program])
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said


def test_every_module_has_the_engines_own_objects(names):
    program = """
import collective_core, collective_core.torch as hvd, copy, horovod, os
from horovod.common import basics, elastic, exceptions, process_sets, util
from horovod.ray import RayExecutor
from horovod.spark import run as run_on_spark
import horovod.torch, horovod.version
import horovod.torch.compression, horovod.torch.elastic.sampler, horovod.torch.elastic.state, horovod.torch.functions
import horovod.torch.mpi_ops, horovod.torch.optimizer, horovod.torch.sync_batch_norm
missing = [name for name in hvd.__all__ if name != "elastic" and getattr(horovod.torch, name) is not getattr(hvd, name)]
assert not missing, missing
assert horovod.run is collective_core.run
assert horovod.torch.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
assert horovod.torch.elastic.TorchState is horovod.torch.elastic.state.TorchState is hvd.elastic.TorchState
assert exceptions.HorovodInternalError is hvd.HorovodInternalError
assert process_sets.global_process_set is hvd.global_process_set
assert basics.HorovodBasics("horovod", "mpi_lib_v2").size is hvd.size
assert copy.deepcopy(basics.HorovodBasics("/envs/tensorflow/horovod/torch/mpi_ops.py")).size is hvd.size
assert horovod.torch.mpi_ops._basics._get_process_set_ids_and_ranks is hvd.get_process_set_ids_and_ranks
assert util.extension_available("torch") and not util.extension_available("mxnet")
for arguments in ({"min_workers": 1}, {"num_workers": 1, "gpus_per_worker": 1}):
    try:
        RayExecutor(RayExecutor.create_settings(), **arguments)
    except ValueError as error:
        print(error)
    else:
        raise SystemExit(f"{arguments} was accepted")
print(os.environ["COLLECTIVE_SEMANTICS"])
"""
    assert run(names, [sys.executable, "-c", program]).splitlines()[-1] == "horovod"


@pytest.mark.frameworks
def test_a_script_for_tensorflow_runs_as_it_is(names):
    command = [find_mpirun(), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", 2, sys.executable]
    said = run(names, [*command, SCRIPTS / "tensorflow2.py"])
    lines = re.findall(r"(rank \d of 2): loss (\d+\.\d+) weight (-?\d+\.\d+)", said)
    assert sorted(rank for rank, _, _ in lines) == ["rank 0 of 2", "rank 1 of 2"]
    assert all(float(loss) < 0.1 for _, loss, _ in lines), lines
    assert len({weight for _, _, weight in lines}) == 1


@pytest.mark.frameworks
def test_every_module_for_tensorflow_has_the_engines_own_objects(names):
    program = """
import horovod.tensorflow as names, collective_core.tensorflow as hvd, sys
import horovod.tensorflow.compression, horovod.tensorflow.elastic, horovod.tensorflow.functions, horovod.tensorflow.mpi_ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import check_extension, extension_available
assert "torch" not in sys.modules
missing = [name for name in hvd.__all__ if name != "elastic" and getattr(names, name) is not getattr(hvd, name)]
assert not missing, missing
assert names.elastic.TensorFlowState is hvd.elastic.TensorFlowState
assert HorovodInternalError is hvd.HorovodInternalError
assert names.mpi_ops.size_op is hvd.size_op
assert names.mpi_ops._basics._get_process_set_ids_and_ranks is hvd.get_process_set_ids_and_ranks
check_extension("horovod.tensorflow")
from horovod.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs
import tensorflow as tf
variables = [tf.Variable(1.0), tf.Variable(2.0)]
assert _executing_eagerly() and names._executing_eagerly()
assert [one is other for one, other in zip(refs_to_vars(vars_to_refs(variables)), variables)] == [True, True]
print(extension_available("tensorflow"))
"""
    assert run(names, [sys.executable, "-c", program]).splitlines()[-1] == "True"


def test_what_scripts_copy_from_horovods_internals(names, tmp_path):
    program = f"""
import sys
from horovod.common.util import _cache, is_version_greater_equal_than
from horovod.runner import _HorovodArgs
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.hosts import parse_hosts
from horovod.runner.launch import _run, parse_args
from horovod.runner.util.threads import in_thread
calls = []
assert [_cache(lambda x: calls.append(x) or x)(3) for _ in range(2)] == [3, 3]
assert is_version_greater_equal_than("2.10.0", "2.9.1") and not is_version_greater_equal_than("2.9.0", "2.9.1")
assert is_version_greater_equal_than("2.9.0+cu126", "2.9") and not is_version_greater_equal_than("2.9.0rc1", "2.9")
assert get_env_rank_and_size() == (0, 1)
assert [(host.hostname, host.slots) for host in parse_hosts("a:2,10.0.0.1:8")] == [("a", 2), ("10.0.0.1", 8)]
in_thread(calls.append, ("in a thread",)).join()
assert "in a thread" in calls
sys.argv[1:] = ["-np", "3", "train.py", "--debug"]
given = parse_args()
assert (given.np, given.program) == (3, ["train.py", "--debug"])
args = _HorovodArgs()
args.num_proc, args.run_func = 2, lambda: __import__("collective_core.torch").torch.init() or 7
assert _run(args) == [7, 7]
args = _HorovodArgs()
args.num_proc, args.command = 2, [sys.executable, "-c", "open({str(tmp_path)!r} + '/' + __import__('os').environ['HOROVOD_RANK'], 'w')"]
_run(args)
"""
    run(names, [sys.executable, "-c", program])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_hosts_are_discovered_by_a_script_of_horovods(names, tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho\necho 10.0.0.1\n")
    script.chmod(0o755)
    program = f"""
from collective_core.errors import CollectiveError
from horovod.ray.runner import RayExecutor
from horovod.runner.elastic.discovery import HostDiscovery, HostDiscoveryScript
found = HostDiscoveryScript({str(script)!r}, 4)
assert isinstance(found, HostDiscovery)
assert found.find_available_hosts_and_slots() == {{"a": 2, "10.0.0.1": 4}}
try:
    HostDiscoveryScript("/bin/false", 1).find_available_hosts_and_slots()
except CollectiveError as error:
    print(error)
"""
    assert "the script that lists the hosts failed" in run(names, [sys.executable, "-c", program])


def test_what_is_not_there_says_what_to_use_instead(names):
    statements = [
        "import horovod.mxnet as hvd",
        "from horovod.ray import ElasticRayExecutor",
        "from horovod.ray.elastic_v2 import ElasticAdapter",
        "from horovod.ray.worker import BaseHorovodWorker",
        "from horovod.runner.common.service.task_service import BasicTaskService",
        "from horovod.runner.common.util import safe_shell_exec",
        "from horovod.runner.common.util.hosts import get_host_assignments",
        "from horovod.runner.elastic.driver import ElasticDriver",
        "from horovod.runner.gloo_run import launch_gloo",
        "from horovod.runner.http.http_server import RendezvousServer",
        "from horovod.runner.launch import run_controller",
        "from horovod.runner.util.threads import on_event",
        "from horovod.spark import run_elastic",
        "from horovod.spark.common.store import Store",
        "import horovod.spark.keras as hvd",
        "from horovod.spark.torch.estimator import TorchEstimator",
        "import horovod.unheard_of",
    ]
    program = f"""
import horovod, importlib.util
for statement in {statements!r}:
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
    else:
        raise SystemExit(statement)
assert importlib.util.find_spec("horovod.mxnet") is None and not hasattr(horovod, "mxnet"), "whether there is one can be asked"
try:
    import another_package_that_is_not_there
except ModuleNotFoundError as error:
    assert error.name == "another_package_that_is_not_there"
"""
    said = run(names, [sys.executable, "-c", program]).splitlines()
    assert len(said) == len(statements)
    for statement, line in zip(statements, said, strict=True):
        assert " is not part of collective-core-horovod: " in line, (statement, line)
        known = "docs/horovod.md names" if "unheard" in line else "not supported" if "mxnet" in line else ": use "
        assert known in line, line


def test_who_only_asks_whether_a_module_is_there_gets_no_exception(names):
    program = """
import horovod, importlib.util, sys, threading
class Delegating:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return next(filter(None, (each.find_spec(name, path, target) for each in sys.meta_path if each is not Delegating)), None)
sys.meta_path.insert(0, Delegating)
assert importlib.util.find_spec("horovod.mxnet") is None, "by way of another finder"
sys.meta_path.remove(Delegating)
assert sys.meta_path[-1].find_spec("horovod.mxnet") is None, "a tool, at the top of the stack"
try:
    import horovod.mxnet
except ModuleNotFoundError as error:
    print(error)
"""
    assert "MXNet is not supported" in run(names, [sys.executable, "-c", program])


def test_the_engines_own_semantics_can_be_kept(names):
    program = "import os; os.environ['COLLECTIVE_SEMANTICS'] = 'engine'; import horovod; print(os.environ['COLLECTIVE_SEMANTICS'])"
    assert run(names, [sys.executable, "-c", program]) == "engine\n"


def put_real_horovod(folder):
    record = folder / "horovod-0.28.1.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")


def test_it_is_not_installed_beside_the_real_one(tmp_path):
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}))
    put_real_horovod(site)
    (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")  # pip and the build tool
    said = run("", [tmp_path / "venv/bin/python", *PIP, SOURCES], fails=True)
    assert "Horovod 0.28.1 is installed in" in said
    assert "pip uninstall horovod" in said
    assert "Traceback" not in said
    assert not (site / "horovod").exists()


def test_beside_the_real_one_it_says_so(names, tmp_path):
    put_real_horovod(tmp_path)
    said = run(f"{names}{os.pathsep}{tmp_path}", [sys.executable, "-c", "import horovod.torch"], fails=True)
    assert "Horovod 0.28.1 and collective-core-horovod are both installed" in said
