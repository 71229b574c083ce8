"""Many non-blocking connections in one thread. Mirrors org.apache.kafka.common.network.Selector.

`poll` does what the sockets allow and fills four results, which are valid until the next poll: frames that went out
whole, frames that came in whole, connections made, connections lost. A channel hands over at most one frame a poll, so
that no channel starves another.

One thread owns the selector; any thread may call `wakeup`. A forked child may only close it. That closes the child's
descriptors and leaves the parent's connections as they are.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import AuthenticationError, DisconnectError, IllegalStateError, KafkaError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.common.windows import Sample, Windows
from spark_kafka_sink.network.channel import Channel, ChannelKind, ChannelState, NetworkReceive, NetworkSend, SetupStep
from spark_kafka_sink.network.sasl.authenticator import SaslAuthenticator
from spark_kafka_sink.network.transport import READ, WRITE, Address, PlainTransport, TransportFactory

_log = logging.getLogger(__name__)

MAX_RECEIVE_SIZE: Final = 100 * 1024 * 1024
"""Bytes of a frame; a larger one is refused."""
_LONGEST_SELECT_MS: Final = 2**31 - 1
_HAS_POLL: Final = hasattr(select, "poll")
"""False on Windows. A frame larger than the socket's buffer then costs more turns."""
_LONGEST_WRITE_MS: Final = 5
_LONGEST_WAIT_FOR_ROOM_MS: Final = 1

AuthenticatorFactory = Callable[[str, str, Callable[[], None]], SaslAuthenticator]
"""(description, host, wakeup) → the authenticator of a new connection."""


@dataclass(slots=True)
class SelectorSample(Sample):
    """Times in ms: `wait_ms` within select, `io_ms` in the rest of the polls."""

    selects: int = 0
    wait_ms: int = 0
    io_ms: int = 0
    connections: int = 0
    """Connections whose TCP handshake was done."""
    closed: int = 0
    """Closed by either side, including those that were never made."""
    authentications: int = 0
    """Successful logins, or TLS handshakes without a login. Renewals of a session do not count."""
    failed_authentications: int = 0


class IdleConnections:
    """Times of last use by connection id, least recently used first."""

    def __init__(self, max_idle_ms: int) -> None:
        """A `max_idle_ms` below 0 means no limit."""
        self._max_idle_ms = max_idle_ms
        self._last_active_ms: OrderedDict[str, int] = OrderedDict()

    def touch(self, connection_id: str, now_ms: int) -> None:
        self._last_active_ms[connection_id] = now_ms
        self._last_active_ms.move_to_end(connection_id)

    def forget(self, connection_id: str) -> None:
        self._last_active_ms.pop(connection_id, None)

    def time_to_next(self, now_ms: int, at_most_ms: int) -> int:
        """Return the ms until a connection has been idle too long: 0 to `at_most_ms`."""
        if self._max_idle_ms >= 0 and self._last_active_ms:
            oldest_ms = next(iter(self._last_active_ms.values()))
            at_most_ms = min(at_most_ms, oldest_ms + self._max_idle_ms - now_ms)
        return max(at_most_ms, 0)

    def expired(self, now_ms: int) -> list[tuple[str, int]]:
        """Return the connections that were idle too long, each with its idle time in ms."""
        found: list[tuple[str, int]] = []
        if self._max_idle_ms < 0:
            return found
        for connection_id, active_ms in self._last_active_ms.items():
            if now_ms - active_ms < self._max_idle_ms:
                break
            found.append((connection_id, now_ms - active_ms))
        return found


