"""Spark's own source reads what this sink has written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from integration.parity.conftest import WARM_UP, Topics
from support.librdkafka import read_topic

from spark_kafka_sink import KafkaProducer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).resolve().parents[3] / "docs" / "dead-letters.md"


@pytest.mark.usefixtures("spark_sink")
def test_dead_letters_of_aborted_attempts_are_not_written_again(
    spark: SparkSession, new_topics: Callable[..., Topics], tmp_path: Path
) -> None:
    """Bug: the example of the page wrote each row once for each attempt, because the source reads without committed."""
    dead, again = new_topics(""), new_topics("")
    with KafkaProducer({"bootstrap.servers": dead.servers, "transactional.id": dead.names["topic"]}) as producer:
        producer.init_transactions()
        for end in (producer.abort_transaction, producer.abort_transaction, producer.commit_transaction):
            producer.begin_transaction()
            headers = [("__sink.errors.topic", b"orders"), ("kept", b"1")]
            for number in range(5):
                producer.send(dead.names["topic"], b"row %d" % number, headers=headers)
            producer.flush()
            end()
    section = PAGE.read_text().split("## Writing them again")[1]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for old, new in (
        ("h1:9092", dead.servers),
        ('"orders-dead"', repr(dead.names["topic"])),
        ('"orders"', repr(again.names["topic"])),
        ("/checkpoints/orders-again", str(tmp_path)),
    ):
        assert old in example
        example = example.replace(old, new)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(example, str(PAGE), "exec"), names)
    assert names["query"].awaitTermination(120)
    found = read_topic(again.servers, again.names["topic"], again.partitions)
    written = [record for record in found if record.value().startswith(b"row ")]
    assert sorted(record.value() for record in written) == [b"row %d" % number for number in range(5)]
    assert all(record.headers() == [("kept", b"1")] for record in written)
    assert WARM_UP in {record.value() for record in found}
