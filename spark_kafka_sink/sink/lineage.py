"""Lineage of a batch for OpenLineage: the job, the run, what it reads and writes, as plain facts.

Imported only with lineage.openlineage=true, on the driver and where Spark unpickles a writer of the data source. It
needs no package of OpenLineage: the events are made in the sender's thread (lineage_events.py, lineage_sender.py).
Whatever goes wrong is logged, and changes nothing for the batch. Names: https://openlineage.io/docs/spec/naming.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from spark_kafka_sink.common.batch_report import WrittenPartition
from spark_kafka_sink.sink.batch_run import NO_QUERY, QueryIds
from spark_kafka_sink.sink.lineage_facts import Dataset, Field, LineageEvent, Parent, RunFacts, sums_by_topic
from spark_kafka_sink.sink.running_query import context_of_thread, running_query
from spark_kafka_sink.sink.worker import digest, remember, remembered

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from spark_kafka_sink.common.batch_report import BatchReport
    from spark_kafka_sink.sink.options import SinkConfig

log = logging.getLogger(__name__)

WORKER_WAIT_S: Final = 1.0
"""How long a batch of `format` waits at most for its event: Spark may kill that process right after the batch."""
_COMMAND: Final = "kafka_sink"
_KIND: Final = "lineage"
_DEFAULT_NAMESPACE: Final = "default"
_SPARK_SETTING: Final = "spark.openlineage."
"""The begin of the settings that the OpenLineage integration of Spark reads; Airflow sets those of the parent."""
_KAFKA_PORT: Final = 9092
_MOST_INPUTS: Final = 250
"""Of a batch. Spark is asked for each file that a batch reads by name, before the batch begins."""
_ALL: Final = -1
"""In place of a partition."""
_OF_RECORDS: Final = frozenset({"key", "value", "headers", "timestamp"})
"""Columns that are in the topic. `topic` and `partition` only say where a row goes."""


@dataclass(frozen=True, slots=True)
class LineageRun(RunFacts):
    """The facts of a batch, and how its events are sent. A plain value: the writer of `format` takes it from process to
    process.
    """

    key: str | None = None
    """The query's name in the driver's processes, under which the run of a stream by `format` is found again."""
    wait_s: float = 0

    def begin(self, began_ms: int, ids: QueryIds = NO_QUERY) -> None:
        """Send START. Raises nothing."""
        self._send(LineageEvent(self, began_ms, ids, None))

    def end(self, report: BatchReport) -> None:
        """Send COMPLETE or FAIL. Raises nothing."""
        ids = QueryIds(report.query_id, report.run_id, report.batch_id, report.query_name)
        small = replace(
            report,
            partitions=_by_topic(report.partitions),
            dead_letter_partitions=_by_topic(report.dead_letter_partitions),
        )
        self._send(LineageEvent(self, report.ended_ms, ids, small))

    def _send(self, event: LineageEvent) -> None:
        from spark_kafka_sink.sink.lineage_sender import process_sender

        try:
            sender = process_sender()
            sender.put(event)
            if self.wait_s:
                sender.wait(self.wait_s)
        except Exception:
            _log_failure()

    def remember(self) -> None:
        """Keep the run id for `found_again`. Raises nothing."""
        if self.key is not None:
            try:
                remember(_KIND, self.key, self.run_id)
            except OSError:
                _log_failure()

    def found_again(self, run_id: str | None) -> LineageRun:
        """Return the run that another process of the driver began: that of `run_id`, as a task reports it, else the
        last one that was remembered.
        """
        if run_id is None and self.key is not None and (text := remembered(_KIND, self.key)) is not None:
            try:
                run_id = str(uuid.UUID(text))
            except ValueError:  # the file is damaged
                run_id = None
        return self if run_id is None else replace(self, run_id=run_id)


def begin_write(
    config: SinkConfig, df: DataFrame, batch_id: int | None, began_ms: int, ids: QueryIds
) -> LineageRun | None:
    """Send START of `KafkaSink.write` or `write_batch`, and return its run; None if that did not work. Raises
    nothing.
    """
    try:
        context = context_of_thread(df.sparkSession)
        is_stream = batch_id is not None or ids.query_id is not None
        owner = ids.query_name or ids.query_id if is_stream else None if context is None else context.appName
        session = None if context is None else df.sparkSession
        run = _new_run(config, df.schema, owner, _settings_of(session), is_stream=is_stream)
        if context is not None:
            run = replace(run, inputs=_first_inputs(_inputs(df, context, ids)))
        run.begin(began_ms, ids)
    except Exception:
        _log_failure()
        return None
    return run


def run_of_format(
    config: SinkConfig,
    schema: StructType,
    *,
    is_stream: bool,
    query_name: str | None = None,
    location: str | None = None,
) -> LineageRun | None:
    """Return the run of a batch by `format`; None if that did not work. `location`: of the query's checkpoint. Raises
    nothing.
    """
    try:
        key = location or query_name
        owner = query_name or (f"query-{digest(location)}" if location else None)
        run = _new_run(config, schema, owner, _settings_of(None), is_stream=is_stream)
        return replace(run, key=None if key is None else digest(key), wait_s=WORKER_WAIT_S)
    except Exception:
        _log_failure()
        return None


def _new_run(
    config: SinkConfig, schema: StructType, owner: str | None, settings: Settings, *, is_stream: bool
) -> LineageRun:
    host, port = config.producer.bootstrap_servers[0]
    return LineageRun(
        run_id=str(uuid.uuid4()),
        namespace=settings("namespace") or os.environ.get("OPENLINEAGE_NAMESPACE") or _DEFAULT_NAMESPACE,
        job=".".join(part for part in (owner, _COMMAND, config.topic) if part),
        is_stream=is_stream,
        cluster=_cluster(host, port),
        topic=config.topic,
        fields=tuple(_field(each.name, each.dataType) for each in schema.fields if each.name in _OF_RECORDS),
        parent=_parent(settings, "parentRunId", "parentJob", "OPENLINEAGE_PARENT_ID"),
        root=_parent(settings, "rootParentRunId", "rootParentJob", "OPENLINEAGE_ROOT_PARENT_ID"),
    )


def _log_failure() -> None:
    log.warning("Lineage of a batch is missing; the batch itself does not change", exc_info=True)


def _by_topic(places: Iterable[WrittenPartition]) -> tuple[WrittenPartition, ...]:
    """Return one entry for each topic: many events may wait for a receiver, and a topic may have thousands of
    partitions.
    """
    sums = sums_by_topic(places).items()
    return tuple(WrittenPartition(topic, _ALL, records, size, -1, -1) for topic, (records, size) in sums)


# ---- names -----------------------------------------------------------------------------------------------------------

Settings = Callable[[str], str | None]
"""Returns a setting spark.openlineage.*, None if it is not given."""


def _settings_of(session: SparkSession | None) -> Settings:
    def setting(name: str) -> str | None:
        return None if session is None else session.conf.get(_SPARK_SETTING + name, None)

    return setting


def _parent(settings: Settings, run_id: str, job: str, variable: str) -> Parent | None:
    """Return the parent that Spark's settings name, else the environment variable: `namespace/name/run id`."""
    if found := settings(run_id):
        parts = [settings(f"{job}Namespace") or _DEFAULT_NAMESPACE, settings(f"{job}Name") or "unknown", found]
    else:
        parts = os.environ.get(variable, "").rsplit("/", 2)
    try:
        namespace, name, text = parts
        return Parent(namespace, name, str(uuid.UUID(text)))
    except ValueError:
        if parts != [""]:
            log.warning(
                "%s of OpenLineage is ignored: it must be namespace/name/run id, with a UUID as run id", variable
            )
        return None


