"""The operator's command of exactly-once delivery: python -m spark_kafka_sink.transactions.

It lists decisions and open transactions, and settles those that no query will: `finish` commits a decided batch,
`abort` aborts undecided transactions, `accept` closes a batch whose rows were lost, `forget` frees a prefix, and
`adopt` moves a query to another decision topic, or lets one without a known decision begin at any batch. All but `list`
make a batch fail that a query is writing, and ask first.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.transaction_values import EndTxnStatus, TransactionDescription, TransactionState
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    ProtocolError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.common.texts import for_stream, one_line
from spark_kafka_sink.protocol.fetch import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from spark_kafka_sink.record.partitioning import partition_for_key
from spark_kafka_sink.sink.exactly_once.advice import name_of_query, operator_command
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, connect, create_decision_topic
from spark_kafka_sink.sink.exactly_once.end_markers import EndMarkers
from spark_kafka_sink.sink.exactly_once.messages import (
    Decision,
    FirstUse,
    driver_id,
    is_marker_text,
    is_task_id,
    prefix_of,
    task_id,
)
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver, PrefixRecords
from spark_kafka_sink.sink.exactly_once.query_names import is_names_key
from spark_kafka_sink.sink.exactly_once.write_names import is_one_off
from spark_kafka_sink.sink.options import DECISION_TOPIC, EXACTLY_ONCE, KAFKA_PREFIX, SinkConfig
from spark_kafka_sink.sink.properties_file import PropertiesFile, read_properties

_NO_LEADER: Final = "their partitions of __transaction_state have no leader"
_ASKED_IDS: Final = 1_000
"""Kafka has 50 partitions of __transaction_state; a cluster with 100 has one without any of these ids once in 200."""
_UNLISTED_IDS: Final = 50
"""So many that each broker coordinates some."""
_DISPUTED_MS: Final = 10_000
"""Brokers hear of a new leader sooner."""
_UNSEEN_MS: Final = 3_000
"""A new leader takes less."""
_OPEN: Final = (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_NOT_ASKED: Final = (AuthorizationError, AuthenticationError)
_MOST_NAMED: Final = 10
_COLUMNS: Final = ("transactional id", "state", "age", "timeout")


class Operator:
    """The commands, for one cluster. Each writes lines to `out`; raises KafkaError."""

    def __init__(self, client: ClusterClient, config: SinkConfig, out: TextIO, wall_ms: Callable[[], int]) -> None:
        self._client = client
        self._config = config
        self._out = out
        self._wall_ms = wall_ms

    def show(self, prefix: str | None) -> None:
        """Show the last decision of every prefix and all open transactions, or those of one prefix."""
        decisions = self._decisions(prefix)
        shown = sorted(key for key in decisions if prefix is None or prefix.encode() in {key, prefix_of(key)})
        for key in shown:
            if prefix_of(key) not in decisions or _is_moved(*decisions[key]):  # else the decision says more
                name = one_line((prefix_of(key) or key).decode("utf-8", "replace"))
                self._say(f"{name}: {_in_words(key, *decisions[key])}")
        if not any(prefix_of(key) is None for key in shown):
            of = "" if prefix is None else f" of {prefix}"
            self._say(f"No decision{of} in {self._config.decision_topic}.")
        rows = [self._row(found) for found in self._open(prefix)]
        known = {(prefix_of(key) or key).decode("utf-8", "replace") for key in decisions}
        if unseen := self._unseen(sorted(known) if prefix is None else [prefix]):
            self._say(f"Transactions of {unseen} are not shown: {_NO_LEADER}.")
        if not rows:
            self._say("No other transaction is open." if unseen else "No transaction is open.")
            return
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row in (_COLUMNS, *rows):
            self._say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def finish(self, prefix: str) -> None:
        """Commit the batch decided last if it is not committed, abort undecided transactions, and show those that stay
        open. Raises IllegalStateError if transactions are open and nothing was decided, because the decision may be in
        another topic; and, as `abort` and `accept`, for a copy of the decision topic, which may lack the last decision.
        """
        self._refuse_undecided(self._used(prefix), prefix)
        self._settle(prefix)

    def abort(self, prefix: str) -> None:
        """Abort undecided transactions, and name them. Raises IllegalStateError if a decided batch is not committed
        yet, or may be decided in another topic.
        """
        cluster = self._used(prefix)
        self._fenced(prefix)  # else the read waits for a decision that a dead driver has left open
        last = cluster.last_decision()
        if last is None:
            self._refuse_decided_elsewhere(prefix, cluster.place.topic)
        _check_finished(last, prefix)
        undecided = self._ongoing(prefix)
        left = self._settle(prefix)
        if aborted := [name for name in undecided if name not in left]:
            self._say(f"Aborted ({len(aborted)}): {', '.join(aborted[:20])}.")

    def accept(self, prefix: str) -> None:
        """Let the query go on after the batch decided last, whatever its rows are then. Of a batch that is not
        finished, all transactions that can still be committed are, with end markers that brokers have left out.

        Raises IllegalStateError if nothing was decided, for a copy of the decision topic, if a coordinator did not
        say what became of a transaction, or may not be asked, and if readers cannot read what was committed.
        """
        cluster = self._used(prefix)
        driver = self._fenced(prefix)
        last = self._driver(prefix).read_records().decision
        if last is None:
            raise IllegalStateError(
                f"No batch of {prefix} is decided in {cluster.place.topic}: there is nothing to accept."
            )
        if last.is_finished:
            self._write(cluster, driver, replace(last.finished(), is_accepted=True))
            self._say(
                f"Batch {last.batch_id} stays as it was committed. The query goes on after it, and skips it whatever"
                " its rows are then."
            )
            return
        self._refuse_disputed(self._client.transactions.disputed, [each.transactional_id for each in last.transactions])
        ended = cluster.end(last.transactions, committed=True)
        for each in ended:
            if each.status is EndTxnStatus.UNRESOLVED or isinstance(each.error, _NOT_ASKED):
                raise IllegalStateError(
                    f"Batch {last.batch_id} stays as it is, because its rows may not be lost: {each.error} Accept it"
                    " when the coordinator answers."
                ) from each.error
        committed = [each for each in ended if each.error is None]
        ids = {each.transaction.transactional_id for each in committed}
        left = tuple(task for task in last.tasks if task.transaction.transactional_id in ids)
        try:
            EndMarkers(prefix, cluster).complete(replace(last, tasks=left), driver)
        except KafkaTimeoutError as error:
            raise IllegalStateError(
                f"Batch {last.batch_id} stays as it is: its rows are committed, and readers do not see all of them yet."
                f" {error} Run accept again when the partition has a leader: a later batch could abort them."
            ) from error
        self._write(cluster, driver, replace(last.finished(), is_accepted=len(committed) < len(last.tasks)))
        self._say(
            f"Batch {last.batch_id} is closed: {len(committed)} of {len(last.tasks)} transactions are known to be"
            " committed. The query goes on after it."
        )

    def forget(self, prefix: str) -> None:
        """Free the prefix: the next query that uses it begins at any batch. Raises IllegalStateError if
        a decided batch is not committed yet, or may not be: transactions are open, and the decision on them may be in
        another topic.
        """
        self._refuse_undecided(self._used(prefix), prefix)
        self.abort(prefix)
        cluster = self._cluster(prefix, is_free=True)
        driver = self._fenced(prefix)
        last = cluster.last_decision()
        _check_finished(last, prefix)  # a query that runs may have decided meanwhile
        # first: a prefix with neither looks as if it had lost both
        self._cluster(prefix).write_first_use(is_adopted=True, is_free=True)
        if last is not None:
            self._write(cluster, driver, last.finished())
        self._say(f"{prefix} is free.")

    def adopt(self, prefix: str) -> None:
        """Let the query of a prefix go on with this decision topic. It takes over the last decision from another topic
        of the cluster, which is refused for the prefix from then on. Without a decision, the query begins at any batch
        that it has not written under another prefix. Creates the decision topic if it is missing. In a copy of it, the
        query goes on after its last decision.

        Raises IllegalStateError if this is the topic of the prefix and there is a decision, if a transaction of a task
        is open or may be, and if a batch that is decided in another topic is not committed; ProducerFencedError if the
        query runs.
        """
        topic, timer = self._config.decision_topic, self._client.timer(self._config.producer.max_block_ms)
        if self._client.creation.count(topic, timer) == 0:
            self._refuse_open(prefix, topic)  # a refused command must not make a topic whose name may be misspelt
        create_decision_topic(self._client, topic, timer)
        cluster = self._cluster(prefix)
        driver = self._fenced(prefix)  # no driver decides from here on
        records = cluster.last_records()
        others = self._other_topics(prefix, records.moved_to)
        if records.moved_to:
            self._refuse_open(prefix, topic)
        elif cluster.copied(records) is None:
            self._refuse_known(prefix, topic, records.decision)
        from_topic, last = _newest({topic: records.decision} | {other: last for other, (_, last) in others.items()})
        for other, (cluster_there, _) in others.items():
            cluster_there.write_first_use(is_adopted=False, moved_to=topic)
            self._say(f"decision.topic={other} is refused for {prefix} from now on.")
        own = cluster.describe([driver.transactional_id])[driver.transactional_id]
        if own is None or own.producer != driver.producer:  # it may decide in another topic, which it has read before
            raise ProducerFencedError(f"{prefix} was started meanwhile. Stop its query, and adopt it again.")
        cluster.write_first_use(is_adopted=True)
        if last is not None:
            self._write(cluster, driver, last)
            where = "here" if from_topic == topic else f"in decision.topic={from_topic}"
            self._say(
                f"{prefix} is adopted: its query goes on after batch {last.batch_id}, the last one decided {where}."
            )
            return
        self._say(f"{prefix} is adopted: its query begins at the next batch of its checkpoint.")
        if not others:
            self._say(
                f"It must not go back to a decision topic that it had before {topic}: none is known, so it would not be"
                " refused there, and a batch could be written twice."
            )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        print(for_stream(line, self._out), file=self._out)

    def _refuse_known(self, prefix: str, topic: str, last: Decision | None) -> None:
        """Raise IllegalStateError if there is a decision, or there may be one on transactions that are open."""
        if last is not None:
            _check_finished(last, prefix)
            raise IllegalStateError(
                f"{prefix} has a decision in {topic}, on batch {last.batch_id}: the query goes on after that batch, and"
                " there is nothing to adopt. Nothing was changed. To let another query begin under this prefix:"
                f" {operator_command('forget', prefix, topic)}"
            )
        self._refuse_open(prefix, topic)

    def _other_topics(self, prefix: str, moved_to: str) -> dict[str, tuple[KafkaDriverCluster, Decision | None]]:
        """Return the last decision of the prefix in each other decision topic that it had and that is no copy. The
        markers of its tasks name these topics, and so does `moved_to`. Raises IllegalStateError for a decision that
        is not finished.
        """
        found: dict[str, tuple[KafkaDriverCluster, Decision | None]] = {}
        named = {*self._marked_topics(prefix), moved_to}
        seen = {"", self._config.decision_topic}
        while left := named - seen:
            other = min(left)
            seen.add(other)
            if self._client.creation.count(other, self._client.timer(self._config.producer.max_block_ms)) == 0:
                self._say(
                    f"decision.topic={other}, which {prefix} had, is not in the cluster: what was decided there last is"
                    " not known."
                )
                continue
            config = replace(self._config, decision_topic=other)
            cluster = KafkaDriverCluster(self._client, config, prefix, has_tasks=False)
            records = cluster.last_records()
            named.add(records.moved_to)
            if cluster.copied(records) is not None:
                self._say(f"decision.topic={other} is a copy: its decisions are not taken over.")
            else:
                if (last := records.decision) is not None and not last.is_finished:
                    raise IllegalStateError(
                        f"Batch {last.batch_id} of {prefix} is decided in decision.topic={other}, and not committed"
                        f" yet. Commit it first: {operator_command('finish', prefix, other)}"
                    )
                found[other] = cluster, last
        return found

    def _marked_topics(self, prefix: str) -> set[str]:
        """Return the topics in which tasks of the prefix have set their markers, as far as the brokers still know the
        tasks' transactional ids (transactional.id.expiration.ms).
        """
        timer = self._client.timer(self._config.producer.max_block_ms)
        listed = self._client.transactions.list_transactions(timer)
        found = {each.transactional_id for each in listed if is_task_id(prefix, each.transactional_id)}
        ids = sorted(found.union(_task_ids([prefix], _UNLISTED_IDS)))  # see `_open`
        self._refuse_disputed(self._client.groups.disputed, ids)
        timer = self._client.timer(self._config.producer.max_block_ms)
        return {
            place.topic
            for commits in self._client.groups.fetch_all_offsets(ids, timer).values()
            for place, commit in commits.items()
            if commit is not None and is_marker_text(commit.metadata)
        }

    def _refuse_disputed(self, disputed: Callable[[Sequence[str], Timer], list[str]], ids: Sequence[str]) -> None:
        """Raise IllegalStateError if brokers name different coordinators of ids or groups: then one of them may answer
        with what it knew before.
        """
        timer = self._client.timer(min(_DISPUTED_MS, self._config.producer.max_block_ms))
        if ids and (left := disputed(ids, timer)):
            raise IllegalStateError(
                f"Brokers name different coordinators of {', '.join(map(one_line, left[:_MOST_NAMED]))}: one of them is"
                " cut off from its controllers, and may not know what the others know. No decision and no transaction"
                " was changed. Run this again when all brokers are healthy."
            )

    def _refuse_open(self, prefix: str, topic: str) -> None:
        """Raise IllegalStateError if transactions of tasks are open, or may be."""
        if left := self._open_tasks(prefix):
            raise IllegalStateError(
                f"{len(left)} transactions of {prefix} are open, and may be decided in another topic. Nothing was"
                f" changed. If they are not, abort them first: {operator_command('abort', prefix, topic)}"
            )
        if unseen := self._unseen([prefix]):
            raise IllegalStateError(
                f"It is not known whether transactions of {prefix} are open. Its ids may be {unseen}, and {_NO_LEADER}."
                " Nothing was changed. Start the broker first."
            )

    def _refuse_undecided(self, cluster: KafkaDriverCluster, prefix: str) -> None:
        """Raise IllegalStateError if transactions of tasks are open and nothing is decided."""
        if left := self._open_tasks(prefix):
            self._fenced(prefix)  # no driver decides after this, and no unfinished decision blocks the read
            if cluster.last_decision() is None:
                raise IllegalStateError(
                    f"No decision of {prefix} is in {cluster.place.topic}, and {len(left)} of its transactions are"
                    " open: nothing was committed or aborted. If its query has another decision.topic, name that with"
                    " --decision-topic: they may be decided there. Else abort ends what is not decided."
                )

    def _refuse_decided_elsewhere(self, prefix: str, topic: str) -> None:
        """Raise IllegalStateError if transactions of tasks are open, and earlier ones had their decisions in another
        topic.
        """
        left = self._open_tasks(prefix)
        timer = self._client.timer(self._config.producer.max_block_ms)
        others = sorted(
            other
            for other in (self._marked_topics(prefix) - {topic} if left else ())
            if self._client.creation.count(other, timer)
        )
        if others:
            raise IllegalStateError(
                f"No decision of {prefix} is in {topic}, and {len(left)} of its transactions are open. They may be"
                f" decided in {others[0]}, where earlier ones were, so nothing was aborted. Name that topic:"
                f" {operator_command('abort', prefix, others[0])}"
            )

    def _settle(self, prefix: str) -> list[str]:
        """Commit what is decided, abort the rest. Return what could not be ended."""
        batch_start = self._driver(prefix).begin()
        last = "Nothing was decided" + (", or it was finished before" if is_one_off(prefix) else "")
        if batch_start.last_batch_id is not None:
            last = f"Batch {batch_start.last_batch_id} is committed"
        left, unseen = self._ongoing(prefix), self._unseen([prefix])
        named = f"open until they time out ({len(left)}): {', '.join(left[:20])}"
        nothing = f"nothing {'else ' if unseen else ''}of {prefix} is open"
        self._say(f"{last}; {named if left else nothing}.")
        if unseen:
            self._say(
                f"What is open of {unseen} is not known: {_NO_LEADER}. It stays open until it times out, or until the"
                " query or this command runs after the broker is back."
            )
        return left

    def _cluster(self, prefix: str, *, is_free: bool = False) -> KafkaDriverCluster:
        """Raises IllegalStateError if there is no decision topic: a new one would say that nothing was decided."""
        topic = self._config.decision_topic
        if self._client.creation.count(topic, self._client.timer(self._config.producer.max_block_ms)) == 0:
            raise IllegalStateError(
                f"There is no topic {topic}, in which decisions of {prefix} are looked for: nothing was changed. If its"
                " query has another decision.topic, name that with --decision-topic."
            )
        leaves_nothing = is_free or is_one_off(prefix)
        return KafkaDriverCluster(self._client, self._config, prefix, is_one_off=leaves_nothing, has_tasks=False)

    def _used(self, prefix: str) -> KafkaDriverCluster:
        """Raises IllegalStateError also for a prefix that nothing is known of. It may be misspelt, and the batch of the
        right one would go on to its timeout.
        """
        cluster, name = self._cluster(prefix), driver_id(prefix)
        is_known = cluster.describe([name])[name] is not None
        nothing = PrefixRecords(None, None)
        if not is_known and cluster.last_records(may_be_old=True) == nothing and not self._open(prefix):
            raise IllegalStateError(
                f"Nothing is known of transactional.id.prefix={prefix!r}: the brokers know no driver of it, and"
                f" {cluster.place.topic} has no record of it. Nothing was changed. See the prefixes that are known:"
                " python -m spark_kafka_sink.transactions list --bootstrap-servers HOST:PORT"
            )
        return cluster

    def _driver(self, prefix: str) -> ExactlyOnceDriver:
        return ExactlyOnceDriver(prefix, self._cluster(prefix), self._wall_ms, is_operator=True)

    def _fenced(self, prefix: str) -> OpenTransaction:
        driver = self._driver(prefix)
        driver.ensure_first_use()
        return driver.fence()

    def _write(self, cluster: KafkaDriverCluster, driver: OpenTransaction, decision: Decision) -> None:
        cluster.write_decision(driver, decision, 0)
        (ended,) = cluster.end([driver], committed=True)
        if ended.error is not None:
            raise ended.error

    def _decisions(self, prefix: str | None) -> dict[bytes, tuple[bytes, str]]:
        """Return the newest record of every key as bytes, and where it is. Shows where newer ones of `prefix`, or of
        any, may be behind a transaction that is open.
        """
        topics, topic = self._client.topics, self._config.decision_topic
        timer = self._client.timer(self._config.producer.max_block_ms)
        count = self._client.creation.count(topic, timer)
        values: dict[bytes, tuple[bytes | None, str]] = {}
        places = [TopicPartition(topic, partition) for partition in range(count)]
        ends = topics.list_offsets(places, LATEST_TIMESTAMP, timer) if places else {}
        stable = topics.list_offsets(places, LATEST_TIMESTAMP, timer, READ_COMMITTED) if places else {}
        own = places if prefix is None or not places else [places[partition_for_key(prefix.encode(), count)]]
        for place in own:
            if stable[place] < ends[place]:
                self._say(
                    f"{place}: what was decided from offset {stable[place]} on is not shown yet, because a"
                    " transaction is open there."
                )
        for place, first in topics.list_offsets(places, EARLIEST_TIMESTAMP, timer).items() if places else ():
            for record in topics.read_from(place, first, timer):
                values[record.key or b""] = record.value, f"{place}, offset {record.offset}"
        return {
            key: (value, where) for key, (value, where) in values.items() if value is not None and not is_names_key(key)
        }

    def _open(self, prefix: str | None) -> list[TransactionDescription]:
        """Open transactions of a prefix; for None all that are named as this sink names them. Those of a prefix's first
        tasks are described in any case: the address of a broker may lead to another one, which does not list them.
        """
        ours = re.compile((".+" if prefix is None else re.escape(prefix)) + r"/(driver|\d+(\.\d+)?)")
        timer = self._client.timer(self._config.producer.max_block_ms)
        listed = self._client.transactions.list_transactions(timer, states=_OPEN)
        ids = {each.transactional_id for each in listed if ours.fullmatch(each.transactional_id)}
        if prefix is not None:
            own = {driver_id(prefix), *_task_ids([prefix], _UNLISTED_IDS)}
            ids |= own.difference(self._without_coordinator([prefix]))
        described = self._client.transactions.describe_transactions(sorted(ids), timer) if ids else {}
        return [found for found in described.values() if found is not None and found.state in _OPEN]

    def _unseen(self, prefixes: Sequence[str]) -> str:
        """Return ids of tasks of the prefixes that have no coordinator now, as text. Empty if there are none."""
        away = self._without_coordinator(prefixes)
        more = f" and {len(away) - _MOST_NAMED} more" if len(away) > _MOST_NAMED else ""
        return ", ".join(map(one_line, away[:_MOST_NAMED])) + more

    def _without_coordinator(self, prefixes: Sequence[str]) -> list[str]:
        """Return ids that tasks of the prefixes may have and that have no coordinator now. So many are asked for that
        they are in all partitions of the coordinators' topic, which the principal may mostly not describe.
        """
        if not (ids := _task_ids(prefixes, _ASKED_IDS)):
            return []
        timer = self._client.timer(min(_UNSEEN_MS, self._config.producer.max_block_ms))
        return self._client.transactions.without_coordinator(ids, timer)

    def _open_tasks(self, prefix: str) -> list[str]:
        return [name for name in self._ongoing(prefix) if name != driver_id(prefix)]

    def _ongoing(self, prefix: str) -> list[str]:
        return [each.transactional_id for each in self._open(prefix) if each.state is TransactionState.ONGOING]

    def _row(self, found: TransactionDescription) -> tuple[str, ...]:
        age = "-" if found.start_time_ms is None else f"{(self._wall_ms() - found.start_time_ms) / 1000:,.0f} s"
        return one_line(found.transactional_id), found.state.value, age, f"{found.timeout_ms / 1000:,.0f} s"


def _task_ids(prefixes: Sequence[str], count: int) -> list[str]:
    """Return `count` ids that the first tasks of the prefixes have in their first attempt."""
    each_has = max(1, count // max(1, len(prefixes)))
    return [task_id(prefix, number, 0) for prefix in prefixes for number in range(each_has)][:count]


def _in_words(key: bytes, value: bytes, where: str) -> str:
    """Return a record in words. A damaged record must not hide those of other prefixes."""
    try:
        if prefix_of(key) is None:
            return _decision_in_words(Decision.from_bytes(value, where, key.decode("utf-8", "replace")))
        return _first_use_in_words(FirstUse.from_bytes(value, where))
    except ProtocolError as error:
        return one_line(str(error))
    except (ValueError, TypeError, OverflowError, AttributeError, OSError) as error:
        return f"{where}: this record cannot be shown: {type(error).__name__}."


def _decision_in_words(decision: Decision) -> str:
    whose = one_line(name_of_query(decision.query_id))
    when = _time(decision.time_ms)
    what = f"batch {decision.batch_id} of {whose}, {decision.rows:,} rows, decided {when}"
    if decision.is_accepted:
        return f"{what}: closed by accept. The query goes on after it, whatever its rows are then."
    if decision.is_finished:
        return f"{what}: committed."
    return (
        f"{what}: its {len(decision.tasks)} transactions are not known to be committed yet. Start the query again"
        " before they time out, or use finish."
    )


def _is_moved(first_use: bytes, where: str) -> bool:
    try:
        return bool(FirstUse.from_bytes(first_use, where).moved_to)
    except ProtocolError:
        return False


def _first_use_in_words(first_use: FirstUse) -> str:
    if first_use.moved_to:
        return f"moved {_time(first_use.time_ms)} to decision.topic={one_line(first_use.moved_to)}."
    if first_use.is_adopted:
        return f"no decision yet; freed or adopted {_time(first_use.time_ms)}, so its query may begin at any batch."
    return f"no decision yet; first used {_time(first_use.time_ms)}."


def _time(time_ms: int) -> str:
    """Return a time in UTC, as text. Raises ValueError, OverflowError or OSError for a time outside the calendar."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(" ", "seconds")


