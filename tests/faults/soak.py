"""A long run: producers send to three real brokers while kills, cuts and other faults are drawn from the fault
matrix.

PYTHONPATH=.:tests python tests/faults/soak.py --minutes 10 --seed 1

Two idempotent producers (by rows and by columns), two transactional ones, and a query of exactly-once batches,
whose processes are killed over and over (support.killed_query), write through proxies. The run ends when the time
is over and there were enough records and faults. Then librdkafka reads everything under both isolation levels, and
the run compares it. It writes a table, a timeline as text and as a picture, and after an error the logs, to --out.
Its exit code is 1 if an acknowledged record was lost, duplicated or reordered, or if anything else was wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from support.cluster_admin import active_controller
from support.fault_stage import FaultStage, Timeline
from support.history import Anomaly, History, Outcome, Sent, summary
from support.killed_query import Query
from support.tcp_proxy import Way
from support.transactional_workload import TransactionalWorkload
from support.workload import Workload, draw_settings, history_of, partitions_of, read_all

from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

mpl.use("agg")
_QUERY_PARTITIONS = 3


@dataclass(frozen=True)
class SoakFault:
    """A fault of the matrix: its begin, its duration and its weight in the draw. It repairs everything at its end."""

    row: int
    name: str
    weight: int
    seconds: tuple[float, float]
    begin: Callable[[FaultStage, random.Random], None]


def _node(stage: FaultStage, rng: random.Random) -> int:
    return rng.choice(stage.kafka.node_ids)


def _reset_in_mid_request(stage: FaultStage, rng: random.Random) -> None:
    for proxy in stage.proxies.values():
        proxy.cut_after(rng.randrange(1, 20_000), Way.UP)


def _end_in_mid_response(stage: FaultStage, rng: random.Random) -> None:
    for proxy in stage.proxies.values():
        proxy.cut_after(rng.randrange(1, 500), Way.DOWN, reset=False)


def _slow(stage: FaultStage, rng: random.Random) -> None:
    for proxy in stage.proxies.values():
        proxy.shape(delay_s=rng.uniform(0.02, 0.1), bytes_per_s=rng.uniform(2e6, 6e6) / 8)


def _kill_all(stage: FaultStage, rng: random.Random) -> None:
    stage.kill(*rng.sample(stage.kafka.node_ids, len(stage.kafka.node_ids)))


SOAK_FAULTS = (
    SoakFault(1, "kill -9 a node", 8, (0, 4), lambda stage, rng: stage.kill(_node(stage, rng))),
    SoakFault(2, "suspend a node", 4, (1, 6), lambda stage, rng: stage.suspend(_node(stage, rng))),
    SoakFault(
        3, "kill -9 the active controller", 3, (0, 4), lambda stage, _: stage.kill(active_controller(stage.direct))
    ),
    SoakFault(4, "restart a node", 2, (0, 0), lambda stage, rng: stage.restart(_node(stage, rng))),
    SoakFault(5, "kill -9 every node", 1, (0, 3), _kill_all),
    SoakFault(
        6, "refuse connections to a node", 3, (1, 4), lambda stage, rng: stage.proxies[_node(stage, rng)].refuse()
    ),
    SoakFault(6, "black hole", 3, (1, 4), lambda stage, rng: stage.proxies[_node(stage, rng)].black_hole()),
    SoakFault(7, "slow and narrow", 1, (2, 5), _slow),
    SoakFault(7, "reset in mid-request", 5, (1, 2), _reset_in_mid_request),
    SoakFault(8, "half-open connections", 4, (1, 3), lambda stage, rng: stage.proxies[_node(stage, rng)].half_open()),
    SoakFault(11, "end in mid-response", 5, (1, 2), _end_in_mid_response),
)


class KilledQuery:
    """A thread that starts the processes of an exactly-once query. They are killed, and go on from the checkpoint."""

    def __init__(self, stage: FaultStage, folder: Path, seed: int) -> None:
        self.kills = 0
        self.topic = stage.new_topic(partitions=_QUERY_PARTITIONS)[0][0]
        self._stage, self._seed = stage, seed
        self._ended = threading.Event()
        checkpoint = folder / f"checkpoint-{self.topic}"
        checkpoint.unlink(missing_ok=True)
        self._query = Query(stage.proxied, self.topic, checkpoint)
        self._log = folder / "query.log"
        self._log.write_text("")
        self._thread = threading.Thread(target=self._run, name="killed-query")
        self._thread.start()

    @property
    def batches(self) -> int:
        return self._query.finished()

    def _run(self) -> None:
        while not self._ended.is_set():
            done = self._start(3, 180)
            self.kills += 0 if done is None else done["kills"]
            self._seed += 1

    def _start(self, kills: int, timeout_s: float) -> dict[str, Any] | None:
        """Start processes until that many were killed, and then one that is not. Return the outcomes, or None if too
        many processes failed, which can happen while brokers are down.
        """
        query = self._query
        command = [sys.executable, "-m", "support.killed_query", "--servers", query.servers, "--topic", query.topic]
        options = ["--checkpoint", str(query.checkpoint), "--kills", str(kills), "--seed", str(self._seed)]
        with self._log.open("a") as log:
            ended = subprocess.run(
                command + options, stdout=subprocess.PIPE, stderr=log, text=True, timeout=timeout_s, check=False
            )
        return dict(json.loads(ended.stdout)) if ended.returncode == 0 else None

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(200)

    def anomalies(self) -> list[Anomaly]:
        """Stop and run one more batch without a fault; check that every row of every finished batch is there once, with
        the rows of a key in order.
        """
        self.stop()
        last = self._start(0, 120)
        status = "none" if last is None else last["status"]
        assert status == 0, f"the query does not go on ({status}): {self._log.read_text()[-2_000:]}"
        rows = [self._query.row(number) for number in range(self.batches * self._query.rows)]
        sent = [Sent(value.decode(), self.topic, None, Outcome.YES, None, key.decode()) for key, value in rows]
        read = read_all(self._stage.direct, {self.topic: _QUERY_PARTITIONS}, "read_committed")
        return History(sent, read).anomalies()


class Soak:
    """One run. `done` is a list of (fault, from, to) in seconds after the start."""

    def __init__(self, stage: FaultStage, rng: random.Random, folder: Path) -> None:
        self.stage, self.rng = stage, rng
        self.query = KilledQuery(stage, folder, rng.randrange(1_000))
        self.began = time.monotonic()
        self.done: list[tuple[SoakFault, float, float]] = []
        self.workloads: list[Workload] = []
        self.transacting: list[TransactionalWorkload] = []
        self._producers: list[KafkaProducer] = []

    def __enter__(self) -> Soak:
        for _ in range(2):
            places = self.stage.new_topic(partitions=4)
            work = Workload(self._producer(), places, self.rng, records_a_second=500)
            self.workloads.append(work)
            work.__enter__()
        for number in range(2):
            places = self.stage.new_topic(partitions=3)
            name = f"soak-{number}-{places[0][0]}"
            start = self._transactional(name)
            self.transacting.append(TransactionalWorkload(name, start, places, self.rng, pause_s=0.1))
            self.transacting[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.query.stop)
            for producer in self._producers:
                stack.callback(producer.close, 5)
            for work in (*self.workloads, *self.transacting):
                stack.callback(work.stop)

    def _producer(self, **more: Any) -> KafkaProducer:
        quick = {"reconnect.backoff.max.ms": 500, "socket.connection.setup.timeout.ms": 1_000}
        settings = draw_settings(self.rng) | quick | more
        made = KafkaProducer({"bootstrap.servers": self.stage.proxied, **settings})
        self._producers.append(made)
        return made

    def _transactional(self, name: str) -> Callable[[], KafkaProducer]:
        return lambda: self._producer(**{"transactional.id": name, "max.block.ms": 20_000})

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def sent(self) -> int:
        return sum(len(work.ledger.sent) for work in (*self.workloads, *self.transacting))  # type: ignore[attr-defined, misc]

    def step(self) -> None:
        """Run one fault to its end, and wait until everything works again."""
        (fault,) = self.rng.choices(SOAK_FAULTS, weights=[fault.weight for fault in SOAK_FAULTS])
        self.stage.note(f"row {fault.row}: {fault.name}")
        began = self.elapsed_s
        fault.begin(self.stage, self.rng)
        time.sleep(self.rng.uniform(*fault.seconds))
        self.stage.heal()
        self.done.append((fault, began, self.elapsed_s))
        for work in self.workloads:
            work.await_acknowledged(20, within_s=90)
        for transacting in self.transacting:
            transacting.await_committed(1, within_s=90)
        for work in (*self.workloads, *self.transacting):  # type: ignore[assignment]
            self.stage.await_in_sync(work.ledger.sent[0].topic)

    def verdict(self) -> list[Anomaly]:
        """Stop all producers, and compare the sent records with those read."""
        found: list[Anomaly] = []
        for work in self.workloads:
            work.stop()
            work.producer.flush(90)
            work.ledger.check()
            others = [error for error in work.ledger.errors if not isinstance(error, KafkaTimeoutError)]
            assert not others, f"{len(others)} records failed by more than time: {others[:3]}"
            found += history_of(self.stage.direct, partitions_of(work.ledger.by_place), work.ledger.sent).anomalies()
        for transacting in self.transacting:
            transacting.stop()
            ledger = transacting.ledger
            ledger.check()
            history = history_of(
                self.stage.direct, partitions_of(ledger.by_place), ledger.sent, transacting.transactions
            )
            found += history.anomalies()
        return found + self.query.anomalies()


def draw(soak: Soak, target: Path) -> None:
    """Draw the acknowledged records of each second, with the faults behind them."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(14, 4.5), layout="constrained")
    colors = {fault.name: mpl.colormaps["tab20"](number) for number, fault in enumerate(SOAK_FAULTS)}
    for fault, begin, end in soak.done:
        axes.axvspan(begin, max(end, begin + 0.3), color=colors[fault.name], alpha=0.25, lw=0)
    for label, works in (("idempotent", soak.workloads), ("transactional", soak.transacting)):
        seconds = Counter(int(at - soak.began) for work in works for at in work.ledger.acknowledged_at)
        axes.plot(range(int(soak.elapsed_s)), [seconds[at] for at in range(int(soak.elapsed_s))], lw=1, label=label)
    drawn = {fault.name for fault, _, _ in soak.done}
    for name in (fault.name for fault in SOAK_FAULTS if fault.name in drawn):
        axes.fill_between([], [], color=colors[name], alpha=0.25, label=name)
    axes.set(xlabel="seconds", ylabel="records acknowledged in a second", title="Soak: faults and what got through")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(target, dpi=120)


