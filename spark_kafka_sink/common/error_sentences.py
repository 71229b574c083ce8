"""What a broker's error code means where it has no class of its own, for nobody but its reader tells these apart.

Protocol guide, "Error Codes"; only those that a producer, a coordinator's client or an admin call meets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SENTENCES: Final[Mapping[int, str]] = {
    12: "The text committed with an offset is longer than the broker's offset.metadata.max.bytes.",
    22: "The group's generation is another one by now (ILLEGAL_GENERATION): its partitions were assigned anew.",
    24: "The group's name is not valid: it must not be empty.",
    25: "The group has no such member (UNKNOWN_MEMBER_ID): it left, or its session.timeout.ms is over.",
    27: "The group is assigning its partitions anew (REBALANCE_IN_PROGRESS).",
    28: "The offsets of one commit are more than a record of __consumer_offsets may hold: commit fewer of them.",
    37: "The number of partitions is not valid.",
    38: "The replication factor is not valid: it is larger than the number of brokers, or 0.",
    39: "The assignment of replicas is not valid.",
    40: "A setting of the topic is not valid.",
    41: "The server is not the controller any more (NOT_CONTROLLER).",
    44: "The server's policy (create.topic.policy.class.name) refuses it.",
    55: "Not attempted, because another part of the request was refused (OPERATION_NOT_ATTEMPTED).",
    82: "Another member with the same group.instance.id has taken over (FENCED_INSTANCE_ID).",
    89: "The quota on changes of topics and partitions is used up (THROTTLING_QUOTA_EXCEEDED): try again later.",
}


def sentence_for(error_code: int) -> str:
    """A sentence, with the code in it where we have not heard of it."""
    return _SENTENCES.get(error_code) or f"The server answered with error code {error_code}."
