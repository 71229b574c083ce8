"""A network client over the fake selector and a scripted cluster, in one thread, on a fake clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from support.fake_clock import FakeClock
from support.fake_selector import FakeNetwork, FakeSelector
from support.scripted_broker.cluster import ScriptedCluster

from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.connection_states import Resolver
from spark_kafka_sink.client.factory import network_client
from spark_kafka_sink.client.seams import ClientRequest, ClientResponse, RequestCallback
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.protocol.versions import Request

REQUEST_TIMEOUT_MS = 30_000
SETUP_TIMEOUT_MS = 10_000
RECONNECT_BACKOFF_MS = 50
REFRESH_BACKOFF_MS = 100
METADATA_EXPIRE_MS = 300_000
REBOOTSTRAP_TRIGGER_MS = 120_000

_SETTINGS = {
    "bootstrap.servers": "rig:9092",
    "client.id": "rig",
    "request.timeout.ms": REQUEST_TIMEOUT_MS,
    "socket.connection.setup.timeout.ms": SETUP_TIMEOUT_MS,
    "socket.connection.setup.timeout.max.ms": 30_000,
    "metadata.recovery.rebootstrap.trigger.ms": REBOOTSTRAP_TRIGGER_MS,
}


class ClientRig:
    """All parts of one client. Metadata begins from all nodes of the cluster, or from `addresses`.

    `beside`: a client of the same cluster and clock.
    """

    def __init__(
        self,
        node_count: int = 1,
        topics: Sequence[str] = (),
        *,
        max_in_flight: int = 5,
        recovery_strategy: str = "rebootstrap",
        addresses: Sequence[tuple[str, int]] | None = None,
        resolve: Resolver | None = None,
        reconnect_backoff_ms: int = RECONNECT_BACKOFF_MS,
        seed: int = 1,
        beside: ClientRig | None = None,
    ) -> None:
        rng = random.Random(seed)
        self.clock: FakeClock = FakeClock() if beside is None else beside.clock
        self.cluster: ScriptedCluster = ScriptedCluster(node_count) if beside is None else beside.cluster
        for topic in topics:
            self.cluster.create_topic(topic, partitions=node_count)
        self.network = FakeNetwork(self.cluster)
        self.selector = FakeSelector(self.network, self.clock)
        self.metadata = TopicsMetadata(topics, REFRESH_BACKOFF_MS, 1_000, METADATA_EXPIRE_MS, rng)
        self.metadata.bootstrap(self.network.bootstrap_addresses() if addresses is None else addresses)
        config = ProducerConfig.from_mapping(
            {
                **_SETTINGS,
                "reconnect.backoff.ms": reconnect_backoff_ms,
                "reconnect.backoff.max.ms": max(reconnect_backoff_ms, 1_000),
                "metadata.recovery.strategy": recovery_strategy,
            }
        )
        self.api_versions = ApiVersions()
        self.client = network_client(
            config,
            self.metadata,
            self.clock,
            rng,
            self.api_versions,
            selector=self.selector,
            resolve=resolve or self.network.resolve,
            max_in_flight_requests=max_in_flight,
        )
        self.states, self.updater = self.client._states, self.client._metadata_updater

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def node(self, node_id: int) -> Node:
        scripted = self.cluster.nodes[node_id]
        return Node(node_id, scripted.host, scripted.port, scripted.rack)

    def poll(self, timeout_ms: int = 0) -> list[ClientResponse]:
        return self.client.poll(timeout_ms, self.now_ms)

    def poll_until(self, condition: Callable[[], object], limit_ms: int = 60_000) -> list[ClientResponse]:
        """Poll until the condition holds; return the responses. Fails after `limit_ms` of the fake clock."""
        deadline_ms = self.now_ms + limit_ms
        responses: list[ClientResponse] = []
        while not condition():
            assert self.now_ms < deadline_ms, "the condition did not come true in time"
            before_ms = self.now_ms
            responses += self.poll(min(deadline_ms - self.now_ms, 100))
            if self.now_ms == before_ms:
                self.clock.advance(1)
        return responses

    def await_metadata(self) -> None:
        """Poll until metadata came from a broker and no update is requested."""
        self.poll_until(
            lambda: not self.metadata.fetch().is_bootstrap_configured and not self.metadata.update_requested()
        )

    def connect(self, node_id: int) -> Node:
        """Poll until a request can be sent to the node."""
        node = self.node(node_id)
        self.poll_until(lambda: self.client.ready(node, self.now_ms))
        return node

    def send(
        self,
        node_id: int,
        request: Request,
        *,
        expect_response: bool = True,
        timeout_ms: int | None = None,
        callback: RequestCallback | None = None,
    ) -> ClientRequest:
        made = self.client.new_client_request(str(node_id), request, self.now_ms, expect_response, timeout_ms, callback)
        self.client.send(made, self.now_ms)
        return made

    def consumer(self, retry_backoff_ms: int = 100) -> RequestClient:
        return RequestClient(self.client, self.metadata, self.clock, retry_backoff_ms, REQUEST_TIMEOUT_MS)
