"""PLAIN (RFC 4616): name and password in the clear. Only TLS hides them from others.

Its own file although it is short: one file a mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret


class PlainMechanism:
    """Sends one message. What the server adds to its acceptance is ignored: some add a few bytes."""

    name: ClassVar[str] = "PLAIN"
    is_slow: ClassVar[bool] = False

    def __init__(self, username: str, password: Secret) -> None:
        """Raises ConfigError if a field is empty or contains NUL, which separates the fields."""
        if not username or not password.reveal():
            raise ConfigError("SASL PLAIN needs a username and a password, neither of them empty.")
        if "\0" in username or "\0" in password.reveal():
            raise ConfigError("SASL PLAIN allows no NUL character in the username or in the password (RFC 4616).")
        self._username = username
        self._password = password
        self._is_sent = False

    @property
    def secrets(self) -> Sequence[Secret]:
        return (self._password,)

    def respond(self, challenge: bytes) -> bytes | None:
        if self._is_sent:
            return None
        if challenge:
            raise SaslAuthenticationError(
                f"The server answered SASL PLAIN with a challenge of {len(challenge)} bytes; PLAIN has none."
            )
        self._is_sent = True
        return b"\0".join((b"", self._username.encode(), self._password.reveal().encode()))
