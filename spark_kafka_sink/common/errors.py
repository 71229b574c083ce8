"""Every error the package raises, one tree under `KafkaError`.

The names are Kafka's own with `Error` for `Exception` (org.apache.kafka.common.errors; `KafkaTimeoutError` keeps its
prefix so that it does not hide the builtin). A class says by attributes what to do about it: `retriable` (sending
again may succeed), `invalid_metadata` (and our view of the cluster is out of date), `fatal` (the producer can do no
more; one that knows better says so of the error itself). Each takes one text and pickles, for Spark's driver to see.

`error_for_code` turns a broker's error code into its class, or into a `BrokerError` or an `UnknownServerError` that
carries the code.
"""

from __future__ import annotations

from typing import ClassVar

from spark_kafka_sink.common.error_sentences import sentence_for
from spark_kafka_sink.common.peer_text import one_line


class KafkaError(Exception):
    """Root of the tree. `str(error)` says what happened, to which topic, partition or node, and what to change."""

    retriable: bool = False
    invalid_metadata: ClassVar[bool] = False
    fatal: bool = False
    error_code: int | None = None
    """The broker's error code (protocol guide, "Error Codes"), or None where the error arose on our side."""
    sentence: ClassVar[str] = ""
    """What the code means, for an error that comes without a text of its own."""
    advice: ClassVar[str] = ""
    """What to change, where the brokers' own text for the code does not say it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.sentence or type(self).__name__)

    @classmethod
    def advised(cls, text: str) -> str:
        """Return a broker's `text` for the code with the class's advice; the text itself if it is empty."""
        return f"{text.rstrip('.')}. {cls.advice}" if text and cls.advice else text


# ---- settings, columns, misuse, the embedded broker ----------------------------------------------------------------


class ConfigError(KafkaError):
    """An option is unknown, malformed, or contradicts another. Names the option."""


class SchemaError(KafkaError):
    """A DataFrame's columns cannot be written to Kafka. Names the column."""


class IllegalStateError(KafkaError):
    """A call that the object's state does not allow: a send after close, a commit without a begin."""


class LocalBrokerError(KafkaError):
    """The embedded broker cannot be fetched, started or reached."""


# ---- raised by the client itself -----------------------------------------------------------------------------------


class RetriableError(KafkaError):
    retriable = True


class InvalidMetadataError(RetriableError):
    invalid_metadata = True


class KafkaTimeoutError(RetriableError):
    """A limit in time was reached: max.block.ms, request.timeout.ms or delivery.timeout.ms; the text says which."""


class BufferExhaustedError(KafkaTimeoutError):
    """buffer.memory stayed full for max.block.ms."""


class DisconnectError(InvalidMetadataError):
    """The connection went away while a request was under way."""

    error_code = 13
    sentence = "The server disconnected before a response was received."


class BootstrapResolutionError(KafkaError):
    """No address of bootstrap.servers can be resolved."""


class SerializationError(KafkaError):
    """A record or an offset cannot be put into bytes: a key that is neither str nor bytes, a header without a name."""


class ProtocolError(KafkaError):
    """Bytes from a peer that are not the Kafka protocol: a wild frame length, a wrong correlation id, a message that
    does not parse.
    """


class CorruptBatchError(ProtocolError):
    """A record batch whose checksum or layout is wrong."""


class ProducerClosedError(IllegalStateError):
    """The producer was closed while this was under way, or before."""


class TransactionAbortedError(KafkaError):
    """The transaction was aborted, by the user or by a close, and no error was the reason: its records that were not
    sent are dropped (Kafka's TransactionAbortedException).
    """


# ---- the broker's error codes --------------------------------------------------------------------------------------


class BrokerError(KafkaError):
    """An error code that has no class of its own; `error_code` tells which."""


class CommitFailedError(BrokerError):
    """The group's generation or member in `send_offsets_to_transaction` is not a current one (codes 22 and 25): the
    group has rebalanced. Abort the transaction, and read again from the committed offsets.
    """


class UnknownServerError(KafkaError):
    """Also an error code that this client does not know, as in Kafka's Errors.forCode; then `error_code` is that."""

    error_code = -1
    sentence = "The server met an unexpected error. Its log says more."


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
    sentence = "The acks setting is not one the server takes."


class AuthorizationError(KafkaError):
    """The principal lacks a permission; the text names the resource and the operation to grant."""


class AuthenticationError(KafkaError):
    """We are not taken for who we say we are, or the peer is not who it says it is. The text names what to change."""

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
        "Timestamps must be in milliseconds since 1970, not in microseconds or nanoseconds. If this one is right, raise"
        " message.timestamp.after.max.ms or message.timestamp.before.max.ms of the topic."
    )
    sentence = f"A record's timestamp is out of the range that the topic accepts. {advice}"


class UnsupportedSaslMechanismError(AuthenticationError):
    error_code = 33
    sentence = "The server does not offer this SASL mechanism."


class IllegalSaslStateError(AuthenticationError):
    error_code = 34
    sentence = "A request that does not fit the SASL state; is the port a SASL listener?"


class UnsupportedVersionError(KafkaError):
    error_code = 35
    sentence = "The server does not speak a version of this request that we speak."


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
    sentence = "The producer's epoch is older than the one that the server knows."


class InvalidTxnStateError(KafkaError):
    error_code = 48
    sentence = "The transaction is not in a state that allows this operation."
    fatal = True


class InvalidPidMappingError(KafkaError):
    error_code = 49
    sentence = "The producer id is not the one assigned to this transactional id."


class InvalidTransactionTimeoutError(KafkaError):
    error_code = 50
    sentence = "transaction.timeout.ms is larger than the server's transaction.max.timeout.ms."
    fatal = True


class ConcurrentTransactionsError(RetriableError):
    error_code = 51
    sentence = "The previous transaction of this transactional id is not completed yet."


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
    """The TLS handshake failed for good: an untrusted, expired or foreign certificate, or no common version."""


class UnknownProducerIdError(OutOfOrderSequenceError):
    error_code = 59
    sentence = "The server has no state for this producer id."


class ListenerNotFoundError(InvalidMetadataError):
    error_code = 72
    sentence = "The leader has no listener like the one that the request came by."


class FencedLeaderEpochError(InvalidMetadataError):
    error_code = 74
    sentence = "The leader epoch in the request is older than the server's."


class UnknownLeaderEpochError(RetriableError):
    error_code = 75
    sentence = "The leader epoch in the request is newer than the server's."


class UnsupportedCompressionTypeError(KafkaError):
    error_code = 76
    sentence = "The server does not take this compression.type."


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
    sentence = "The transaction met an error and can only be aborted."


class RebootstrapRequiredError(KafkaError):
    error_code = 129
    sentence = "The server asks the client to start again from bootstrap.servers."


def _classes_below(parent: type[KafkaError]) -> list[type[KafkaError]]:
    return [each for child in parent.__subclasses__() for each in (child, *_classes_below(child))]


_CLASS_BY_CODE: dict[int, type[KafkaError]] = {
    error_class.error_code: error_class
    for error_class in _classes_below(KafkaError)
    if error_class.error_code is not None
}


def error_for_code(error_code: int, message: str = "", api: str = "", node: str = "") -> KafkaError:
    """The error of a broker's non-zero code; `message`, on one line, stands for the class's sentence if not empty. The
    class's advice follows it. The request (`api`, "Produce" for one) and the node's id are told with a code that this
    client does not know.
    """
    error_class = _CLASS_BY_CODE.get(error_code)
    if error_class is not None:
        return error_class(error_class.advised(one_line(message)))
    sentence = sentence_for(error_code)
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
    return error
