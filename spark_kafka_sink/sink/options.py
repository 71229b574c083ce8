"""The sink's options: one table, parsed once on the driver into a `SinkConfig`.

Names are those of Spark's own Kafka sink: `topic`, and `kafka.` before every producer setting. Spark hands options
over with keys in any case, so case does not count here. No option is ignored silently: an unknown option is an error,
which names a similar known one. An option that cannot work here is an error that says why, and what to use instead.

Users share one set of options between reading and writing. Options of Spark's Kafka source (KafkaSourceProvider of
spark-sql-kafka-0-10, 4.2) and of consumers (ConsumerConfig of Kafka 4.x, without settings that producers have too) have
no effect in a write. Spark's sink ignores them; this one ignores them with a warning.

Plain values that pickle; used on the driver and in tasks.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_kafka_sink.common.config import LIBRDKAFKA, ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import LONG_MAX, RefusalError, between, boolean, nearest, table_of
from spark_kafka_sink.common.texts import shown
from spark_kafka_sink.common.version import VERSION
from spark_kafka_sink.record.sifting import topic_fault
from spark_kafka_sink.serialization import format_options
from spark_kafka_sink.serialization.format_options import Formats, formats_of
from spark_kafka_sink.sink.requested_topic import (
    CONFIG_PREFIX,
    CREATE_OPTION,
    IF_MISSING,
    TOPIC_OPTIONS,
    RequestedTopic,
    requested_topic,
)

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

    from spark_kafka_sink.serialization.record_formats import ResolvedFormats
    from spark_kafka_sink.sink.limits.conversation import LimitServer

log = logging.getLogger(__name__)

KAFKA_PREFIX: Final = "kafka."
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"

DECISION_TOPIC: Final = "__spark_kafka_sink_decisions"
METRICS_HOST: Final = "127.0.0.1"
TRANSACTION_TIMEOUT_MS: Final = 900_000
"""The brokers' default maximum (transaction.max.timeout.ms): a restart has this time to finish a decided batch."""

OUTSIDE_OPTION: Final = "write.outside.queries"
_OF_EXACTLY_ONCE: Final = ("transactional.id.prefix", "decision.topic", OUTSIDE_OPTION)
REPORT_LOG_OPTION: Final = "report.log"
LINEAGE_OPTION: Final = "lineage.openlineage"
TELEMETRY_OPTION: Final = "telemetry.opentelemetry"
TRACEPARENT_OPTION: Final = "telemetry.headers.traceparent"
EARLY_OPTION: Final = "timestamp.allow.before.1980"
TOLERANCE_OPTION: Final = "errors.tolerance"
DEAD_LETTER_TOPIC_OPTION: Final = "errors.deadletterqueue.topic.name"
MOST_DEAD_LETTERS_OPTION: Final = "errors.deadletterqueue.max.rows"
MOST_DEAD_LETTERS: Final = 1000
_OF_DEAD_LETTERS: Final = (DEAD_LETTER_TOPIC_OPTION, MOST_DEAD_LETTERS_OPTION)
RECORDS_LIMIT_OPTION: Final = "write.max.records.per.second"
BYTES_LIMIT_OPTION: Final = "write.max.bytes.per.second"
_OPTIONS: Final = (
    "topic",
    *TOPIC_OPTIONS,
    "delivery.guarantee",
    "metrics.port",
    "metrics.host",
    REPORT_LOG_OPTION,
    LINEAGE_OPTION,
    TELEMETRY_OPTION,
    TRACEPARENT_OPTION,
    EARLY_OPTION,
    TOLERANCE_OPTION,
    *_OF_DEAD_LETTERS,
    RECORDS_LIMIT_OPTION,
    BYTES_LIMIT_OPTION,
    *_OF_EXACTLY_ONCE,
)
"""Besides these there is an option topic.config.<name> for each setting of a topic."""
_LONGEST_PREFIX: Final = 200