def _cluster(host: str, port: int | str) -> str:
    return f"kafka://[{host}]:{port}" if ":" in host else f"kafka://{host}:{port}"


def _field(name: str, kind: DataType) -> Field:
    """Return a column, with what is inside of it as Spark's integration names it."""
    if isinstance(kind, StructType):
        return Field(name, "struct", tuple(_field(each.name, each.dataType) for each in kind.fields))
    if isinstance(kind, ArrayType):
        return Field(name, "array", (_field("_element", kind.elementType),))
    if isinstance(kind, MapType):
        return Field(name, "map", (_field("key", kind.keyType), _field("value", kind.valueType)))
    return Field(name, kind.simpleString())


_S3: Final = {"s3a": "s3", "s3n": "s3"}
_WITH_CONTAINER: Final = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Schemes whose `container@account` is a name. Elsewhere the part before the @ may be a login."""


def file_dataset(location: str) -> Dataset:
    """Return the dataset of a file or folder, without login and query of its address."""
    parts = urlsplit(location)
    if parts.scheme in {"", "file"}:
        return Dataset("file", unquote(parts.path).rstrip("/") or "/")
    login, _, place = parts.netloc.rpartition("@")
    if login and parts.scheme in _WITH_CONTAINER and ":" not in login:
        place = parts.netloc
    return Dataset(f"{_S3.get(parts.scheme, parts.scheme)}://{place}", unquote(parts.path).strip("/") or "/")


# ---- what a batch reads ----------------------------------------------------------------------------------------------


def _first_inputs(inputs: Iterator[Dataset]) -> tuple[Dataset, ...]:
    """Return the first ones, each once."""
    first = tuple(dict.fromkeys(islice(inputs, _MOST_INPUTS)))
    if next(inputs, None) is not None:
        log.info("This batch reads more than %d files: its lineage has the first ones", _MOST_INPUTS)
    return first


def _inputs(df: DataFrame, context: SparkContext, ids: QueryIds) -> Iterator[Dataset]:
    """Yield the files and topics that Spark's plan names; those of other sources it does not name. A plan that is not
    as expected yields none.
    """
    try:
        plan: Any
        if ids.query_id is None:
            plan = df._jdf.queryExecution().analyzed()
        elif (query := running_query(df, context)) is not None:
            plan = query.analyzedPlan()
        else:
            return
        leaves = plan.collectLeaves()
        for place in range(leaves.size()):
            leaf = leaves.apply(place)
            if (read := _READERS.get(leaf.getClass().getSimpleName())) is not None:
                yield from read(leaf)
    except Exception:
        log.info("Spark does not tell what this batch reads", exc_info=True)


def _of_file_stream(leaf: Any) -> Iterator[Dataset]:
    """Of StreamingRelation: a source of Spark's first interface."""
    path = leaf.dataSource().options().get("path")
    if path.isDefined():
        yield file_dataset(path.get())


