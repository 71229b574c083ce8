"""From bootstrap.servers to the addresses that metadata begins with. Runs once, before there is any thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from spark_kafka_sink.client.connection_states import Resolver
from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.common.peer_text import one_line

CanonicalNames = Callable[[str], Sequence[str]]
"""Host → the full name of each of its addresses. Raises BootstrapResolutionError where it has none."""

log = logging.getLogger(__name__)


def bootstrap_addresses(
    servers: Sequence[tuple[str, int]], dns_lookup: str, resolve: Resolver, canonical_names: CanonicalNames
) -> list[tuple[str, int]]:
    """The (host, port) pairs that resolve; one that does not is passed over with a warning.

    `dns_lookup` (client.dns.lookup): with resolve_canonical_bootstrap_servers_only each name gives way to the full
    names of its addresses, as Kerberos wants them; with use_all_dns_ips it stays.
    Raises BootstrapResolutionError where no server resolves.
    """
    is_canonical = dns_lookup == "resolve_canonical_bootstrap_servers_only"
    found: list[tuple[str, int]] = []
    failures: list[str] = []

    def pass_over(host: str, port: int, error: BootstrapResolutionError) -> None:
        log.warning("Passing over %s:%d of bootstrap.servers: %s", one_line(host), port, error)
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