_REFUSED: Final[Mapping[str, str]] = {
    "kafka.transactional.id": "the rows of many tasks cannot share one transactional id; leave it out",
}
"""Options with a meaning elsewhere: lower-case key → why not here."""
SOURCE_OPTIONS: Final = (
    "assign",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    "includeHeaders",
    "kafkaConsumer.pollTimeoutMs",
    "maxOffsetsPerTrigger",
    "maxRecordsPerPartition",
    "maxTriggerDelay",
    "minOffsetsPerTrigger",
    "minPartitions",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingTimestamp",
    "subscribe",
    "subscribePattern",
)
CONSUMER_SETTINGS: Final = (
    "allow.auto.create.topics",
    "auto.commit.interval.ms",
    "auto.offset.reset",
    "check.crcs",
    "client.rack",
    "default.api.timeout.ms",
    "enable.auto.commit",
    "exclude.internal.topics",
    "fetch.max.bytes",
    "fetch.max.wait.ms",
    "fetch.min.bytes",
    "group.id",
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "heartbeat.interval.ms",
    "internal.throw.on.fetch.stable.offset.unsupported",
    "isolation.level",
    "key.deserializer",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "max.poll.records",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "share.acknowledgement.mode",
    "share.acquire.mode",
    "value.deserializer",
)
PASSED_OVER: Final[Mapping[str, str]] = {
    name.lower(): name for name in (*SOURCE_OPTIONS, *(f"kafka.{setting}" for setting in CONSUMER_SETTINGS))
}
"""Lower-case name → the name as Spark and Kafka spell it."""