def _of_stream(leaf: Any) -> Iterable[Dataset]:
    """Of StreamingRelationV2."""
    return kafka_inputs(leaf.extraOptions()) if leaf.sourceName() == "kafka" else ()


def _of_files(leaf: Any) -> Iterator[Dataset]:
    """Of LogicalRelation, with the relation HadoopFsRelation: files that a batch reads."""
    relation = leaf.relation()
    if relation.getClass().getSimpleName() == "HadoopFsRelation":
        paths = relation.location().rootPaths()
        for place in range(paths.size()):
            yield file_dataset(paths.apply(place).toString())


_READERS: Final[Mapping[str, Callable[[Any], Iterable[Dataset]]]] = {
    "StreamingRelation": _of_file_stream,
    "StreamingRelationV2": _of_stream,
    "LogicalRelation": _of_files,
}


def kafka_inputs(options: Any) -> Sequence[Dataset]:
    """Return the topics that the options of Spark's Kafka source list. `subscribePattern` and `assign` list none."""
    servers, topics = options.get("kafka.bootstrap.servers"), options.get("subscribe")
    if not servers or not topics:
        return ()
    first = re.sub(r"^\w+://", "", servers.split(",")[0].strip())
    host, _, port = first.rpartition(":")
    cluster = _cluster(host.strip("[]"), port) if host else _cluster(first, _KAFKA_PORT)
    return [Dataset(cluster, topic.strip()) for topic in topics.split(",") if topic.strip()]