def report(soak: Soak, anomalies: list[Anomaly]) -> Table:
    table = Table(title=f"{len(soak.done)} faults in {soak.elapsed_s / 60:.1f} minutes", show_footer=True)
    for column in ("row", "fault"):
        table.add_column(column)
    table.add_column("times", str(len(soak.done)), justify="right")
    table.add_column("seconds at most", justify="right")
    for fault in SOAK_FAULTS:
        times = [end - begin for each, begin, end in soak.done if each is fault]
        if times:
            table.add_row(str(fault.row), fault.name, str(len(times)), f"{max(times):.1f}")
    works = (*soak.workloads, *soak.transacting)
    table.add_section()
    table.add_row("", "records sent", f"{soak.sent:,}", "")
    table.add_row("", "acknowledged", f"{sum(len(work.ledger.acknowledged_at) for work in works):,}", "")  # type: ignore[attr-defined, misc]
    failed = [sum(len(work.ledger.failed_after_s) for work in each) for each in (soak.workloads, soak.transacting)]
    table.add_row("", "failed", f"{failed[0]:,}", "")
    table.add_row("", "failed, in transactions that were aborted", f"{failed[1]:,}", "")
    table.add_row("", "transactions committed", f"{sum(work.committed for work in soak.transacting):,}", "")
    table.add_row("", "kills of an exactly-once query", str(soak.query.kills), "")
    table.add_row("", "its batches", f"{soak.query.batches:,}", "")
    table.add_row("", "longest silence", "", f"{max(work.longest_silence_s() for work in soak.workloads):.1f}")
    table.add_row("", "anomalies", str(len(anomalies)), "")
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long at least (10)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000), help="decides the faults")
    parser.add_argument("--records", type=int, default=100_000, help="how many at least (100,000)")
    parser.add_argument("--faults", type=int, default=30, help="how many at least (30)")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="where the report goes (build/soak)")
    return parser.parse_args(arguments)


