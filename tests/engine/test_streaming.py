"""Streams: what is read, who gets which record, and that the records of committed steps are neither lost nor counted twice."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cases import slow_but_last
from collective_core.extensions.streaming import Directory, Files, Kafka, ProgressiveValidation, StandardInput, Stream, auc, files
from conftest import WORKERS, find_mpirun

PATIENCE = 120.0

# --- sources, without ranks -----------------------------------------------------------------------------------------------------------


def position_of(source):
    return dict(source.discover({})[0])


def test_a_line_of_a_file_that_grows_counts_when_its_newline_is_there(tmp_path):
    path = tmp_path / "log"
    source = Files(path)
    positions = position_of(source)
    assert source.read(positions, 9) == ([], {}, False), "it may come later"
    with path.open("ab", buffering=0) as file:
        file.write(b"one\r\n\ntw")
        read = source.read(positions, 9)
        assert read.records == [b"one", b""]
        file.write(b"o\nthree\n")
    assert source.read({**positions, **read.positions}, 1).records == [b"two"]
    assert source.read(positions, 9).records == [b"one", b"", b"two", b"three"], "any position can be read again"


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_whatever_is_appended_and_read_in_whatever_pieces_is_what_was_written(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "READ_BYTES", block)
    dice = random.Random(3)
    for trial in range(20):
        path, written, taken = tmp_path / f"{trial}", b"", []
        source = Files(path)
        positions = position_of(source)
        for _ in range(60):
            if dice.random() < 0.5:
                piece = bytes(dice.choice(b"ab\n") for _ in range(dice.randrange(40)))
                with path.open("ab") as file:
                    file.write(piece)
                written += piece
            elif dice.random() < 0.1:
                source = Files(path)
            else:
                read = source.read(positions, dice.randrange(1, 9))
                positions.update(read.positions)
                taken += read.records
        taken += source.read(positions, 10_000).records
        assert taken == written.split(b"\n")[:-1]
        assert (
            Files(path, follow=False).read(position_of(source), 10_000).records
            == written.split(b"\n")[: None if written[-1:] != b"\n" else -1]
        )


@pytest.mark.parametrize("change", ["truncated", "renamed", "replaced by a longer one", "truncated and longer again"])
def test_a_file_that_is_no_longer_the_one_that_was_read_is_refused(tmp_path, change):
    path = tmp_path / "log"
    path.write_text("the first\nthe second\n")
    source = Files(path)
    positions = {str(path): source.read(position_of(source), 2).positions[str(path)]}
    if change == "truncated":
        path.write_text("the first\n")
    elif change == "renamed":
        path.rename(tmp_path / "log.1")
    elif change == "replaced by a longer one":
        path.rename(tmp_path / "log.1")
        path.write_text("another first line\nanother second line\n")
    else:
        path.write_text("Xhe first\nthe second\nand a third\n")
    for reader in (source, Files(path)):
        with pytest.raises(ValueError, match=r"(truncated|replaced|renamed).*give each file a name of its own"):
            reader.read(positions, 9)


@pytest.mark.parametrize("kind", ["files", "directory"])
def test_a_file_that_begins_like_the_one_that_was_read_is_not_taken_for_it(tmp_path, kind):
    head = ",".join(f"column{number}" for number in range(100)) + "\n"
    path = tmp_path / "log"
    path.write_text(head + "of the first\n")
    source = Files(path) if kind == "files" else Directory(tmp_path)
    positions = source.read(position_of(source), 9).positions
    path.unlink()
    path.write_text(head + "of another 1\n" + ("more\n" if kind == "files" else ""))
    with pytest.raises(ValueError, match="was replaced"):
        source.read(positions, 9) if kind == "files" else source.discover(positions)


def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    source = Files(tmp_path / "pipe", follow=False)
    with pytest.raises(ValueError, match=r"pipe is not a regular file\. For a pipe, use hvd\.data\.StandardInput"):
        source.read(position_of(source), 9)


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_RECORD", 1 << 20)
    path = tmp_path / "log"
    path.write_bytes(b"short\n" + b"x" * (1 << 21))
    with pytest.raises(ValueError, match="a line of more than 1 MiB at byte 6"):
        Files(path).read(position_of(Files(path)), 9)


def test_files_of_a_folder_are_read_once_they_have_their_name_and_may_go_when_they_are_read(tmp_path):
    source = Directory(tmp_path, "*.csv")
    for name in ("b.csv", "a.csv", ".c.csv", "d.csv.tmp", "e.txt"):
        (tmp_path / name).write_text(f"of {name}\nlast line of {name}")
    positions = position_of(source)
    assert list(positions) == ["a.csv", "b.csv"]
    read = source.read(positions, 3)
    assert read.records == [b"of a.csv", b"last line of a.csv", b"of b.csv"]
    positions.update(read.positions)
    (tmp_path / ".c.csv").rename(tmp_path / "Before all others.csv")
    new, gone = source.discover(positions)
    assert (list(new), list(gone)) == (["Before all others.csv"], [])
    positions.update(new)
    read = source.read(positions, 9)
    assert read.records == [b"last line of b.csv", b"of .c.csv", b"last line of .c.csv"], "in the order in which they came"
    positions.update(read.positions)
    (tmp_path / "a.csv").unlink()
    assert source.discover(positions) == ({}, ["a.csv"])
    (tmp_path / "b.csv").write_text("more than before, in place, which is wrong")
    with pytest.raises(ValueError, match=r"b\.csv has 42 bytes; it had 27"):
        source.discover(positions)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_another_file_of_the_same_size_is_not_taken_for_one_that_was_read(tmp_path, is_loaded):
    put(tmp_path, "a", ["1", "2"])
    source = Directory(tmp_path)
    positions = source.read(position_of(source), 9).positions
    assert source.discover(positions) == ({}, [])
    (tmp_path / "a").touch()
    assert source.discover(positions) == ({}, []), "the same bytes"
    put(tmp_path, "a", ["3", "4"])
    with pytest.raises(ValueError, match=r"a was replaced by another file of 4 bytes after it was read to its end\. Give each file a name"):
        (Directory(tmp_path) if is_loaded else source).discover(positions)


def test_a_state_from_another_folder_is_refused_by_files_that_were_looked_at(tmp_path):
    put(tmp_path, "a", ["1", "2"])
    source = Directory(tmp_path)
    offset, fingerprint, is_read = source.read(position_of(source), 9).positions["a"]
    assert source.discover({"a": [offset, fingerprint, is_read]}) == ({}, [])
    with pytest.raises(ValueError, match="replaced by another file"):
        source.discover({"a": [offset, "0" * 16, is_read]})


def test_a_file_that_is_gone_before_it_was_read_is_named(tmp_path):
    (tmp_path / "a").write_text("1\n2\n")
    source = Directory(tmp_path)
    positions = {"a": source.read(position_of(source), 1).positions["a"]}
    (tmp_path / "a").unlink()
    assert source.discover(positions) == ({}, [])
    with pytest.raises(ValueError, match="a is not there, and 2 bytes of it were read"):
        Directory(tmp_path).read(positions, 1)


GOOD = {"schema": 1, "source": "directory", "records": 3, "positions": {"a.txt": [4, "0123456789abcdef", False]}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema": 2}, "not a state of a stream"),
        ({"records": -1}, "not a state of a stream"),
        ({"positions": [["a.txt", 4]]}, "not a state of a stream"),
        ({"source": "kafka"}, "one of a stream of 'kafka'"),
        ({"positions": {"../a.txt": [4, "", False]}}, "does not match"),
        ({"positions": {"/etc/a.txt": [4, "", False]}}, "does not match"),
        ({"positions": {"a.csv": [4, "", False]}}, "does not match"),
        ({"positions": {"a.txt": [-4, "", False]}}, "not a valid position"),
        ({"positions": {"a.txt": [True, "", False]}}, "not a valid position"),
        ({"positions": {"a.txt": 4}}, "not a valid position"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_nothing_changes(tmp_path, changes, expected):
    stream = Stream(Directory(tmp_path, "*.txt"), 1)
    stream.load_state_dict(GOOD)
    with pytest.raises(ValueError, match=expected):
        stream.load_state_dict({**GOOD, **changes})
    assert stream.state_dict() == GOOD


def test_positions_of_other_sources_are_checked_too(tmp_path):
    config = {"bootstrap.servers": "localhost:1"}
    for source, partition, position in (
        (Files(tmp_path / "a"), "/etc/passwd", [0, "", False]),
        (StandardInput(), "standard input", "1"),
        (Kafka("clicks", config), "others/1", 1),
        (Kafka("clicks", config), "clicks/-1", 1),
        (Kafka("clicks", config), "clicks/1", -1),
    ):
        with pytest.raises(ValueError, match=r"position|offset"):
            source.validate(partition, position)
    with pytest.raises(ValueError, match=r"enable\.auto\.commit: the stream sets"):
        Kafka("clicks", {"enable.auto.commit": True})
    for settings in ({"batch_size": 0}, {"batch_size": 1, "shard": "half"}, {"batch_size": 1, "shard": "partition"}):
        with pytest.raises(ValueError, match=r"batch_size must|shard"):
            Stream(StandardInput(), **settings)


# --- evaluation ------------------------------------------------------------------------------------------------------------------------


def test_the_area_under_the_curve_is_the_share_of_pairs_in_the_right_order():
    generator = np.random.default_rng(5)
    for count in (2, 3, 10, 100):
        for levels in (2, 5, 1000):  # few levels: many ties
            labels, scores = generator.integers(0, 2, count), generator.integers(0, levels, count)
            labels[:2] = 0, 1
            pairs = list(itertools.product(scores[labels == 1], scores[labels == 0]))
            expected = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)
            assert auc(labels, scores) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(auc([1, 1], [0.1, 0.2]))
    assert np.isnan(auc([], []))


def test_a_damaged_state_of_an_evaluation_is_refused():
    evaluation = ProgressiveValidation()
    good = evaluation.state_dict()
    for changes in ({"schema": 0}, {"records": "1"}, {"kept": b""}, {"kept": "AAAA"}, {"kept": "!"}):
        with pytest.raises(ValueError, match="state of a ProgressiveValidation"):
            evaluation.load_state_dict({**good, **changes})


# --- ranks -----------------------------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, lines) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(f"{line}\n" for line in lines))
    (folder / f".{name}").rename(folder / name)


def steps_of(reports, key):
    """By step, each rank's records."""
    ranks = [reports[rank]["found"][key][0] for rank in sorted(reports)]
    assert len({len(taken) for taken in ranks}) == 1, "every rank takes part in each step"
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (4, 1), (3, 2)))
def test_each_record_is_given_once_and_ranks_without_records_take_part(launch, tmp_path, n, hosts):
    lengths = {"a": 20, "b": 1, "c": 0, "d": 7, "e": 2}
    (tmp_path / "empty").mkdir()
    for name, length in lengths.items():
        put(tmp_path / "files", f"{name}.txt", [f"{name}{number}" for number in range(length)])
    (tmp_path / "files" / "f.txt").write_text("f0")
    reports = launch("streaming.py", n, hosts, ("sources", str(tmp_path))).must_succeed().reports()
    everything = [f"{name}{number}" for name, length in {**lengths, "f": 1}.items() for number in range(length)]
    for key in ("directory", "dealt out", "files", "own files"):
        steps = steps_of(reports, key)
        given = [record for step in steps for records in step for record in records]
        assert sorted(given) == sorted(everything), key
        for name in lengths:
            own = [record for record in given if record.startswith(name)]
            assert own == [f"{name}{number}" for number in range(len(own))], "a partition's records stay in order"
        for rank in range(n):
            assert reports[rank]["found"][key][1] == [sum(map(len, step)) for step in steps]
        if key in ("dealt out", "files"):
            sizes = [[len(records) for records in step] for step in steps]
            assert all(max(step) - min(step) <= 1 for step in sizes), "equal parts"
            assert all(sum(step) == 3 * n for step in sizes[:-1])
        else:
            assert any(min(map(len, step)) == 0 for step in steps), "some rank has had none"
    assert [record for step in steps_of(reports, "dealt out") for records in step for record in records] == everything


