"""Read the committed records of a topic with librdkafka, and count them: `python -P count_records.py BROKERS TOPIC`.
Prints the number.
"""

from __future__ import annotations

import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

TIMEOUT_S = 30


def main(brokers: str, topic: str) -> None:
    settings = {"bootstrap.servers": brokers, "group.id": "count", "enable.partition.eof": True, "check.crcs": True}
    consumer = Consumer(settings)
    unread = set(consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in unread])
    counted = 0
    while unread:
        message = consumer.poll(TIMEOUT_S)
        if message is None:
            raise TimeoutError(f"Nothing came from {topic} for {TIMEOUT_S} s; partitions {sorted(unread)} are left.")
        error = message.error()
        if error is None:
            counted += 1
        elif error.code() == KafkaError._PARTITION_EOF:
            unread.discard(message.partition())
        else:
            raise KafkaException(error)
    consumer.close()
    print(counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
