"""The application of a simulation, and its run from a seed: random sends, faults and steps of the clock, then an end,
with a check of all guarantees.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from support.simulation.checker import Finding, check
from support.simulation.faults import Troubles
from support.simulation.ledger import Call, Ledger, SentRecord
from support.simulation.plan import Plan, draw_plan
from support.simulation.world import ProductLog, StuckError, World

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RecordMetadata, RunMetadata
from spark_kafka_sink.record.columns import RecordColumns

_STEPS_MS = (0, 1, 1, 2, 3, 5, 10, 30, 100, 400, 2_000)
_PAUSES_MS = (50, 500, 2_000)
_RECOVERY_MS = 15_000
"""After this time and a request timeout all faults have ended: connections, metadata and producer ids are new, and no
retry or backoff is left.
"""
_REST_MS = 60_000
"""Longer than any timeout of a connection or request, backoff or throttle that began before the end of the faults."""


class Simulation:
    """The run of one seed."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed = seed
        rng = random.Random(seed)
        self.plan: Plan = draw_plan(rng)
        self.world = World(self.plan, rng)
        self.ledger = Ledger(self.world.clock)
        self.troubles = Troubles(self.world, rng)
        self.flush_findings: list[Finding] = []
        self.longest_pause_ms = 0
        self.must_arrive: list[Call] = []
        """Calls made after the end of all faults."""
        self.must_not_time_out: list[Call] = []
        """Calls with time left at the end of all faults."""
        self._rng = rng
        self._verbose = verbose
        self._standstill_ms = 0

    @property
    def timeline(self) -> str:
        return f"{self.plan}\n{self.world.timeline}"

    def run(self) -> list[Finding]:
        """Return the violated guarantees."""
        with ProductLog(self.world.timeline if self._verbose else None) as product_log:
            try:
                self._act()
                _ENDINGS[self.plan.ending](self)
            except StuckError as stuck:
                return [Finding(str(stuck))]
        return [*(Finding(f"swallowed: {text}") for text in product_log.swallowed), *check(self)]

    # ---- the middle --------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        rng, roughness = self._rng, self.plan.roughness
        for _ in range(self.plan.actions):
            if rng.random() < roughness:
                if rng.random() < 0.3:
                    self.troubles.end_one_fault()
                else:
                    self.troubles.add_fault()
            else:
                rng.choices(_ACTIONS, _WEIGHTS)[0](self)

    def _send_row(self) -> None:
        rng = self._rng
        topic = rng.choice(self.world.topics)
        count = len(self.world.cluster.topics[topic].partitions)
        partition = rng.choice((None, None, rng.randrange(count)))
        timestamp_ms = rng.choice((None, None, 1_600_000_000_000 + rng.randrange(10**9)))
        record = self._record(partition, timestamp_ms, _row_size(rng))
        call = self.ledger.begin(topic, [record], is_block=False)
        self._call(call, lambda: self._send_record(call, record))

    def _send_record(self, call: Call, record: SentRecord) -> None:
        def received(metadata: RecordMetadata, error: KafkaError | None) -> None:
            self._log_outcome(call, self.ledger.note_record_outcome(call, metadata, error))

        call.future = self.world.producer.send(
            call.topic,
            record.value,
            record.key,
            record.partition,
            record.timestamp_ms,
            record.headers,
            received,
        )

    def _send_block(self) -> None:
        rng = self._rng
        topic = rng.choice(self.world.topics)
        count = len(self.world.cluster.topics[topic].partitions)
        has_partitions = rng.random() < 0.4
        records = []
        size = rng.choice((5, 30, 30, 300))
        for _ in range(rng.choice((1, 3, 12, 40))):
            partition = rng.choice((None, rng.randrange(count))) if has_partitions else None
            records.append(self._record(partition, None, size))
        call = self.ledger.begin(topic, records, is_block=True)
        self._call(call, lambda: self._send_records(call, has_partitions))

    def _send_records(self, call: Call, has_partitions: bool) -> None:
        def received(run: RunMetadata, error: KafkaError | None) -> None:
            self._log_outcome(call, self.ledger.note_run_outcome(call, run, error))

        records = call.records
        has_headers = any(record.headers for record in records)
        columns = RecordColumns.from_rows(
            [record.value for record in records],
            [record.key for record in records] if any(record.key for record in records) else None,
            [record.headers for record in records] if has_headers else None,
            None,
            [record.partition for record in records] if has_partitions else None,
        )
        self.world.producer.send_columns(call.topic, columns, received)

    def _record(self, partition: int | None, timestamp_ms: int | None, size: int) -> SentRecord:
        rng, number = self._rng, self.ledger.next_number()
        key = None if rng.random() < 0.5 else b"key-%d" % rng.randrange(8)
        headers = (("h", b"x"), ("n", None)) if rng.random() < 0.1 else ()
        value = b"%d:" % number + b"v" * size
        return SentRecord(number, key, value, partition, timestamp_ms, headers)

    def _call(self, call: Call, send: Callable[[], None]) -> None:
        self.world.timeline.note("%s to %s, partition %s", call, call.topic, [r.partition for r in call.records])
        try:
            send()
        except KafkaError as error:
            call.raised = error
            self.world.timeline.note("  %s raised %r", call, error)
        call.returned_ms = self.world.now_ms

    def _log_outcome(self, call: Call, outcome: object) -> None:
        self.world.timeline.note("  %s: %s", call, outcome)

    def _let_time_pass(self) -> None:
        duration_ms = self._rng.choice(_STEPS_MS)
        self.world.timeline.note("after %d ms", duration_ms)
        self.world.run_for(duration_ms)
        self._standstill_ms = 0

    def _pause(self) -> None:
        """The whole process pauses, as on a suspended machine."""
        pause_ms = self._rng.choice(_PAUSES_MS)
        self._standstill_ms += pause_ms
        self.longest_pause_ms = max(self.longest_pause_ms, self._standstill_ms)
        self.world.timeline.note("the process pauses for %d ms", pause_ms)
        self.world.clock.advance(pause_ms)

    def _flush(self) -> None:
        accumulator = self.world.accumulator
        before = [call for call in self.ledger if call.raised is None]
        self.world.timeline.note("flush")
        limit_ms = self._settle_limit_ms()
        accumulator.flush(
            self.world.producer.sender.wakeup,
            lambda batch: self.world.run_until(lambda: batch.result.is_done, limit_ms),
        )
        left = [str(call) for call in before if not call.is_settled]
        self.world.timeline.note("flushed")
        self.flush_findings += [Finding(f"flush returned before {each} had ended") for each in left]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _settle_limit_ms(self) -> int:
        return self.plan.delivery_timeout_ms + self.longest_pause_ms + 1

    def _heal(self) -> None:
        """End all faults: every call ends, and new records arrive."""
        world = self.world
        self.troubles.heal()
        latest_ms = world.now_ms + world.config.request_timeout_ms + _RECOVERY_MS - self.plan.delivery_timeout_ms
        if self.plan.settings["batch.size"] == 1:  # otherwise a record may have the time of an older one in its batch
            self.must_not_time_out = [
                call for call in self.ledger if not call.outcomes and call.began_ms > latest_ms + self.longest_pause_ms
            ]
        world.run_for(_REST_MS)
        for topic in world.topics:
            for partition in range(len(world.cluster.topics[topic].partitions)):
                record = self._record(partition, None, 5)
                call = self.ledger.begin(topic, [record], is_block=False)
                self.must_arrive.append(call)
                self._call(call, partial(self._send_record, call, record))
        world.run_until(lambda: all(call.is_settled for call in self.ledger), self._settle_limit_ms())
        world.run_until(lambda: not world.client.has_in_flight_requests(), self.world.config.request_timeout_ms + 1)

    def _close(self) -> None:
        """Close with unsent records: each one is sent, or fails in time."""
        self.world.timeline.note("close")
        self.world.producer.close()
        config = self.world.config
        to_hear_ms = 3 * config.request_timeout_ms + config.socket_connection_setup_timeout_max_ms
        self.world.run_to_the_end(self._settle_limit_ms() + to_hear_ms)

    def _force_close(self) -> None:
        self.world.timeline.note("forced close")
        self.world.producer.sender.force_close()
        self.world.run_to_the_end(0)

    def _close_in_a_send(self) -> None:
        """Close in another thread while a send waits, if it waits."""

        def begin_close() -> None:
            self.world.before_wait = None
            self.world.timeline.note("close, while a send waits")
            self.world.producer.close()

        self.world.before_wait = begin_close
        for _ in range(4):
            self._send_row()
            self._send_block()
        self.world.before_wait = None
        self._close()


def _row_size(rng: random.Random) -> int:
    return rng.choice((5, 5, 30, 30, 120, 120, 500, 2_000))


_Action = Callable[[Simulation], None]
_TABLE: dict[_Action, int] = {
    Simulation._send_row: 45,
    Simulation._send_block: 15,
    Simulation._let_time_pass: 35,
    Simulation._pause: 2,
    Simulation._flush: 3,
}
_ACTIONS, _WEIGHTS = list(_TABLE), list(_TABLE.values())
_ENDINGS: dict[str, _Action] = {
    "heal": Simulation._heal,
    "close": Simulation._close,
    "force close": Simulation._force_close,
    "close in a send": Simulation._close_in_a_send,
}
