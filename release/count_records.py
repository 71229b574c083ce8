"""Count the records of a topic with librdkafka: `python -P count_records.py BROKERS TOPIC`. Prints the number."""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, TopicPartition

TIMEOUT_S = 30


def main(brokers: str, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "count"})
    partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
    counted = 0
    for partition in partitions:
        first, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
        counted += end - first
    consumer.close()
    print(counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
