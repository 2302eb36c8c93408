"""NCCL without a GPU: which library is found, that NVIDIA's own answers through our calls, and the engine's part of the protocol.

What needs GPUs is in tests/gpu.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
from collective_core.errors import CollectiveError

from collective_core import nccl

#: NVIDIA's wheel of this version: the library in it says 2.16.5, and works without a GPU as far as its version and names go.
WHEEL, VERSION = "nvidia-nccl-cu11==2.16.5", 21605


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder for the search path of Python that holds NVIDIA's library as its wheel installs it."""
    folder = tmp_path_factory.mktemp("nccl")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as packed:
        packed.extractall(folder)
    return folder


def ask(program, folder, **variables):
    """What a fresh Python prints that finds packages in `folder`: a loaded library never leaves a process."""
    code = f"import sys, json, ctypes\nsys.path.insert(0, {str(folder)!r})\nfrom collective_core import nccl\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nvidias_library_answers(wheel):
    program = "library = nccl.library()\nprint(json.dumps([library.path, library.version, len(library.unique_id())]))"
    path, version, id_bytes = ask(program, wheel)
    assert path == str(wheel / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    assert (version, id_bytes) == (VERSION, nccl.ID_BYTES)


def test_nccls_own_sentence_is_raised(wheel):
    program = """
from collective_core.errors import CollectiveError
try:
    nccl.library().communicator(0, nccl.library().unique_id(), 0)
except CollectiveError as error:
    print(json.dumps(str(error)))
"""
    assert "ncclCommInitRank of " in ask(program, wheel)


def test_the_copy_that_is_loaded_already_comes_first(wheel, tmp_path):
    other = tmp_path / "libnccl.so.2"
    shutil.copy(wheel / "nvidia" / "nccl" / "lib" / "libnccl.so.2", other)
    program = f"ctypes.CDLL({str(other)!r})\nprint(json.dumps(nccl.library().path))"
    assert ask(program, wheel) == str(other)


def test_a_chosen_file_is_used_or_refused(wheel, tmp_path, monkeypatch):
    chosen = str(wheel / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    assert ask("print(json.dumps(nccl.library().path))", tmp_path, COLLECTIVE_NCCL=chosen) == chosen
    assert ask("print(json.dumps(nccl.library()))", wheel, COLLECTIVE_NCCL="off") is None
    text = tmp_path / "no-library.so"
    text.write_text("text")
    monkeypatch.setenv("COLLECTIVE_NCCL", str(text))
    with pytest.raises(CollectiveError, match=r"COLLECTIVE_NCCL=.*no-library\.so cannot be used"):
        nccl.library()


def test_without_a_gpu_nothing_goes_through_it(wheel):
    program = """
import collective_core.torch as hvd
hvd.init()
print(json.dumps([hvd.nccl_built(), hvd.nccl_enabled(), hvd.cuda_built()]))
"""
    pytest.importorskip("torch")
    assert ask(program, wheel) == [VERSION, False, False]


def test_a_communicator_that_is_made_after_a_failure_is_aborted_and_never_used(monkeypatch):
    gpu = pytest.importorskip("collective_core.torch.gpu")
    monkeypatch.setattr(gpu.torch.cuda, "Stream", lambda _device: None)  # no GPU here
    own, aborted = gpu._Set(0, b"", 2, 0), []

    class Library:
        def communicator(self, *_):
            assert own.retire("a rank has died") == 0, "there is none yet"
            return 7

        def abort(self, communicator):
            aborted.append(communicator)

    own.join(Library())
    assert (aborted, own.communicator, own.broken) == ([7], 0, "a rank has died")


def test_an_abort_waits_for_what_is_being_put_on_the_stream_but_not_for_ever(monkeypatch):
    gpu = pytest.importorskip("collective_core.torch.gpu")
    own = gpu._Set(0, b"", 2, 0)
    own.communicator, order = 7, []
    own.lock.acquire()
    aborting = threading.Thread(target=lambda: order.append(own.retire("a rank has died")))
    aborting.start()
    assert (own.communicator, own.broken) == (7, "")
    order.append("put")
    own.lock.release()
    aborting.join()
    assert order == ["put", 7]
    own.communicator = 8
    monkeypatch.setattr(gpu, "ABORT_PATIENCE", 0.01)
    with own.lock:  # NCCL waits for the dead rank in the call itself
        assert own.retire("again") == 8


def test_ranks_on_one_gpu_are_found():
    gpu = pytest.importorskip("collective_core.torch.gpu")
    assert gpu.ranks_that_share([b"a", b"b", b"c"]) == []
    assert gpu.ranks_that_share([b"a", b"b", b"a", b"c", b"b", b"a"]) == [[0, 2, 5], [1, 4]]


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (3, 3)])
def test_a_death_between_operations_is_seen_by_who_looks(launch, n, hosts):
    reports = launch("idle.py", n, hosts, keep_going=True).reports()
    assert {(reports[rank]["kind"], *reports[rank]["ranks"]) for rank in set(range(n)) - {1}} == {("peer_lost", 1)}


@pytest.mark.parametrize(("n", "hosts"), [(3, 1), (3, 2)])
def test_the_engine_agrees_and_leaves_the_memory_of_gpus_alone(launch, n, hosts):
    reports = launch("carried_for_gpus.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
