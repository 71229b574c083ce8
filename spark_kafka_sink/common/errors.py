"""Every error that the package raises, one tree under `KafkaError`. No state; any thread.

The names are Kafka's own with `Error` for `Exception` (org.apache.kafka.common.errors; `KafkaTimeoutError` keeps its
prefix so that it does not hide the builtin). The attributes of a class say what to do: `retriable` (sending again may
succeed), `invalid_metadata` (our metadata is out of date), `fatal` (the producer cannot go on; an instance may differ
from its class). The attributes of an instance are facts: the topic-partition, the node, the setting, the error code.
Code decides by these and never by the text. Each error pickles, because Spark sends it from a worker to the driver.

`error_for_code` turns a broker's error code into an error (protocol guide, "Error Codes"). A code without a class of
its own becomes a `BrokerError`, an unknown code an `UnknownServerError`; both carry the code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.texts import one_line

E = TypeVar("E", bound="KafkaError")

_SETTING: Final = re.compile("`([A-Za-z0-9._*-]+)`")


class KafkaError(Exception):
    """Root of the tree. `str(error)` says what happened, to which topic, partition or node, and what to change."""

    retriable: bool = False
    """Whether the same call may succeed if it is made again."""
    invalid_metadata: ClassVar[bool] = False
    fatal: bool = False
    """Whether the producer cannot go on: close it, and make another."""
    error_code: int | None = None
    """The broker's error code (protocol guide, "Error Codes"), or None if this client raised the error by itself."""
    sentence: ClassVar[str] = ""
    """The meaning of the code, for an error without its own text."""
    advice: ClassVar[str] = ""
    """The remedy, if the brokers' own text for the code does not name it."""

    topic: str | None = None
    """The topic, if the error is about one."""
    topic_partition: TopicPartition | None = None
    """The topic and the partition, if the error is about one."""
    node: str | None = None
    """The broker's id as text."""
    setting: str | None = None
    """The option to change, by the name that the user gave."""
    report: Any = None
    """The WriteReport of the rows that `KafkaProducer.write` had delivered when it raised this error."""
    heading: str = ""
    """The places that `at` has added, for the head of the text."""
    hint: str = ""
    """A sentence for the end of the text: what else may be the cause."""

    def __init__(
        self,
        message: str = "",
        *,
        topic: str | None = None,
        topic_partition: TopicPartition | None = None,
        node: str | None = None,
        setting: str | None = None,
    ) -> None:
        """Take the text, and the facts that the text names already."""
        super().__init__(message or self.sentence or type(self).__name__)
        if topic_partition is not None:
            self.topic_partition, self.topic = topic_partition, topic_partition.topic
        if topic is not None:
            self.topic = topic
        if node is not None:
            self.node = node
        if setting is not None:
            self.setting = setting

    def __str__(self) -> str:
        return f"{self.heading}{self.args[0]}{self.hint}"

    @property
    def text(self) -> str:
        """What happened, without the places that `at` has added."""
        return str(self.args[0])

    def at(
        self: E, *, topic: str | None = None, topic_partition: TopicPartition | None = None, node: str | None = None
    ) -> E:
        """Return a copy with one more fact, which its text begins with. Return the error itself if it has that fact.

        Give one of the three. An error with a topic-partition has its topic too.
        """
        if (topic or self.topic, topic_partition or self.topic_partition, node or self.node) == (
            self.topic,
            self.topic_partition,
            self.node,
        ):
            return self
        located = self.copied()
        if topic_partition is not None:
            place = str(topic_partition)
            located.topic_partition, located.topic = topic_partition, topic_partition.topic
        elif topic is not None:
            place = f"Topic {one_line(topic)}"
            located.topic = topic
        else:
            place = f"Node {node}"
            located.node = node
        located.heading = f"{place}: {self.heading}"
        return located

    def reworded(self: E, text: str, *, retriable: bool = True) -> E:
        """Return an error with the same class and facts that says `text`. If not `retriable`, its cause must not be
        sent again, whatever its class says.
        """
        found = type(self)(text)
        found.__dict__ = {**self.__dict__, **found.__dict__}
        found.heading = found.hint = ""
        found.retriable = retriable and self.retriable
        return found

    def copied(self: E) -> E:
        """Return a copy for one of the many callers that it is raised to: one object would collect the tracebacks of
        all, from any thread, and keep their frames alive.
        """
        own = copy.copy(self).with_traceback(self.__traceback__)
        own.__cause__, own.__context__ = self.__cause__, self.__context__
        own.__suppress_context__ = self.__suppress_context__  # setting a cause has set it
        return own

    @classmethod
    def advised(cls, text: str) -> str:
        """Return a broker's `text` for the code with the class's advice; the text itself if it is empty."""
        return f"{text.rstrip('.')}. {cls.advice}" if text and cls.advice else text


