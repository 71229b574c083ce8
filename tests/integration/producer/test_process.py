"""A producer's effects on its process: memory, forks and the end. Each test runs a new process."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.fresh_process import run_strictly
from support.librdkafka import read_topic, read_values

from spark_kafka_sink.local import Admin

MEGABYTE = 1024 * 1024


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a new process; return its last line, which is JSON."""
    process = run_strictly(script, *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


MEMORY = """
import array, json, os, resource, sys
import pyarrow as pa
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

servers, topic, mode, codec = sys.argv[1:]
producer = KafkaProducer({"bootstrap.servers": servers, "buffer.memory": 8 << 20, "compression.type": codec})
random = os.urandom(900_000)
if mode == "columns":  # made in place: a list of values on the way would hide what comes after below its own peak
    offsets, values = array.array("i", range(0, 73 * 900_000, 900_000)), os.urandom(72 * 900_000)
    columns = RecordColumns(pa.Array.from_buffers(pa.binary(), 72, [None, pa.py_buffer(offsets), pa.py_buffer(values)]))
producer.send(topic, random).result(30)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before, futures, errors = peak(), [], []
if mode == "columns":
    producer.send_columns(topic, columns, lambda _, error: errors.append(str(error)) if error else None)
else:
    for n in range(72):
        futures.append(producer.send(topic, random[n:] + random[:n]))
producer.flush(60)
errors += [str(future.exception()) for future in futures if future.exception()]
grown = peak() - before
producer.close()
print(json.dumps({"grown": grown, "errors": errors}))
"""


@pytest.mark.parametrize(("mode", "codec"), [("rows", "none"), ("columns", "none"), ("columns", "zstd")])
def test_memory_stays_little_above_buffer_memory(kafka_broker: Admin, fresh_name: str, mode: str, codec: str) -> None:
    """The test sends 62 MiB of values of 900 kB through a buffer of 8 MiB."""
    kafka_broker.create_topic(fresh_name)
    found = run(MEMORY, kafka_broker.bootstrap_servers, fresh_name, mode, codec)
    assert found["errors"] == []
    messages = read_topic(kafka_broker.bootstrap_servers, fresh_name)
    assert [len(message.value()) for message in messages] == [900_000] * 73
    assert found["grown"] < 28 * MEGABYTE


FORK = """
import json, os, sys
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

servers, topic = sys.argv[1:]
producer = KafkaProducer({"bootstrap.servers": servers, "linger.ms": 300})
producer.send(topic, "before").result(30)
waiting = producer.send(topic, "in the buffer at the fork")
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    raised = []
    from spark_kafka_sink.record.columns import RecordColumns
    for use in (
        lambda: producer.send(topic, "from the child"),
        lambda: producer.send_columns(topic, RecordColumns.from_rows(["from the child"])),
        lambda: producer.flush(1),
        lambda: producer.partitions_for(topic),
    ):
        try:
            use()
        except IllegalStateError as error:
            raised.append(str(error))
    producer.close()
    with KafkaProducer({"bootstrap.servers": servers}) as own:
        own.send(topic, "from the child's own producer").result(30)
    os.write(write_end, json.dumps(raised).encode())
    del producer
    sys.exit(0)  # runs what Python runs at exit
os.close(write_end)
_, status = os.waitpid(child, 0)
raised = json.loads(os.read(read_end, 10_000))
waiting.result(30)
for number in range(100):
    producer.send(topic, f"after {number}")
producer.flush(30)
producer.close()
print(json.dumps({"pid": os.getpid(), "status": os.waitstatus_to_exitcode(status), "raised": raised}))
"""


def test_forked_child_is_refused_and_changes_nothing(kafka_broker: Admin, fresh_name: str) -> None:
    kafka_broker.create_topic(fresh_name)
    found = run(FORK, kafka_broker.bootstrap_servers, fresh_name)
    assert found["status"] == 0
    assert len(found["raised"]) == 4
    assert {text.partition(";")[0] for text in found["raised"]} == {f"This producer belongs to process {found['pid']}"}
    values = read_values(kafka_broker.bootstrap_servers, fresh_name)
    own = values.index("from the child's own producer")
    assert own > 0
    del values[own]
    assert values == ["before", "in the buffer at the fork", *(f"after {number}" for number in range(100))]


EXIT = """
import json, sys
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

servers, topic = sys.argv[1:]
producer = KafkaProducer({"bootstrap.servers": servers, "linger.ms": 60_000})
producer.partitions_for(topic)
producer.send(topic, "lingers")
print(json.dumps({}))
"""


def test_process_ends_without_closing_its_producer(kafka_broker: Admin, fresh_name: str) -> None:
    kafka_broker.create_topic(fresh_name)
    began = time.monotonic()
    assert run(EXIT, kafka_broker.bootstrap_servers, fresh_name) == {}
    assert time.monotonic() - began < 20
    assert read_values(kafka_broker.bootstrap_servers, fresh_name) == []


CLOSED_AT_EXIT = """
import json, sys
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

servers, topic, how = sys.argv[1:]

class Wrapper:
    def __init__(self):
        self.producer = KafkaProducer({"bootstrap.servers": servers})

    def __del__(self):
        try:
            if how == "result":
                self.producer.send(topic, "too late").result()
            else:
                getattr(self.producer, how)()
        except Exception as error:
            print(error)

def futures():
    with KafkaProducer({"bootstrap.servers": servers, "linger.ms": 60_000}) as producer:
        while True:
            yield producer.send(topic, "lingers")

if how == "generator":
    found = futures()
    next(found)
else:
    kept = Wrapper()
    kept.producer.send(topic, "first").result(30)
    kept.producer.send(topic, "second")
print(json.dumps({}))
"""


@pytest.mark.parametrize("how", ["close", "flush", "result", "generator"])
def test_process_ends_although_something_waits_for_the_producer_then(
    kafka_broker: Admin, fresh_name: str, how: str
) -> None:
    """Bug: the interpreter stops all other threads at its end, and a call in a __del__, or the end of a generator
    around a with block, waited for the Sender for ever.
    """
    kafka_broker.create_topic(fresh_name)
    began = time.monotonic()
    process = run_strictly(CLOSED_AT_EXIT, kafka_broker.bootstrap_servers, fresh_name, how)
    assert (process.returncode, process.stderr) == (0, "")
    assert time.monotonic() - began < 30
    if how == "generator":  # its record lingers
        assert "records without an acknowledgement are dropped" in process.stdout