class _SameRelease:
    """Is first in the pickle of a config. To unpickle it is to check the release, before anything else is read."""

    def __reduce__(self) -> tuple[Callable[[str, int], None], tuple[str, int]]:
        return _check_release, (VERSION, _fields_checksum())


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """Every option, typed and checked. Make one with `from_options`."""

    producer: ProducerConfig
    topic: str | None = None
    """The topic of every row; None: each row names it in its `topic` column."""
    requested_topic: RequestedTopic | None = None
    """How a missing topic is created before any task; None: never."""
    is_exactly_once: bool = False
    transactional_id_prefix: str | None = None
    """None: made of the checkpoint location; a batch write claims one (write_names.py)."""
    decision_topic: str = DECISION_TOPIC
    is_outside_queries: bool = False
    """The user's statement that a batch write by `format` is not inside foreachBatch."""
    metrics_ports: range | None = None
    """Ports on which a worker may serve its producers' metrics to Prometheus."""
    metrics_host: str = METRICS_HOST
    logs_reports: bool = False
    """Whether each batch has its `BatchReport` in the log."""
    sends_lineage: bool = False
    """Whether each batch sends events of OpenLineage."""
    sends_telemetry: bool = False
    """Whether batches and tasks have spans and metrics of OpenTelemetry."""
    writes_traceparent: bool = False
    """Whether each record has its task's span in the header `traceparent`."""
    batch_trace: str | None = None
    """The traceparent of the batch's span. Only in tasks."""
    allows_early_timestamps: bool = False
    """Whether a number in the column `timestamp` may stand for a date before 1980."""
    dead_letter_topic: str | None = None
    """The topic of rows that can never be written; None: such a row fails its task."""
    most_dead_letters: int = MOST_DEAD_LETTERS
    """For each micro-batch or write."""
    records_per_second: int | None = None
    """The most records that all tasks of a query send together; None: no limit."""
    bytes_per_second: int | None = None
    """Of encoded records, before compression."""
    limit_server: LimitServer | None = None
    """Where tasks ask before they send. Only in tasks, if there is a limit."""
    formats: Formats | None = None
    """What `value` and `key` become. Only on the driver, because it has the settings of the registry."""
    column_formats: ResolvedFormats | None = None
    """The same for tasks, with the schema and its id."""
    user_types: tuple[tuple[str, DataType], ...] = ()
    """The types of columns with a format that hold a user-defined type. Only for tasks that get rows."""
    given: tuple[str, ...] = field(default=(), compare=False)
    """Producer settings that the caller named, for `describe`."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (_SameRelease(), *(getattr(self, each.name) for each in fields(self)))

    @property
    def trusted_topic(self) -> str | None:
        """The decision topic, if this sink uses it. No row may go there: whoever writes to it decides for any query."""
        return self.decision_topic if self.is_exactly_once else None

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit on what a query sends in a second."""
        return self.records_per_second is not None or self.bytes_per_second is not None

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> SinkConfig:
        """Check and parse `options`. Raises ConfigError before any I/O. Logs a warning, once in a process, that names
        ignored options of Spark's source and of consumers.
        """
        by_key = _lower_case(options)
        passed_over = {key: by_key.pop(key) for key in PASSED_OVER.keys() & by_key.keys()}
        for key in by_key:
            _refuse(key)
        settings = {key.removeprefix(KAFKA_PREFIX): v for key, v in by_key.items() if key.startswith(KAFKA_PREFIX)}
        is_exactly_once = _is_exactly_once(by_key)
        if is_exactly_once and settings.get("transaction.timeout.ms") is None:
            settings["transaction.timeout.ms"] = TRANSACTION_TIMEOUT_MS
        config = _producer_config(settings)
        if is_exactly_once and not config.enable_idempotence:
            raise ConfigError(
                "delivery.guarantee=exactly-once needs kafka.enable.idempotence=true, kafka.acks=all, retries"
                " and kafka.max.in.flight.requests.per.connection of at most 5: leave these settings out."
            )
        topic = _name(by_key, "topic")
        decision_topic = _name(by_key, "decision.topic") or DECISION_TOPIC
        if topic == decision_topic:
            raise ConfigError(f"topic={topic!r} is also the decision topic: set decision.topic to another topic.")
        dead_letter_topic = _dead_letter_topic(by_key, topic, decision_topic)
        records_per_second = _rate(by_key, RECORDS_LIMIT_OPTION, "records")
        if is_exactly_once:
            _check_time_for_a_record(records_per_second, config)
        warn_of(key for key, value in passed_over.items() if value is not None)
        return cls(
            producer=config,
            topic=topic,
            requested_topic=requested_topic(by_key, topic),
            is_exactly_once=is_exactly_once,
            transactional_id_prefix=_prefix(by_key),
            decision_topic=decision_topic,
            is_outside_queries=_boolean(by_key, OUTSIDE_OPTION),
            metrics_ports=_metrics_ports(by_key.get("metrics.port")),
            metrics_host=_metrics_host(by_key),
            logs_reports=_boolean(by_key, REPORT_LOG_OPTION),
            sends_lineage=_sends_lineage(by_key),
            sends_telemetry=_sends_telemetry(by_key),
            writes_traceparent=_writes_traceparent(by_key),
            allows_early_timestamps=_boolean(by_key, EARLY_OPTION),
            dead_letter_topic=dead_letter_topic,
            most_dead_letters=_most_dead_letters(by_key),
            records_per_second=records_per_second,
            bytes_per_second=_rate(by_key, BYTES_LIMIT_OPTION, "bytes"),
            formats=formats_of(by_key),
            given=tuple(key for key in settings if settings[key] is not None),
        )

    def describe(self) -> str:
        """Return the options on one line, as parsed; a secret shows as ***."""
        shown = [] if self.topic is None else [f"topic={self.topic!r}"]
        if self.requested_topic is not None:
            shown.append(f"{CREATE_OPTION}={IF_MISSING} ({self.requested_topic})")
        if self.is_exactly_once:
            shown.append(f"delivery.guarantee={EXACTLY_ONCE}")
        if self.transactional_id_prefix is not None:
            shown.append(f"transactional.id.prefix={self.transactional_id_prefix!r}")
        if self.dead_letter_topic is not None:
            shown.append(f"{TOLERANCE_OPTION}=all, {DEAD_LETTER_TOPIC_OPTION}={self.dead_letter_topic!r}")
        limits = ((RECORDS_LIMIT_OPTION, self.records_per_second), (BYTES_LIMIT_OPTION, self.bytes_per_second))
        shown += [f"{name}={rate}" for name, rate in limits if rate is not None]
        if self.formats is not None:
            shown += self.formats.describe()
        table = table_of(ProducerConfig)
        for key in self.given:
            if table[key].metadata.get("is_secret"):
                shown.append(f"{KAFKA_PREFIX}{key}=***")
                continue
            value = getattr(self.producer, key.replace(".", "_"))
            if key == "bootstrap.servers":
                value = ",".join(f"{host}:{port}" for host, port in value)
            shown.append(f"{KAFKA_PREFIX}{key}={value!r}")
        return ", ".join(shown)


