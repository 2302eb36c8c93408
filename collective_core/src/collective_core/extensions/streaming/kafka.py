"""Records of Kafka's topics, read with confluent-kafka (librdkafka).

The stream's state is the only place where offsets are kept: no consumer group is joined, and nothing is committed to the brokers, so that
offsets and model are always of the same step.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from collective_core.common.requirement import require
from collective_core.extensions.streaming.source import Position, Positions, Read, Source

#: Seconds for a question to the brokers.
ANSWER = 10.0
#: Settings that exactly-once depends on.
OURS = {"group.id", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "enable.partition.eof"}


class Kafka(Source):
    """The values of the records of ``topics``; each of their partitions is one of the stream's. A position is the next record's offset.

    ``config``: librdkafka's settings, such as ``bootstrap.servers`` and ``security.protocol``. ``start``: where a stream without a state
    begins, ``"earliest"`` or ``"latest"``; partitions that come later are read from their first record. ``follow=False``: the stream
    ends when it has come to the end of each partition. A record without a value is b"". Records that the brokers have deleted before they
    were read are an error.
    Raises ImportError without confluent-kafka, ValueError for settings that are the stream's own.
    """

    kind = "kafka"
    discovery_interval = 30.0

    def __init__(self, topics: str | Sequence[str], config: Mapping[str, Any], start: str = "earliest", follow: bool = True) -> None:
        self._api = require("confluent_kafka", "confluent-kafka", (1, 9), "pip install 'confluent-kafka>=1.9'")
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        if start not in ("earliest", "latest"):
            raise ValueError(f'start is "earliest" or "latest", not {start!r}')
        if OURS & set(config):
            raise ValueError(f"{', '.join(sorted(OURS & set(config)))}: the stream sets these itself; leave them out of config")
        self._start, self._follow = start, follow
        fixed = {"group.id": "collective_core", "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._config = {**config, **fixed, "auto.offset.reset": "error", "enable.partition.eof": True}
        self._consumer: Any = None
        self._next: Positions = {}  # of the partitions that are assigned
        self._at_end: set[str] = set()

    def _connected(self) -> Any:
        if self._consumer is None:
            self._consumer = self._api.Consumer(self._config)
        return self._consumer

    def discover(self, known: Mapping[str, Position]) -> tuple[Positions, Sequence[str]]:
        try:
            return self._new_partitions(known), ()
        except self._api.KafkaException:
            if not known:
                raise
            return {}, ()  # brokers that cannot be reached now are asked again later, as librdkafka does for records

    def _new_partitions(self, known: Mapping[str, Position]) -> Positions:
        consumer, found = self._connected(), {}
        for topic in self._topics:
            about = consumer.list_topics(topic, timeout=ANSWER).topics[topic]
            if about.error is not None:
                raise ValueError(f"topic {topic}: {about.error}")
            for number in sorted(about.partitions):
                name = f"{topic}/{number}"
                if name not in known:
                    lowest, end = consumer.get_watermark_offsets(self._api.TopicPartition(topic, number), timeout=ANSWER)
                    found[name] = end if self._start == "latest" and not known else lowest
        return found

    def read(self, positions: Mapping[str, Position], most: int) -> Read:
        if self._next != positions:
            self._assign(positions)
        if not positions:
            return Read([], {}, not self._follow)
        records, found = [], {}
        for message in self._connected().consume(most, timeout=0):
            error, name = message.error(), f"{message.topic()}/{message.partition()}"
            if error is None:
                records.append(message.value() or b"")
                found[name] = self._next[name] = message.offset() + 1
                self._at_end.discard(name)
            elif error.code() == self._api.KafkaError._PARTITION_EOF:
                self._at_end.add(name)
            else:  # lost connections are no errors here: librdkafka connects again
                offset, self._next = self._next.get(name), {}  # what came after it in this batch is to be read again
                raise ValueError(f"partition {name} at offset {offset}: {error}")
        return Read(records, found, not self._follow and self._at_end >= self._next.keys())

    def _assign(self, positions: Mapping[str, Position]) -> None:
        assigned = []
        for name, offset in positions.items():
            topic, _, number = name.rpartition("/")
            assigned.append(self._api.TopicPartition(topic, int(number), offset))
        self._connected().assign(assigned)
        self._next, self._at_end = dict(positions), set()

    def validate(self, partition: str, position: Position) -> None:
        topic, _, number = str(partition).rpartition("/")
        if topic not in self._topics or not re.fullmatch(r"[0-9]{1,9}", number):
            raise ValueError(f"the state has an offset for {partition!r}, which is not a partition of {', '.join(self._topics)}")
        if type(position) is not int or position < 0:
            raise ValueError(f"{position!r} is not a valid offset in {partition}")

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer, self._next = None, {}
