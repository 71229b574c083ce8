"""Certificates and keys from files and text, as far as they can do harm: how long that takes and how much is read."""

from __future__ import annotations

import time

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.network import tls_stores
from spark_kafka_sink.network.tls_stores import trusted_certificates


def config(location: str) -> ProducerConfig:
    settings = {"security.protocol": "SSL", "ssl.truststore.location": location}
    return ProducerConfig.from_mapping({"bootstrap.servers": "h:1", **settings})


def test_a_file_without_end_is_refused() -> None:
    """Bug: all memory was filled."""
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        trusted_certificates(config("/dev/zero"))


@pytest.mark.parametrize("labels", [1, 20_000])
def test_blocks_without_an_end_take_linear_time(labels: int) -> None:
    """Bug: 540 KB of them took a minute."""
    text = "".join(f"-----BEGIN L{number % labels}-----\n" for number in range(20_000))
    started = time.process_time()
    assert tls_stores._normalized(text) == ""
    assert time.process_time() - started < 2


def test_blocks_after_one_without_an_end_are_found() -> None:
    text = "-----BEGIN A-----\n-----BEGIN B-----\nAAAA\n-----END B-----\n"
    assert tls_stores._normalized(text) == "-----BEGIN B-----\nAAAA\n-----END B-----\n"
