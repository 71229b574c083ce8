"""Decides at each poll whether to request metadata, and from which node, and handles the response. I/O thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.metadata import Metadata, MetadataRequestAndVersion
from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    KafkaError,
    ListenerNotFoundError,
    RebootstrapRequiredError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import Message, Request

_GAPS: Final = "The answer leaves out some of its partitions, so their number is not known."
_MOST_NAMED: Final = 10
"""Topics or partitions that one line of the log names."""

log = logging.getLogger(__name__)


class LeastLoadedNode(NamedTuple):
    """The node to send a request to, None if none is available now, and whether there is any connection. That one may
    be busy, throttled, or renewing its session.
    """

    node: Node | None
    is_any_connected: bool


class NodeChoice(Protocol):
    """The part of the connections that the updater needs."""

    def least_loaded(self, now_ms: int) -> LeastLoadedNode: ...

    def can_send_request(self, node_id: str, now_ms: int) -> bool: ...

    def can_connect(self, node: Node, now_ms: int) -> bool: ...

    def initiate_connect(self, node: Node, now_ms: int) -> None: ...


SendInternal = Callable[[Request, str, int], None]
"""(request, node id, now_ms): send a request whose response comes to `handle_response`."""


class MetadataUpdater(Protocol):
    """The part of the metadata that the network client needs (org.apache.kafka.clients.MetadataUpdater)."""

    def fetch_nodes(self) -> Sequence[Node]: ...

    @property
    def cluster_id(self) -> str | None:
        """The cluster of the metadata; None if no broker has named it since the start from bootstrap.servers."""
        ...

    def note_another_cluster(self) -> None:
        """A node belongs to another cluster now, and its connection will be closed."""
        ...

    def is_update_due(self, now_ms: int) -> bool:
        """Return whether an update must be sent now, and none is in flight."""
        ...

    def maybe_update(self, connections: NodeChoice, send: SendInternal, now_ms: int) -> int:
        """Send or prepare a metadata request if one is due. Return the ms until the next call."""
        ...

    def handle_disconnect(
        self, node_id: str, reason: str, fatal: KafkaError | None, now_ms: int, *, is_nonsense: bool = False
    ) -> None:
        """The connection to the node was lost or could not be made. `fatal`: the node refused this client.
        `is_nonsense`: the node sent data that is not the Kafka protocol.
        """
        ...

    def note_reachable(self, node_id: str) -> None:
        """The last attempt to connect to the node did not fail: the connection is ready for requests, or was lost later
        than that.
        """
        ...

    def handle_failed_request(self, fatal: KafkaError | None, now_ms: int) -> None:
        """The metadata request in flight will not be answered."""
        ...

    def handle_response(self, response: Message, now_ms: int) -> None: ...

    def needs_rebootstrap(self, now_ms: int) -> bool:
        """Return whether all connections must be closed and `rebootstrap` called."""
        ...

    def rebootstrap(self, now_ms: int) -> None: ...

    def close(self) -> None: ...


class DefaultMetadataUpdater:
    """Refreshes `metadata` from any of its nodes (NetworkClient.DefaultMetadataUpdater).

    `recovery_strategy` (metadata.recovery.strategy) "rebootstrap": start again from bootstrap.servers if no known node
    is available (KIP-899), if metadata could not be fetched for `rebootstrap_trigger_ms`, or if a broker asks for it
    (KIP-1102). With "none" only if no known node is left in the cluster.
    """

    def __init__(
        self,
        metadata: Metadata,
        request_timeout_ms: int,
        reconnect_backoff_ms: int,
        recovery_strategy: str,
        rebootstrap_trigger_ms: int,
    ) -> None:
        self._metadata = metadata
        self._request_timeout_ms = request_timeout_ms
        self._reconnect_backoff_ms = reconnect_backoff_ms
        self._may_rebootstrap = recovery_strategy == "rebootstrap"
        self._rebootstrap_trigger_ms = rebootstrap_trigger_ms
        self._in_progress: MetadataRequestAndVersion | None = None
        self._requested_since_ms: int | None = None
        self._must_rebootstrap = False
        self._is_elsewhere = False
        """A node belongs to another cluster now, and no metadata has come since."""
        self._logged_errors = ""

    def fetch_nodes(self) -> Sequence[Node]:
        return self._metadata.fetch().nodes

    @property
    def cluster_id(self) -> str | None:
        return self._metadata.cache.cluster_id

    def note_another_cluster(self) -> None:
        self._is_elsewhere = True

    def note_reachable(self, node_id: str) -> None:
        self._metadata.note_reachable(node_id)

    def is_update_due(self, now_ms: int) -> bool:
        return self._in_progress is None and self._metadata.time_to_next_update(now_ms) == 0

    def maybe_update(self, connections: NodeChoice, send: SendInternal, now_ms: int) -> int:
        wait_ms = self._metadata.time_to_next_update(now_ms)
        if self._in_progress is not None:
            wait_ms = max(wait_ms, self._request_timeout_ms)
        if wait_ms > 0:
            return wait_ms
        if self._requested_since_ms is None:
            self._requested_since_ms = now_ms
        node, is_any_connected = connections.least_loaded(now_ms)
        is_lost = not is_any_connected and (node is None or self._is_elsewhere)
        may_restart = self._may_rebootstrap or self._is_elsewhere
        if is_lost and may_restart and not self._metadata.fetch().is_bootstrap_configured:
            self._must_rebootstrap = True
            return 0
        if node is None:
            return self._reconnect_backoff_ms
        return self._update_from(connections, send, node, now_ms)

    def _update_from(self, connections: NodeChoice, send: SendInternal, node: Node, now_ms: int) -> int:
        if connections.can_send_request(node.id_string, now_ms):
            self._in_progress = self._metadata.new_metadata_request_and_version(now_ms)
            try:
                send(self._in_progress.request, node.id_string, now_ms)
            except BaseException:  # such as MemoryError: no answer will come
                self._in_progress = None
                raise
            return self._request_timeout_ms
        if connections.can_connect(node, now_ms):
            connections.initiate_connect(node, now_ms)
            return self._reconnect_backoff_ms
        return FOREVER_MS  # being connected, or busy: an event or a timeout of that node changes it

    def handle_disconnect(
        self,
        node_id: str,
        reason: str,
        fatal: KafkaError | None,
        now_ms: int,
        *,
        is_nonsense: bool = False,
    ) -> None:
        self._metadata.note_connection_failure(node_id, reason, is_nonsense=is_nonsense)
        if self.is_update_due(now_ms):
            self.handle_failed_request(None, now_ms)
        if fatal is not None:
            self._metadata.fatal_error(fatal)
        # The node may be gone forever, so ask for the leaders.
        self._metadata.request_update(reset_equivalent_backoff=False)

    def handle_failed_request(self, fatal: KafkaError | None, now_ms: int) -> None:
        if fatal is not None:
            self._metadata.fatal_error(fatal)
        self._metadata.failed_update(now_ms)
        self._in_progress = None

    def handle_response(self, response: Message, now_ms: int) -> None:
        update, asked = MetadataResponse.from_entity(response), self._in_progress
        self._in_progress = None
        if update.error_code == RebootstrapRequiredError.error_code and self._may_rebootstrap:
            log.info("The broker asks to start again from bootstrap.servers.")
            self._must_rebootstrap = True
        elif not update.brokers or asked is None:
            # A broker that is starting knows no nodes. Its answer is ignored.
            self._metadata.failed_update(now_ms)
        else:
            self._logged_errors = _log_errors(update, asked.request, self._logged_errors)
            self._metadata.update(asked.request_version, update, asked.is_partial, now_ms)
            self._requested_since_ms = None
            self._is_elsewhere = False

    def needs_rebootstrap(self, now_ms: int) -> bool:
        waited_ms = now_ms - self._requested_since_ms if self._requested_since_ms is not None else 0
        is_late = waited_ms > self._rebootstrap_trigger_ms
        return self._must_rebootstrap or (is_late and self._may_rebootstrap)

    def rebootstrap(self, now_ms: int) -> None:
        self._metadata.rebootstrap()
        self._requested_since_ms = now_ms
        self._must_rebootstrap = self._is_elsewhere = False

    def close(self) -> None:
        self._metadata.close()


def _log_errors(update: MetadataResponse, asked: MetadataRequest, logged: str) -> str:
    """Return the text on topics without metadata. It is a warning only if it differs from `logged`, the last one: a
    producer asks for a missing topic again and again.
    """
    errors = {topic: error_for_code(code, api="Metadata") for topic, code in update.error_codes()}
    if not asked.allow_auto_topic_creation:
        # a caller that looks for a missing topic creates it, or reports it
        errors = {
            topic: error for topic, error in errors.items() if not isinstance(error, UnknownTopicOrPartitionError)
        }
    text = ""
    if errors:
        gaps = {topic.name for topic in update.topics if topic.has_gaps}
        named = [
            f"topic {one_line(topic)}: {_GAPS if topic in gaps else error}"
            for topic, error in islice(errors.items(), _MOST_NAMED)
        ]
        named += [f"and {len(errors) - _MOST_NAMED} more topics."] if len(errors) > _MOST_NAMED else []
        is_missing = any(isinstance(error, UnknownTopicOrPartitionError) for error in errors.values())
        hint = " If the brokers are creating it, this passes." if is_missing else ""
        text = f"No metadata from the brokers for {' '.join(named)}{hint}"
        log.log(logging.DEBUG if text == logged else logging.WARNING, "%s", text)
    unreachable = [
        str(partition.topic_partition)
        for topic in update.topics
        for partition in topic.partitions
        if partition.error_code == ListenerNotFoundError.error_code
    ]
    if unreachable:
        log.warning(
            "%d partitions have a leader without a listener for us, as %s", len(unreachable), unreachable[:_MOST_NAMED]
        )
    return text
