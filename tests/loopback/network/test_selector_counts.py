"""The selector's counts of its connections and polls."""

from __future__ import annotations

import threading

from support.peer import Peer, connect, lost, poll_until

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import SaslAuthenticationError, SslAuthenticationError
from spark_kafka_sink.common.windows import Reading
from spark_kafka_sink.network.selector import Selector, SelectorSample
from spark_kafka_sink.network.transport import PlainTransport


def totals(selector: Selector) -> SelectorSample:
    reading: Reading[SelectorSample] = selector.counts.read(SystemClock().now_ms())
    return reading.total


def test_connections_made_and_closed_are_counted(selector: Selector, peer: Peer) -> None:
    connect(selector, peer, "1")
    connection = connect(selector, peer, "2")
    assert selector.connection_count == 2
    connection.close()
    lost(selector, "2")
    selector.close("1")
    counted = totals(selector)
    assert (counted.connections, counted.closed, selector.connection_count) == (2, 2, 0)
    assert counted.authentications == 0, "there is neither TLS nor a login"


class RefusedAtOnce(PlainTransport):
    """A transport whose handshake fails in the call that finds TCP connected, as TLS can with a quick peer."""

    __slots__ = ()

    def handshake(self) -> int:
        raise SslAuthenticationError("not trusted")


def test_connection_whose_handshake_fails_at_once_is_counted(peer: Peer) -> None:
    """Bug: the selector counted it as closed, but not as made."""
    selector = Selector(SystemClock(), -1, make_transport=RefusedAtOnce)
    selector.connect("1", peer.address)
    lost(selector, "1")
    counted = totals(selector)
    assert (counted.connections, counted.closed, counted.failed_authentications) == (1, 1, 1)
    selector.close_all()


def test_time_in_select_is_counted_separately(selector: Selector) -> None:
    timer = threading.Timer(0.2, selector.wakeup)
    timer.start()
    selector.poll(10_000)
    timer.join()
    counted = totals(selector)
    assert counted.selects >= 1
    assert counted.wait_ms >= 150
    assert counted.io_ms <= counted.wait_ms


class Login:
    """A login that succeeds or is refused at its first step."""

    is_complete = False

    def __init__(self, is_refused: bool) -> None:
        self._is_refused = is_refused

    def begin(self) -> None: ...

    def is_due(self, _: int) -> bool:
        return False

    def take_outgoing(self) -> None: ...

    def advance(self, _: int) -> None:
        if self._is_refused:
            raise SaslAuthenticationError("no")
        self.is_complete = True


def test_each_login_is_counted_once_by_outcome(peer: Peer) -> None:
    outcomes = iter([False, True])
    selector = Selector(SystemClock(), -1, make_authenticator=lambda *_: Login(next(outcomes)))  # type: ignore[arg-type, return-value]
    selector.connect("1", peer.address)
    poll_until(selector, lambda: selector.is_channel_ready("1"))
    selector.connect("2", peer.address)
    lost(selector, "2")
    for _ in range(3):
        selector.poll(0)
    counted = totals(selector)
    assert (counted.authentications, counted.failed_authentications) == (1, 1)
    selector.close_all()
