"""Exactly-once batches of a driver that is one process: foreachBatch and `KafkaSink.write`.

A session is one prefix's: its connections, and its epoch from batch to batch, so that it notices when another driver
takes over, or another sink of the same foreachBatch. Sessions are the process's, not a sink's, because a user may make
the sink anew for each batch. One batch of a session at a time; any thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import AuthenticationError, ConfigError, IllegalStateError, KafkaError
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.advice import operator_command
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, connect
from spark_kafka_sink.sink.exactly_once.messages import Decision, Mandate, TaskOutcome
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.write_names import Claim, claim_name, release_name
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import IDLE_MS
from spark_kafka_sink.sink.running_query import has_own_threads, query_id_of, running_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_IDLE_MS: Final = IDLE_MS
_SOON_IDLE_MS: Final = 2_000
"""A batch write may be the only one of its prefix, and the next ones of others: each keeps five descriptors. So may a
stream with `availableNow`, of which nobody here knows whether it has ended.
"""
_MOST_RESTING: Final = 32
"""Sessions of streams that keep their connections between batches for long: those that were used last."""

_LOCATION: Final = re.compile(r"([^/:]+:)?(//[^/]*)?(.*)", re.DOTALL)
"""Scheme, authority and path, split as Hadoop's Path does it: there is no query, and no escape."""

QUERY_NAME: Final = "queryname"
"""The option in which Spark hands over what .queryName(...) was given."""

RunTasks = Callable[[Mandate, int], Sequence[TaskOutcome]]
"""Runs a batch's tasks under a mandate and a batch id."""


class StreamBatch(NamedTuple):
    """A micro-batch as foreachBatch tells it. `run_id` changes with every start of the query. `checkpoint` is where
    Spark keeps the query's checkpoint, with its scheme, None where Spark does not say.
    """

    query_id: str
    run_id: str | None
    batch_id: int
    checkpoint: str | None = None