def _unpickled(_: None, *values: object) -> SinkConfig:
    return SinkConfig(*values)  # type: ignore[arg-type] # those of the fields, in their order


@functools.cache
def _fields_checksum() -> int:
    """Differs between two commits with the same version, if a pickle of one cannot be read by the other."""
    return zlib.crc32(" ".join(each.name for kind in (SinkConfig, ProducerConfig) for each in fields(kind)).encode())


def _check_release(version: str, checksum: int) -> None:
    """Raise ConfigError unless a config was pickled by this release: the fields of its parts are read by position, and
    another release would take the value of one setting for that of another.
    """
    if (version, checksum) == (VERSION, _fields_checksum()):
        return
    other = f"version {version}" if version != VERSION else "another commit with the same version number"
    raise ConfigError(
        "The driver and this Python worker have different releases of spark-kafka-sink. This worker has version"
        f" {VERSION} in {Path(__file__).parents[2]} ({sys.executable}), and the driver has {other}. The worker has"
        " written nothing, because it could misread the driver's options. Install the same release for both"
        " (docs/deploying.md)."
    )


def _lower_case(options: Mapping[str, object]) -> dict[str, object]:
    by_key: dict[str, object] = {}
    for key, value in options.items():
        if not isinstance(key, str):
            raise ConfigError(f"Names of options must be text, not {key!r}.")
        lower = key.strip().lower()
        if lower in by_key:
            raise ConfigError(f"The option {key} is given twice: case does not count in option names.")
        by_key[lower] = value
    return by_key


def _refuse(key: str) -> None:
    if reason := _REFUSED.get(key) or _REFUSED.get(KAFKA_PREFIX + key):
        raise ConfigError(f"The option {key} cannot be used here: {reason}.", setting=key)
    bare = key.removeprefix(KAFKA_PREFIX)
    if key in _OPTIONS or key.startswith(CONFIG_PREFIX) or format_options.is_option(key):
        return
    if key != bare and bare not in _OPTIONS:
        return
    meant = _meant(key, bare)
    if meant is None:
        raise ConfigError(f"There is no option {key}, and no option has a similar name: leave it out.", setting=key)
    raise ConfigError(f"There is no option {key}. The nearest one is {meant}.", setting=key)


def _meant(key: str, bare: str) -> str | None:
    """Return the option that an unknown one probably means; None if no name is similar."""
    if bare in _OPTIONS:
        return bare
    if key in LIBRDKAFKA:
        return KAFKA_PREFIX + LIBRDKAFKA[key]
    settings = ProducerConfig.keys()
    known = {name: KAFKA_PREFIX + name for name in settings}
    known |= {KAFKA_PREFIX + name: KAFKA_PREFIX + name for name in settings}
    known |= {name: name for name in (*_OPTIONS, *format_options.OPTIONS)}
    name = nearest(key, known)
    return None if name is None else known[name]


def _is_exactly_once(by_key: Mapping[str, object]) -> bool:
    value = by_key.get("delivery.guarantee")
    guarantee = AT_LEAST_ONCE if value is None else str(value).strip().lower()
    if guarantee not in {AT_LEAST_ONCE, EXACTLY_ONCE}:
        raise ConfigError(
            f"delivery.guarantee must be {AT_LEAST_ONCE} or {EXACTLY_ONCE}, not {shown(value)}.",
            setting="delivery.guarantee",
        )
    for key in _OF_EXACTLY_ONCE:
        if guarantee == AT_LEAST_ONCE and by_key.get(key) is not None:
            raise ConfigError(
                f"The option {key} belongs to delivery.guarantee={EXACTLY_ONCE}: set that too, or leave it out.",
                setting=key,
            )
    return guarantee == EXACTLY_ONCE


