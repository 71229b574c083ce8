"""Puts a client together from a configuration: selector, connection states, metadata updater, network client."""

from __future__ import annotations

import random

from spark_kafka_sink import __version__
from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.bootstrap import bootstrap_addresses
from spark_kafka_sink.client.connection_states import ClusterConnectionStates
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.metadata_updater import DefaultMetadataUpdater
from spark_kafka_sink.client.network_client import NetworkClient
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.network.resolver import canonical_names, resolve
from spark_kafka_sink.network.sasl.login import AuthenticatorFactory
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.tls import transport_factory


def bootstrap(metadata: Metadata, config: ProducerConfig) -> None:
    """Let `metadata` begin from bootstrap.servers. Raises BootstrapResolutionError where none resolves."""
    metadata.bootstrap(
        bootstrap_addresses(config.bootstrap_servers, config.client_dns_lookup, resolve, canonical_names)
    )


def network_client(
    config: ProducerConfig,
    metadata: Metadata,
    clock: Clock,
    rng: random.Random,
    api_versions: ApiVersions,
    max_in_flight_requests: int | None = None,
) -> NetworkClient:
    """A network client that keeps `metadata` fresh; in flight as the configuration says, where not given."""
    states = ClusterConnectionStates(
        config.reconnect_backoff_ms,
        config.reconnect_backoff_max_ms,
        config.socket_connection_setup_timeout_ms,
        config.socket_connection_setup_timeout_max_ms,
        resolve,
        rng,
    )
    updater = DefaultMetadataUpdater(
        metadata,
        config.request_timeout_ms,
        config.reconnect_backoff_ms,
        config.metadata_recovery_strategy,
        config.metadata_recovery_rebootstrap_trigger_ms,
    )
    make_authenticator = AuthenticatorFactory(config, clock, rng) if config.uses_sasl else None
    return NetworkClient(
        Selector(
            clock,
            config.connections_max_idle_ms,
            make_authenticator=make_authenticator,
            make_transport=transport_factory(config),
        ),
        updater,
        config.client_id,
        max_in_flight_requests or config.max_in_flight_requests_per_connection,
        states,
        clock,
        rng,
        config.request_timeout_ms,
        config.send_buffer_bytes,
        config.receive_buffer_bytes,
        api_versions,
        __version__,
    )