# ---- settings, columns, misuse, the embedded broker ----------------------------------------------------------------


class ConfigError(KafkaError):
    """An option is unknown, malformed, or contradicts another. Names the option.

    Backquotes in the text mark the name of a producer setting: "`acks` must be all". The error shows them without the
    quotes, and `named` with the prefix that its caller uses.
    """

    def __init__(self, message: str = "", *, setting: str | None = None) -> None:
        super().__init__(_SETTING.sub(r"\1", message), setting=setting)
        self.marked = message

    def named(self, prefix: str) -> ConfigError:
        """Return the error with `prefix` ("kafka.") before each setting in its text, and before its fact `setting`."""
        setting = None if self.setting is None else prefix + self.setting
        return ConfigError(_SETTING.sub(rf"`{prefix}\1`", self.marked), setting=setting)


class SchemaError(KafkaError):
    """A DataFrame's columns cannot be written to Kafka. Names the column."""


class TooManyDeadLettersError(KafkaError):
    """More rows of a micro-batch or write cannot be written than errors.deadletterqueue.max.rows allows."""


class WriteLimitError(KafkaError):
    """A batch is too large for write.max.records.per.second or write.max.bytes.per.second: its transaction would time
    out before all rows are sent.
    """


class RegistryError(KafkaError):
    """No address of schema.registry.url answers as a schema registry."""

    fault: str = ""
    """The kind of failure: a name of serialization/registry.py, empty if it has none."""


class IllegalStateError(KafkaError):
    """A call that the object's state does not allow: a send after close, a commit without a begin."""


class LocalBrokerError(KafkaError):
    """The embedded broker cannot be fetched, started or reached."""


# ---- raised by the client itself -----------------------------------------------------------------------------------


class RetriableError(KafkaError):
    """Parent of the errors after which the same call may succeed."""

    retriable = True


class InvalidMetadataError(RetriableError):
    """Parent of the errors that show that the producer's metadata is out of date."""

    invalid_metadata = True


class KafkaTimeoutError(RetriableError):
    """A limit in time was reached: max.block.ms, request.timeout.ms or delivery.timeout.ms; the text says which."""


class LimitServerError(RetriableError):
    """A task cannot reach the process on the driver's machine that keeps the limits of a write, so it sends nothing."""


class BufferExhaustedError(KafkaTimeoutError):
    """buffer.memory stayed full for max.block.ms."""


class DisconnectError(InvalidMetadataError):
    """The connection was lost while a request was in flight."""

    error_code = 13
    sentence = "The server disconnected before a response was received."


class BootstrapResolutionError(KafkaError):
    """No address of bootstrap.servers can be resolved."""


class SerializationError(KafkaError):
    """A record or an offset cannot be put into bytes: a key that is neither str nor bytes, a header without a name."""


class ProtocolError(KafkaError):
    """Bytes from a peer that are not the Kafka protocol: an impossible frame length, a wrong correlation id, a message
    that does not parse.
    """


class CorruptBatchError(ProtocolError):
    """A record batch whose checksum or layout is wrong."""


class ProducerClosedError(IllegalStateError):
    """The producer was closed before or during the call."""


class TransactionAbortedError(KafkaError):
    """The transaction was aborted, by the user or by a close, and no error was the reason: its records that were not
    sent are dropped (Kafka's TransactionAbortedException).
    """


# ---- the broker's error codes --------------------------------------------------------------------------------------


class BrokerError(KafkaError):
    """The error of a code without a class. `error_code` is the code."""


class CommitFailedError(BrokerError):
    """The group's generation or member in `send_offsets_to_transaction` is not a current one (codes 22 and 25): the
    group has rebalanced. Abort the transaction, and read again from the committed offsets.
    """


class UnknownServerError(KafkaError):
    """Also an error code that this client does not know, as in Kafka's Errors.forCode; then `error_code` is that."""

    error_code = -1
    sentence = "The server had an unexpected error. Its log says more."