def _producer_config(settings: Mapping[str, object]) -> ProducerConfig:
    try:
        return ProducerConfig.from_mapping(settings)
    except ConfigError as error:
        raise error.named(KAFKA_PREFIX) from None


def _name(by_key: Mapping[str, object], key: str) -> str | None:
    """Return the name of a topic; None if the option is not given."""
    value = by_key.get(key)
    if value is None:
        return None
    topic = str(value).strip()
    if not topic:
        raise ConfigError(f"The option {key} is empty: give it the name of a topic, or leave it out.", setting=key)
    fault = topic_fault(topic)  # else that shows only in the tasks, for dead letters only with the first of them
    if fault is not None:
        raise ConfigError(f"{key}={shown(topic)}: {fault.removesuffix('.')}.", setting=key)
    return topic


def _prefix(by_key: Mapping[str, object]) -> str | None:
    value = by_key.get("transactional.id.prefix")
    if value is None:
        return None
    prefix = str(value).strip()
    if not prefix or not prefix.isprintable() or len(prefix) > _LONGEST_PREFIX:
        raise ConfigError(
            f"transactional.id.prefix={shown(value)} must have 1 to {_LONGEST_PREFIX} printable characters. Each query"
            " and sink must have its own.",
            setting="transactional.id.prefix",
        )
    return prefix


def _dead_letter_topic(by_key: Mapping[str, object], topic: str | None, decision_topic: str) -> str | None:
    """Return the topic of dead letters; None with errors.tolerance=none."""
    value = by_key.get(TOLERANCE_OPTION)
    tolerance = "none" if value is None else str(value).strip().lower()
    if tolerance not in {"none", "all"}:
        raise ConfigError(f"{TOLERANCE_OPTION} must be none or all, not {shown(value)}.", setting=TOLERANCE_OPTION)
    if tolerance == "none":
        for key in _OF_DEAD_LETTERS:
            if by_key.get(key) is not None:
                raise ConfigError(
                    f"The option {key} has no effect without {TOLERANCE_OPTION}=all: set that too, or leave it out.",
                    setting=key,
                )
        return None
    found = _name(by_key, DEAD_LETTER_TOPIC_OPTION)
    if found is None:
        raise ConfigError(
            f"{TOLERANCE_OPTION}=all needs a topic for the rows that cannot be written: set"
            f" {DEAD_LETTER_TOPIC_OPTION}.",
            setting=DEAD_LETTER_TOPIC_OPTION,
        )
    for taken, whose in ((topic, "topic"), (decision_topic, "decision.topic")):
        if found == taken:
            raise ConfigError(
                f"{DEAD_LETTER_TOPIC_OPTION}={found!r} is also {whose}: give the dead letters a topic of their own.",
                setting=DEAD_LETTER_TOPIC_OPTION,
            )
    return found


def _most_dead_letters(by_key: Mapping[str, object]) -> int:
    value = by_key.get(MOST_DEAD_LETTERS_OPTION)
    if value is None:
        return MOST_DEAD_LETTERS
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise ConfigError(
            f"{MOST_DEAD_LETTERS_OPTION}={shown(value)} must be a whole number of 1 or more: the most dead letters of a"
            " micro-batch or write.",
            setting=MOST_DEAD_LETTERS_OPTION,
        )
    return int(text)


def _rate(by_key: Mapping[str, object], key: str, unit: str) -> int | None:
    """Return a limit of a write; None if the option is not given."""
    value = by_key.get(key)
    if value is None:
        return None
    try:
        return between(1, LONG_MAX)(value)
    except RefusalError:
        raise ConfigError(
            f"{key}={shown(value)} must be a whole number of 1 or more: the most {unit} that all tasks of a query send"
            " in a second. Leave it out for no limit.",
            setting=key,
        ) from None


