"""The producer's settings: one table, and the rules between them.

A row of the table is a field of `ProducerConfig`: Kafka's key with dots for underscores, its type, default, check and
meaning. Values may be text (as all options of Spark) or typed. No setting is ignored. An unknown key is an error, which
names the nearest known key if one is near. A key that has a meaning only for the Java client is an error that says so.
Reference: org.apache.kafka.clients.producer.ProducerConfig of 4.x.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from spark_kafka_sink.common import options as parsers
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import (
    INT_MAX,
    LONG_MAX,
    OptionRow,
    field_name_of,
    nearest,
    option,
    parse_value,
    row_of,
    table_of,
)
from spark_kafka_sink.common.security import JAVA_ONLY_SECURITY, SecurityConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(SecurityConfig):
    """All settings, typed and checked. Made by `from_mapping`."""

    bootstrap_servers: tuple[tuple[str, int], ...] = field(
        metadata={
            "parse": parsers.addresses,
            "type": "list",
            "default": None,
            "doc": "Required: host:port pairs to learn the cluster from, comma-separated.",
        }
    )
    client_id: str = option(
        parsers.name,
        "",
        "string",
        "Name of this client in the brokers' logs, metrics and quotas. Without it each producer gets one: producer-1,"
        " producer-2, … in each process, or producer-<transactional.id>.",
    )
    client_dns_lookup: str = option(
        parsers.one_of("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"),
        "use_all_dns_ips",
        "string",
        "use_all_dns_ips: the IP addresses of a host are tried one after the other until one connects."
        " resolve_canonical_bootstrap_servers_only: the same, but each host of bootstrap.servers is first replaced"
        " by the names that reverse DNS gives for its addresses; with TLS only for sasl.mechanism=GSSAPI.",
    )
    enable_metrics_push: bool = option(
        parsers.boolean,
        True,
        "boolean",
        "Push metrics to brokers that have a plugin for them and a subscription (KIP-714). It needs the extra telemetry"
        " on the executors.",
    )
    acks: int = option(
        parsers.acks,
        "all",
        "string",
        "When a record is acknowledged. all (or -1): every in-sync replica has it. 1: the leader has it. 0: it was"
        " sent, and the producer does not notice if it is lost.",
    )
    enable_idempotence: bool = option(
        parsers.boolean,
        True,
        "boolean",
        "Retries neither duplicate nor reorder records. Defaults to false when acks is 0 or 1, retries is 0, or"
        " max.in.flight.requests.per.connection is above 5.",
    )
    transactional_id: str | None = option(
        parsers.non_empty_name, None, "string", "The name of this producer's transactions at the brokers."
    )
    transaction_timeout_ms: int = option(
        parsers.between(1, INT_MAX),
        60_000,
        "int",
        "The broker aborts a transaction that is open for this long. Defaults to 900000 with"
        " delivery.guarantee=exactly-once.",
    )
    max_in_flight_requests_per_connection: int = option(
        parsers.between(1, INT_MAX), 5, "int", "Requests that a connection may have in flight."
    )
    retries: int = option(
        parsers.between(0, INT_MAX),
        INT_MAX,
        "int",
        "How often a batch is sent again. Prefer to set delivery.timeout.ms.",
    )
    retry_backoff_ms: int = option(
        parsers.long_ms, 100, "long", "Pause before the first retry; it doubles, with jitter (KIP-580)."
    )
    retry_backoff_max_ms: int = option(parsers.long_ms, 1_000, "long", "The longest pause before a retry.")
    delivery_timeout_ms: int = option(
        parsers.int_ms,
        120_000,
        "int",
        "A record is acknowledged or fails within this time after its send. Defaults to linger.ms + request.timeout.ms"
        " if that is more.",
    )
    request_timeout_ms: int = option(parsers.int_ms, 30_000, "int", "How long an answer to one request may take.")
    linger_ms: int = option(parsers.long_ms, 5, "long", "How long a batch that is not full waits for more records.")
    batch_size: int = option(
        parsers.int_ms,
        262_144,
        "int",
        "Bytes of a full batch, expected after compression. Before compression a batch holds up to 3.3 times as much."
        " Kafka's own default is 16384.",
    )
    max_request_size: int = option(
        parsers.int_ms,
        1_048_576,
        "int",
        "Bytes of the largest request, expected after compression, and of the largest record before compression.",
    )
    buffer_memory: int = option(
        parsers.long_ms,
        33_554_432,
        "long",
        "Bytes of records that may wait for their acknowledgement. A send waits while it is full.",
    )
    max_block_ms: int = option(
        parsers.long_ms,
        60_000,
        "long",
        "How long a send may wait for metadata and for buffer.memory, and a transactional call for its end. In"
        " send_columns the limit is for each block of rows.",
    )
    compression_type: str = option(
        parsers.one_of("none", "gzip", "snappy", "lz4", "zstd"),
        "none",
        "string",
        "Codec of the record batches: none, gzip, snappy, lz4 or zstd.",
    )
    compression_gzip_level: int = option(
        parsers.gzip_level, -1, "int", "1 (fast) to 9 (small), -1 for the codec's own default."
    )
    compression_lz4_level: int = option(
        parsers.between(1, 17),
        9,
        "int",
        "1 to 17; 9 stands for the fast compressor, as in Kafka's own client.",
    )
    compression_zstd_level: int = option(parsers.between(-131_072, 22), 3, "int", "-131072 (fast) to 22 (small).")
    partitioner_ignore_keys: bool = option(
        parsers.boolean, False, "boolean", "Choose partitions as if records had no key."
    )
    partitioner_adaptive_partitioning_enable: bool = option(
        parsers.boolean, True, "boolean", "Send more of the records without a key to brokers that keep up (KIP-794)."
    )
    partitioner_availability_timeout_ms: int = option(
        parsers.long_ms,
        0,
        "long",
        "A broker that has not taken a waiting batch for this long gets no records without a key. 0 turns this off.",
    )
    metadata_max_age_ms: int = option(
        parsers.long_ms, 300_000, "long", "Metadata is refreshed after this long, even without an error."
    )
    metadata_max_idle_ms: int = option(
        parsers.between(5_000, LONG_MAX),
        300_000,
        "long",
        "The producer forgets a topic that it has not written to for this long.",
    )
    metadata_recovery_strategy: str = option(
        parsers.one_of("none", "rebootstrap"),
        "rebootstrap",
        "string",
        "What to do if no known broker can be reached. rebootstrap: start again from bootstrap.servers (KIP-899)."
        " none: go on trying the known brokers.",
    )
    metadata_recovery_rebootstrap_trigger_ms: int = option(
        parsers.long_ms,
        300_000,
        "long",
        "With rebootstrap: start again from bootstrap.servers when metadata could not be refreshed for this long"
        " (KIP-1102).",
    )
    reconnect_backoff_ms: int = option(
        parsers.long_ms, 50, "long", "Pause before the first reconnect to a broker; it doubles, with jitter."
    )
    reconnect_backoff_max_ms: int = option(
        parsers.long_ms,
        1_000,
        "long",
        "The longest pause before a reconnect. Defaults to reconnect.backoff.ms if that is more.",
    )
    socket_connection_setup_timeout_ms: int = option(
        parsers.long_ms,
        10_000,
        "long",
        "How long the first attempt to connect, with TLS and login, may take; it doubles, with jitter.",
    )
    socket_connection_setup_timeout_max_ms: int = option(
        parsers.long_ms, 30_000, "long", "The longest time for an attempt to connect."
    )
    connections_max_idle_ms: int = option(
        parsers.between(-1, LONG_MAX),
        540_000,
        "long",
        "An unused connection is closed after this long; -1 means never.",
    )
    send_buffer_bytes: int = option(
        parsers.between(-1, INT_MAX), 131_072, "int", "SO_SNDBUF; -1 for the system's default."
    )
    receive_buffer_bytes: int = option(
        parsers.between(-1, INT_MAX), 32_768, "int", "SO_RCVBUF; -1 for the system's default."
    )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> ProducerConfig:
        """Check and parse `settings`, a mapping from Kafka's keys (dots) to text or typed values.

        Raises ConfigError for an unknown key, a malformed value, a missing bootstrap.servers, or a contradiction.
        """
        table = table_of(cls)
        for key in settings:
            if key not in table:
                raise ConfigError(_unknown_key(key, table), setting=key)
        if settings.get("bootstrap.servers") is None:
            raise ConfigError(
                "`bootstrap.servers` is missing: give it host:port pairs of the cluster's brokers, comma-separated."
            )
        given = {key: value for key, value in settings.items() if value is not None}
        parsed = {field_name_of(key): parse_value(key, value, table[key].metadata) for key, value in given.items()}
        config = cls(**_with_dependent_defaults(parsed))
        config._check_rules()
        config._check_schemes(given["bootstrap.servers"])
        config.check_security(frozenset(given))
        return config

    @classmethod
    def keys(cls) -> frozenset[str]:
        """Return every key that `from_mapping` takes."""
        return frozenset(table_of(cls))

    def canonical(self) -> tuple[tuple[str, object], ...]:
        """Return a hashable identity: equal for configurations with equal settings. Every task asks for it."""
        return tuple(zip(_KEYS, _SETTINGS(self), strict=True))

    @property
    def compression_level(self) -> int | None:
        """The level of the codec in use, or None if it has no levels or its default is set."""
        levels = {
            "gzip": None if self.compression_gzip_level == -1 else self.compression_gzip_level,
            "lz4": None if self.compression_lz4_level == 9 else self.compression_lz4_level,
            "zstd": self.compression_zstd_level,
        }
        return levels.get(self.compression_type)

    def _check_schemes(self, servers: object) -> None:
        for scheme in parsers.schemes(servers):
            if scheme.upper() != self.security_protocol:
                raise ConfigError(
                    f"`bootstrap.servers` names {scheme}://, and `security.protocol` is {self.security_protocol}: set"
                    f" `security.protocol` to the listener's, or leave {scheme}:// out."
                )

    def _check_rules(self) -> None:
        for broken, text in _RULES:
            if broken(self):
                raise ConfigError(text.format(config=self))


_KEYS: Final = tuple(table_of(ProducerConfig))
_SETTINGS: Final = attrgetter(*map(field_name_of, _KEYS))
_RULES: Final[tuple[tuple[Callable[[ProducerConfig], bool], str], ...]] = (
    (
        lambda c: c.delivery_timeout_ms < min(c.linger_ms + c.request_timeout_ms, INT_MAX),
        "`delivery.timeout.ms`={config.delivery_timeout_ms} must be at least `linger.ms` + `request.timeout.ms`"
        " ({config.linger_ms} + {config.request_timeout_ms}): raise it, or lower `request.timeout.ms`.",
    ),
    (
        lambda c: c.enable_idempotence and c.acks != -1,
        "`enable.idempotence`=true needs `acks`=all: set `acks`=all, or `enable.idempotence`=false.",
    ),
    (
        lambda c: c.enable_idempotence and c.retries == 0,
        "`enable.idempotence`=true needs `retries` above 0: remove `retries`, or set `enable.idempotence`=false.",
    ),
    (
        lambda c: c.enable_idempotence and c.max_in_flight_requests_per_connection > 5,
        "`enable.idempotence`=true allows at most 5 for `max.in.flight.requests.per.connection`,"
        " not {config.max_in_flight_requests_per_connection}: lower it, or set `enable.idempotence`=false.",
    ),
    (
        lambda c: (
            c.client_dns_lookup == "resolve_canonical_bootstrap_servers_only"
            and c.uses_tls
            and not (c.uses_sasl and c.sasl_mechanism == "GSSAPI")
        ),
        "`client.dns.lookup`=resolve_canonical_bootstrap_servers_only with"
        " `security.protocol`={config.security_protocol}: the certificate would be checked against a"
        " name that the DNS gives, which an attacker may control. Leave"
        " `client.dns.lookup` out; only Kerberos (`sasl.mechanism`=GSSAPI) needs it.",
    ),
    (
        lambda c: c.transactional_id is not None and not c.enable_idempotence,
        "`transactional.id` needs `enable.idempotence`=true.",
    ),
)

_JAVA_ONLY: Final[Mapping[str, str]] = {
    "key.serializer": "Kafka option 'key.serializer' is not supported as keys are serialized with ByteArraySerializer."
    " Cast the column to string or binary instead",
    "value.serializer": "Kafka option 'value.serializer' is not supported as value are serialized with"
    " ByteArraySerializer. Cast the column to string or binary instead",
    "interceptor.classes": "no Java class is loaded here; change the DataFrame before it is written",
    "partitioner.class": "no Java class is loaded here; add a 'partition' column instead",
    "metric.reporters": "no Java class is loaded here; read the producer's metrics() instead",
    "security.providers": "no Java class is loaded here; leave it out",
    "config.providers": "no Java class is loaded here; resolve the value before you pass it",
    "auto.include.jmx.reporter": "this client has no JMX; read the producer's metrics() instead",
    "metrics.num.samples": "the producer's metrics keep fixed windows; leave it out",
    "metrics.sample.window.ms": "the producer's metrics keep fixed windows; leave it out",
    "metrics.recording.level": "the producer's metrics have one level; leave it out",
    "transaction.two.phase.commit.enable": "no broker has a stable form of it (KIP-939); leave it out",
    **JAVA_ONLY_SECURITY,
}


LIBRDKAFKA: Final[Mapping[str, str]] = {
    "batch.num.messages": "batch.size",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.max.bytes": "max.request.size",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.kbytes": "buffer.memory",
    "queue.buffering.max.messages": "buffer.memory",
    "queue.buffering.max.ms": "linger.ms",
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.password": "sasl.jaas.config",
    "sasl.username": "sasl.jaas.config",
    "socket.timeout.ms": "request.timeout.ms",
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.certificate.location": "ssl.keystore.location",
    "ssl.key.location": "ssl.keystore.location",
}
"""Settings of librdkafka → the setting of Kafka with the same meaning, if another name is more similar."""


def _with_dependent_defaults(parsed: dict[str, Any]) -> dict[str, Any]:
    """Set the defaults that depend on other settings, as Kafka does.

    Idempotence is off by default if another setting rules it out (KIP-679). delivery.timeout.ms is at least linger.ms
    plus request.timeout.ms. The longest pause before a reconnect is at least the first one.
    """
    rules_it_out = (
        parsed.get("acks", -1) != -1
        or parsed.get("retries", INT_MAX) == 0
        or parsed.get("max_in_flight_requests_per_connection", 5) > 5
    )
    if rules_it_out and parsed.get("transactional_id") is None:
        parsed.setdefault("enable_idempotence", False)
    if "delivery_timeout_ms" not in parsed:
        needed = parsed.get("request_timeout_ms", 30_000) + parsed.get("linger_ms", 5)
        parsed["delivery_timeout_ms"] = min(max(120_000, needed), INT_MAX)
    parsed.setdefault("reconnect_backoff_max_ms", max(1_000, parsed.get("reconnect_backoff_ms", 50)))
    return parsed


def _unknown_key(key: object, known: Collection[str]) -> str:
    if not isinstance(key, str):
        return f"Names of settings must be text, not {key!r}."
    if key in _JAVA_ONLY:
        return f"`{key}` is a setting of the Java client: {_JAVA_ONLY[key]}."
    if meant := LIBRDKAFKA.get(key) or nearest(key, known):
        return f"`{key}` is not a producer setting. The nearest one is `{meant}`."
    return f"`{key}` is not a producer setting, and no setting has a similar name: leave it out."


def describe_options() -> list[OptionRow]:
    """Return the rows of the table for documents: in their order, security last."""
    security = table_of(SecurityConfig)
    rows = {key: row_of(key, f.metadata) for key, f in table_of(ProducerConfig).items()}
    return [rows[key] for key in rows if key not in security] + [rows[key] for key in security]