class OffsetOutOfRangeError(KafkaError):
    error_code = 1
    sentence = "The offset is outside the range that the server keeps for this partition."


class CorruptMessageError(RetriableError):
    error_code = 2
    sentence = "The server found a record batch with a wrong checksum, size or layout."


class UnknownTopicOrPartitionError(InvalidMetadataError):
    error_code = 3
    sentence = "The server does not host this topic-partition."


class LeaderNotAvailableError(InvalidMetadataError):
    error_code = 5
    sentence = "There is no leader for this topic-partition: an election is under way."


class NotLeaderOrFollowerError(InvalidMetadataError):
    error_code = 6
    sentence = "The server is not the leader of this topic-partition."


class RequestTimedOutError(RetriableError):
    error_code = 7
    sentence = "The server could not answer within the request's time limit."


class ReplicaNotAvailableError(InvalidMetadataError):
    error_code = 9
    sentence = "The replica is not available for this topic-partition."


class RecordTooLargeError(KafkaError):
    error_code = 10
    sentence = "A record is larger than the limit: max.request.size here, max.message.bytes on the topic."


class CoordinatorLoadInProgressError(RetriableError):
    error_code = 14
    sentence = "The coordinator is still loading its state."


class CoordinatorNotAvailableError(RetriableError):
    error_code = 15
    sentence = "The coordinator is not available."


class NotCoordinatorError(RetriableError):
    error_code = 16
    sentence = "The server is not the coordinator any more."


class InvalidTopicError(KafkaError):
    error_code = 17
    sentence = "The topic name is not valid: up to 249 characters of [a-zA-Z0-9._-], not '.' or '..'."


class RecordBatchTooLargeError(KafkaError):
    error_code = 18
    sentence = "The record batch is larger than the topic's segment.bytes: lower batch.size or raise segment.bytes."


class NotEnoughReplicasError(RetriableError):
    error_code = 19
    sentence = "Fewer replicas are in sync than min.insync.replicas asks for."


class NotEnoughReplicasAfterAppendError(RetriableError):
    error_code = 20
    sentence = "The records were written, but to fewer in-sync replicas than min.insync.replicas asks for."


class InvalidRequiredAcksError(KafkaError):
    error_code = 21
    sentence = "The server does not support this acks setting."


class AuthorizationError(KafkaError):
    """The principal lacks a permission; the text names the resource and the operation to grant."""


class AuthenticationError(KafkaError):
    """The login failed: the peer refused this client's identity, or the peer's identity could not be verified."""

    fatal = True


class TopicAuthorizationError(AuthorizationError):
    error_code = 29
    sentence = "Not authorized for the topic: grant WRITE and DESCRIBE on it."


class GroupAuthorizationError(AuthorizationError):
    error_code = 30
    sentence = "Not authorized for the group: grant READ on it."


class ClusterAuthorizationError(AuthorizationError):
    error_code = 31
    sentence = "Not authorized for the cluster: grant IDEMPOTENT_WRITE, or WRITE on at least one topic."
    fatal = True


class InvalidTimestampError(KafkaError):
    error_code = 32
    advice = (
        "Timestamps must be in milliseconds since 1970, not in microseconds or nanoseconds. A record without one gets"
        " the time of the machine that writes it: correct that machine's clock if it is wrong. If this timestamp is"
        " right, raise message.timestamp.after.max.ms or message.timestamp.before.max.ms of the topic."
    )
    sentence = f"A record's timestamp is out of the range that the topic accepts. {advice}"


class UnsupportedSaslMechanismError(AuthenticationError):
    error_code = 33
    sentence = "The server does not offer this SASL mechanism."


class IllegalSaslStateError(AuthenticationError):
    error_code = 34
    sentence = "The request does not fit the SASL state. Is the port a SASL listener?"


class UnsupportedVersionError(KafkaError):
    error_code = 35
    sentence = (
        "The server does not accept the version of this request that it announced. If its transaction.version or"
        " metadata.version was lowered, raise it again, and restart this process."
    )
    oldest_release: str | None = None
    """The oldest Kafka release that supports the option, if the error names one."""


class TopicExistsError(KafkaError):
    error_code = 36
    sentence = "The topic exists already."


class InvalidRequestError(KafkaError):
    error_code = 42
    sentence = "The server refused the request as malformed. Its log says more."


