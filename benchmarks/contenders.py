"""The contenders of benchmarks/benchmark.py. As a script: one contender in its own process.

The script reads one assignment, as JSON, from the command line. It prints a line of JSON for each timed run, and one
for the workers. If the assignment says so, it reads from stdin what to run, and prints a line for each of these runs.
It reads processor time and memory from /proc, so it runs only on Linux.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from cells import COMMON, MOST_FLIGHTS, AnyCell, Assignment, Cell, FlightsCell, cell_of, columns, table
from flights import as_bytes, confluent_serializer, flights, format_struct, rows_of_files, write_struct
from watched import OPTIONS, PACKAGES, watch

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Producer
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

# ---- processor time and memory, from /proc ---------------------------------------------------------------------------

TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process in /proc: see proc_pid_stat(5)."""

    pid: int
    parent: int
    cpu_s: float
    """Processor seconds of the process, and of the children that it has waited for."""


def processes() -> dict[int, Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if line := read(path):
            fields = line.rpartition(b")")[2].split()  # the name before it may hold blanks
            pid = int(path.parent.name)
            found[pid] = Process(pid, int(fields[1]), sum(map(int, fields[11:15])) / TICKS)
    return found


def own_tree() -> list[Process]:
    """Return this process, its JVM, and the daemon and the Python workers of that JVM."""
    every = processes()

    def is_ours(pid: int) -> bool:
        while pid in every and pid != os.getpid():
            pid = every[pid].parent
        return pid == os.getpid()

    return [process for pid, process in every.items() if is_ours(pid)]


def cpu_seconds() -> float:
    return sum(process.cpu_s for process in own_tree())


def compiler_seconds(pid: int) -> dict[int, float]:
    """Return the processor seconds of each compiler thread of a JVM, which starts and ends them on demand."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        line = read(path)
        if b" CompilerThre" in line:
            found[int(path.parent.name)] = sum(map(int, line.rpartition(b")")[2].split()[11:13])) / TICKS
    return found


def seconds_since(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Return the seconds that the threads of `now` have taken since `before`."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items())


def worker_peak_bytes() -> int:
    """Return the highest resident memory of one of Spark's Python workers; 0 if none exists."""
    tree = own_tree()
    daemons = {process.pid for process in tree if b"pyspark.daemon" in read(Path(f"/proc/{process.pid}/cmdline"))}
    peaks = [0]
    for process in tree:
        if process.parent in daemons:
            lines = read(Path(f"/proc/{process.pid}/status")).splitlines()
            peaks += [int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:")]
    return max(peaks)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


# ---- contenders ----------------------------------------------------------------------------------------------------


def jvm_sink(df: DataFrame, work: Assignment) -> None:
    df.write.format("kafka").options(**work.sink_options()).save()


def write(df: DataFrame, work: Assignment) -> None:
    from spark_kafka_sink import KafkaSink

    KafkaSink(work.sink_options()).write(df)


def write_watched(df: DataFrame, work: Assignment) -> None:
    from spark_kafka_sink import KafkaSink

    KafkaSink({**work.sink_options(), **OPTIONS}).write(df)


def data_source(df: DataFrame, work: Assignment) -> None:
    df.write.format("kafka_sink").options(**work.sink_options()).mode("append").save()


def write_once(df: DataFrame, work: Assignment) -> None:
    from spark_kafka_sink import KafkaSink

    KafkaSink({**work.sink_options(), **_once(work)}).write(df)


def data_source_once(df: DataFrame, work: Assignment) -> None:
    df.write.format("kafka_sink").options(**work.sink_options(), **_once(work)).mode("append").save()


def _once(work: Assignment) -> dict[str, str]:
    return {"delivery.guarantee": "exactly-once", "transactional.id.prefix": work.topic}


def noop_source(df: DataFrame, _work: Assignment) -> None:
    """Write to a Python data source that sends nothing. Its cost is the least of any Python data source."""
    register_noop_source(df.sparkSession)
    df.write.format("noop_source").mode("append").save()


def register_noop_source(session: SparkSession) -> None:
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage as Message

    class Drain:
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
            for _ in iterator:
                pass
            return Message()

        def commit(self, *_: Any) -> None:
            pass

        abort = commit

    class Writer(Drain, DataSourceArrowWriter):
        pass

    class StreamWriter(Drain, DataSourceStreamArrowWriter):
        pass

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "noop_source"

        def writer(self, *_: Any, **__: Any) -> Writer:
            return Writer()

        def streamWriter(self, *_: Any, **__: Any) -> StreamWriter:  # noqa: N802 - Spark's
            return StreamWriter()

    session.dataSource.register(Source)


def foreach_partition(df: DataFrame, work: Assignment) -> None:
    from spark_kafka_sink import KafkaSink

    df.foreachPartition(KafkaSink(work.sink_options()).write_partition)


ERRORS_ONLY: Final = {"delivery.report.only.error": True}
"""A setting of librdkafka."""


def confluent(df: DataFrame, work: Assignment) -> None:
    """Write as the package's documentation shows: with a delivery report for every record."""
    _confluent(df, work, {})


def confluent_errors_only(df: DataFrame, work: Assignment) -> None:
    """Write with delivery reports for failed records only, as experts of librdkafka may do."""
    _confluent(df, work, ERRORS_ONLY)


def _confluent(df: DataFrame, work: Assignment, reports: Mapping[str, bool]) -> None:
    topic, is_keyed = work.topic, cell_of(work.cell).is_keyed
    settings = {**work.settings("ssl.ca.location"), **reports}

    def write_rows(rows: Iterator[Row]) -> None:
        from confluent_kafka import Producer

        failures: list[str] = []

        def delivered(error: object, _message: object) -> None:
            if error is not None:
                failures.append(str(error))

        producer = Producer(settings)
        for row in rows:
            key = row.key if is_keyed else None
            while True:
                try:
                    producer.produce(topic, value=row.value, key=key, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        if producer.flush(120) or failures:
            raise RuntimeError(f"confluent-kafka did not deliver all: {failures[:1]}")

    df.foreachPartition(write_rows)


def confluent_batch(df: DataFrame, work: Assignment) -> None:
    """Write each Arrow batch by one call of `produce_batch`, with a delivery report for every record."""
    _confluent_batch(df, work, {})


def confluent_batch_errors_only(df: DataFrame, work: Assignment) -> None:
    _confluent_batch(df, work, ERRORS_ONLY)


def _confluent_batch(df: DataFrame, work: Assignment, reports: Mapping[str, bool]) -> None:
    topic, settings = work.topic, {**work.settings("ssl.ca.location"), **reports}

    def write_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from confluent_kafka import Producer

        yield pa.record_batch({"records": [produce_batches(Producer(settings), topic, batches)]})

    df.mapInArrow(write_batches, "records BIGINT").collect()


MOST_QUEUED: Final = 100_000
"""The default of librdkafka's queue.buffering.max.messages. A batch that does not fit would be queued in part."""


def produce_batches(producer: Producer, topic: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Write batches of at most MOST_QUEUED rows, and return the number of rows. Raises RuntimeError if a record was not
    delivered.
    """
    failures: list[str] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failures.append(str(error))

    rows = 0
    for batch in batches:
        values = batch.column("value").to_pylist()
        messages: list[dict[str, Any]]
        if "key" in batch.schema.names:
            keys = batch.column("key").to_pylist()
            messages = [{"value": value, "key": key} for value, key in zip(values, keys, strict=True)]
        else:
            messages = [{"value": value} for value in values]
        producer.poll(0)
        while len(producer) > MOST_QUEUED - len(messages):
            producer.poll(0.1)
        if producer.produce_batch(topic, messages, on_delivery=delivered) != len(messages):
            failures += [str(message["_error"]) for message in messages if "_error" in message]
        rows += len(messages)
    if producer.flush(120) or failures:
        raise RuntimeError(f"confluent-kafka did not deliver all: {failures[:1]}")
    return rows


def kafka_python(df: DataFrame, work: Assignment) -> None:
    topic, is_keyed = work.topic, cell_of(work.cell).is_keyed
    settings: dict[str, Any] = {
        name.replace(".", "_"): int(value) if value.lstrip("-").isdigit() else value
        for name, value in work.settings("ssl.cafile").items()
        if (name, value) != ("compression.type", "none")
    }

    def write_rows(rows: Iterator[Row]) -> None:
        from kafka import KafkaProducer

        failures: list[BaseException] = []
        producer = KafkaProducer(**settings)
        for row in rows:
            key = row.key.encode() if is_keyed else None
            value = row.value.encode() if isinstance(row.value, str) else bytes(row.value)
            producer.send(topic, value=value, key=key).add_errback(failures.append)
        producer.flush(120)
        producer.close()
        if failures:
            raise RuntimeError(f"kafka-python did not deliver all: {failures[0]}")

    df.foreachPartition(write_rows)


def hand_over(df: DataFrame, _work: Assignment) -> None:
    """Make the rows and give them to Python, with Spark's own limits of a batch, and send nothing."""

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.record_batch({"records": [sum(batch.num_rows for batch in batches)]})

    df.mapInArrow(count, "records BIGINT").collect()


# ---- contenders without Spark, which write an Arrow table ------------------------------------------------------------

ROWS_OF_A_BATCH: Final = 10_000
"""As in Spark's Arrow batches."""

_producers: dict[str, Any] = {}
"""The producer of this process, which its runs share."""


def table_write(data: pa.Table, work: Assignment) -> None:
    from spark_kafka_sink import KafkaProducer

    if work.contender not in _producers:
        store = {"ssl.truststore.type": "PEM"} if work.authority_file else {}
        _producers[work.contender] = KafkaProducer(store | work.settings("ssl.truststore.location"))
    report = _producers[work.contender].write(data, work.topic)
    if report.records != data.num_rows:
        raise RuntimeError(f"KafkaProducer.write delivered {report}")


def table_produce_batch(data: pa.Table, work: Assignment) -> None:
    _table_produce_batch(data, work, {})


def table_produce_batch_errors_only(data: pa.Table, work: Assignment) -> None:
    _table_produce_batch(data, work, ERRORS_ONLY)


def _table_produce_batch(data: pa.Table, work: Assignment, reports: Mapping[str, bool]) -> None:
    from confluent_kafka import Producer

    if work.contender not in _producers:
        _producers[work.contender] = Producer({**work.settings("ssl.ca.location"), **reports})
    produce_batches(_producers[work.contender], work.topic, data.to_batches(max_chunksize=ROWS_OF_A_BATCH))


Write = Callable[[Any, Assignment], None]
"""Writes a DataFrame, or for a contender without Spark an Arrow table."""
IN_MEMORY = 200
"""Bytes of a value. With larger values a run has fewer records."""


@dataclass(frozen=True)
class Contender:
    title: str
    run: Write
    share: float = 1.0
    """Share of the records. Slow contenders would take minutes, and their rate does not depend on the number."""
    needs_jars: bool = False
    packages: tuple[str, ...] = ()
    """Python packages that it needs in addition to ours."""
    codec_packages: Mapping[str, str] = field(default_factory=dict)
    """One more package for a codec."""
    sends: bool = True
    needs_spark: bool = True
    takes_structs: bool = False
    """Whether it serializes the rows of a job itself."""
    is_once: bool = False
    """Whether it writes exactly once. That costs a fixed amount for each task, so it is measured with small ones."""
    is_watched: bool = False
    """Whether all is switched on by which the sink is seen from outside. Measured in the cells of README."""

    def fits(self, cell: AnyCell) -> bool:
        """Return whether it is measured in this cell."""
        if self.is_watched:
            return str(cell) in COMMON
        if self.is_once or cell.tasks:
            return self.needs_spark and bool(cell.tasks) and not self.takes_structs
        if isinstance(cell, FlightsCell):
            return self.needs_spark and not (self.takes_structs and cell.format == "text")
        return not self.takes_structs

    def records(self, cell: AnyCell, records: int) -> int:
        """Return the records of a run, fewer for large values: a topic that does not fit into memory would make this a
        comparison of disks.
        """
        if isinstance(cell, FlightsCell):
            return rows_of_files(min(records, MOST_FLIGHTS), self.share)
        if cell.tasks:
            return cell.tasks * cell.task_rows
        return max(1, int(records * self.share * min(1, IN_MEMORY / cell.value_bytes)))


CONTENDERS: Mapping[str, Contender] = {
    "jvm": Contender("Spark's JVM sink", jvm_sink, needs_jars=True),
    "write": Contender("KafkaSink.write", write),
    "write_watched": Contender("same, watched by all", write_watched, packages=PACKAGES, is_watched=True),
    "format": Contender('format("kafka_sink")', data_source),
    "write_once": Contender("KafkaSink.write, exactly once", write_once, is_once=True),
    "format_once": Contender('format("kafka_sink"), exactly once', data_source_once, is_once=True),
    "write_struct": Contender("KafkaSink.write, value.format", write_struct, takes_structs=True),
    "format_struct": Contender('format("kafka_sink"), value.format', format_struct, takes_structs=True),
    "confluent_serializer": Contender(
        "confluent-kafka, serialized by rows",
        confluent_serializer,
        share=0.125,
        packages=("confluent_kafka", "fastavro"),
        takes_structs=True,
    ),
    "foreach_partition": Contender("KafkaSink.write_partition", foreach_partition, share=0.25),
    "confluent": Contender("confluent-kafka by rows", confluent, share=0.25, packages=("confluent_kafka",)),
    "confluent_errors_only": Contender(
        "same, errors reported only", confluent_errors_only, share=0.25, packages=("confluent_kafka",)
    ),
    "confluent_batch": Contender(
        "confluent-kafka produce_batch", confluent_batch, share=0.25, packages=("confluent_kafka",)
    ),
    "confluent_batch_errors_only": Contender(
        "same, errors reported only", confluent_batch_errors_only, share=0.25, packages=("confluent_kafka",)
    ),
    "kafka_python": Contender(
        "kafka-python by rows",
        kafka_python,
        share=0.05,
        packages=("kafka",),
        codec_packages={"zstd": "zstandard", "snappy": "snappy"},
    ),
    "hand_over": Contender("Arrow hand-over, not sent", hand_over, sends=False),
    "noop_source": Contender("Python data source, not sent", noop_source, sends=False),
    "table_write": Contender("no Spark: KafkaProducer.write", table_write, needs_spark=False),
    "table_produce_batch": Contender(
        "no Spark: produce_batch", table_produce_batch, share=0.25, packages=("confluent_kafka",), needs_spark=False
    ),
    "table_produce_batch_errors_only": Contender(
        "same, errors reported only",
        table_produce_batch_errors_only,
        share=0.25,
        packages=("confluent_kafka",),
        needs_spark=False,
    ),
}


def jvm_stream(rows: DataFrame, work: Assignment) -> DataStreamWriter:
    return rows.writeStream.format("kafka").options(**work.sink_options())


def batch_stream(rows: DataFrame, work: Assignment) -> DataStreamWriter:
    from spark_kafka_sink import KafkaSink

    return rows.writeStream.foreachBatch(KafkaSink(work.sink_options()).write_batch)


def data_source_stream(rows: DataFrame, work: Assignment) -> DataStreamWriter:
    return rows.writeStream.format("kafka_sink").options(**work.sink_options())


def noop_source_stream(rows: DataFrame, _work: Assignment) -> DataStreamWriter:
    register_noop_source(rows.sparkSession)
    return rows.writeStream.format("noop_source")


def foreach_stream(rows: DataFrame, work: Assignment) -> DataStreamWriter:
    from spark_kafka_sink import KafkaSink

    return rows.writeStream.foreach(KafkaSink(work.sink_options()))


def hand_over_stream(rows: DataFrame, work: Assignment) -> DataStreamWriter:
    return rows.writeStream.foreachBatch(lambda batch, _id: hand_over(batch, work))


def noop_stream(rows: DataFrame, _work: Assignment) -> DataStreamWriter:
    return rows.writeStream.format("noop")


@dataclass(frozen=True)
class StreamContender:
    title: str
    start: Callable[[DataFrame, Assignment], DataStreamWriter]
    needs_jars: bool = False
    sends: bool = True


STREAMS: Mapping[str, StreamContender] = {
    "jvm": StreamContender("Spark's JVM sink", jvm_stream, needs_jars=True),
    "write_batch": StreamContender("foreachBatch(sink.write_batch)", batch_stream),
    "format": StreamContender('format("kafka_sink")', data_source_stream),
    "foreach": StreamContender("foreach(sink)", foreach_stream),
    "hand_over": StreamContender("foreachBatch, hand-over, not sent", hand_over_stream, sends=False),
    "noop_source": StreamContender("Python data source, not sent", noop_source_stream, sends=False),
    "noop": StreamContender("Spark's noop", noop_stream, sends=False),
}


# ---- running -------------------------------------------------------------------------------------------------------


def open_session(work: Assignment) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    if not work.is_latency and CONTENDERS[work.contender].is_watched:
        watch()
    # Spark's workers import the functions of flights.py from here
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    builder = SparkSession.builder.master(f"local[{work.cores}]").appName("benchmark")
    settings = {"ui.enabled": "false", "ui.showConsoleProgress": "false", "log.level": "ERROR"}
    if work.jars:
        settings["jars"] = ",".join(work.jars)
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    return builder.getOrCreate()


def report(**result: float) -> None:
    print(json.dumps(result), flush=True)


def rows_of(session: SparkSession | None, work: Assignment) -> Any:
    """Return the rows of the cell: a DataFrame of `session`, or without one an Arrow table."""
    cell = cell_of(work.cell)
    if isinstance(cell, FlightsCell):
        assert session is not None
        rows = flights(session, work)
        return rows if CONTENDERS[work.contender].takes_structs else as_bytes(rows, cell)
    if session is None:
        return table(cell, work.records)
    return session.range(0, work.records, 1, cell.tasks or work.cores).selectExpr(*columns(cell, "id"))


def measure_rate(session: SparkSession | None, work: Assignment) -> None:
    """Write the rows of the cell."""
    data, run = rows_of(session, work), CONTENDERS[work.contender].run
    warm_ups, began = 0, time.perf_counter()
    while not warm_ups or time.perf_counter() - began < work.warm_up_s:
        run(data, work)
        warm_ups += 1
    for _ in range(work.runs):
        cpu_s, started = cpu_seconds(), time.perf_counter()
        run(data, work)
        seconds = time.perf_counter() - started
        report(seconds=seconds, cpu_s=cpu_seconds() - cpu_s)
    report(worker_peak_bytes=worker_peak_bytes(), warm_ups=warm_ups)


class Packages:
    """Builds of the package, which this process and Spark's workers import by turns. Spark has other workers for each
    build, because their PYTHONPATH is another one.
    """

    NAME: Final = "spark_kafka_sink"

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._modules: dict[str, dict[str, ModuleType]] = {}
        self._current = ""

    def use(self, folder: str) -> None:
        """Import the package from `folder` from now on, in new tasks too. Raises ImportError if Python does not."""
        if folder != self._current:
            self._modules[self._current] = {name: sys.modules.pop(name) for name in self._imported()}
            sys.modules.update(self._modules.get(folder, {}))
            sys.path[:] = [folder, *(path for path in sys.path if path not in {folder, self._current})]
            self._session.sparkContext.environment["PYTHONPATH"] = os.pathsep.join([folder, str(Path(__file__).parent)])
            self._current = folder
        found = importlib.import_module(self.NAME).__file__ or ""
        if not found.startswith(f"{folder}{os.sep}"):
            raise ImportError(f"{self.NAME} comes from {found}, not from {folder}")

    def _imported(self) -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == self.NAME]


def take_turns(session: SparkSession, work: Assignment) -> None:
    """Make a run for each line of stdin, with the package and the topic that it names: `{"package": …, "topic": …}`.
    Each topic gets the same rows.
    """
    data, run, packages = rows_of(session, work), CONTENDERS[work.contender].run, Packages(session)
    for line in sys.stdin:
        turn = json.loads(line)
        packages.use(turn["package"])
        if work.contender == "format":
            from spark_kafka_sink.sink.data_source import KafkaSinkDataSource

            session.dataSource.register(KafkaSinkDataSource)  # Spark keeps the one that it found first
        cpu_s, started = cpu_seconds(), time.perf_counter()
        run(data, replace(work, topic=turn["topic"]))
        seconds = time.perf_counter() - started
        report(seconds=seconds, cpu_s=cpu_seconds() - cpu_s)


def measure_latency(session: SparkSession, work: Assignment) -> None:
    """Run micro-batches of Spark's generator, one after the other. The first quarter is warm-up."""
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", work.records)
    rows = source.option("numPartitions", work.cores).load()
    warm_up = work.runs // 3
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        writer = STREAMS[work.contender].start(rows.selectExpr(*columns(Cell.parse(work.cell), "value")), work)
        query = writer.option("checkpointLocation", folder).start()
        try:
            for batch_id, milliseconds in batches(query):
                if batch_id >= warm_up:
                    report(add_batch_ms=milliseconds)
                if batch_id + 1 >= warm_up + work.runs:
                    break
        finally:
            query.stop()
    report(worker_peak_bytes=worker_peak_bytes())


def batches(query: StreamingQuery) -> Iterator[tuple[int, int]]:
    """Yield id and milliseconds of `addBatch` of each finished micro-batch. Raises the error that ends the query."""
    next_id = 0
    while not query.awaitTermination(0.05):
        for progress in query.recentProgress:
            if progress.batchId >= next_id and progress.numInputRows:
                next_id = progress.batchId + 1
                yield progress.batchId, progress.durationMs["addBatch"]
    raise RuntimeError("The query ended by itself.")


def main(arguments: list[str]) -> None:
    given = json.loads(arguments[0])
    work = Assignment(**{**given, "jars": tuple(given["jars"])})
    if not work.is_latency and not CONTENDERS[work.contender].needs_spark:
        measure_rate(None, work)
        return
    session = open_session(work)
    try:
        if work.takes_turns:
            take_turns(session, work)
        else:
            (measure_latency if work.is_latency else measure_rate)(session, work)
    finally:
        session.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
