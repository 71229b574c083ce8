"""The API versions of each connected node, and whether it still belongs to the cluster. The I/O thread writes the
versions, any thread reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from spark_kafka_sink.client.metadata_updater import MetadataUpdater
from spark_kafka_sink.common.errors import KafkaError, UnsupportedVersionError, error_for_code
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.common.version import SOFTWARE_NAME, VERSION
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message, NodeApiVersions, Request


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


_VERSIONS: Final = ApiVersionsRequest(SOFTWARE_NAME, VERSION)
CLUSTER_QUESTION: Final = MetadataRequest((), allow_auto_topic_creation=False)
"""Its answer is for `VersionDiscovery.on_cluster`, and no update of metadata."""


class VersionDiscovery:
    """What to ask a connected node before it gets other requests: its versions (KIP-511), and then its cluster if it
    was connected to before. Only the I/O thread uses it.

    An address may lead to another cluster when it is connected to again: after a disaster, behind a proxy, or because
    another machine has it now. There this client's producer id may be another producer's, and a leader would
    acknowledge our records as duplicates of that producer's. The first connection to a node is not checked: metadata
    has just named it. (With Kafka 4.3 and newer a broker can find it out by ApiVersions, KIP-1242.)
    """

    def __init__(self, registry: ApiVersions, metadata_updater: MetadataUpdater) -> None:
        self._registry = registry
        self._metadata_updater = metadata_updater
        self._due: dict[str, tuple[Request, int]] = {}
        self._were_connected: set[str] = set()
        self._unproved: dict[str, NodeApiVersions] = {}
        """The versions of nodes that have not named their cluster yet."""

    def begin(self, node_id: str) -> None:
        """The node was connected."""
        self._due[node_id] = _VERSIONS, _VERSIONS.latest_version

    def forget(self, node_id: str) -> None:
        """The node was disconnected."""
        self._due.pop(node_id, None)
        self._unproved.pop(node_id, None)
        self._registry.remove(node_id)

    def due(self) -> list[str]:
        return list(self._due)

    def take(self, node_id: str) -> tuple[Request, int]:
        """Return the request to send now, and its version. The node is not due any more."""
        return self._due.pop(node_id)

    def on_versions(self, node_id: str, asked_version: int, response: Message) -> bool:
        """Handle the versions of a node. Return True if it may get requests, False if another question is due. Raises
        the node's error, or ProtocolError if the response lists no api.

        A node that does not support the version says so and, since Kafka 2.4, names one that it supports. Each attempt
        uses a lower version than the one before, whatever the node names, so the attempts end.
        """
        code = int(response.error_code)
        try:
            if code == 0:
                return self._on_known(node_id, NodeApiVersions.from_response(response))
            if code != UnsupportedVersionError.error_code or asked_version == 0:
                raise error_for_code(code, api="ApiVersions")
        except KafkaError as error:
            text = f"Node {node_id} does not report which versions it supports: {error}"
            raise error.reworded(text) from error
        claimed = [api.max_version for api in response.api_keys if api.api_key == ApiKey.API_VERSIONS]
        self._due[node_id] = _VERSIONS, max(min(claimed[0] if claimed else 0, asked_version - 1), 0)
        return False

    def _on_known(self, node_id: str, versions: NodeApiVersions) -> bool:
        if node_id in self._were_connected and self._metadata_updater.cluster_id is not None:
            with suppress(UnsupportedVersionError):
                self._due[node_id] = CLUSTER_QUESTION, versions.usable_version(CLUSTER_QUESTION)
                self._unproved[node_id] = versions
                return False
        self._were_connected.add(node_id)
        self._note_ready(node_id, versions)
        return True

    def on_cluster(self, node_id: str, response: Message) -> None:
        """Raise KafkaError if the node belongs to another cluster than the metadata. A node need not say it."""
        known, found = self._metadata_updater.cluster_id, response.cluster_id
        if found is None or known is None or found == known:
            self._note_ready(node_id, self._unproved.pop(node_id))
            return
        self._metadata_updater.note_another_cluster()
        raise KafkaError(
            f"Node {node_id} belongs to another cluster now: {one_line(found)} instead of {one_line(known)}. It gets no"
            " records of this client."
        )

    def _note_ready(self, node_id: str, versions: NodeApiVersions) -> None:
        self._registry.update(node_id, versions)
        self._metadata_updater.note_reachable(node_id)