class Selector:
    """The connections of one client, by connection id (a node's id as text)."""

    def __init__(
        self,
        clock: Clock,
        connections_max_idle_ms: int,
        make_authenticator: AuthenticatorFactory | None = None,
        make_transport: TransportFactory = PlainTransport,
    ) -> None:
        """`connections_max_idle_ms` below 0 keeps idle connections forever. With `make_authenticator`, a connection is
        ready when its authenticator is complete.
        """
        self._clock = clock
        self._make_authenticator = make_authenticator
        self._make_transport = make_transport
        self._process_id = os.getpid()
        self._poller = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._poller.register(self._wakeup_reader, READ, None)
        self._is_woken = False
        self._was_woken = False  # in this poll
        self._is_closed = False
        self._channels: dict[str, Channel] = {}
        self._idle = IdleConnections(connections_max_idle_ms)
        self._to_write: list[Channel] = []  # sends given since the last poll
        self._buffered: set[Channel] = set()  # their TLS has bytes that the poller cannot see
        self._to_drain: list[Channel] = []  # sending failed; frames that came before it are still read
        self._lost: dict[str, ChannelState] = {}  # the next poll reports them
        self.counts = Windows(SelectorSample)
        self.completed_sends: list[NetworkSend] = []
        self.completed_receives: list[NetworkReceive] = []
        self.disconnected: dict[str, ChannelState] = {}
        self.connected: list[str] = []

    # ---- connections -----------------------------------------------------------------------------------------------

    def connect(self, connection_id: str, address: Address, send_buffer: int = -1, receive_buffer: int = -1) -> None:
        """Start to connect. A later poll reports the connection as `connected` or `disconnected`, even if the attempt
        fails at once.

        Buffer sizes are bytes, -1 for the system's default. Raises IllegalStateError if the id is in use.
        """
        self._check_usable()
        if connection_id in self._channels or connection_id in self._lost:
            raise IllegalStateError(f"There is a connection {connection_id!r} already.")
        description = f"Node {connection_id} at {address}"
        try:
            transport = self._make_transport(address, description, send_buffer, receive_buffer)
        except OSError as error:
            self._lost[connection_id] = ChannelState(ChannelKind.NOT_CONNECTED, _connect_error(description, error))
            return
        except AuthenticationError as error:
            self._lost[connection_id] = ChannelState(ChannelKind.AUTHENTICATION_FAILED, error)
            return
        try:
            authenticator = None
            if self._make_authenticator is not None:
                authenticator = self._make_authenticator(description, address.host, self.wakeup)
            channel = Channel(connection_id, description, transport, MAX_RECEIVE_SIZE, authenticator)
            self._watch(channel, WRITE)
        except BaseException:  # the caller gets the error, and no socket is left
            transport.close()
            raise
        self._channels[connection_id] = channel
        self._idle.touch(channel.id, self._clock.now_ms())

    def close(self, connection_id: str) -> None:
        """Close one connection, if there is one. The next poll does not report it, because the caller knows."""
        self._lost.pop(connection_id, None)
        channel = self._channels.get(connection_id)
        if channel is not None:
            self._drop(channel)

    def close_all(self) -> None:
        """Close every connection and the selector itself. May be called twice, and in a forked child."""
        self._is_closed = True
        for channel in list(self._channels.values()):
            self._drop(channel)
        self._lost.clear()
        self._poller.close()
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    @property
    def connection_count(self) -> int:
        """The number of connections, including those that are being made. Any thread may read it."""
        return len(self._channels)

    def is_channel_ready(self, connection_id: str) -> bool:
        """Return whether `send` accepts a frame for this connection."""
        channel = self._channels.get(connection_id)
        return channel is not None and channel.is_ready

    def setup_step(self, connection_id: str) -> SetupStep | None:
        """Return what a connection waits for before it is ready; None if it was ready once, or does not exist."""
        channel = self._channels.get(connection_id)
        return None if channel is None else channel.setup_step

    # ---- sending and polling ---------------------------------------------------------------------------------------

    def send(self, send: NetworkSend) -> None:
        """Queue a frame for the next poll. Raises IllegalStateError if the connection is not ready, or if its last
        frame is not sent yet.
        """
        self._check_usable()
        channel = self._channels.get(send.destination)
        if channel is None or not channel.is_connected or channel.is_authenticating:
            raise IllegalStateError(f"There is no connection {send.destination!r} to send on.")
        if channel.has_send:
            raise IllegalStateError(f"{channel.description}: the last send is still under way ({channel.send}).")
        channel.send = send
        self._to_write.append(channel)

    def poll(self, timeout_ms: int) -> None:
        """Wait for an event, for `wakeup` or for `timeout_ms`, and fill the four results with what happened."""
        self._check_usable()
        self.completed_sends = []
        self.completed_receives = []
        self.connected = []
        self.disconnected, self._lost = self._lost, {}
        self._was_woken = False
        # A new frame mostly fits the socket's buffer. Then the poller need not watch the socket for room.
        to_write, self._to_write = self._to_write, []
        now_ms = self._clock.now_ms()
        for channel in to_write:
            self._shielded(self._write, channel, now_ms)
        deadline_ms = now_ms + timeout_ms
        # A frame larger than the socket's buffer goes out in pieces, and the caller need not hear of each piece. The
        # loop ends, because no other frame can be queued meanwhile.
        while self._poll_once(deadline_ms - now_ms, now_ms):
            now_ms = self._clock.now_ms()

    def _poll_once(self, timeout_ms: int, now_ms: int) -> bool:
        """Return whether frames went on and nothing else happened. A `timeout_ms` below 0 counts as 0."""
        to_drain, self._to_drain = self._to_drain, []  # before the events: those channels were read just now
        buffered, self._buffered = self._buffered, set()
        began_ms, select_ms = now_ms, self._clock.now_ms()
        events = self._select(0 if to_drain or buffered else self._bounded_timeout(timeout_ms, now_ms))
        now_ms = self._clock.now_ms()
        counts = self.counts.at(now_ms)
        counts.selects += 1
        counts.wait_ms += now_ms - select_ms
        for channel in buffered:
            events[channel] = events.get(channel, 0) | READ
        for channel, ready in events.items():
            if not channel.is_closed:
                self._process(channel, ready, now_ms)
        if self._make_authenticator is not None:
            self._advance_authentications(now_ms)
        self._drain_failed(to_drain, now_ms)
        self._close_idle(now_ms)
        counts.io_ms += select_ms - began_ms + self._clock.now_ms() - now_ms
        has_result = self._was_woken or self.completed_sends or self.completed_receives or self.disconnected
        return bool(events) and not has_result and all(channel.is_sending for channel in events)

    def wakeup(self) -> None:
        """Make the current poll, or the next one, return at once. Any thread may call it. No effect once closed."""
        if self._is_woken or self._is_closed or os.getpid() != self._process_id:
            return
        try:
            self._is_woken = True
            self._wakeup_writer.send(b"\0")
        except OSError as error:  # closed meanwhile; or full, and then the poll wakes anyway
            _log.debug("Wake-up not sent: %s", error)
        except BaseException:  # Ctrl-C: the flag without its byte would keep every later wake-up from being sent
            self._is_woken = False
            raise

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._is_closed:
            raise IllegalStateError("The selector is closed.")
        if os.getpid() != self._process_id:
            raise IllegalStateError(
                f"The connections belong to process {self._process_id}; "
                f"process {os.getpid()}, forked from it, must make its own."
            )

    def _bounded_timeout(self, timeout_ms: int, now_ms: int) -> int:
        if self.completed_sends or self.disconnected:
            return 0
        return min(self._idle.time_to_next(now_ms, at_most_ms=timeout_ms), _LONGEST_SELECT_MS)

    def _select(self, timeout_ms: int) -> dict[Channel, int]:
        found: dict[Channel, int] = {}
        for key, ready in self._poller.select(timeout_ms / 1000):
            if key.data is None:
                self._take_wakeup()
            else:
                found[key.data] = ready
        return found

    def _take_wakeup(self) -> None:
        self._wakeup_reader.recv(64)
        # After the read: a wake-up in between finds this poll awake, and must not leave the flag set without its byte.
        self._is_woken = False
        self._was_woken = True

    def _process(self, channel: Channel, ready: int, now_ms: int) -> None:
        if not channel.is_connected:
            self._shielded(self._finish_connect, channel, now_ms)
            return
        if ready & READ:
            self._shielded(self._read, channel, now_ms)
        if ready & WRITE and not channel.is_closed:
            self._shielded(self._write, channel, now_ms)

    def _shielded(self, step: Callable[[Channel, int], object], channel: Channel, now_ms: int) -> bool:
        """Run a step of one channel and return its result. An unexpected exception closes only that connection
        (Selector.pollSelectionKeys).
        """
        try:
            return bool(step(channel, now_ms))
        except Exception as error:
            self._lose_for_fault(channel, error)
            return False

    def _lose_for_fault(self, channel: Channel, error: Exception) -> None:
        # The text of an error that a login raises may show a secret.
        text = f": {one_line(str(error))}" if channel.is_authenticated else ""
        fault = f"{channel.description}: this client closes the connection after an unexpected {_name(error)}{text}"
        _log.warning("%s", fault)
        _log.debug("Where it was raised:\n%s", "".join(traceback.format_tb(error.__traceback__)))
        if not channel.is_closed:
            self._lose(channel, channel.state(DisconnectError(fault)))

    def _finish_connect(self, channel: Channel, now_ms: int) -> None:
        had_tcp = channel.has_tcp
        try:
            awaited = channel.shake_hands()
        except OSError as error:
            self._lose(channel, channel.state(_connect_error(channel.description, error)))
            return
        except KafkaError as error:
            self._lose(channel, channel.state(error))
            return
        finally:
            if channel.has_tcp and not had_tcp:  # also where TLS fails in the same call
                self.counts.at(now_ms).connections += 1
        if awaited:
            self._watch(channel, awaited)
            return
        if self._make_authenticator is None and not isinstance(channel.transport, PlainTransport):  # TLS is done
            self.counts.at(now_ms).authentications += 1
        self._idle.touch(channel.id, now_ms)
        self._watch(channel, READ)
        self.connected.append(channel.id)
        try:
            channel.authenticate()
        except KafkaError as error:
            self._lose(channel, channel.state(error))

    def _read(self, channel: Channel, now_ms: int) -> bool:
        """Read from a channel. Return whether a whole frame came."""
        try:
            receive = channel.read()
        except OSError as error:
            self._lose(channel, channel.state(DisconnectError(f"{channel.description}: {_text(error)}.")))
            return False
        except KafkaError as error:
            self._lose(channel, channel.state(error))
            return False
        self._idle.touch(channel.id, now_ms)
        if channel.failed_send is None and channel.transport.has_buffered():
            self._buffered.add(channel)
        if receive is None:
            return False
        try:
            is_taken = channel.take(receive, now_ms)
        except KafkaError as error:
            self._lose(channel, channel.state(error))
            return False
        if not is_taken:
            self.completed_receives.append(receive)
        return True

    def _advance_authentications(self, now_ms: int) -> None:
        """Send what authenticators have to say since they read, or since a slow step of theirs has ended."""
        for channel in list(self._channels.values()):
            if channel.is_held_up:
                self._shielded(self._write, channel, now_ms)
            if channel.is_authenticated and not channel.is_counted:
                channel.is_counted = True
                self.counts.at(now_ms).authentications += 1

    def _write(self, channel: Channel, now_ms: int) -> None:
        if channel.is_closed or channel.failed_send is not None:
            return
        try:
            channel.prepare(now_ms)
        except KafkaError as error:
            self._lose(channel, channel.state(error))
            return
        try:
            done = channel.write()
            if done is None and _HAS_POLL and channel.is_sending and self._is_alone(channel):
                done = self._write_on(channel)
        except OSError as error:
            channel.failed_send = DisconnectError(f"{channel.description}: sending failed: {_text(error)}.")
            self._watch(channel, 0)
            self._to_drain.append(channel)
            return
        self._idle.touch(channel.id, now_ms)
        if done is not None:
            self.completed_sends.append(done)
        self._watch(channel, READ | (WRITE if channel.send is not None else 0))

    def _is_alone(self, channel: Channel) -> bool:
        return not any(other.is_sending for other in self._channels.values() if other is not channel)

    def _write_on(self, channel: Channel) -> NetworkSend | None:
        """Send the rest of a frame that is larger than the socket's buffer, while the peer takes it at once.

        Meanwhile the poll handles nothing else. Each response or wake-up would otherwise cost the client another turn
        with little work in it.
        """
        room = select.poll()
        room.register(channel.transport.fileno(), select.POLLOUT)
        end_ms, done, left = self._clock.now_ms() + _LONGEST_WRITE_MS, None, -1
        while channel.send is not None and channel.send.remaining != left and room.poll(_LONGEST_WAIT_FOR_ROOM_MS):
            left = channel.send.remaining
            done = channel.write()
            if self._clock.now_ms() >= end_ms:
                break
        return done

    def _drain_failed(self, to_drain: list[Channel], now_ms: int) -> None:
        """Read the frames that the peer sent before sending to it failed, one a poll; then drop the connection."""
        for channel in to_drain:
            if channel.is_closed:
                continue
            if self._shielded(self._read, channel, now_ms):
                self._to_drain.append(channel)
            elif not channel.is_closed:
                self._lose(channel, channel.state(None))

    def _close_idle(self, now_ms: int) -> None:
        for connection_id, idle_ms in self._idle.expired(now_ms):
            channel = self._channels[connection_id]
            text = f"{channel.description}: idle for {idle_ms} ms (connections.max.idle.ms)."
            self._lose(channel, ChannelState(ChannelKind.EXPIRED, DisconnectError(text)))

    def _lose(self, channel: Channel, state: ChannelState) -> None:
        self._drop(channel)
        self.disconnected[channel.id] = state
        if channel.id in self.connected:  # a poll reports one of the two
            self.connected.remove(channel.id)
        if state.kind is ChannelKind.AUTHENTICATION_FAILED:
            self.counts.at(self._clock.now_ms()).failed_authentications += 1
        _log.debug("Connection %s lost: %s", channel.id, state)

    def _drop(self, channel: Channel) -> None:
        channel.is_closed = True
        self.counts.at(self._clock.now_ms()).closed += 1
        del self._channels[channel.id]
        self._idle.forget(channel.id)
        self._buffered.discard(channel)
        for step in (partial(self._watch, channel, 0), channel.transport.close):
            try:
                step()
            except Exception as error:  # the loss is reported anyway
                _log.warning("%s: the socket could not be closed cleanly: %s", channel.description, _name(error))

    def _watch(self, channel: Channel, interest: int) -> None:
        if interest == channel.interest or os.getpid() != self._process_id:
            return  # a forked child shares the parent's poller, and would change what the parent watches
        if not channel.interest:
            self._poller.register(channel.transport, interest, channel)
        elif interest:
            self._poller.modify(channel.transport, interest, channel)
        else:
            self._poller.unregister(channel.transport)
        channel.interest = interest


def _connect_error(description: str, error: OSError) -> KafkaError:
    return DisconnectError(f"{description} cannot be connected to: {_text(error)}.")


def _name(error: Exception) -> str:
    return type(error).__name__


def _text(error: OSError) -> str:
    return error.strerror or str(error)
