"""No option shows the login or the query of an address: in an error, or in a repr. The test walks over the tables, so
that a new option is covered, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.serialization import format_options
from spark_kafka_sink.serialization.registry_settings import registry_options
from spark_kafka_sink.sink import options
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.requested_topic import CONFIG_PREFIX

CANARY = "canary-p4ss"
ADDRESSES = (
    f"https://me:{CANARY}@host/path",
    f"https://me:{CANARY}@host:9092",
    f"SASL_SSL://me:{CANARY}@host:9092",
    f"me:{CANARY}@host:9092",
    f"https://host/path?code={CANARY}",
    f"https://host:8081/?code={CANARY}#part",
    f"host:9092,https://host:1/?code={CANARY}",
    f"http://me:{CANARY}@[host",
    f"http://me:{CANARY}@host:no-port?code={CANARY}",
)
REGISTRY = {"schema.registry.url": "https://registry", "value.format": "avro"}
SOURCES = ("STATIC_TOKEN", "OAUTHBEARER", "OAUTHBEARER_AZURE_IMDS")
OAUTH = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "OAUTHBEARER"}
BEARER = {
    "schema.registry.bearer.auth.client.id": "me",
    "schema.registry.bearer.auth.client.secret": "s",
    "schema.registry.bearer.auth.scope": "s",
    "schema.registry.bearer.auth.issuer.endpoint.url": "https://idp/token",
    "schema.registry.bearer.auth.logical.cluster": "lsrc-1",
}
AROUND: tuple[dict[str, str], ...] = (
    {},
    {"topic.create": "if-missing", "delivery.guarantee": "exactly-once", "metrics.port": "1"},
    {"errors.tolerance": "all"},
    {"value.format": "avro", "key.format": "protobuf"},
    REGISTRY,
    *({**REGISTRY, **BEARER, "schema.registry.bearer.auth.credentials.source": source} for source in SOURCES),
    {
        **OAUTH,
        "kafka.sasl.oauthbearer.client.credentials.client.id": "me",
        "kafka.sasl.oauthbearer.client.credentials.client.secret": "s",
    },
)
"""Other options with which an option has an effect: each option is tried with all of these."""
PLAIN = {
    "topic",
    f"{CONFIG_PREFIX}retention.ms",
    "decision.topic",
    "errors.deadletterqueue.topic.name",
    "transactional.id.prefix",
    "kafka.client.id",
    "key.schema",
    "value.schema",
    "key.schema.message",
    "value.schema.message",
    "schema.registry.ssl.ca.location",
    "schema.registry.bearer.auth.client.id",
    "schema.registry.bearer.auth.identity.pool.id",
    "schema.registry.bearer.auth.logical.cluster",
    "schema.registry.bearer.auth.scope",
}
"""Names, schemas and a path, which a repr shows. None of them is an address that is connected to."""


def every_option() -> Iterator[str]:
    yield from options._OPTIONS
    yield f"{CONFIG_PREFIX}retention.ms"
    yield from format_options.OPTIONS
    yield from (row.name for row in registry_options())
    yield from (f"kafka.{key}" for key in sorted(ProducerConfig.keys()))


def test_the_tables_have_the_options_with_addresses() -> None:
    assert {
        "kafka.bootstrap.servers",
        "kafka.sasl.oauthbearer.token.endpoint.url",
        "metrics.host",
        "schema.registry.url",
        "schema.registry.proxy",
        "schema.registry.bearer.auth.issuer.endpoint.url",
        "schema.registry.bearer.auth.issuer.endpoint.query",
    } <= {*every_option()}


@pytest.mark.parametrize("option", sorted({*every_option()}))
def test_no_login_and_no_query_of_an_address_is_shown(option: str) -> None:
    """Bug: the errors for bootstrap.servers and for the token endpoint of the registry showed them, and a repr, too."""
    refusals = 0
    for address in ADDRESSES:
        for around in AROUND:
            given = {"kafka.bootstrap.servers": "h:9092", "topic": "orders", **around, option: address}
            refusal: KafkaError | None = None
            texts = ""
            try:
                config = SinkConfig.from_options(given)
                texts = f"{config} {config.formats} {config.producer} {KafkaSink(given)}"
            except KafkaError as error:
                refusal = error
            if refusal is not None:
                texts = "".join(traceback.format_exception(refusal))
                refusals += 1
            assert CANARY not in texts or (refusal is None and option in PLAIN), texts
    assert refusals or option in PLAIN
