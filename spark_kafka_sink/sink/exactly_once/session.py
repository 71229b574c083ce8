"""Exactly-once batches of a driver that is one process: foreachBatch and `KafkaSink.write`.

A session belongs to one prefix. It keeps the connections, and the epoch from batch to batch, so that it notices another
driver that takes over, or another sink of the same foreachBatch. Sessions belong to the process and not to a sink,
because a user may make a new sink for each batch. A session runs one batch at a time; any thread may call.
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
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    ConfigError,
    IllegalStateError,
    KafkaError,
    ProducerFencedError,
)
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch
from spark_kafka_sink.network.tls_context import FileStates, are_renewed, file_states
from spark_kafka_sink.sink.batch_run import BATCH_ID
from spark_kafka_sink.sink.exactly_once.advice import operator_command
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, advice_on_creation, connect
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, TaskOutcome, driver_id
from spark_kafka_sink.sink.exactly_once.protocol import Committed, ExactlyOnceDriver, goes_on
from spark_kafka_sink.sink.exactly_once.query_names import QueryBatch, check_name
from spark_kafka_sink.sink.exactly_once.write_names import Claim, claim_name, release_name
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import IDLE_MS
from spark_kafka_sink.sink.pyspark_versions import OLDEST_WITH_FORMAT, PYSPARK, is_older
from spark_kafka_sink.sink.running_query import has_own_threads, query_id_of, running_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_SOON_IDLE_MS: Final = 2_000
"""A batch write may be the only one of its prefix, and each session keeps five descriptors. The same holds for a stream
with `availableNow`: the session does not know whether it has ended.
"""
_MOST_RESTING: Final = 32
"""Sessions of streams that keep their connections for `IDLE_MS` between batches: the most recently used ones."""

_LOCATION: Final = re.compile(r"([^/:]+:)?(//[^/]*)?(.*)", re.DOTALL)
"""Scheme, authority and path, split as by Hadoop's Path, without query and escapes."""

QUERY_NAME: Final = "queryname"
"""The option in which Spark hands over the name given by .queryName(...)."""

_FORMAT: Final = 'format("kafka_sink")'

RunTasks = Callable[[BatchStart, int], Sequence[TaskOutcome]]
"""Runs the tasks of a batch, given its start and its batch id."""


class StreamBatch(NamedTuple):
    """A micro-batch of foreachBatch. `run_id` changes with every start of the query. `checkpoint` is the location of
    the query's checkpoint, with its scheme, None if Spark does not say.
    """

    query_id: str
    run_id: str | None
    batch_id: int
    checkpoint: str | None = None


