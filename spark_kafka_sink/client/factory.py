"""Builds a network client from a configuration, and finds the first addresses for its metadata."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.connection_states import ClusterConnectionStates, Resolver
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.metadata_updater import DefaultMetadataUpdater
from spark_kafka_sink.client.network_client import NetworkClient
from spark_kafka_sink.client.seams import Selectable
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.network.sasl.login import AuthenticatorFactory
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.tls import transport_factory
from spark_kafka_sink.network.transport import canonical_names, resolve

CanonicalNames = Callable[[str], Sequence[str]]
"""Host → the full name of each of its addresses. Raises BootstrapResolutionError if it has none."""
log = logging.getLogger(__name__)


def network_client(
    config: ProducerConfig,
    metadata: Metadata,
    clock: Clock,
    rng: random.Random,
    api_versions: ApiVersions,
    *,
    selector: Selectable | None = None,
    resolve: Resolver = resolve,
    max_in_flight_requests: int | None = None,
) -> NetworkClient:
    """Build a network client that refreshes `metadata` and writes each node's versions into `api_versions`.

    Without `selector` it uses a selector over sockets. `max_in_flight_requests` is the limit for each node; None means
    the configured limit.
    """
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
    return NetworkClient(
        config,
        _selector(config, clock, rng) if selector is None else selector,
        updater,
        states,
        api_versions,
        clock,
        rng,
        max_in_flight_requests or config.max_in_flight_requests_per_connection,
    )


def _selector(config: ProducerConfig, clock: Clock, rng: random.Random) -> Selector:
    return Selector(
        clock,
        config.connections_max_idle_ms,
        make_authenticator=AuthenticatorFactory(config, clock, rng) if config.uses_sasl else None,
        make_transport=transport_factory(config),
    )


def bootstrap(metadata: Metadata, config: ProducerConfig) -> None:
    """Start `metadata` from bootstrap.servers. Raises BootstrapResolutionError if no server resolves."""
    metadata.bootstrap(
        bootstrap_addresses(config.bootstrap_servers, config.client_dns_lookup, resolve, canonical_names)
    )


def bootstrap_addresses(
    servers: Sequence[tuple[str, int]], dns_lookup: str, resolve: Resolver, canonical_names: CanonicalNames
) -> list[tuple[str, int]]:
    """Return the (host, port) pairs that resolve. Log a warning for each one that does not.

    `dns_lookup` (client.dns.lookup): resolve_canonical_bootstrap_servers_only replaces each name by the full names of
    its addresses, which Kerberos needs; use_all_dns_ips keeps it. Raises BootstrapResolutionError if no server
    resolves.
    """
    is_canonical = dns_lookup == "resolve_canonical_bootstrap_servers_only"
    found: list[tuple[str, int]] = []
    failures: list[str] = []

    def pass_over(host: str, port: int, error: BootstrapResolutionError) -> None:
        log.warning("Ignoring %s:%d of bootstrap.servers: %s", one_line(host), port, error)
        failures.append(str(error))

    for host, port in servers:
        try:
            names = canonical_names(host) if is_canonical else [host]
        except BootstrapResolutionError as error:
            pass_over(host, port, error)
            continue
        for name in names:
            try:
                resolve(name, port)
                found.append((name, port))
            except BootstrapResolutionError as error:
                pass_over(name, port, error)
    if not found:
        raise BootstrapResolutionError(
            f"No host of bootstrap.servers can be resolved: correct the names or the DNS. {' '.join(failures)}"
        )
    return list(dict.fromkeys(found))
