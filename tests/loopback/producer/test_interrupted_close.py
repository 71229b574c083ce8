"""Ctrl-C while close waits for in-flight records, over real sockets."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import ProducerClosedError
from spark_kafka_sink.protocol.versions import ApiKey

JOIN_S = 5


@contextmanager
def interrupted_in_close(producer: KafkaProducer) -> Iterator[None]:
    """Send Ctrl-C once the producer's close has stopped the Sender and waits for it. A shell that starts the tests in
    the background lets them ignore Ctrl-C.
    """
    sender, main = producer.sender, threading.main_thread()

    def interrupt() -> None:
        while sender._is_running:
            reported.wait(0.001)
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)

    reported = threading.Event()
    thread = threading.Thread(target=interrupt, daemon=True)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        thread.join(JOIN_S)
    finally:
        signal.signal(signal.SIGINT, outside)


def hold(arrived: threading.Event, goes_on: threading.Event) -> faults.Hook:
    """Keep the request in the broker until the test releases it."""

    def hook(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        arrived.set()
        assert goes_on.wait(JOIN_S)
        return proceed()

    return hook


@pytest.mark.parametrize("second_close", ["none", "waits", "forced"])
def test_interrupted_close_leaves_records_to_the_sender(second_close: str) -> None:
    """KafkaProducerTest.shouldCloseProperlyAndThrowIfInterrupted. In Java an interrupted close fails the records. Here
    the Sender sends them and ends; a second close waits for that, up to its timeout.

    Bug: up to Python 3.12 the second close neither waited nor ended anything. A program that ended after it lost the
    records, without an error.
    """
    cluster = ScriptedCluster(1)
    cluster.create_topic("t", partitions=1)
    arrived, goes_on = threading.Event(), threading.Event()
    cluster.on(ApiKey.PRODUCE, hold(arrived, goes_on))
    with ScriptedServer(cluster) as server:
        producer = KafkaProducer({"bootstrap.servers": ",".join(server.bootstrap_servers), "linger.ms": "0"})
        future = producer.send("t", b"value")
        assert arrived.wait(JOIN_S)
        with interrupted_in_close(producer):
            producer.close()
        assert not producer.sender.has_ended
        assert not future.done()
        if second_close == "forced":
            producer.close(0)
            assert isinstance(future.exception(), ProducerClosedError)
        if second_close == "waits":
            threading.Timer(0.1, goes_on.set).start()
            producer.close()
            assert future.done()
        goes_on.set()
        if second_close != "forced":
            assert future.result(timeout=JOIN_S).offset == 0
        assert producer.sender.wait_for_end(JOIN_S)
        assert not producer.has_failed