class DriverSession:
    """The batches of one prefix. A session without a prefix is for one batch write, for which it claims a name
    (write_names.py).

    The first batch makes connections. New ones are made for a sink with other settings, after a long rest, once the
    files of the certificates were renewed, and after a failed batch: an interrupted client may wait forever.
    """

    def __init__(self, prefix: str | None) -> None:
        self._given_prefix = prefix
        self._name: Claim | None = None
        self._lock = threading.Lock()
        self._client: ClusterClient | None = None
        self._connected_by: int | None = None
        self._files: FileStates = ()
        self._cluster: KafkaDriverCluster
        self._driver: ExactlyOnceDriver
        self._held: ProducerIdAndEpoch | None = None
        self._decided: Decision | None = None
        self._last: StreamBatch | None = None
        self._last_sink: tuple[str | None, int] | None = None
        self._is_last_written = False
        self._checked_run: str | None = None
        self.used_ms = 0
        """The last time that a batch began or ended, by the monotonic clock."""

    def run(self, config: SinkConfig, batch: StreamBatch | None, run_tasks: RunTasks) -> Committed:
        """Begin, run the tasks, commit; abort if something fails. `batch` None: a batch write, which comes after the
        last one under the prefix. Raises IllegalStateError for a second sink of one batch, KafkaError, and the errors
        of the tasks.
        """
        with self._lock:
            self._claim(config, batch)
            self._connect(config)
            self.used_ms = SystemClock().now_ms()
            held, self._held = self._held, None  # after a failure the next batch fences again
            known, self._decided = self._decided, None
            batch_start: BatchStart | None = None
            outcomes: Sequence[TaskOutcome] = ()
            try:
                if held is None and batch is not None:
                    self._driver.check_owner(batch.batch_id, batch.query_id)
                batch_start, known = self._begin(batch, held, known)
                self._check_name(config, batch_start, batch)
                batch_id = batch.batch_id if batch is not None else batch_start.next_batch_id
                outcomes = run_tasks(batch_start, batch_id) or _no_task(batch_start, batch, batch_id)
                committed = self._driver.commit(outcomes)
            except BaseException as cause:
                # an interrupt in the middle of a request, or old certificates: the client is not used again
                if not isinstance(cause, KafkaError) or isinstance(cause, AuthenticationError):
                    self.close()
                try:
                    if batch_start is not None:
                        self._give_up(config, batch_start, outcomes)
                    else:
                        self._release_name(config)
                finally:
                    self.close()  # a refused login may have made the batch, or its abort, fail
                raise
            self._held = (committed.driver or batch_start.driver).producer
            self._decided = committed.decision or known
            self._is_last_written = True
            self._release_name(config)
            self.used_ms = SystemClock().now_ms()
            if committed.was_skipped:
                log.info("Batch %d of %s was committed before: skipped", batch_id, self._prefix)
            return committed

    def _begin(
        self, batch: StreamBatch | None, held: ProducerIdAndEpoch | None, known: Decision | None
    ) -> tuple[BatchStart, Decision | None]:
        """Return the begin of the batch, and the last decision if it is this driver's own.

        Another driver may have written under the prefix between two batch writes. It is no rival, and may have left a
        decision.
        """
        try:
            batch_start = self._driver.begin(held, known)
        except ProducerFencedError:
            if held is None or batch is not None:
                raise
            return self._driver.begin(), None
        # else `begin` has read the last decision, which may be of another driver
        return batch_start, known if goes_on(held, batch_start.driver) else None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            del self._cluster, self._driver
            client.close()

    def is_of_run(self, batch: StreamBatch) -> bool:
        """Return whether its last batch is of the same run of the same query."""
        last = self._last
        return last is not None and (last.query_id, last.run_id) == (batch.query_id, batch.run_id)

    def _check_name(self, config: SinkConfig, batch_start: BatchStart, batch: StreamBatch | None) -> None:
        """Refuse a batch that the query has written under another prefix, once in each run."""
        if batch is None or self._checked_run == batch.run_id is not None:
            return

        def is_of_this_run(prefix: str) -> bool:
            found = _SESSIONS.get((os.getpid(), prefix))
            return found is not None and found.is_of_run(batch)

        checked = QueryBatch(batch.query_id, batch.batch_id, config.topic)
        if check_name(self._cluster, batch_start, checked, is_of_this_run):
            self._checked_run = batch.run_id

    @property
    def _prefix(self) -> str:
        """The prefix; a session without one has a claimed name while it is connected."""
        prefix = self._name.prefix if self._name is not None else self._given_prefix
        assert prefix is not None
        return prefix

    @property
    def keeps_connections(self) -> bool:
        """Whether it keeps connections between the batches of a stream."""
        return self._client is not None and self._last is not None

    def rest(self, *, is_one_of_many: bool = False) -> None:
        """Close the connections if they were not used for ten minutes; for two seconds after a batch write, or if there
        are many sessions. A client's view of the cluster takes 75 KB and more.
        """
        limit_ms = _SOON_IDLE_MS if self._last is None or is_one_of_many else IDLE_MS
        is_idle = SystemClock().now_ms() - self.used_ms > limit_ms
        if is_idle and self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()

    def _claim(self, config: SinkConfig, batch: StreamBatch | None) -> None:
        """Claim the batch for one sink. A second sink would take the first one's decision for its own, and drop its own
        rows, so it is refused, also after the first one failed. A sink that failed may try again.
        """
        sink = (config.topic, _connection_of(config))
        if batch is not None and batch == self._last and (self._is_last_written or sink != self._last_sink):
            raise IllegalStateError(
                f"Batch {batch.batch_id} was written under transactional.id.prefix={self._prefix!r} in this run"
                " already. Two sinks of one foreachBatch, or two calls for one batch, need a name each: give the second"
                " one a transactional.id.prefix of its own. Leave the first one as it is: under a new prefix it would"
                " write this batch again. A retry in your own code must leave out a write_batch that has returned."
            )
        if not _are_of_one_run(self._last, batch):
            self._held = None  # a driver between two runs is no rival; it may have left a decision
        self._last, self._last_sink, self._is_last_written = batch, sink, False

    def _connect(self, config: SinkConfig) -> None:
        """Raises KafkaError; the next batch tries again then."""
        required = _connection_of(config)
        is_connected = self._client is not None and required == self._connected_by
        if is_connected and not are_renewed(config.producer, self._files):
            if config.topic != self._driver.topic:
                self._driver = self._driver_of(config)
            return
        self.close()
        if required != self._connected_by:
            self._held = self._decided = None
        files = file_states(config.producer)
        client = connect(config.producer)
        try:
            if self._is_one_off and self._name is None:
                self._name = claim_name(client, config, random.Random())
            self._cluster = KafkaDriverCluster(client, config, self._prefix, is_one_off=self._is_one_off)
        except BaseException:
            client.close()
            raise
        self._driver = self._driver_of(config)
        self._client, self._connected_by, self._files = client, required, files

    def _release_name(self, config: SinkConfig) -> None:
        """Release the name of a batch write that is committed, or of which nothing is open or decided."""
        name, self._name = self._name, None
        if name is not None and self._client is not None:
            release_name(self._client, config, name)

    @property
    def _is_one_off(self) -> bool:
        return self._given_prefix is None

    def _driver_of(self, config: SinkConfig) -> ExactlyOnceDriver:
        """Return a driver over the existing connections, which sinks with other topics share."""
        wall_ms, is_new = SystemClock().wall_ms, self._is_one_off
        return ExactlyOnceDriver(self._prefix, self._cluster, wall_ms, topic=config.topic, is_new=is_new)

    def _give_up(self, config: SinkConfig, batch_start: BatchStart, outcomes: Sequence[TaskOutcome]) -> None:
        why: object = "it may be decided, or not all of it could be aborted."
        try:
            self._connect(config)
            if self._driver.abort(batch_start, outcomes):
                self._release_name(config)
                return
        except KafkaError as error:
            why = error
        if self._last is not None:
            log.warning("Open transactions of the batch end when the query is started again, or by timeout: %s", why)
        else:  # writing it again would not end them
            command = operator_command("finish", self._prefix, config.decision_topic)
            log.warning("Open transactions of the write end by timeout, or earlier by %s: %s", command, why)


