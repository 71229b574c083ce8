"""What every mechanism is to the authenticator. No I/O here; one thread at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from spark_kafka_sink.common.secret import Secret


class SaslMechanism(Protocol):
    """One exchange from the client's side (RFC 4422): the server's message in, ours out. Used once, then thrown away.

    `repr` and every error are free of secrets.
    """

    name: ClassVar[str]
    """As the server lists it."""
    is_slow: ClassVar[bool]
    """`respond` computes or waits for long, so it must not run on the thread of the sockets."""

    @property
    def secrets(self) -> Sequence[Secret]:
        """What we have told the server in the clear, so that it is taken out of whatever it says to us."""
        ...

    def respond(self, challenge: bytes) -> bytes | None:
        """What to send after `challenge`, b"" to begin with; None when the server has proved all that it must and
        nothing is left to say.

        Raises SaslAuthenticationError where the server is not to be trusted or refuses us, RetriableError where what
        we need to answer cannot be had now.
        """
        ...
