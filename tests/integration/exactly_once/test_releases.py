"""Exactly-once delivery on the oldest embedded release; test_old_releases.py has older ones."""

from __future__ import annotations

import uuid

from support.exactly_once_batches import check_batches

from spark_kafka_sink.local import Admin


def test_batches_count_once_on_the_old_release(old_kafka_broker: Admin) -> None:
    topic = f"batches-{uuid.uuid4().hex[:8]}"
    old_kafka_broker.create_topic(topic)
    check_batches(old_kafka_broker.bootstrap_servers, topic, transaction_version=1)
