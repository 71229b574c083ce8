"""Tasks of the data source's writers, without Spark."""

from __future__ import annotations

import pytest

from spark_kafka_sink.sink import data_source
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaStreamWriter
from spark_kafka_sink.sink.exactly_once.messages import BatchStart
from spark_kafka_sink.sink.exactly_once.task import TaskIdentity


def batch_start_of(writer: KafkaBatchWriter | KafkaStreamWriter) -> BatchStart:
    """Return the start of the writer's batch, from the report of a task that has no rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_source, "batch_task", lambda start: TaskIdentity(start.next_batch_id, "", 0, 0))
        patch.setattr(data_source, "streaming_task", lambda: TaskIdentity(0, "", 0, 0))
        outcome = writer.write(iter(())).outcome
    assert outcome is not None, "the batch did not begin"
    return outcome.batch_start