def _are_of_one_run(last: StreamBatch | None, batch: StreamBatch | None) -> bool:
    """Return whether two batches are of one run of a query. Batch writes (None) count as one run."""
    if last is None or batch is None:
        return last is batch
    return batch.run_id == last.run_id


def _no_task(batch_start: BatchStart, batch: StreamBatch | None, batch_id: int) -> Sequence[TaskOutcome]:
    """Return the outcome of a micro-batch without partitions, which runs no task. It is compared with the batch decided
    under its number, as those of tasks are. Raises IllegalStateError as a task does.
    """
    if batch is None:
        return ()
    is_skipped = batch_start.is_written_already(batch_id, batch.query_id)
    return (TaskOutcome(batch_start, batch_id, batch.query_id, 0, 0, None, is_skipped),)


def _connection_of(config: SinkConfig) -> int:
    """Return a hash of the settings of a connection. A process keeps it for every prefix; the settings would take 20
    KB.
    """
    return hash((config.decision_topic, config.producer.canonical()))


_SESSIONS: Final[dict[tuple[int, str], DriverSession]] = {}


def session(prefix: str) -> DriverSession:
    """Return the process's session for this prefix, whatever the settings of its sinks. Closes the connections of
    sessions that have not been used for a while, such as those of ended queries.
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
    """Return a streaming query's prefix: the option's, else one made of the checkpoint location, else of the query
    name.

    With spark.sql.streaming.checkpointLocation Spark keeps the checkpoint in a folder of the query's name below that
    location, and shows the location only to tasks (`task.check_default_location`). Raises ConfigError.
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
    """Return whether `stream_prefix` makes the prefix of the query's name."""
    keys = {key.lower() for key, value in options.items() if value}
    return config.transactional_id_prefix is None and "checkpointlocation" not in keys and QUERY_NAME in keys


