"""The operator's view of exactly-once delivery: python -m spark_kafka_sink.transactions.

Lists what was decided and what is open, in plain words, and settles it where no query will: `finish` commits a batch
that is decided, `abort` ends what is not, `accept` closes a batch whose rows were lost, `forget` frees a prefix. All
but `list` break the batch that a query may be writing, and ask first.
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

from spark_kafka_sink.client.coordinator import Coordinator
from spark_kafka_sink.client.transaction_values import (
    EndTxnStatus,
    OpenTransaction,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    IllegalStateError,
    KafkaError,
    ProtocolError,
)
from spark_kafka_sink.common.properties_file import read_properties
from spark_kafka_sink.protocol.requests import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from spark_kafka_sink.record.murmur2 import partition_for_key
from spark_kafka_sink.sink.decision import Decision
from spark_kafka_sink.sink.driver_cluster import KafkaDriverCluster, connect
from spark_kafka_sink.sink.driver_session import is_one_off
from spark_kafka_sink.sink.exactly_once import ExactlyOnceDriver
from spark_kafka_sink.sink.mandate import driver_id, name_of_query
from spark_kafka_sink.sink.options import DECISION_TOPIC, EXACTLY_ONCE, KAFKA_PREFIX, SinkConfig

_OPEN: Final = (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_NOT_ASKED: Final = (AuthorizationError, AuthenticationError)
_COLUMNS: Final = ("transactional id", "state", "age", "time-out")


class Operator:
    """The commands, for one cluster. Each writes lines to `out`; raises KafkaError."""

    def __init__(self, coordinator: Coordinator, config: SinkConfig, out: TextIO, wall_ms: Callable[[], int]) -> None:
        self._coordinator = coordinator
        self._config = config
        self._out = out
        self._wall_ms = wall_ms

    def show(self, prefix: str | None) -> None:
        """Every prefix's last decision, and every transaction that is open; of one prefix where it is given."""
        decisions = self._decisions(prefix)
        for key in sorted(decisions):
            if prefix in {None, key}:
                self._say(f"{key}: {self._in_words(*decisions[key])}")
        if not decisions.keys() & ({prefix} if prefix is not None else decisions.keys()):
            of = "" if prefix is None else f" of {prefix}"
            self._say(f"No decision{of} in {self._config.decision_topic}.")
        rows = [self._row(found) for found in self._open(prefix)]
        if not rows:
            self._say("No transaction is open.")
            return
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row in (_COLUMNS, *rows):
            self._say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def finish(self, prefix: str) -> None:
        """Commit the batch decided last where that is not done, and abort what is undecided; tell what stays open.
        Raises IllegalStateError where something is open and nothing was decided: the decision may be in another topic.
        """
        cluster = self._cluster(prefix)
        if left := [name for name in self._ongoing(prefix) if name != driver_id(prefix)]:
            self._fenced(cluster, prefix)  # nobody decides from here on, and a reader waits for no half a decision
            if cluster.last_decision() is None:
                raise IllegalStateError(
                    f"No decision of {prefix} is in {cluster.place.topic}, and {len(left)} of its transactions are"
                    " open: nothing was committed or aborted. If its query has another decision.topic, name that with"
                    " --decision-topic: they may be decided there. Else abort ends what is not decided."
                )
        self._settle(prefix)

    def abort(self, prefix: str) -> None:
        """Abort what is undecided. Raises IllegalStateError where a decided batch is not committed yet."""
        _check_finished(self._cluster(prefix).last_decision(), prefix)
        self._settle(prefix)

    def accept(self, prefix: str) -> None:
        """Call the batch decided last finished, though rows of it were lost; what can still be committed is. One that
        is finished is skipped from now on when it comes again, whatever its rows are then. Raises IllegalStateError
        where nothing was decided, or a coordinator did not say what became of a transaction, or may not be asked.
        """
        cluster = self._cluster(prefix)
        driver = self._fenced(cluster, prefix)
        last = cluster.last_decision()
        if last is None:
            raise IllegalStateError(
                f"No batch of {prefix} waits to be committed in {cluster.place.topic}: there is nothing to accept."
            )
        if last.is_finished:
            self._write(cluster, driver, replace(last, takes_any_rows=True))
            self._say(
                f"Batch {last.batch_id} is committed already. It is skipped when it comes again, whatever its rows are"
                " then: those that are not in Kafka yet are not written. The query goes on after it."
            )
            return
        ended = cluster.end(last.transactions, committed=True)
        for each in ended:
            if each.status is EndTxnStatus.UNRESOLVED or isinstance(each.error, _NOT_ASKED):
                raise IllegalStateError(
                    f"Batch {last.batch_id} stays as it is, for rows of it may not be lost: {each.error} Accept it when"
                    " that can be asked."
                ) from each.error
        committed = [each for each in ended if each.error is None]
        self._write(cluster, driver, replace(last, is_accepted=len(committed) < len(last.tasks)))
        self._say(
            f"Batch {last.batch_id} is closed: {len(committed)} of {len(last.tasks)} transactions are known to be"
            " committed. The query goes on after it."
        )

    def forget(self, prefix: str) -> None:
        """Free the prefix: whoever uses it next begins at nothing. Raises IllegalStateError where a decided batch is
        not committed yet.
        """
        self.abort(prefix)
        cluster = self._cluster(prefix, is_free=True)
        driver = self._fenced(cluster, prefix)
        last = cluster.last_decision()
        _check_finished(last, prefix)  # a query that runs may have decided meanwhile
        if last is not None:
            self._write(cluster, driver, last)
        self._say(f"{prefix} is free.")

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        print(line, file=self._out)

    def _settle(self, prefix: str) -> None:
        mandate = self._driver(prefix).begin()
        last = "Nothing was decided" + (", or it was finished before" if is_one_off(prefix) else "")
        if mandate.last_batch_id is not None:
            last = f"Batch {mandate.last_batch_id} is committed"
        left = self._ongoing(prefix)
        named = f"open until they time out ({len(left)}): {', '.join(left[:20])}"
        self._say(f"{last}; {named if left else f'nothing of {prefix} is open'}.")

    def _cluster(self, prefix: str, *, is_free: bool = False) -> KafkaDriverCluster:
        """Raises IllegalStateError where there is no decision topic: to make one would say that nothing was decided."""
        topic = self._config.decision_topic
        if self._coordinator.creation.count(topic, self._coordinator.timer(self._config.producer.max_block_ms)) == 0:
            raise IllegalStateError(
                f"There is no topic {topic}, in which decisions of {prefix} are looked for: nothing was changed. If its"
                " query has another decision.topic, name that with --decision-topic."
            )
        leaves_nothing = is_free or is_one_off(prefix)
        return KafkaDriverCluster(self._coordinator, self._config, prefix, is_one_off=leaves_nothing, has_tasks=False)

    def _driver(self, prefix: str) -> ExactlyOnceDriver:
        return ExactlyOnceDriver(prefix, self._cluster(prefix), self._wall_ms)

    def _fenced(self, cluster: KafkaDriverCluster, prefix: str) -> OpenTransaction:
        name = driver_id(prefix)
        return OpenTransaction(name, *cluster.init_producer_id(name, None), cluster.transaction_version())

    def _write(self, cluster: KafkaDriverCluster, driver: OpenTransaction, decision: Decision) -> None:
        cluster.write_decision(driver, decision.finished(), 0)
        (ended,) = cluster.end([driver], committed=True)
        if ended.error is not None:
            raise ended.error

    def _decisions(self, prefix: str | None) -> dict[str, tuple[bytes, str]]:
        """The newest decision of every prefix, as it was written, and where. Says where newer ones of `prefix`, or of
        any, may be behind a transaction that is open.
        """
        topics, topic = self._coordinator.topics, self._config.decision_topic
        timer = self._coordinator.timer(self._config.producer.max_block_ms)
        count = self._coordinator.creation.count(topic, timer)
        values: dict[bytes, tuple[bytes | None, str]] = {}
        places = [TopicPartition(topic, partition) for partition in range(count)]
        ends = topics.list_offsets(places, LATEST_TIMESTAMP, timer) if places else {}
        stable = topics.list_offsets(places, LATEST_TIMESTAMP, timer, READ_COMMITTED) if places else {}
        own = places if prefix is None or not places else [places[partition_for_key(prefix.encode(), count)]]
        for place in own:
            if stable[place] < ends[place]:
                self._say(
                    f"{place}: what was decided from offset {stable[place]} on is not shown yet, for a transaction is"
                    " open there."
                )
        for place, first in topics.list_offsets(places, EARLIEST_TIMESTAMP, timer).items() if places else ():
            for record in topics.read_from(place, first, timer):
                values[record.key or b""] = record.value, f"{place}, offset {record.offset}"
        return {
            key.decode("utf-8", "replace"): (value, where)
            for key, (value, where) in values.items()
            if value is not None
        }

    def _open(self, prefix: str | None) -> list[TransactionDescription]:
        """Of any prefix, whatever is named as ours are."""
        ours = re.compile((".+" if prefix is None else re.escape(prefix)) + r"/(driver|\d+(\.\d+)?)")
        timer = self._coordinator.timer(self._config.producer.max_block_ms)
        listed = self._coordinator.transactions.list_transactions(timer, states=_OPEN)
        ids = [each.transactional_id for each in listed if ours.fullmatch(each.transactional_id)]
        described = self._coordinator.transactions.describe_transactions(ids, timer) if ids else {}
        return [found for found in described.values() if found is not None and found.state in _OPEN]

    def _ongoing(self, prefix: str) -> list[str]:
        return [each.transactional_id for each in self._open(prefix) if each.state is TransactionState.ONGOING]

    def _row(self, found: TransactionDescription) -> tuple[str, ...]:
        age = "-" if found.start_time_ms is None else f"{(self._wall_ms() - found.start_time_ms) / 1000:,.0f} s"
        return found.transactional_id, found.state.value, age, f"{found.timeout_ms / 1000:,.0f} s"

    def _in_words(self, value: bytes, where: str) -> str:
        try:
            decision = Decision.from_bytes(value, where)
        except ProtocolError as error:  # those of other prefixes are to be shown all the same
            return str(error)
        when = datetime.fromtimestamp(decision.time_ms / 1000, UTC).isoformat(" ", "seconds")
        whose = name_of_query(decision.query_id)
        what = f"batch {decision.batch_id} of {whose}, {decision.rows:,} rows, decided {when}"
        if decision.is_accepted:
            return f"{what}: closed by accept, and not all of its rows are known to be committed."
        if decision.is_finished:
            return f"{what}: committed."
        return (
            f"{what}: its {len(decision.tasks)} transactions are not known to be committed yet. Start the query again"
            " before they time out, or use finish."
        )


