"""What two ranks say of themselves while they work. argv: the first port, or nothing where none is asked for."""

import contextlib
import sys
import time
import urllib.error
import urllib.request

import common
import numpy as np

import collective_core as cc

port = int(sys.argv[1]) if len(sys.argv) > 1 else None
before = cc.metrics()
assert before["operations"] == []
assert before["rank"] is None
cc.init()
rank = cc.rank()


def served(path="/metrics", method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port + cc.local_rank()}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def samples_in(text):
    """Those of the whole job's allreduces and of the rank; each belongs to the family that was declared last."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            family, kind = line.split()[2:]
            assert kind == ("counter" if family.endswith("_total") else "gauge"), line
        elif not line.startswith("# HELP "):
            sample, value = line.rsplit(" ", 1)
            assert sample.split("{")[0] == family, line
            found[sample] = float(value)
    return {sample: found[sample] for sample in found if 'kind="allreduce",process_set="0"' in sample or sample == "collective_rank"}


def refused(**request):
    try:
        served(**request)
    except urllib.error.HTTPError as error:
        return error.code


def of_kind(kind, process_set=0, found=None):
    rows = (found or cc.metrics())["operations"]
    return next(row for row in rows if (row["kind"], row["process_set"]) == (kind, process_set))


small, large = np.ones(1024, np.float32), np.ones(1 << 20, np.float32)
cc.barrier()
for _ in range(10):
    cc.allreduce(small, op=cc.Sum, out=small)
for _ in range(3):
    cc.allreduce(large, op=cc.Sum, out=large)
if rank == 1:
    time.sleep(2.0)
cc.allreduce(small, op=cc.Sum, name="late")
with contextlib.suppress(cc.CollectiveError):
    cc.allreduce(np.ones(2 + rank), name="two shapes")
    raise RuntimeError("no mismatch")
memory = cc.empty(1 << 20, np.uint8)
now = cc.metrics()
allreduce = of_kind("allreduce", found=now)
assert (now["rank"], now["size"], now["elastic_resets"]) == (rank, 2, 0)
assert of_kind("barrier", found=now)["operations"] >= 1
assert (allreduce["operations"], allreduce["failed"]) == (15, 1)
assert allreduce["bytes"] == 11 * 4096 + 3 * (4 << 20) + 8 * (2 + rank)
assert allreduce["transfer_seconds"] > 0
assert memory.nbytes <= now["arena_bytes"] <= now["arena_peak_bytes"] <= now["arena_size_bytes"]
if port:
    samples = samples_in(served())
    assert samples.pop("collective_rank") == rank
    assert len(samples) == 7
    for key, value in allreduce.items():
        if key not in ("kind", "process_set"):
            assert samples[f'collective_{key}_total{{kind="allreduce",process_set="0"}}'] == value
    assert (refused(path="/"), refused(method="POST")) == (404, 501)

mine = [cc.add_process_set([one]) for one in range(cc.size())][rank]
cc.allgather(np.ones(7, np.uint8), process_set=mine)
number = mine.process_set_id
in_set = of_kind("allgather", number)
assert (in_set["operations"], in_set["bytes"]) == (1, 7)

# Numbers go on after the end of a job, and in the next one.
cc.shutdown()
gone = cc.metrics()
assert of_kind("allreduce", found=gone) == allreduce
assert of_kind("allgather", number, gone) == in_set
assert (gone["rank"], gone["arena_size_bytes"]) == (None, 0)
assert gone["waited_seconds"] >= now["waited_seconds"] > 0
cc.init()
cc.allreduce(small, op=cc.Sum, name="again")
again = of_kind("allreduce")
assert (again["operations"], again["bytes"]) == (16, allreduce["bytes"] + 4096)
cc.shutdown()
common.report(
    **{key: allreduce[key] for key in ("peers_seconds", "hosts_seconds")},
    **{key: now[key] for key in ("late_seconds", "slowest_rank", "waited_seconds")},
)
