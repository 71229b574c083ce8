"""OAUTHBEARER (RFC 7628): a bearer token, and Kafka's extensions to it (KIP-342)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.peer_text import one_line
from spark_kafka_sink.common.secret import Secret

_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_EXTENSION_NAME: Final = re.compile("[A-Za-z]+")
_EXTENSION_VALUE: Final = re.compile(r"[\x21-\x7e \t\r\n]+")
_LONGEST_ERROR: Final = 16_384
_TOLD_FIELDS: Final = ("status", "scope", "openid-configuration")


def check_extensions(extensions: Mapping[str, str]) -> None:
    """Raises ConfigError where a name or value would break the message, or stand for the token itself."""
    for name, value in extensions.items():
        if name == "auth" or not _EXTENSION_NAME.fullmatch(name):
            raise ConfigError(f"The SASL extension {name!r} needs another name: letters alone, and not 'auth'.")
        if not _EXTENSION_VALUE.fullmatch(value):
            raise ConfigError(f"The SASL extension {name!r} has a value that is empty or not printable ASCII.")


class OAuthBearerMechanism:
    """One message. A server that refuses it answers with its reasons, is told that they were heard, and then fails."""

    name: ClassVar[str] = "OAUTHBEARER"
    is_slow: ClassVar[bool] = True

    def __init__(self, token: Callable[[], Secret], extensions: Mapping[str, str]) -> None:
        """`token` gives a valid one, if need be after a while. Raises ConfigError as `check_extensions` does."""
        check_extensions(extensions)
        self._token = token
        self._extensions = dict(extensions)
        self._sent: tuple[Secret, ...] = ()
        self._refusal: str | None = None

    @property
    def secrets(self) -> Sequence[Secret]:
        return self._sent

    def respond(self, challenge: bytes) -> bytes | None:
        if not self._sent:
            return self._begin(challenge)
        if self._refusal is not None:  # after its reasons nothing but a failure is due, whatever it says
            raise SaslAuthenticationError(self._refusal)
        if not challenge:
            return None
        self._refusal = f"SASL OAUTHBEARER: the server refuses the token{_reasons(challenge, self._sent[0])}."
        return b"\x01"

    def _begin(self, challenge: bytes) -> bytes:
        if challenge:
            raise SaslAuthenticationError("SASL OAUTHBEARER: the server spoke first, where the client does.")
        token = self._token()
        if not _TOKEN.fullmatch(token.reveal()):
            raise SaslAuthenticationError(
                "SASL OAUTHBEARER: what the token provider gave is no bearer token (RFC 6750)."
            )
        self._sent = (token,)
        extensions = "".join(f"{name}={value}\x01" for name, value in self._extensions.items())
        return f"n,,\x01auth=Bearer {token.reveal()}\x01{extensions}\x01".encode()


def _reasons(challenge: bytes, token: Secret) -> str:
    """What of the server's reasons (RFC 7628, section 3.2.2) can be told; they are JSON, or are not believed. It may
    have repeated the token.
    """
    try:
        reasons = json.loads(challenge[:_LONGEST_ERROR].decode())
    except (ValueError, RecursionError):
        return ""
    if not isinstance(reasons, dict):
        return ""
    texts = {name: str(reasons[name]).replace(token.reveal(), "***") for name in _TOLD_FIELDS if name in reasons}
    told = {name: one_line(text) for name, text in texts.items()}
    return f": {', '.join(f'{name} {value}' for name, value in told.items())}" if told else ""