class OutOfOrderSequenceError(KafkaError):
    error_code = 45
    sentence = "The server received a sequence number out of order."


class DuplicateSequenceError(KafkaError):
    error_code = 46
    sentence = "The server has these records already."


class InvalidProducerEpochError(KafkaError):
    error_code = 47
    sentence = (
        "The producer's epoch is older than the one that the server knows: its transaction was open longer than"
        " transaction.timeout.ms, and the broker aborted it; or a newer producer has the transactional id."
    )


class InvalidTxnStateError(KafkaError):
    error_code = 48
    sentence = "The transaction is not in a state that allows this operation."
    fatal = True


class InvalidPidMappingError(KafkaError):
    error_code = 49
    sentence = "The producer id is not the one of this transactional id, or the server does not know it."


class InvalidTransactionTimeoutError(KafkaError):
    error_code = 50
    sentence = "transaction.timeout.ms is larger than the server's transaction.max.timeout.ms."
    fatal = True


class ConcurrentTransactionsError(RetriableError):
    error_code = 51
    sentence = (
        "The previous transaction of this transactional id is not completed yet. If that lasts, its end marker cannot"
        " be written: a partition of it has no leader, or fewer in-sync replicas than min.insync.replicas; or settings"
        " of a topic refuse the marker."
    )


class TransactionCoordinatorFencedError(KafkaError):
    error_code = 52
    sentence = "The transaction coordinator was replaced by a newer one."


class TransactionalIdAuthorizationError(AuthorizationError):
    error_code = 53
    sentence = "Not authorized for the transactional id: grant WRITE and DESCRIBE on it."
    fatal = True


class KafkaStorageError(InvalidMetadataError):
    error_code = 56
    sentence = "The server could not reach its log folder."


class SaslAuthenticationError(AuthenticationError):
    error_code = 58
    sentence = "SASL authentication failed."


class SslAuthenticationError(AuthenticationError):
    """The TLS handshake failed permanently: an untrusted, expired or foreign certificate, or no common version."""

    fault: str = ""
    """The kind of failure: a name of network/tls.py, empty if it has none."""


class UnknownProducerIdError(OutOfOrderSequenceError):
    error_code = 59
    sentence = "The server has no state for this producer id."


class ListenerNotFoundError(InvalidMetadataError):
    error_code = 72
    sentence = "The leader has no listener with the name of the one that the request used."


class FencedLeaderEpochError(InvalidMetadataError):
    error_code = 74
    sentence = "The leader epoch in the request is older than the server's."


class UnknownLeaderEpochError(RetriableError):
    error_code = 75
    sentence = "The leader epoch in the request is newer than the server's."


class UnsupportedCompressionTypeError(KafkaError):
    error_code = 76
    sentence = "The server does not support this compression.type."


class OffsetNotAvailableError(RetriableError):
    error_code = 78
    sentence = "The leader's high watermark has not caught up with its election."


class InvalidRecordError(KafkaError):
    error_code = 87
    sentence = "The server refused the record, as it does a null key in a compacted topic."


class UnstableOffsetCommitError(RetriableError):
    error_code = 88
    sentence = "The offset belongs to a transaction that has not ended."


class ProducerFencedError(KafkaError):
    error_code = 90
    sentence = "A newer producer with the same transactional id has taken over."
    fatal = True


class UnknownTopicIdError(InvalidMetadataError):
    error_code = 100
    sentence = "The server does not host a topic with this id."


class InconsistentTopicIdError(InvalidMetadataError):
    error_code = 103
    sentence = "The topic's id on the server is another one."


class TransactionalIdNotFoundError(KafkaError):
    error_code = 105
    sentence = "The transactional id is not known to the server."


class TransactionAbortableError(KafkaError):
    error_code = 120
    sentence = "The transaction had an error and can only be aborted."


class RebootstrapRequiredError(KafkaError):
    error_code = 129
    sentence = "The server asks the client to start again from bootstrap.servers."


# ---- codes without a class: the text says what they mean -------------------------------------------------------------