_BATCH_PREFIXES: Final[dict[tuple[int, str, str | None, int], str]] = {}


def batch_prefix(config: SinkConfig, batch: StreamBatch) -> str:
    """Return the prefix of foreachBatch: the option's, else one made of the checkpoint's location. With the location, a
    new query after a deleted checkpoint is refused. A query with a decision under its query id keeps that prefix.
    Raises KafkaError.
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
            is_by_id = _has_decided(client, config, by_id)
        found = by_id if is_by_id else _location_prefix(batch.checkpoint)
    _BATCH_PREFIXES[key] = _BATCH_PREFIXES[key[0], key[1], None, key[3]] = (
        found  # Spark forgets a query that is stopped
    )
    return found


def _has_decided(client: ClusterClient, config: SinkConfig, prefix: str) -> bool:
    """Return whether there is a decision of the prefix. Creates no decision topic: the query may have another prefix,
    under which it was used with another topic.
    """
    timer, name = client.timer(config.producer.max_block_ms), driver_id(prefix)
    with advice_on_creation(config.decision_topic):
        is_there = client.creation.count(config.decision_topic, timer) > 0
    if not is_there and client.transactions.describe_transactions([name], timer)[name] is None:
        return False
    return KafkaDriverCluster(client, config, prefix).last_decision() is not None


def _location_prefix(location: str) -> str:
    return f"spark-kafka-sink-{hashlib.sha256(_one_spelling(location).encode()).hexdigest()[:24]}"


def _one_spelling(location: str) -> str:
    """Return one spelling for all locations that are equal to Hadoop's Path. A plain location is its own spelling.

    Only Spark's JVM knows whether `/a` is `file:///a`, and the folder of a relative location. It cannot be asked here.
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
    """Return the query and run of a DataFrame of foreachBatch. Raises ConfigError if Spark does not say, or if
    `batch_id` is not the number of the batch that it runs.
    """
    try:
        context = df.sparkSession.sparkContext
        query_id = query_id_of(context)
    except Exception as error:  # Spark Connect has no SparkContext; its errors share no class
        others = f"PySpark {OLDEST_WITH_FORMAT} or newer, with {_FORMAT}, or run the query without Spark Connect"
        raise ConfigError(
            "delivery.guarantee=exactly-once: the query's id is not known here (Spark Connect does not give it to"
            f" foreachBatch). Use {others if is_older(PYSPARK, OLDEST_WITH_FORMAT) else _FORMAT}."
        ) from error
    if not query_id:
        if not has_own_threads():
            raise ConfigError(
                "delivery.guarantee=exactly-once: with PYSPARK_PIN_THREAD=false Spark does not say which query a batch"
                ' belongs to. Take it out of the driver\'s environment, or use format("kafka_sink").'
            )
        raise ConfigError(
            "delivery.guarantee=exactly-once: write_batch was not called by foreachBatch, and this batch belongs to no"
            " query. Inside foreachBatch a thread of your own must be a pyspark.InheritableThread, or a pool's"
            " function wrapped in pyspark.inheritable_thread_target. For a batch DataFrame call write."
        )
    running_id = context.getLocalProperty(BATCH_ID)
    if running_id is not None and running_id != str(batch_id):
        raise ConfigError(
            f"delivery.guarantee=exactly-once: write_batch got the batch id {batch_id!r:.100}, and Spark runs batch"
            f" {running_id} of the query. Give write_batch the batch_id that foreachBatch gives to your function: Spark"
            " repeats it when it runs the batch again. With a number of your own the rows could be written twice. A"
            " thread of your own must be started, or its function wrapped, in the batch that it writes."
        )
    query = running_query(df, context)  # the job group is the run's id only until the user sets another one
    if query is None:
        return StreamBatch(query_id, None, batch_id)
    return StreamBatch(query_id, query.runId().toString(), batch_id, query.resolvedCheckpointRoot())