def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(launch, tmp_path):
    n = 3
    put(tmp_path / "files", "a.txt", ["1", "2"])
    put(tmp_path / "files", "b.txt", ["1", "2"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "growing").write_text("0\n" * 2 * n + "not whole")
    reports = launch("streaming.py", n, 1, ("wrong", str(tmp_path))).must_succeed().reports()
    for report in reports.values():
        found = report["found"]
        mixed, behind, truncated, ended, own, *evaluations = found["texts"]
        assert mixed.startswith("mismatch: the ranks' streams differ: rank 0 has files, batch_size=2")
        assert "rank 1 has files, batch_size=3" in mixed
        assert "rank 2 has files, batch_size=2, shard=record, at record 1. Load the same state" in behind
        assert truncated.startswith("invalid: the stream cannot be read by rank 0: ")
        assert "was truncated or replaced" in truncated
        assert ended == "ended"
        assert own.startswith("invalid: the stream cannot be read by rank 1: ")
        assert "make it reachable for every rank" in own
        for evaluation in evaluations:
            assert evaluation.startswith("value: labels (0 or 1), scores and losses must be finite")
        assert found["first"] == ["0", "0"]
        assert found["sum"] == n


@pytest.mark.slow
def test_a_partition_that_is_found_while_a_step_waits_for_records_is_read_after_it(launch, tmp_path):
    reports = launch("streaming.py", 1, 1, ("found while waiting", str(tmp_path))).must_succeed().reports()
    assert reports[0]["found"] == [["a"], ["b"]]


def records(count: int, first: int = 0):
    """`id x0 x1 y`."""
    generator = np.random.default_rng([9, first])
    for number in range(first, first + count):
        x = generator.normal(size=2)
        yield f"{number} {x[0]:.6f} {x[1]:.6f} {int(x[0] - x[1] + generator.normal() > 0)}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        put(folder / "data", f"{number}.txt", records(50 + 2 * number, 100 * number))
    return folder


@pytest.fixture(scope="module")
def alone(launch, data):
    """What one process reports that takes all records of a step."""
    done = launch("streaming.py", 1, 1, ("training", str(data)), {"TEST_BATCH": "12", "TEST_SHARD": "record"})
    return done.must_succeed().reports()[0]["found"]


@pytest.mark.slow
def test_ranks_learn_and_evaluate_what_one_process_does(launch, data, alone):
    reports = launch("streaming.py", 3, 1, ("training", str(data)), {"TEST_BATCH": "4", "TEST_SHARD": "record"}).must_succeed().reports()
    for report in reports.values():
        found = report["found"]
        assert found["taken"] == alone["taken"]
        assert found["weights"] == pytest.approx(alone["weights"], rel=1e-9)
        assert found["auc"] == pytest.approx(alone["auc"], abs=1e-12)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-9)
        assert found == reports[0]["found"], "the same bits on every rank"
    assert alone["auc"] > 0.6
    assert len(alone["taken"]) == 156