_SENTENCES: Final[Mapping[int, str]] = {
    4: "The size of a fetch is not valid (INVALID_FETCH_SIZE).",
    8: "The broker is not available (BROKER_NOT_AVAILABLE): it is starting, or it is shutting down.",
    11: "The controller's epoch is older than the broker's (STALE_CONTROLLER_EPOCH).",
    12: "The text committed with an offset is longer than the broker's offset.metadata.max.bytes.",
    22: "The group has a newer generation (ILLEGAL_GENERATION): its partitions were assigned again.",
    23: "The group's members have no protocol in common (INCONSISTENT_GROUP_PROTOCOL).",
    24: "The group's name is not valid: it must not be empty.",
    25: "The group has no such member (UNKNOWN_MEMBER_ID): it left, or its session.timeout.ms is over.",
    26: "The session timeout is outside the broker's limits (INVALID_SESSION_TIMEOUT).",
    27: "The group is assigning its partitions again (REBALANCE_IN_PROGRESS).",
    28: "The offsets of one commit are more than a record of __consumer_offsets may hold: commit fewer of them.",
    37: "The number of partitions is not valid.",
    38: "The replication factor is not valid: it is larger than the number of brokers, or 0.",
    39: "The assignment of replicas is not valid.",
    40: "A setting of the topic is not valid.",
    41: "The server is not the controller any more (NOT_CONTROLLER).",
    43: "The topic's message.format.version is too old (UNSUPPORTED_FOR_MESSAGE_FORMAT): an idempotent producer"
    " needs 0.11 or newer. Raise message.format.version of the topic, or set enable.idempotence=false.",
    44: "The server's policy (create.topic.policy.class.name) refuses it.",
    54: "The broker has no security features (SECURITY_DISABLED): it has no authorizer.",
    55: "Not attempted, because another part of the request was refused (OPERATION_NOT_ATTEMPTED).",
    57: "The broker has no such log folder (LOG_DIR_NOT_FOUND).",
    60: "The partition is being reassigned (REASSIGNMENT_IN_PROGRESS).",
    61: "The broker has no delegation.token.secret.key (DELEGATION_TOKEN_AUTH_DISABLED).",
    62: "The broker does not know the delegation token (DELEGATION_TOKEN_NOT_FOUND).",
    63: "The delegation token belongs to another user (DELEGATION_TOKEN_OWNER_MISMATCH).",
    64: "This listener accepts no requests for delegation tokens (DELEGATION_TOKEN_REQUEST_NOT_ALLOWED).",
    65: "Not authorized for the delegation token (DELEGATION_TOKEN_AUTHORIZATION_FAILED).",
    66: "The delegation token is expired (DELEGATION_TOKEN_EXPIRED): get a new one.",
    67: "The type of the principal is not valid (INVALID_PRINCIPAL_TYPE).",
    68: "The group still has members (NON_EMPTY_GROUP).",
    69: "The group does not exist (GROUP_ID_NOT_FOUND).",
    70: "The broker does not know the fetch session (FETCH_SESSION_ID_NOT_FOUND).",
    71: "The epoch of the fetch session is not valid (INVALID_FETCH_SESSION_EPOCH).",
    73: "The broker deletes no topics (TOPIC_DELETION_DISABLED): delete.topic.enable is false.",
    77: "The broker's epoch is older than the controller's (STALE_BROKER_EPOCH).",
    79: "The group requires a member id first (MEMBER_ID_REQUIRED).",
    80: "The preferred leader is not available (PREFERRED_LEADER_NOT_AVAILABLE).",
    81: "The group is full (GROUP_MAX_SIZE_REACHED): group.max.size of the broker.",
    82: "Another member with the same group.instance.id has taken over (FENCED_INSTANCE_ID).",
    83: "No replica may become leader (ELIGIBLE_LEADERS_NOT_AVAILABLE).",
    84: "The partition needs no election (ELECTION_NOT_NEEDED).",
    85: "The partition is not being reassigned (NO_REASSIGNMENT_IN_PROGRESS).",
    86: "The group reads the topic (GROUP_SUBSCRIBED_TO_TOPIC).",
    89: "The quota on changes of topics and partitions is used up (THROTTLING_QUOTA_EXCEEDED): try again later.",
    91: "The broker does not know the resource (RESOURCE_NOT_FOUND).",
    92: "The resource exists already (DUPLICATE_RESOURCE).",
    93: "The credential is not acceptable (UNACCEPTABLE_CREDENTIAL).",
    94: "The controllers know different voters (INCONSISTENT_VOTER_SET).",
    95: "The version of the update is not valid (INVALID_UPDATE_VERSION).",
    96: "The features could not be updated (FEATURE_UPDATE_FAILED).",
    97: "A broker could not read the principal that another sent (PRINCIPAL_DESERIALIZATION_FAILURE).",
    98: "The snapshot does not exist (SNAPSHOT_NOT_FOUND).",
    99: "The position is outside the snapshot (POSITION_OUT_OF_RANGE).",
    101: "Another broker has the same node.id (DUPLICATE_BROKER_REGISTRATION).",
    102: "The broker is not registered (BROKER_ID_NOT_REGISTERED).",
    104: "The broker belongs to another cluster (INCONSISTENT_CLUSTER_ID).",
    106: "The fetch session knows the topic by another id (FETCH_SESSION_TOPIC_ID_ERROR).",
    107: "The replica cannot join the in-sync replicas (INELIGIBLE_REPLICA).",
    108: "A new leader was elected meanwhile (NEW_LEADER_ELECTED).",
    109: "The offset is in tiered storage (OFFSET_MOVED_TO_TIERED_STORAGE).",
    110: "The group has fenced this member's epoch (FENCED_MEMBER_EPOCH).",
    111: "Another member still has the group.instance.id (UNRELEASED_INSTANCE_ID).",
    112: "The broker has no such assignor (UNSUPPORTED_ASSIGNOR).",
    113: "The member's epoch is old (STALE_MEMBER_EPOCH).",
    114: "The address is a controller's instead of a broker's, or the reverse (MISMATCHED_ENDPOINT_TYPE): check"
    " bootstrap.servers.",
    115: "The server does not serve this type of endpoint (UNSUPPORTED_ENDPOINT_TYPE).",
    116: "The controller's id is not known (UNKNOWN_CONTROLLER_ID).",
    117: "The broker does not know the metrics subscription (UNKNOWN_SUBSCRIPTION_ID).",
    118: "The metrics are larger than the broker accepts (TELEMETRY_TOO_LARGE).",
    119: "The controller refuses the broker's registration (INVALID_REGISTRATION).",
    121: "The record's state does not allow its acknowledgement (INVALID_RECORD_STATE).",
    122: "The share session does not exist (SHARE_SESSION_NOT_FOUND).",
    123: "The epoch of the share session is not valid (INVALID_SHARE_SESSION_EPOCH).",
    124: "The share group's state has another epoch (FENCED_STATE_EPOCH).",
    125: "The voter's key is another one (INVALID_VOTER_KEY).",
    126: "The voter is there already (DUPLICATE_VOTER).",
    127: "The voter does not exist (VOTER_NOT_FOUND).",
    128: "The regular expression is not valid (INVALID_REGULAR_EXPRESSION).",
    130: "The streams topology is not valid (STREAMS_INVALID_TOPOLOGY).",
    131: "The epoch of the streams topology is not valid (STREAMS_INVALID_TOPOLOGY_EPOCH).",
    132: "The streams topology is old (STREAMS_TOPOLOGY_FENCED).",
    133: "The broker has the maximum number of share sessions (SHARE_SESSION_LIMIT_REACHED).",
}
"""A code that no request of this client should meet has a short sentence with its name."""