def _check_finished(last: Decision | None, prefix: str) -> None:
    if last is not None and not last.is_finished:
        raise IllegalStateError(
            f"Batch {last.batch_id} of {prefix} is decided, and can only be finished: start the query again, or use"
            " finish."
        )


def _newest(decisions: Mapping[str, Decision | None]) -> tuple[str, Decision | None]:
    """Return the newest decision and its topic. Drivers have different clocks, so the highest batch of the query that
    decided last.
    """
    made = [(topic, decision) for topic, decision in decisions.items() if decision is not None]
    if not made:
        return "", None
    query_id = max((decision for _, decision in made), key=lambda decision: decision.time_ms).query_id
    of_query = [each for each in made if each[1].query_id == query_id]
    return max(of_query, key=lambda each: each[1].batch_id)


_METHODS: Final = {"list": "show"}
_DECISION_TOPIC: Final = "decision.topic"
_HELP: Final[Mapping[str, str]] = {
    "finish": "commit the decided batch, abort all other open transactions; refused if nothing was decided",
    "abort": "abort all undecided transactions; refused while a decided batch waits to be committed",
    "accept": "let the query go on after the last batch, though rows of it were lost or have changed",
    "forget": "free the prefix: the next query that uses it begins at any batch",
    "adopt": "let a query go on with this decision topic: after its last decision, at any batch if none is known",
}
_QUESTIONS: Final[Mapping[str, str]] = {
    "finish": "Commit the decided batch of {prefix} and abort its other open transactions?",
    "abort": "Abort all undecided transactions of {prefix}?",
    "accept": "Let the query of {prefix} go on after its last batch, though rows of it were lost or have changed?",
    "forget": "Forget what was written under {prefix}? A query that goes on under it may then write a batch twice.",
    "adopt": (
        "Let the query of {prefix} go on with this decision topic? If no other topic of the cluster is known to have"
        " its last decision, it begins at the next batch of its checkpoint. If that batch was written before, its rows"
        " are written twice: look first whether the topics that the query writes have rows of it."
    ),
}


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None, ask: Callable[[str], str] = input) -> int:
    """Run the command. Return the exit code: 0, or 1 if nothing was changed."""
    options = _parser().parse_args(arguments)
    out = out or sys.stdout
    flags = {
        f"{KAFKA_PREFIX}bootstrap.servers": options.bootstrap_servers,
        _DECISION_TOPIC: options.decision_topic,
        "transactional.id.prefix": options.prefix,  # refused if no query can have it, such as an empty one
    }
    given = {name: value for name, value in flags.items() if value is not None}
    file = None
    try:
        file = None if options.properties is None else _properties(options.properties)
        settings = ({} if file is None else _of_cluster(file)) | given
        config = SinkConfig.from_options({**settings, "delivery.guarantee": EXACTLY_ONCE})
        prefix = config.transactional_id_prefix  # without blanks around it, as the query has it
        if options.command != "list" and not options.yes:
            question = _QUESTIONS[options.command].format(prefix=prefix)
            text = (
                f"{question} Stop its query first: a batch under way fails. Its decisions are looked for in"
                f" {config.decision_topic}."
            )
            print(for_stream(text, out), file=out)
            try:
                answer = ask(for_stream(f"Type {prefix} to go on: ", out)).strip()
            except EOFError:
                answer = ""
                print("There is no input to read an answer from: --yes goes on without asking.", file=out)
            except KeyboardInterrupt:
                answer = ""
                print(file=out)  # the terminal's cursor is behind the question
            if answer != prefix:
                print("Nothing was changed.", file=out)
                return 1
        with connect(config.producer) as client:
            operator = Operator(client, config, out, SystemClock().wall_ms)
            getattr(operator, _METHODS.get(options.command, options.command))(prefix)
    except KafkaError as error:
        place = "" if file is None or error.setting in given else file.place(error.setting)
        text = f"{type(error).__name__}: {error}{place}"  # it may hold a record of another writer
        print(for_stream("".join(each if each.isprintable() else "?" for each in text), out), file=out)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spark_kafka_sink.transactions",
        description="Shows and settles decisions and open transactions of exactly-once delivery.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--bootstrap-servers", help="host:port pairs, comma-separated")
    common.add_argument(
        "--properties", type=Path, help="a file of options: the lines kafka.NAME=VALUE and decision.topic"
    )
    common.add_argument("--decision-topic", help=f"decision.topic of the query [{DECISION_TOPIC}]")
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", parents=[common], help="show decisions and open transactions")
    listed.add_argument("--prefix", help="only of this transactional.id.prefix")
    for name, text in _HELP.items():
        command = commands.add_parser(name, parents=[common], help=text)
        command.add_argument("--prefix", required=True, help="transactional.id.prefix of the query and sink")
        command.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _properties(path: Path) -> PropertiesFile:
    """Read the options of a query. Raises ConfigError."""
    try:
        return read_properties(path)
    except OSError as error:
        raise ConfigError(f"--properties {path} cannot be read: {error.strerror}.") from error


def _of_cluster(file: PropertiesFile) -> dict[str, object]:
    """Return the options of a query that lead to the cluster and to its decisions."""
    options = {name.lower(): value for name, value in file.values.items()}  # in any case, as for the query
    return {name: value for name, value in options.items() if name.startswith(KAFKA_PREFIX) or name == _DECISION_TOPIC}
