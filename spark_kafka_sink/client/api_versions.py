"""The API versions of each connected node. The I/O thread writes them, any thread reads them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from spark_kafka_sink.common.errors import UnsupportedVersionError, error_for_code
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, Message, NodeApiVersions


class ApiVersions:
    """Versions by node id, and the cluster's finalized features of the highest known epoch. The features stay when a
    connection closes (org.apache.kafka.clients.ApiVersions).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, NodeApiVersions] = {}
        self._features: Mapping[str, int] = {}
        self._features_epoch = -1
        self._ever_offered: frozenset[int] = frozenset()

    def update(self, node_id: str, versions: NodeApiVersions) -> None:
        with self._lock:
            self._by_node[node_id] = versions
            self._ever_offered |= versions.ranges.keys()
            if versions.finalized_features_epoch > self._features_epoch:
                self._features_epoch = versions.finalized_features_epoch
                self._features = versions.finalized_features

    def remove(self, node_id: str) -> None:
        with self._lock:
            self._by_node.pop(node_id, None)

    def get(self, node_id: str) -> NodeApiVersions | None:
        with self._lock:
            return self._by_node.get(node_id)

    def was_offered(self, api_key: ApiKey) -> bool:
        """Return whether any node has ever offered this API. Some nodes never do: their cluster must be set up for it.

        Each turn of a loop may ask, so it takes no lock.
        """
        return api_key in self._ever_offered

    def is_offered(self, api_key: ApiKey) -> bool:
        """Return whether a connected node offers this API."""
        with self._lock:
            return any(api_key in versions.ranges for versions in self._by_node.values())

    def finalized_feature(self, name: str) -> int:
        """Return the level of a feature such as transaction.version; 0 if no node has reported it."""
        with self._lock:
            return self._features.get(name, 0)


_LATEST: Final = SUPPORTED_VERSIONS[ApiKey.API_VERSIONS].latest


class VersionDiscovery:
    """The nodes to send ApiVersions to, and the version of that request (KIP-511). Only the I/O thread uses it."""

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
        """Return the version of the request to send now. The node is not due any more."""
        return self._due.pop(node_id)

    def on_response(self, node_id: str, asked_version: int, response: Message) -> bool:
        """Handle the response. Return True if the node's versions are known, False if the request is due again in a
        lower version. Raises the node's error, or ProtocolError if the response lists no api.

        A node that does not support the version says so and, since Kafka 2.4, names one that it supports. Each attempt
        uses a lower version than the one before, whatever the node names, so the attempts end.
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
