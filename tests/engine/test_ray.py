"""Ranks as actors of a real Ray cluster with two nodes of this machine."""

from __future__ import annotations

import os
import signal
import time

import pytest
from collective_core.errors import CollectiveError

from collective_core import RankFailedError, Runner

pytestmark = pytest.mark.slow

#: Seconds in which processes must have ended after their job.
GONE = 8.0


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args=options)
    made.add_node(num_cpus=2, object_store_memory=80 << 20)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_every_actor_is_a_rank_and_ranks_of_one_node_stand_together(cluster, capfd):
    def train(scale):
        import numpy

        import collective_core as cc

        cc.init()
        print("hello from rank", cc.rank())
        assert [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_SIZE")] == [str(cc.rank()), "2"]
        assert os.environ["HOROVOD_HOSTNAME"]
        place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        expected = [cc.rank(), 4, cc.rank() % 2, 2, cc.rank() // 2, 2]
        assert [int(os.environ[name]) for name in place] == expected
        assert os.environ["MASTER_ADDR"] == os.environ["COLLECTIVE_STORE"].rpartition(":")[0]
        return cc.rank(), os.environ["RAY_RAYLET_PID"], (cc.allreduce(numpy.ones(2), op=cc.Sum) * scale).tolist()

    found = Runner(np=4, ray=True).run(train, scale=2)
    assert [(rank, values) for rank, _, values in found] == [(rank, [8.0, 8.0]) for rank in range(4)]
    nodes = [node for _, node, _ in found]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    lines = [line for line in capfd.readouterr().out.splitlines() if "hello" in line]
    assert sorted(lines) == [f"[{rank}] hello from rank {rank}" for rank in range(4)]


def test_without_np_the_cluster_is_filled_and_given_back(cluster):
    for _ in range(2):
        assert Runner(ray={"CPU": 2}).run(lambda: 1) == [1, 1]


def test_the_first_failure_is_raised_with_its_rank(cluster):
    def train():
        import collective_core as cc

        cc.init()
        cc.barrier()
        if cc.rank() == 1:
            raise ValueError("no such layer")
        cc.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 on .* raised ValueError: no such layer"):
        Runner(np=3, ray=True).run(train)


def test_a_worker_that_is_killed_is_named_and_takes_its_rank_along(cluster, tmp_path):
    def train(folder):
        import collective_core as cc

        cc.init()
        with open(f"{folder}/{cc.rank()}", "w") as file:
            file.write(str(os.getpid()))
        cc.barrier()
        if cc.rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)  # the actor, not the rank
        time.sleep(60)

    with pytest.raises(RankFailedError, match=r"rank 0 on .* the way to it is gone"):
        Runner(np=2, ray=True).run(train, str(tmp_path))
    left = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert len(left) == 2
    end = time.monotonic() + GONE
    while (left := {pid for pid in left if os.path.exists(f"/proc/{pid}")}) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_more_than_ray_has_room_for(cluster):
    with pytest.raises(CollectiveError, match=r"no room for 9 ranks with 1 CPU each: it has 4 CPU free"):
        Runner(np=9, ray=True, start_timeout=1).run(lambda: 1)


def test_one_answer_to_where_ranks_run(cluster):
    with pytest.raises(CollectiveError, match="give one"):
        Runner(np=2, ray=True, hosts="a:2")
    assert Runner(np=-1, ray=True).run(os.getpid) != [os.getpid()]


def test_ray_that_is_not_started(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(CollectiveError, match=r"call ray\.init\(\) first"):
        Runner(np=2, ray=True).run(lambda: 1)
