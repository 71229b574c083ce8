"""Which options the doctor gives to the sink's own check, and which belong to Spark or to a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import stream_to_kafka
from spark_kafka_sink.doctor.examination import Given
from spark_kafka_sink.sink.exactly_once.session import stream_prefix
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.properties_file import read_properties

ROOT = Path(__file__).resolve().parents[3]
SERVERS = {"kafka.bootstrap.servers": "h1:9092"}


@pytest.mark.parametrize("file", sorted((ROOT / "conf").glob("*.properties")), ids=lambda file: file.name)
def test_file_of_a_job_has_options_that_the_sink_takes(file: Path) -> None:
    given = Given.of({**SERVERS, **read_properties(file).values})
    SinkConfig.from_options(given.sink)
    assert [name for name in given.others if stream_to_kafka.is_sink_option(name)] == []


def test_each_setting_of_the_job_is_known_as_such() -> None:
    settings = {each.name: "1" for each in stream_to_kafka.SETTINGS}
    given = Given.of(settings)
    assert [name for name in given.sink if not stream_to_kafka.is_sink_option(name)] == []


def test_checkpoint_of_a_job_names_the_transactional_ids() -> None:
    config = SinkConfig.from_options({**SERVERS, "topic": "t", "delivery.guarantee": "exactly-once"})
    by_job = Given.of({"checkpoint.location": "/data/checkpoint"})
    by_spark = Given.of({"checkpointLocation": "/data/checkpoint", "path": "x"})
    assert stream_prefix(config, by_job.stream) == stream_prefix(config, by_spark.stream)
    assert (by_job.sink, by_spark.sink) == ({}, {})


def test_misspelt_option_stays_with_the_sink() -> None:
    assert Given.of({"kafka.lingr.ms": "5", "Trigger": "1 s"}) == Given({"kafka.lingr.ms": "5"}, {}, ["Trigger"])
