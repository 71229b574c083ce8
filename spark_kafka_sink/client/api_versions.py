"""What each connected node speaks. Written by the I/O thread, read by any."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from spark_kafka_sink.common.errors import UnsupportedVersionError, error_for_code
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, Message, NodeApiVersions


class ApiVersions:
    """Versions by node id, and the cluster's finalized features of the highest epoch heard of, which outlive a
    connection (org.apache.kafka.clients.ApiVersions).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, NodeApiVersions] = {}
        self._features: Mapping[str, int] = {}
        self._features_epoch = -1

    def update(self, node_id: str, versions: NodeApiVersions) -> None:
        with self._lock:
            self._by_node[node_id] = versions
            if versions.finalized_features_epoch > self._features_epoch:
                self._features_epoch = versions.finalized_features_epoch
                self._features = versions.finalized_features

    def remove(self, node_id: str) -> None:
        with self._lock:
            self._by_node.pop(node_id, None)

    def get(self, node_id: str) -> NodeApiVersions | None:
        with self._lock:
            return self._by_node.get(node_id)

    def finalized_feature(self, name: str) -> int:
        """The level of a feature such as transaction.version; 0 where no node has told of it."""
        with self._lock:
            return self._features.get(name, 0)


_LATEST: Final = SUPPORTED_VERSIONS[ApiKey.API_VERSIONS].latest


class VersionDiscovery:
    """Which nodes must be asked for their versions, and in which version of that request (KIP-511). I/O thread only."""

    def __init__(self, registry: ApiVersions) -> None:
        self._registry = registry
        self._due: dict[str, int] = {}

    def begin(self, node_id: str) -> None:
        """The node was connected."""
        self._due[node_id] = _LATEST

    def forget(self, node_id: str) -> None:
        """The node was disconnected."""
        self._due.pop(node_id, None)
        self._registry.remove(node_id)

    def due(self) -> list[str]:
        return list(self._due)

    def take_version(self, node_id: str) -> int:
        """The version to ask in now; the node is not due after this."""
        return self._due.pop(node_id)

    def on_response(self, node_id: str, asked_version: int, response: Message) -> bool:
        """Take the answer in. True: the node's versions are known. False: it is due to be asked again, in an older
        version. Raises the node's error, or ProtocolError where it names no api at all.

        A node that does not know the version says so and, since Kafka 2.4, which one it does know. Each further
        attempt is in a lower version than the one before, whatever the node claims, so that this ends.
        """
        code = int(response.error_code)
        if code == 0:
            self._registry.update(node_id, NodeApiVersions.from_response(response))
            return True
        if code != UnsupportedVersionError.error_code or asked_version == 0:
            raise error_for_code(code, api="ApiVersions")
        claimed = [api.max_version for api in response.api_keys if api.api_key == ApiKey.API_VERSIONS]
        self._due[node_id] = max(min(claimed[0] if claimed else 0, asked_version - 1), 0)
        return False
