"""A real cluster behind proxies, for faults. A timeline notes each action."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.tcp_proxy import TcpProxy
from support.workload import Place

from spark_kafka_sink.local import EmbeddedKafka

PROPERTIES = {
    "auto.create.topics.enable": False,
    "broker.session.timeout.ms": 2000,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "controlled.shutdown.retry.backoff.ms": 500,
}


class Timeline:
    """The actions and events, with their times; printed at once."""

    def __init__(self, show: Callable[[str], None] = print) -> None:
        self._began = time.monotonic()
        self._show = show
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:8.3f} s  {text}"
        self.lines.append(line)
        self._show(line)


class FaultStage:
    """A context manager: a running cluster of one or three nodes, each with a proxy in front."""

    def __init__(self, nodes: int, features: Mapping[str, int] | None = None) -> None:
        self.name = f"{nodes} nodes" + "".join(f", {name} {level}" for name, level in (features or {}).items())
        # Buffers too small for a large request.
        self.proxies = {node_id: TcpProxy(receive_buffer_bytes=65_536) for node_id in range(1, nodes + 1)}
        self.kafka = EmbeddedKafka(
            nodes,
            properties=PROPERTIES,
            features=features,
            advertised={node_id: proxy.address for node_id, proxy in self.proxies.items()},
        )
        self.timeline = Timeline()
        """The timeline of the running test."""

    def __enter__(self) -> FaultStage:
        self.kafka.start()
        for node_id, proxy in self.proxies.items():
            proxy.upstream = self.kafka.proxied_address(node_id)
            proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies.values():
            proxy.__exit__()
        self.kafka.stop()

    @property
    def direct(self) -> str:
        """Return bootstrap servers without the proxies: for checks, and for faults of brokers only."""
        return self.kafka.bootstrap_servers

    @property
    def proxied(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies.values())

    def save_logs(self, target: Path) -> None:
        self.kafka.save_logs(target)

    # ---- topics ------------------------------------------------------------------------------------------------------

    def new_topic(self, partitions: int = 1, **config: str | int) -> list[Place]:
        """Create a topic with a replica on each node. All replicas but one must be in sync. Return its partitions."""
        name, nodes = f"t{uuid.uuid4().hex[:10]}", len(self.proxies)
        self.kafka.create_topic(name, partitions, nodes, {"min.insync.replicas": max(1, nodes - 1), **config})
        return [(name, partition) for partition in range(partitions)]

    def leader(self, place: Place) -> int:
        return self.kafka.describe_topic(place[0]).partitions[place[1]].leader

    def await_in_sync(self, topic: str, replicas: int | None = None, within_s: float = 30.0) -> None:
        """Wait until every partition of the topic has a leader and that many replicas in sync (default: all)."""
        deadline, expected = time.monotonic() + within_s, replicas or len(self.proxies)
        while any(len(each.isr) < expected or each.leader < 0 for each in self.kafka.describe_topic(topic).partitions):
            assert time.monotonic() < deadline, f"{topic} does not have {expected} replicas in sync after {within_s} s"
            time.sleep(0.05)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.timeline.note(text)

    def kill(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.note(f"SIGKILL to node {node_id}")
            self.kafka.kill_node(node_id)

    def start(self, *node_ids: int) -> None:
        self.kafka.start_node(*node_ids)
        self.note(f"nodes {node_ids} are back")

    def restart(self, node_id: int) -> None:
        self.note(f"SIGTERM to node {node_id}")
        self.kafka.restart_node(node_id)
        self.note(f"node {node_id} is back")

    def suspend(self, node_id: int) -> None:
        self.note(f"SIGSTOP to node {node_id}")
        self.kafka.suspend_node(node_id)

    def resume(self, node_id: int) -> None:
        self.note(f"SIGCONT to node {node_id}")
        self.kafka.resume_node(node_id)

    def heal(self) -> None:
        """Open all connections again, and start every node."""
        for proxy in self.proxies.values():
            proxy.heal()
        self.revive(self.kafka.node_ids)

    def revive(self, node_ids: Sequence[int]) -> None:
        """Resume the suspended ones of the nodes, and start those that are down."""
        down = [node_id for node_id in node_ids if not self.kafka.node_running(node_id)]
        for node_id in set(node_ids) - set(down):
            self.kafka.resume_node(node_id)
        if down:
            self.start(*down)