def _check_finished(last: Decision | None, prefix: str) -> None:
    if last is not None and not last.is_finished:
        raise IllegalStateError(
            f"Batch {last.batch_id} of {prefix} is decided, and can be finished alone: start the query again, or use"
            " finish."
        )


_METHODS: Final = {"list": "show"}
_DECISION_TOPIC: Final = "decision.topic"
_HELP: Final[Mapping[str, str]] = {
    "finish": "commit what was decided, abort all else that is open; refused where nothing was decided",
    "abort": "abort all that is open and undecided; refused where a decided batch waits to be committed",
    "accept": "close the last batch though rows of it are missing in Kafka, or skip it though its rows are others now",
    "forget": "free the prefix: whoever uses it next begins at nothing",
}
_QUESTIONS: Final[Mapping[str, str]] = {
    "finish": "Commit what was decided under {prefix} and abort all else that is open under it?",
    "abort": "Abort all that is open and undecided under {prefix}?",
    "accept": "Close the last batch of {prefix} though rows of it are missing in Kafka, or come otherwise now?",
    "forget": "Forget what was written under {prefix}? A query that goes on under it may then write a batch twice.",
}


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None, ask: Callable[[str], str] = input) -> int:
    """The exit code: 0, or 1 where nothing was changed."""
    options = _parser().parse_args(arguments)
    out = out or sys.stdout
    try:
        settings = {} if options.properties is None else _properties(options.properties)
        flags = {
            f"{KAFKA_PREFIX}bootstrap.servers": options.bootstrap_servers,
            _DECISION_TOPIC: options.decision_topic,
            "transactional.id.prefix": options.prefix,  # one that no query can have is refused, an empty one above all
        }
        settings |= {name: value for name, value in flags.items() if value is not None}
        config = SinkConfig.from_options({**settings, "delivery.guarantee": EXACTLY_ONCE})
        if options.command != "list" and not options.yes:
            question = _QUESTIONS[options.command].format(prefix=options.prefix)
            print(
                f"{question} Stop its query first: a batch under way fails. Its decisions are looked for in"
                f" {config.decision_topic}.",
                file=out,
            )
            try:
                answer = ask(f"Type {options.prefix} to go on: ").strip()
            except EOFError:
                answer = ""
                print("There is nobody to ask: --yes goes on without.", file=out)
            if answer != options.prefix:
                print("Nothing was changed.", file=out)
                return 1
        with connect(config.producer) as coordinator:
            operator = Operator(coordinator, config, out, SystemClock().wall_ms)
            getattr(operator, _METHODS.get(options.command, options.command))(options.prefix)
    except KafkaError as error:
        print(f"{type(error).__name__}: {error}", file=out)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spark_kafka_sink.transactions", description="What exactly-once delivery decided and left open."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--bootstrap-servers", help="host:port pairs, comma-separated")
    common.add_argument(
        "--properties", type=Path, help="a file of options: the lines kafka.NAME=VALUE and decision.topic"
    )
    common.add_argument("--decision-topic", help=f"decision.topic of the query [{DECISION_TOPIC}]")
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", parents=[common], help="show decisions and open transactions")
    listed.add_argument("--prefix", help="of this transactional.id.prefix alone")
    for name, text in _HELP.items():
        command = commands.add_parser(name, parents=[common], help=text)
        command.add_argument("--prefix", required=True, help="transactional.id.prefix of the query and sink")
        command.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _properties(path: Path) -> dict[str, object]:
    """Of a query's options those that lead to the cluster and to its decisions. Raises ConfigError."""
    try:
        found = read_properties(path)
    except OSError as error:
        raise ConfigError(f"--properties {path} cannot be read: {error.strerror}.") from error
    options = {name.lower(): value for name, value in found.items()}  # in any case, as for the query
    return {name: value for name, value in options.items() if name.startswith(KAFKA_PREFIX) or name == _DECISION_TOPIC}


if __name__ == "__main__":
    sys.exit(main())