@pytest.mark.slow
@pytest.mark.parametrize("shard", slow_but_last("record", "partition"))
def test_a_job_that_goes_on_with_other_ranks_reads_what_was_not_saved(launch, data, alone, tmp_path, shard):
    (tmp_path / "data").symlink_to(data / "data")
    settings = {"TEST_BATCH": "4", "TEST_SHARD": shard}
    first = launch("streaming.py", 2, 1, ("stopped", str(tmp_path), "8"), settings).must_succeed().reports()[0]["found"]
    assert 0 < len(first["saved"]) < len(first["taken"]) < 156
    reports = launch("streaming.py", 3, 1, ("continued", str(tmp_path)), settings).must_succeed().reports()
    for report in reports.values():
        found = report["found"]
        assert found["began"]["taken"] == first["saved"]
        assert sorted(found["taken"], key=int) == sorted(alone["taken"], key=int)
        assert len(set(found["taken"])) == 156


def test_standard_input_is_dealt_out_by_rank_0(tmp_path):
    lines = [str(number) for number in range(57)]
    command = [find_mpirun(), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", "2", sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(WORKERS), "OMP_NUM_THREADS": "1"}
    words = [str(WORKERS / "streaming.py"), "standard input", str(tmp_path)]
    done = subprocess.run([*command, *words], input="\n".join(lines), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {entry["rank"]: entry["found"] for entry in (json.loads(line[7:]) for line in done.stdout.splitlines() if "REPORT" in line)}
    steps = list(zip(*(found[rank]["taken"] for rank in (0, 1)), strict=True))
    assert [record for step in steps for part in step for record in part] == lines, "what was read after the last state is read again"
    for rank in (0, 1):
        assert found[rank]["again"][0] == found[rank]["again"][1]
        for first, text in zip((16, 24), found[rank]["too early"], strict=True):
            assert f"line 0 of standard input is to be read again, but all before line {first} were given up" in text


def test_a_standard_input_that_leads_nowhere_is_an_error():
    script = "from collective_core.extensions.streaming import StandardInput as Source; Source().read({Source.PARTITION: 0}, 1)"
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "standard input of rank 0 is /dev/null" in done.stderr


# --- Kafka -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broker():
    """Address, new topic of four partitions, and producer: of librdkafka's mock cluster, or the broker that TEST_KAFKA_BROKER names."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    named, topic = os.environ.get("TEST_KAFKA_BROKER"), f"clicks-{time.time_ns()}"
    if named:
        administration = AdminClient({"bootstrap.servers": named})
        administration.create_topics([NewTopic(topic, 4, 1)])[topic].result(10)
    producer = Producer({"bootstrap.servers": named} if named else {"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0})
    (node,) = producer.list_topics(timeout=10).brokers.values()
    yield f"{node.host}:{node.port}", topic, producer
    producer.flush(10)


def test_records_of_kafka_are_read_once_also_by_another_number_of_ranks(launch, broker, tmp_path):
    address, topic, producer = broker
    lengths = (50, 0, 3, 20)
    for partition, length in enumerate(lengths):
        for number in range(length):
            producer.produce(topic, f"{partition}.{number}".encode(), partition=partition)
    assert producer.flush(10) == 0
    settings = {"TEST_KAFKA": address, "TEST_TOPIC": topic, "TEST_STOP": "3"}
    first = launch("streaming.py", 2, 1, ("kafka", str(tmp_path)), settings).must_succeed().reports()
    del settings["TEST_STOP"]
    second = launch("streaming.py", 3, 1, ("kafka", str(tmp_path)), settings).must_succeed().reports()
    given = []
    for reports in (first, second):
        ranks = [reports[rank]["found"] for rank in sorted(reports)]
        assert all(found["totals"] == ranks[0]["totals"] for found in ranks)
        steps = list(zip(*(found["taken"] for found in ranks), strict=True))
        assert [sum(map(len, step)) for step in steps] == ranks[0]["totals"]
        given += [record for step in steps for part in step for record in part]
        assert all("offset 10000" in found["beyond"] and "out of range" in found["beyond"] for found in ranks)
    assert 0 < sum(first[0]["found"]["totals"]) < sum(lengths)
    for partition, length in enumerate(lengths):
        own = [record for record in given if record.startswith(f"{partition}.")]
        assert own == [f"{partition}.{number}" for number in range(length)]
    assert len(given) == sum(lengths)


def read_until(source, positions, count):
    """So many records, for which positions go on; the brokers need a moment."""
    found, end = [], time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < end, found
        read = source.read(positions, count - len(found))
        found += read.records
        positions.update(read.positions)
    return found


def test_kafkas_latest_is_where_the_stream_began_and_new_partitions_are_read_from_their_first_record(broker):
    address, topic, producer = broker
    for partition in range(4):
        producer.produce(topic, b"old", partition=partition)
    assert producer.flush(10) == 0
    source = Kafka(topic, {"bootstrap.servers": address}, start="latest")
    assert source.discover({})[0] == {f"{topic}/{partition}": 1 for partition in range(4)}
    assert source.discover({f"{topic}/0": 1})[0] == {f"{topic}/{partition}": 0 for partition in (1, 2, 3)}
    source.close()


def test_what_comes_after_an_error_in_a_batch_of_kafka_is_read_when_it_is_read_again(broker):
    address, topic, producer = broker
    for number in range(3):
        producer.produce(topic, str(number).encode(), partition=0)
    assert producer.flush(10) == 0
    source = Kafka(topic, {"bootstrap.servers": address})
    positions = {f"{topic}/0": 0}
    assert read_until(source, positions, 1) == [b"0"]

    class Failed:
        """As Kafka's consumer gives an error among the messages."""

        def topic(self):
            return topic

        def partition(self):
            return 0

        def error(self):
            return source._api.KafkaError(source._api.KafkaError.TOPIC_AUTHORIZATION_FAILED)

    class Once:
        """A consumer that loses its first batch behind an error."""

        def __init__(self, consumer):
            self._consumer, self._is_first = consumer, True

        def __getattr__(self, name):
            return getattr(self._consumer, name)

        def consume(self, count, timeout):
            if not self._is_first:
                return self._consumer.consume(count, timeout=timeout)
            self._is_first = False
            return [Failed(), *self._consumer.consume(2, timeout=PATIENCE)]

    source._consumer = Once(source._consumer)
    with pytest.raises(ValueError, match=f"partition {topic}/0 at offset 1: .*"):
        source.read(positions, 2)
    assert read_until(source, positions, 2) == [b"1", b"2"]
    source.close()


@pytest.mark.slow
def test_a_state_from_before_the_first_step_goes_back_to_where_kafkas_latest_was(launch, broker, tmp_path):
    address, topic, producer = broker
    producer.produce(topic, b"old", partition=0)
    assert producer.flush(10) == 0
    settings = {"TEST_KAFKA": address, "TEST_TOPIC": topic}
    reports = launch("streaming.py", 2, 1, ("latest", str(tmp_path)), settings).must_succeed().reports()
    for report in reports.values():
        assert report["found"] == {"first": [], "second": ["0", "1", "2"], "again": ["0", "1", "2"]}


# --- kills -----------------------------------------------------------------------------------------------------------------------------

ENOUGH = 400  # records that a job finds ahead


class Kills:
    """An elastic job whose ranks kill themselves, one of each generation, at random moments; the test feeds it until enough have died."""

    def __init__(self, folder: Path, kills: int, source: str, broker: tuple = ("", "", None)) -> None:
        self._folder, self._kills, self._source, self._written = folder, kills, source, 0
        address, self._topic, self._producer = broker
        (folder / "data").mkdir()
        self._feed()
        command = [sys.executable, "-m", "collective_core.launch", "-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "0.1", "0.1"]
        words = [sys.executable, str(WORKERS / "streaming_kills.py"), str(folder), str(kills)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_SOURCE": source, "TEST_KAFKA": address, "TEST_TOPIC": self._topic}
        output = (folder / "output").open("w")
        self.process = subprocess.Popen([*command, *words], stdout=output, stderr=subprocess.STDOUT, env=environment)

    def _feed(self) -> None:
        lines = list(records(100, self._written))
        put(self._folder / "kept", f"{self._written}", lines)
        if self._source == "file that grows":
            with (self._folder / "data" / "log").open("a", buffering=100) as file:
                file.writelines(f"{line}\n" for line in lines)
        else:
            put(self._folder / "data", f"{self._written:06d}.txt", lines)
        self._written += len(lines)
        if self._producer is not None:
            for number, line in enumerate(lines):
                self._producer.produce(self._topic, line.encode(), partition=number % 4)
            assert self._producer.flush(10) == 0

    def _noted(self, key: str) -> list:
        lines = [line for path in self._folder.glob("log.*") for line in path.read_text().splitlines() if line.endswith("}")]
        return [note[key] for note in map(json.loads, lines) if key in note]

    def finish(self) -> tuple[int, int, list]:
        """Records that were written, ranks that died, and what the ranks report at the end."""
        seen, end = (0, 0), time.monotonic() + PATIENCE
        while self.process.poll() is None:
            committed, killed = max(self._noted("committed"), default=0), len(self._noted("killed"))
            if killed >= self._kills:
                break
            if self._written - committed < ENOUGH:
                self._feed()
            if (committed, killed) != seen:
                seen, end = (committed, killed), time.monotonic() + PATIENCE
            assert time.monotonic() < end, (seen, (self._folder / "output").read_text()[-3000:])
            time.sleep(0.02)
        # Before the last records come: the ranks look for it when they have them all.
        put(self._folder, "stop", [str(self._written + 100)])
        self._feed()
        self.process.wait(PATIENCE)
        assert self.process.returncode == 0, (self._folder / "output").read_text()[-3000:]
        return self._written, len(self._noted("killed")), self._noted("end")


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "source"), slow_but_last((50, "directory"), (10, "kafka"), (10, "file that grows"), (2, "directory")))
def test_ranks_that_are_killed_at_random_moments_lose_no_record_and_count_none_twice(request, tmp_path, kills, source):
    broker = request.getfixturevalue("broker") if source == "kafka" else ("", "", None)
    written, killed, ends = Kills(tmp_path, kills, source, broker).finish()
    assert killed >= kills
    assert len(ends) >= 2
    for end in ends:
        taken = [int(number) for step in end["steps"] for number in step.split()]
        assert sorted(taken) == list(range(written))
        assert end["steps"] == ends[0]["steps"]
        assert end["weights"] == ends[0]["weights"]
    replay = subprocess.run(
        [sys.executable, str(WORKERS / "streaming_kills.py"), str(tmp_path)],
        input=json.dumps(ends[0]["steps"]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert replay.returncode == 0, replay.stderr
    assert ends[0]["weights"] == pytest.approx(json.loads(replay.stdout), rel=1e-9), "one process that takes the committed steps"


IDLE = """
import os, sys
import collective_core.torch as hvd
hvd.init()
stream = hvd.data.Stream(hvd.data.Directory(sys.argv[1]), 2)
@hvd.elastic.run
def train(state):
    print("begins", hvd.size(), os.getpid(), flush=True)
    for batch in stream:
        state.count += batch.total
        state.commit()
        if state.count == 5:
            stream.end()
    print("ends", hvd.size(), state.count, flush=True)
train(hvd.elastic.TorchState(stream=stream, count=0))
"""


@pytest.mark.slow
def test_ranks_die_and_come_while_a_stream_has_no_records(tmp_path):
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-m", "collective_core.launch", "-np", "2", "--min-np", "1", sys.executable, "-c", IDLE]
    with subprocess.Popen([*command, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True) as job:
        watchdog = threading.Timer(PATIENCE, job.kill)
        watchdog.start()

        def wait_for(size):
            """The processes of so many ranks, by rank, once all of them wait for records."""
            found = {}
            for line in job.stdout:
                rank, word, number, pid = line.split()
                if word == "begins" and int(number) == size:
                    found[rank] = int(pid)
                    if len(found) == size:
                        return found
            raise AssertionError(f"{size} ranks did not come together")

        os.kill(wait_for(2)["[1]"], signal.SIGKILL)
        wait_for(1)
        wait_for(2)
        put(tmp_path / "data", "late", range(5))
        ends = [line.split()[1:] for line in job.stdout if "ends" in line]
        assert job.wait(PATIENCE) == 0
        watchdog.cancel()
    assert ends == [["ends", "2", "5"]] * 2