def main() -> int:
    chosen = parse(sys.argv[1:])
    console = Console()
    console.print(f"Soak with seed {chosen.seed}; the report goes to {chosen.out}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=chosen.out / "producers.log", filemode="w", format="%(asctime)s %(message)s")
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with FaultStage(3) as stage, Progress(*columns, console=console) as progress:
        stage.timeline = Timeline(lambda line: progress.console.print(line, highlight=False))
        bars = {
            name: progress.add_task(name, total=total)
            for name, total in (
                ("seconds", int(chosen.minutes * 60)),
                ("records", chosen.records),
                ("faults", chosen.faults),
            )
        }
        with Soak(stage, random.Random(chosen.seed), chosen.out) as soak:
            problem: str | None = None
            try:
                while not progress.finished:
                    soak.step()
                    seen = {"seconds": soak.elapsed_s, "records": soak.sent, "faults": len(soak.done)}
                    for name, value in seen.items():
                        progress.update(bars[name], completed=int(value))
                anomalies = soak.verdict()
            except AssertionError as stuck:
                problem, anomalies = str(stuck), []
            if problem or anomalies:
                stage.save_logs(chosen.out / "logs")
    console.print(report(soak, anomalies))
    (chosen.out / "timeline.txt").write_text("\n".join(stage.timeline.lines) + "\n", encoding="utf-8")
    draw(soak, chosen.out / "timeline.png")
    console.print(f"{chosen.out / 'timeline.png'}, {chosen.out / 'timeline.txt'}")
    if problem:
        console.print(f"[red]It went no further: {problem}")
    elif anomalies:
        console.print(f"[red]{summary(anomalies)}")
    return int(bool(problem or anomalies))


if __name__ == "__main__":
    sys.exit(main())