class DriverSession:
    """The batches of one prefix. Connections are made with the first one, and anew for a sink of other settings, after
    a long rest, and after a batch that failed: a client that was interrupted may wait for ever, and certificates may
    have been renewed since it read their files. A session without a prefix is of one batch write, for which it claims a
    name (write_names.py).
    """

    def __init__(self, prefix: str | None) -> None:
        self._given_prefix = prefix
        self._name: Claim | None = None
        self._lock = threading.Lock()
        self._client: ClusterClient | None = None
        self._connected_by: int | None = None
        self._cluster: KafkaDriverCluster
        self._driver: ExactlyOnceDriver
        self._held: ProducerIdAndEpoch | None = None
        self._decided: Decision | None = None
        self._last: StreamBatch | None = None
        self._last_sink: tuple[str | None, int] | None = None
        self._is_last_written = False
        self.used_ms = 0
        """When it was asked for a batch, or had done one, by a clock that only goes on."""

    def run(self, config: SinkConfig, batch: StreamBatch | None, run_tasks: RunTasks) -> None:
        """Begin, run the tasks, commit; abort where something fails. `batch` None: a batch write, which comes after the
        last one under the prefix. Raises IllegalStateError for a second sink's part of one batch, KafkaError, and what
        the tasks raise.
        """
        with self._lock:
            self._claim(config, batch)
            self._connect(config)
            self.used_ms = SystemClock().now_ms()
            held, self._held = self._held, None  # after a failure the next batch fences anew
            known, self._decided = self._decided, None
            mandate: Mandate | None = None
            outcomes: Sequence[TaskOutcome] = ()
            try:
                if held is None and batch is not None:
                    self._driver.check_owner(batch.batch_id, batch.query_id)
                mandate = self._driver.begin(held, known)
                if held is None or held.producer_id != mandate.driver.producer_id:
                    known = None  # `begin` has read the last decision, which may be another driver's
                batch_id = batch.batch_id if batch is not None else mandate.next_batch_id
                outcomes = run_tasks(mandate, batch_id) or _no_task(mandate, batch, batch_id)
                committed = self._driver.commit(outcomes)
            except BaseException as cause:
                # Ctrl-C, say, in the midst of what the client does; or certificates of its own time
                if not isinstance(cause, KafkaError) or isinstance(cause, AuthenticationError):
                    self.close()
                try:
                    if mandate is not None:
                        self._give_up(config, mandate, outcomes)
                    else:
                        self._release_name(config)
                finally:
                    self.close()  # what kept it from an end, or from an abort, may be that it was not let in
                raise
            self._held = (committed.driver or mandate.driver).producer
            self._decided = committed.decision or known
            self._is_last_written = True
            self._release_name(config)
            self.used_ms = SystemClock().now_ms()
            if committed.was_skipped:
                log.info("Batch %d of %s was committed before: skipped", batch_id, self._prefix)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            del self._cluster, self._driver
            client.close()

    @property
    def _prefix(self) -> str:
        """Of a session without one only while it is connected."""
        prefix = self._name.prefix if self._name is not None else self._given_prefix
        assert prefix is not None
        return prefix

    @property
    def keeps_connections(self) -> bool:
        """Between the batches of a stream."""
        return self._client is not None and self._last is not None

    def rest(self, *, is_one_of_many: bool = False) -> None:
        """Close the connections where nobody has used them for ten minutes, or for two seconds after a batch write or
        where there are many, and let go of them: what they know of the cluster is 75 KB and more.
        """
        limit_ms = _SOON_IDLE_MS if self._last is None or is_one_of_many else _IDLE_MS
        is_idle = SystemClock().now_ms() - self.used_ms > limit_ms
        if is_idle and self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()

    def _claim(self, config: SinkConfig, batch: StreamBatch | None) -> None:
        """A batch is one sink's, be it that the sink failed: another one would take the first one's decision for its
        own, and drop its rows. A sink that failed may try again.
        """
        sink = (config.topic, _connection_of(config))
        if batch is not None and batch == self._last and (self._is_last_written or sink != self._last_sink):
            raise IllegalStateError(
                f"Batch {batch.batch_id} was written under transactional.id.prefix={self._prefix!r} in this run"
                " already: two sinks of one foreachBatch, or two calls for one batch, need a transactional.id.prefix"
                " each."
            )
        if batch is None or self._last is None or batch.run_id != self._last.run_id:
            self._held = None  # who wrote between two writes, or two runs, is no rival, and may have left it to finish
        self._last, self._last_sink, self._is_last_written = batch, sink, False

    def _connect(self, config: SinkConfig) -> None:
        """Raises KafkaError; the next batch tries again then."""
        wanted = _connection_of(config)
        if self._client is not None and wanted == self._connected_by:
            if config.topic != self._driver.topic:
                self._driver = self._driver_of(config)
            return
        self.close()
        if wanted != self._connected_by:
            self._held = self._decided = None
        client = connect(config.producer)
        try:
            if self._is_one_off and self._name is None:
                self._name = claim_name(client, config, random.Random())
            self._cluster = KafkaDriverCluster(client, config, self._prefix, is_one_off=self._is_one_off)
        except BaseException:
            client.close()
            raise
        self._driver = self._driver_of(config)
        self._client, self._connected_by = client, wanted

    def _release_name(self, config: SinkConfig) -> None:
        """Of a batch write that is committed, or of which nothing is open or decided."""
        name, self._name = self._name, None
        if name is not None and self._client is not None:
            release_name(self._client, config, name)

    @property
    def _is_one_off(self) -> bool:
        return self._given_prefix is None

    def _driver_of(self, config: SinkConfig) -> ExactlyOnceDriver:
        """Of the connections there are; sinks with other topics share them."""
        wall_ms, is_new = SystemClock().wall_ms, self._is_one_off
        return ExactlyOnceDriver(self._prefix, self._cluster, wall_ms, topic=config.topic, is_new=is_new)

    def _give_up(self, config: SinkConfig, mandate: Mandate, outcomes: Sequence[TaskOutcome]) -> None:
        why: object = "it may be decided, or not all of it could be aborted."
        try:
            self._connect(config)
            if self._driver.abort(mandate, outcomes):
                self._release_name(config)
                return
        except KafkaError as error:
            why = error
        if self._last is not None:
            log.warning("What the batch left open ends when the query is started again, or by time-out: %s", why)
        else:  # to write it again is no way to end it
            command = operator_command("finish", self._prefix, config.decision_topic)
            log.warning("What the write left open ends by time-out, or before by %s: %s", command, why)


def _no_task(mandate: Mandate, batch: StreamBatch | None, batch_id: int) -> Sequence[TaskOutcome]:
    """The outcome of a micro-batch of no partition, which runs no task: it must be what was decided under its number,
    too. Raises IllegalStateError as a task does.
    """
    if batch is None:
        return ()
    is_skipped = mandate.is_written_already(batch_id, batch.query_id)
    return (TaskOutcome(mandate, batch_id, batch.query_id, 0, 0, None, is_skipped),)


def _connection_of(config: SinkConfig) -> int:
    """What tells one from another. A number, for a process keeps it of every prefix: the settings take 20 KB."""
    return hash((config.decision_topic, config.producer.canonical()))


_SESSIONS: Final[dict[tuple[int, str], DriverSession]] = {}


def session(prefix: str) -> DriverSession:
    """The process's session for this prefix, of whatever settings its sinks are. Prefixes that nobody comes back to, as
    those of queries that have ended, keep no connections.
    """
    own = os.getpid()
    found = _SESSIONS.setdefault((own, prefix), DriverSession(prefix))
    others = [other for (pid, _), other in list(_SESSIONS.items()) if pid == own and other is not found]
    others.sort(key=lambda other: other.used_ms, reverse=True)
    resting = 0
    for other in others:
        other.rest(is_one_of_many=resting >= _MOST_RESTING)
        resting += other.keeps_connections
    return found


