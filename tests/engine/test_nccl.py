"""NCCL without a GPU: which library is found, that NVIDIA's own answers through our calls, and the engine's part of the protocol.

What needs GPUs is in tests/gpu.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
from cases import slow_but_last
from collective_core.errors import CollectiveError
from collective_core.transport import nccl, nccl_calls

from collective_core import _native

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
    code = f"import sys, json, ctypes\nsys.path.insert(0, {str(folder)!r})\nfrom collective_core.transport import nccl\n{program}"
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


def test_calls_are_as_nvidias_header_has_them(wheel):
    header = (wheel / "nvidia" / "nccl" / "include" / "nccl.h").read_text()
    named = {"sendbuff": "source", "recvbuff": "target", "datatype": "dtype", "op": "reduction", "root": "peer", "peer": "peer"}
    named.update(dict.fromkeys(("count", "sendcount", "recvcount"), "count"))
    for function, names in nccl.ARGUMENTS.items():
        [parameters] = re.findall(rf"^ncclResult_t\s+{function}\((.*?)\);", header, re.MULTILINE | re.DOTALL)
        words = [parameter.split()[-1] for parameter in parameters.split(",")]
        assert [named[word] for word in words[:-2]] == list(names), function
        assert words[-2:] == ["comm", "stream"]
    numbers = {name: int(number) for name, number in re.findall(r"\bnccl(\w+)\s*=\s*(\d+)", header)}
    assert [numbers[name] for name in ("Sum", "Prod", "Max", "Min")] == [nccl.SUM, nccl.PRODUCT, nccl.MAX, nccl.MIN]
    spelt = {name: re.sub(r"^u?int|^b?float", lambda found: found[0].capitalize(), name) for name in nccl.TYPES}
    assert {name: numbers[spelt[name]] for name in nccl.TYPES} == nccl.TYPES


def test_a_refused_call_is_named_and_ends_its_group(wheel):
    program = """
from collective_core.errors import CollectiveError
said = []
for function in nccl.ARGUMENTS:
    try:
        nccl.library().put([nccl.Call(function, 1, nccl.TYPES["float32"])], 4096, 8192, 0, 0)
    except CollectiveError as error:
        said.append(str(error))
nccl.library().put([], 0, 0, 0, 0)
print(json.dumps(said))
"""
    said = ask(program, wheel)
    assert [sentence.split()[0] for sentence in said] == list(nccl.ARGUMENTS)


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
    transport = pytest.importorskip("collective_core.torch.nccl_transport")
    monkeypatch.setattr(transport.torch.cuda, "Stream", lambda _device: None)  # no GPU here
    own, aborted = transport.Set(0, b"", 2, 0), []

    class Library:
        def communicator(self, *_):
            assert own.retire("a rank has died") == 0, "there is none yet"
            return 7

        def abort(self, communicator):
            aborted.append(communicator)

    own.join(Library())
    assert (aborted, own.communicator, own.broken) == ([7], 0, "a rank has died")


def test_an_abort_waits_for_what_is_being_put_on_the_stream_but_not_for_ever(monkeypatch):
    transport = pytest.importorskip("collective_core.torch.nccl_transport")
    own = transport.Set(0, b"", 2, 0)
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
    monkeypatch.setattr(transport, "ABORT_PATIENCE", 0.01)
    with own.lock:  # NCCL waits for the dead rank in the call itself
        assert own.retire("again") == 8


def test_what_may_wait_for_other_ranks_has_a_thread_of_its_own(monkeypatch):
    transport = pytest.importorskip("collective_core.torch.nccl_transport")
    own, here, threads = transport.Set(5, b"", 2, 0), threading.current_thread(), []
    monkeypatch.setitem(transport.sets, 5, own)

    def launch(own, asked, calls):
        threads.append(threading.current_thread())
        own.connected |= nccl_calls.routes(calls)

    monkeypatch.setattr(transport, "_launch", launch)

    def carry(sent, received):
        rows = [(ctypes.c_int64 * 2)(*numbers) for numbers in (sent, received)]
        transfer = _native.Transfer(5, _native.ALLTOALL, row_bytes=4, sent=rows[0], received=rows[1])
        assert transport.start(ctypes.pointer(transfer), 0, 0) == 0
        while not transport.test(5, 0, 0):
            pass
        return threads[-1] is here

    own.communicator = 7
    assert [carry([1, 0], [1, 0]), carry([9, 0], [2, 0]), carry([1, 1], [1, 0]), carry([0, 3], [1, 0])] == [False, True, False, True]
    own.communicator = 0  # which then has to be joined
    assert not carry([1, 0], [1, 0])


def test_the_engine_is_told_why_nothing_was_carried(monkeypatch):
    transport = pytest.importorskip("collective_core.torch.nccl_transport")
    own, said = transport.Set(5, b"", 2, 0), ctypes.create_string_buffer(64)
    monkeypatch.setitem(transport.sets, 5, own)
    wrong = _native.Transfer(5, _native.REDUCESCATTER, dtype=_native.DTYPES["int16"], count=2, sent=(ctypes.c_int64 * 2)(1, 1))
    assert transport.start(ctypes.pointer(wrong), ctypes.addressof(said), len(said)) == -1
    assert said.value
    own.retire("a rank has died")
    assert transport.start(ctypes.pointer(_native.Transfer(5, _native.BROADCAST, count=1)), ctypes.addressof(said), len(said)) == 0
    assert transport.test(5, ctypes.addressof(said), len(said)) == -1
    assert said.value == b"a rank has died"


def test_ranks_on_one_gpu_are_found():
    gpu = pytest.importorskip("collective_core.torch.gpu")
    assert gpu.ranks_that_share([b"a", b"b", b"c"]) == []
    assert gpu.ranks_that_share([b"a", b"b", b"a", b"c", b"b", b"a"]) == [[0, 2, 5], [1, 4]]


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 3)))
def test_a_death_between_operations_is_seen_by_who_looks(launch, n, hosts):
    reports = launch("idle.py", n, hosts, keep_going=True).reports()
    assert {(reports[rank]["kind"], *reports[rank]["ranks"]) for rank in set(range(n)) - {1}} == {("peer_lost", 1)}


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((3, 1), (3, 2)))
def test_the_engine_agrees_and_leaves_the_memory_of_gpus_alone(launch, n, hosts):
    reports = launch("carried_for_gpus.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize("n", slow_but_last(2, 3))
def test_torch_tensors_come_to_the_same_through_it(launch, n):
    pytest.importorskip("torch")
    reports = launch("pretended_gpus.py", n).must_succeed().reports()
    assert set(reports) == set(range(n))