def _check_time_for_a_record(records_per_second: int | None, config: ProducerConfig) -> None:
    """Raise ConfigError if not even one record could be sent in the time of a transaction."""
    timeout_ms = config.transaction_timeout_ms
    if records_per_second is not None and records_per_second * timeout_ms < 1000:
        raise ConfigError(
            f"{RECORDS_LIMIT_OPTION}={records_per_second} and kafka.transaction.timeout.ms={timeout_ms}: a transaction"
            " would time out before one record is sent. Raise one of them.",
            setting=RECORDS_LIMIT_OPTION,
        )


def _boolean(by_key: Mapping[str, object], key: str) -> bool:
    """Return the value; False if the option is not given."""
    value = by_key.get(key)
    try:
        return value is not None and boolean(value)
    except RefusalError:
        raise ConfigError(f"{key} must be true or false, not {shown(value)}.", setting=key) from None


def _sends_lineage(by_key: Mapping[str, object]) -> bool:
    if not _boolean(by_key, LINEAGE_OPTION):
        return False
    if importlib.util.find_spec("openlineage") is None:
        raise ConfigError(
            f"{LINEAGE_OPTION}=true needs the package openlineage-python: pip install 'spark-kafka-sink[openlineage]'.",
            setting=LINEAGE_OPTION,
        )
    return True


def _sends_telemetry(by_key: Mapping[str, object]) -> bool:
    if not _boolean(by_key, TELEMETRY_OPTION):
        return False
    check_telemetry("")
    return True


def check_telemetry(where: str) -> None:
    """Raise ConfigError if OpenTelemetry is not installed. `where`: the end of the sentence."""
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # not even the package above it
            is_installed = False
        if not is_installed:
            raise ConfigError(
                f"{TELEMETRY_OPTION}=true needs the packages opentelemetry-sdk and"
                f" opentelemetry-exporter-otlp-proto-http{where}: pip install 'spark-kafka-sink[opentelemetry]'.",
                setting=TELEMETRY_OPTION,
            )


def _writes_traceparent(by_key: Mapping[str, object]) -> bool:
    if not _boolean(by_key, TRACEPARENT_OPTION):
        return False
    if not _boolean(by_key, TELEMETRY_OPTION):
        raise ConfigError(
            f"{TRACEPARENT_OPTION}=true has no effect without {TELEMETRY_OPTION}=true: set that too, or leave it out.",
            setting=TRACEPARENT_OPTION,
        )
    return True


def _metrics_ports(value: object) -> range | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value).strip())
    if found is None or not 0 < (first := int(found[1])) <= (last := int(found[2] or first)) <= 65_535:
        raise ConfigError(
            f"metrics.port={shown(value)} must be a port or a range of ports, such as 9250-9299.",
            setting="metrics.port",
        )
    check_prometheus("")
    return range(first, last + 1)


def check_prometheus(where: str) -> None:
    """Raise ConfigError if prometheus_client is not installed. `where`: the end of the sentence."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"metrics.port needs the package prometheus_client{where}: pip install 'spark-kafka-sink[prometheus]'.",
            setting="metrics.port",
        )


def _metrics_host(by_key: Mapping[str, object]) -> str:
    value = by_key.get("metrics.host")
    if value is None:
        return METRICS_HOST
    if by_key.get("metrics.port") is None:
        raise ConfigError(
            "metrics.host has no effect without metrics.port: set that too, or leave it out.", setting="metrics.host"
        )
    host = str(value).strip()
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ConfigError(
            f"metrics.host={shown(value)} must be an address of this machine, without a port: 127.0.0.1, or 0.0.0.0 for"
            " all.",
            setting="metrics.host",
        )
    return host


def warn_of(keys: Iterable[str]) -> None:
    """Log a warning that names the options `keys` (of PASSED_OVER), once in a process for the same options."""
    if names := tuple(sorted(PASSED_OVER[key] for key in keys)):
        _warn_once(names)


@functools.cache
def _warn_once(names: tuple[str, ...]) -> None:
    log.warning(
        "Options of Spark's Kafka source and of consumers have no effect in a write, and are ignored: %s",
        ", ".join(names),
    )
