"""What the accumulator tells the Sender before a drain. Made under the accumulator's lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.producer.accumulator_partition import PartitionQueue


@dataclass(slots=True)
class ReadyCheck:
    """What can be sent, and when to look again."""

    ready_nodes: dict[int, Node] = field(default_factory=dict)
    next_check_delay_ms: int = FOREVER_MS
    waiting_nodes: set[int] = field(default_factory=set)
    """Leaders of partitions that have batches queued, to be sent now or later."""
    unknown_leader_topics: set[str] = field(default_factory=set)
    queue_sizes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic → partition with a leader → batches queued: the load by which KIP-794 chooses."""

    def consider(self, leader: Node, queue: PartitionQueue, in_a_hurry: bool, linger_ms: int, now_ms: int) -> None:
        """Count `leader` as ready when the first batch of `queue` is to go now, else note when it will be."""
        batch = queue.batches[0]
        if batch.is_backing_off(now_ms):
            self.next_check_delay_ms = min(self.next_check_delay_ms, batch.retry_at_ms - now_ms)
            return
        lingered_ms = batch.waited_ms(now_ms)
        if in_a_hurry or queue.is_full or lingered_ms >= linger_ms:
            self.ready_nodes[leader.id] = leader
        else:
            self.next_check_delay_ms = min(self.next_check_delay_ms, linger_ms - lingered_ms)
