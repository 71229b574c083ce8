"""Where coordinators are: asked of any node, for many keys at once, and kept until somebody finds one moved, or until
too many are known.

One thread, that of the caller, which also polls the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from spark_kafka_sink.client.client_request import ClientResponse
from spark_kafka_sink.client.consumer_network_client import ConsumerNetworkClient
from spark_kafka_sink.client.request_future import RequestFuture
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    CoordinatorNotAvailableError,
    KafkaError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.coordinator_requests import (
    GROUP,
    TRANSACTION,
    FindCoordinatorRequest,
    FindCoordinatorsRequest,
    coordinator_of,
)

_PERMISSIONS: Final = {
    (GROUP, 30): "Not authorized for the group: grant DESCRIBE on it, which READ includes.",
    (TRANSACTION, 53): "Not authorized for the transactional id: grant DESCRIBE on it, which WRITE includes.",
}
_MOST_KNOWN: Final = 10_000
"""More than a call asks about at once. Batch writes without a prefix have new names each time."""
_ONE_AT_A_TIME: Final = CoordinatorNotAvailableError("The node takes one key at a time.")


class LookupFlight:
    """A question on its way to `node`. `take` may be called once `future` is done."""

    def __init__(
        self,
        lookup: CoordinatorLookup,
        node: Node,
        key_type: int,
        keys: Sequence[str],
        future: RequestFuture[ClientResponse],
    ) -> None:
        self.node = node
        self.keys = keys
        self.future = future
        self._lookup = lookup
        self._key_type = key_type

    def take(self) -> Mapping[str, KafkaError]:
        """Note the coordinators found; gives the errors of keys that have none."""
        if self.future.failed():
            error = self.future.error
            if isinstance(error, UnsupportedVersionError) and len(self.keys) > 1:
                self._lookup.takes_several_keys = False
                error = _ONE_AT_A_TIME
            return dict.fromkeys(self.keys, error)
        body = self.future.value().body
        errors: dict[str, KafkaError] = {}
        for key in self.keys:
            found = coordinator_of(body, key)
            if found is None:
                errors[key] = CoordinatorNotAvailableError("The answer does not mention the key.")
            elif found.error_code:
                text = _PERMISSIONS.get((self._key_type, found.error_code)) or found.error_message or ""
                errors[key] = error_for_code(found.error_code, text, api="FindCoordinator")
            else:
                self._lookup.note(self._key_type, key, Node(found.node_id, found.host, found.port))
        return errors


class CoordinatorLookup:
    """Coordinators by type (GROUP, TRANSACTION) and key (KIP-98, KIP-699)."""

    def __init__(self, client: ConsumerNetworkClient) -> None:
        self._client = client
        self._nodes: dict[tuple[int, str], Node] = {}
        self.takes_several_keys = True
        """False once a node was too old for that (before Kafka 3.0)."""

    def known(self, key_type: int, key: str) -> Node | None:
        return self._nodes.get((key_type, key))

    def note(self, key_type: int, key: str, node: Node) -> None:
        self._nodes[key_type, key] = node
        if len(self._nodes) > _MOST_KNOWN:
            del self._nodes[next(iter(self._nodes))]

    def forget(self, key_type: int, key: str) -> None:
        """The node said that it is not the coordinator, or does not answer."""
        self._nodes.pop((key_type, key), None)

    def send(self, key_type: int, keys: Sequence[str]) -> list[LookupFlight]:
        """Ask the node with the least to do, in one request where it takes several keys. None where there is no node
        to ask now.
        """
        node = self._client.least_loaded_node()
        if node is None:
            return []
        if len(keys) > 1 and self.takes_several_keys:
            request: Request = FindCoordinatorsRequest(tuple(keys), key_type)
            return [LookupFlight(self, node, key_type, keys, self._client.send(node, request))]
        return [
            LookupFlight(self, node, key_type, [key], self._client.send(node, FindCoordinatorRequest(key, key_type)))
            for key in keys
        ]
