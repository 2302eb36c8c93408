"""Ranks as tasks of a real Spark with two executors, each a process of its own with its own Python workers."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from collective_core.errors import CollectiveError

from collective_core import RankFailedError, Runner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spark():
    if shutil.which("java") is None:
        pytest.fail("there is no Java for Spark: apt install openjdk-17-jre-headless", pytrace=False)
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local-cluster[2,2,512]")
        .appName("ranks")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .getOrCreate()
    )
    yield session
    session.stop()


def test_every_task_is_a_rank(spark, capfd):
    def train(scale):
        import numpy

        import collective_core as cc

        cc.init()
        print("hello from rank", cc.rank())
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [str(cc.rank()), "4", str(cc.local_rank())]
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] in os.environ["COLLECTIVE_STORE"]) == ("127.0.0.1", False)
        return cc.rank(), os.getppid(), (cc.allreduce(numpy.ones(2), op=cc.Sum) * scale).tolist()

    found = Runner(np=4, spark=spark).run(train, scale=2)
    assert [(rank, values) for rank, _, values in found] == [(rank, [8.0, 8.0]) for rank in range(4)]
    assert len({parent for _, parent, _ in found}) > 1, "the ranks ran in several Python workers"
    lines = [line for line in capfd.readouterr().out.splitlines() if "hello" in line]
    assert sorted(lines) == [f"[{rank}] hello from rank {rank}" for rank in range(4)]


def test_without_np_all_slots_are_taken(spark):
    assert len(Runner(spark=spark).run(lambda: 1)) == 4


def test_a_rank_that_fails_is_named_and_spark_does_not_try_again(spark, tmp_path):
    log = tmp_path / "calls"

    def train(path):
        import collective_core as cc

        cc.init()
        with open(path, "a") as file:
            file.write(f"{cc.rank()}\n")
        cc.barrier()
        if cc.rank() == 1:
            raise ValueError("no such layer")
        cc.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 on .* raised ValueError: no such layer"):
        Runner(np=3, spark=spark).run(train, str(log))
    assert sorted(log.read_text().split()) == ["0", "1", "2"]


def test_more_ranks_than_spark_has_slots(spark):
    with pytest.raises(CollectiveError, match="runs 4 tasks at once and 9 ranks need as many"):
        Runner(np=9, spark=spark, start_timeout=1).run(lambda: 1)


def test_files_that_spark_was_given_and_the_users_job_group(spark, tmp_path):
    (tmp_path / "given_to_spark.py").write_text("VALUE = 7\n")
    context = spark.sparkContext
    context.addPyFile(str(tmp_path / "given_to_spark.py"))
    context.setJobGroup("mine", "what the user does")

    def train():
        import given_to_spark

        return given_to_spark.VALUE

    assert Runner(np=2, spark=spark).run(train) == [7, 7]
    assert context.getLocalProperty("spark.jobGroup.id") == "mine"


def test_negative_np_stays_on_this_machine(spark):
    assert Runner(np=-1, spark=spark).run(os.getpid) != [os.getpid()]
    with pytest.raises(CollectiveError, match="give one"):
        Runner(np=2, spark=spark, hosts="a:2")
