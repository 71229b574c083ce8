"""The prefixes of exactly-once batch writes without a given prefix: names of a pool that the whole cluster shares.

Brokers keep each transactional id and each group for days (transactional.id.expiration.ms, offsets.retention.minutes),
so that a new prefix for each write would leave as many as there are writes times tasks. A name of the pool belongs to
one write at a time. The write holds it by an open transaction of the id `<name>/claim`, to which the decision topic is
added and nothing is written, so that no reader waits for it. Its state tells other applications whether the name is
free (KIP-664): committed by a write that ended well, or unknown to its coordinator. A claim that timed out is of a
write that failed or died: that name is not used until its coordinator forgets it, because errors tell the operator to
settle that write by its name.

Kafka has no request that claims an id only if it is free. But each InitProducerId gives the next epoch: only the write
that gets the epoch after the one it saw has the name. Any other write leaves the name, and has touched no driver.

No state. The thread of the caller.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.errors import InvalidProducerEpochError, KafkaError, ProducerFencedError
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.options import SinkConfig

log = logging.getLogger(__name__)

_ONE_OFF: Final = re.compile(r"spark-kafka-sink-(write-\d+|[0-9a-f]{32})")
"""Releases before the pool drew 32 digits for each write."""
_FIRST_WINDOW: Final = 16
"""Names that are asked for at once; then twice as many."""
_RELEASED: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT})
"""The states of the claim of a write that ended well."""


class Claim(NamedTuple):
    """A name that one write has. `transaction` stays open as long as the write has it."""

    prefix: str
    transaction: OpenTransaction


def pool_name(number: int) -> str:
    """Return the prefix of this number in the pool, from 0."""
    return f"spark-kafka-sink-write-{number}"


def is_one_off(prefix: str) -> bool:
    """Return whether it is the prefix of a batch write without a given prefix; streams have other prefixes."""
    return _ONE_OFF.fullmatch(prefix) is not None


def claim_name(client: ClusterClient, config: SinkConfig, rng: random.Random) -> Claim:
    """Claim a free name for kafka.transaction.timeout.ms, as long as the write's own transactions may be open.

    Creates the decision topic if it is missing. Raises KafkaError.
    """
    timeout_ms = config.producer.transaction_timeout_ms
    # Asked before the names are looked at: what comes between the look and the claim lets two writes take one name.
    version = KafkaDriverCluster(client, config, pool_name(0), is_one_off=True).transaction_version()
    is_old = False
    for prefix, found in _free_names(client, config, rng):
        name, timer, seen = _claim_id(prefix), client.timer(config.producer.max_block_ms), found
        place = KafkaDriverCluster(client, config, prefix, is_one_off=True).place
        if is_old:
            seen = client.transactions.describe_transactions([name], timer)[name]
            if not _is_free(seen):
                continue
        own = client.transactions.init_producer_id(name, timeout_ms, timer, None)
        claim = Claim(prefix, OpenTransaction.of(name, own, version))
        if _is_next(own, seen):
            try:
                client.writer.add_partitions({claim.transaction: [place]}, timer)
            except (ProducerFencedError, InvalidProducerEpochError):
                pass  # another write has come after this one, and leaves the name, too
            else:
                return claim
        is_old = True
        log.info("Another write took the name %s at the same moment; trying the next one", prefix)
    raise AssertionError("the pool has no last name")


def release_name(client: ClusterClient, config: SinkConfig, claim: Claim) -> None:
    """Release the name for other writes. Only for a write that was committed, or of which nothing is open or decided.

    A claim that cannot be ended now ends by its timeout, and its name is not used for some days.
    """
    timer = client.timer(config.producer.max_block_ms)
    try:
        (ended,) = client.transactions.end_txns([claim.transaction], timer, committed=True)
        error = ended.error
    except KafkaError as failed:
        error = failed
    if error is not None:
        log.warning("The write has ended, and its name %s is not used again for some days: %s", claim.prefix, error)


def _claim_id(prefix: str) -> str:
    return f"{prefix}/claim"


def _is_free(claim: TransactionDescription | None) -> bool:
    """Return whether a write may claim a name. `claim`: the last claim by its coordinator, or None if there is none."""
    return claim is None or claim.state in _RELEASED


def _is_next(own: ProducerIdAndEpoch, seen: TransactionDescription | None) -> bool:
    """Return whether no other InitProducerId came between: a coordinator counts the epochs of an id, from 0 for a new
    one.
    """
    if seen is None:
        return own.epoch == 0
    return own == seen.producer._replace(epoch=seen.producer.epoch + 1)


def _free_names(
    client: ClusterClient, config: SinkConfig, rng: random.Random
) -> Iterator[tuple[str, TransactionDescription | None]]:
    """Yield names and what was seen of their claims. Of each window those that a write gave back come before those that
    no write has had. The order is random, so that two writes that look at one time seldom try the same name.
    """
    first, size = 0, _FIRST_WINDOW
    while True:
        names = [pool_name(number) for number in range(first, first + size)]
        timer = client.timer(config.producer.max_block_ms)
        described = client.transactions.describe_transactions(map(_claim_id, names), timer)
        rng.shuffle(names)
        claims = {name: described[_claim_id(name)] for name in names}
        yield from (each for each in claims.items() if each[1] is not None and each[1].state in _RELEASED)
        yield from (each for each in claims.items() if each[1] is None)
        first, size = first + size, 2 * size