def stream_prefix(config: SinkConfig, options: Mapping[str, str]) -> str:
    """A streaming query's prefix: the option's, else one made of the checkpoint location, else of the query name.

    With spark.sql.streaming.checkpointLocation Spark keeps the checkpoint in a folder of the query's name below that
    location, and shows the location only to tasks (`transactional_arrow.check_default_location`). Raises ConfigError.
    """
    if config.transactional_id_prefix is not None:
        return config.transactional_id_prefix
    given = {key.lower(): value for key, value in options.items()}
    if location := given.get("checkpointlocation"):
        return _location_prefix(location)
    if name := given.get(QUERY_NAME):
        return f"spark-kafka-sink-{hashlib.sha256(b'query name ' + name.encode()).hexdigest()[:24]}"
    raise ConfigError(
        "delivery.guarantee=exactly-once needs a name that stays the same from start to start: give"
        ' .option("checkpointLocation", ...); or .queryName(...) and spark.sql.streaming.checkpointLocation; or the'
        " option transactional.id.prefix."
    )


def is_named_by_query(config: SinkConfig, options: Mapping[str, str]) -> bool:
    """Whether `stream_prefix` makes the prefix of the query's name."""
    keys = {key.lower() for key, value in options.items() if value}
    return config.transactional_id_prefix is None and "checkpointlocation" not in keys and QUERY_NAME in keys


_BATCH_PREFIXES: Final[dict[tuple[int, str, str | None, int], str]] = {}


def batch_prefix(config: SinkConfig, batch: StreamBatch) -> str:
    """The prefix of foreachBatch: the option's, else one made of the checkpoint's location, so that a new query after
    a checkpoint that was deleted is refused. A query decided under its id goes on under that. Raises KafkaError.
    """
    if config.transactional_id_prefix is not None:
        return config.transactional_id_prefix
    by_id = f"spark-kafka-sink-{batch.query_id}"
    key = (os.getpid(), batch.query_id, batch.checkpoint, _connection_of(config))
    found = _BATCH_PREFIXES.get(key)
    if found is None:
        if batch.checkpoint is None:
            raise IllegalStateError(
                f"Query {batch.query_id} was stopped before this process wrote a batch of it, so that Spark does not"
                " say where its checkpoint is. The batch is written when the query is started again."
            )
        with connect(config.producer) as client:
            is_by_id = KafkaDriverCluster(client, config, by_id).last_decision() is not None
        found = by_id if is_by_id else _location_prefix(batch.checkpoint)
    _BATCH_PREFIXES[key] = _BATCH_PREFIXES[key[0], key[1], None, key[3]] = (
        found  # Spark forgets a query that is stopped
    )
    return found


def _location_prefix(location: str) -> str:
    return f"spark-kafka-sink-{hashlib.sha256(_one_spelling(location).encode()).hexdigest()[:24]}"


def _one_spelling(location: str) -> str:
    """The same for locations that are one to Hadoop's Path, whatever the file systems are; a plain one is its own.
    Whether `/a` is `file:///a`, and what a relative one is below, only Spark's JVM knows, which is not within reach.
    """
    found = _LOCATION.fullmatch(location)
    assert found is not None
    scheme, authority, path = (part or "" for part in found.groups())
    if path:
        path = posixpath.normpath(re.sub("^/+", "/", path)).rstrip("/")
    if authority in {"", "//"}:  # file:/a is file:///a, and ///a is /a
        authority = "//" if scheme and path.startswith("/") else ""
    return scheme + authority + path


def stream_batch(df: DataFrame, batch_id: int) -> StreamBatch:
    """Which query and run a DataFrame of foreachBatch belongs to. Raises ConfigError where Spark does not say."""
    try:
        context = df.sparkSession.sparkContext
        query_id = query_id_of(context)
    except Exception as error:  # Spark Connect has no SparkContext; its errors share no class
        raise ConfigError(
            "delivery.guarantee=exactly-once: the query's id cannot be told here (Spark Connect has none for"
            ' foreachBatch). Use format("kafka_sink").'
        ) from error
    if not query_id:
        if not has_own_threads():
            raise ConfigError(
                "delivery.guarantee=exactly-once: with PYSPARK_PIN_THREAD=false foreachBatch does not tell which query"
                ' a batch is of. Take it out of the driver\'s environment, or use format("kafka_sink").'
            )
        raise ConfigError(
            "delivery.guarantee=exactly-once: write_batch was not called by foreachBatch, and there is no query whose"
            " batch this is. Inside foreachBatch a thread of your own must be a pyspark.InheritableThread, or a pool's"
            " function wrapped in pyspark.inheritable_thread_target. For a batch DataFrame call write."
        )
    query = running_query(df, context)  # its thread's job group is the run's id too, until the user sets another one
    if query is None:
        return StreamBatch(query_id, None, batch_id)
    return StreamBatch(query_id, query.runId().toString(), batch_id, query.resolvedCheckpointRoot())