def _classes_below(parent: type[KafkaError]) -> list[type[KafkaError]]:
    return [each for child in parent.__subclasses__() for each in (child, *_classes_below(child))]


_CLASS_BY_CODE: dict[int, type[KafkaError]] = {
    error_class.error_code: error_class
    for error_class in _classes_below(KafkaError)
    if error_class.error_code is not None
}


def error_for_code(error_code: int, message: str = "", api: str = "", node: str = "") -> KafkaError:
    """Return the error of a broker's non-zero code. `message`, on one line, replaces the class's sentence if it is not
    empty; the class's advice follows it. The request (`api`, such as "Produce") and the node's id are in the text of a
    code that this client does not know.
    """
    error_class = _CLASS_BY_CODE.get(error_code)
    if error_class is not None:
        return error_class(error_class.advised(one_line(message)))
    sentence = _SENTENCES.get(error_code)
    error: KafkaError
    if sentence is not None:
        error = BrokerError(one_line(message) or sentence)
    else:
        text = f"It said: {one_line(message)}" if message else "Its log says more."
        error = UnknownServerError(
            f"{f'Node {node}' if node else 'The server'} answered {api or 'a request'} with error code {error_code},"
            f" which this client does not know. {text}"
        )
    error.error_code = error_code
    error.node = node or None
    return error
