"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): both sides prove that they know the password, neither sends it.

This is our own code, because it does not trust the server: it limits what the server may ask for, and checks the
server's proof. As in Kafka's ScramFormatter, name and password are UTF-8 without SASLprep, and there is no channel
binding. Nothing is logged, because the messages contain proofs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets as random_source
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret, one_line

_FEWEST_ITERATIONS: Final = 4_096
_MOST_ITERATIONS: Final = 1_000_000
"""They take about a second to compute. Kafka's brokers store at most 16,384."""
_LONGEST_MESSAGE: Final = 4_096
_NO_CHANNEL_BINDING: Final = "n,,"
_NONCE_BYTES: Final = 24
_ATTRIBUTE: Final = re.compile("[A-Za-z]=[^,\0]*")
_COUNT: Final = re.compile("[1-9][0-9]{0,9}", re.ASCII)
_NONCE: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]+")


def new_nonce() -> str:
    """Return printable text without a comma, from the system's random source."""
    return random_source.token_urlsafe(_NONCE_BYTES)


class _ScramMechanism:
    """client-first, server-first, client-final, server-final. It is complete when the last one is verified."""

    name: ClassVar[str]
    is_slow: ClassVar[bool] = True
    _hash: ClassVar[str]

    def __init__(
        self,
        username: str,
        password: Secret,
        is_delegation_token: bool = False,
        nonce: Callable[[], str] = new_nonce,
    ) -> None:
        """If `is_delegation_token`, name and password are the id and the HMAC of a delegation token (KIP-48).

        Raises ConfigError if one is empty, or if the name contains NUL.
        """
        if not username or not password.reveal():
            raise ConfigError(f"SASL {self.name} needs a username and a password, neither of them empty.")
        if "\0" in username:
            raise ConfigError(f"SASL {self.name} allows no NUL character in the username.")
        self._password = password
        self._nonce = nonce()
        saslname = username.replace("=", "=3D").replace(",", "=2C")
        extension = ",tokenauth=true" if is_delegation_token else ""
        self._first_bare = f"n={saslname},r={self._nonce}{extension}"
        self._server_signature = b""
        self._next: Callable[[bytes], bytes | None] = self._begin

    @property
    def secrets(self) -> Sequence[Secret]:
        return ()

    def respond(self, challenge: bytes) -> bytes | None:
        return self._next(challenge)

    def _begin(self, challenge: bytes) -> bytes:
        if challenge:
            raise self._refused("it sent the first message, but the client must")
        self._next = self._on_server_first
        return (_NO_CHANNEL_BINDING + self._first_bare).encode()

    def _on_server_first(self, challenge: bytes) -> bytes:
        server_first = self._text(challenge)
        found = self._attributes(server_first)
        self._next = self._on_server_final
        if list(found)[:3] != ["r", "s", "i"]:
            raise self._refused("its first message does not have nonce, salt and iteration count, in this order")
        nonce, salt, iterations = found["r"], self._decoded(found["s"], "salt"), self._iterations(found["i"])
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce) or not _NONCE.fullmatch(nonce):
            raise self._refused("its nonce does not extend the nonce of this client")
        without_proof = f"c={base64.b64encode(_NO_CHANNEL_BINDING.encode()).decode()},r={nonce}"
        signed = f"{self._first_bare},{server_first},{without_proof}".encode()
        salted = hashlib.pbkdf2_hmac(self._hash, self._password.reveal().encode(), salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), signed)
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        proof = bytes(key ^ mask for key, mask in zip(client_key, signature, strict=True))
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def _on_server_final(self, challenge: bytes) -> None:
        found = self._attributes(self._text(challenge))
        self._next = self._on_more
        if next(iter(found)) != "v":
            raise self._refused("it did not prove that it knows the password (no v= in its last message)")
        if not hmac.compare_digest(self._decoded(found["v"], "signature"), self._server_signature):
            raise self._refused("its proof that it knows the password is wrong")
        self._server_signature = b""

    def _on_more(self, challenge: bytes) -> None:
        raise self._refused(f"it sent {len(challenge)} bytes more after its last message")

    # ---- reading what the server says ------------------------------------------------------------------------------

    def _text(self, challenge: bytes) -> str:
        if not 0 < len(challenge) <= _LONGEST_MESSAGE:
            raise self._refused(f"its message has {len(challenge)} bytes, not 1 to {_LONGEST_MESSAGE}")
        try:
            return challenge.decode()
        except UnicodeDecodeError:
            raise self._refused("its message is not UTF-8") from None

    def _attributes(self, text: str) -> dict[str, str]:
        """Return the attributes in order. An error of the server counts before anything else. An unknown mandatory
        extension ends the exchange (RFC 5802, section 5.1).
        """
        pieces = text.split(",")
        if not all(map(_ATTRIBUTE.fullmatch, pieces)):
            raise self._refused("its message is not a list of attributes")
        found = {piece[0]: piece[2:] for piece in pieces}
        if "e" in found:
            raise self._refused(f"it said: {one_line(found['e'])}. Check username and password")
        if "m" in found:
            raise self._refused("it asks for an extension (m=) that is not known here")
        if len(found) != len(pieces):
            raise self._refused("its message has an attribute twice")
        return found

    def _iterations(self, text: str) -> int:
        count = int(text) if _COUNT.fullmatch(text) else 0
        if not _FEWEST_ITERATIONS <= count <= _MOST_ITERATIONS:
            raise self._refused(
                f"it asks for {one_line(text)[:20]!r} iterations; {_FEWEST_ITERATIONS} to {_MOST_ITERATIONS} are safe"
            )
        return count

    def _decoded(self, text: str, what: str) -> bytes:
        try:
            decoded = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        if not decoded:
            raise self._refused(f"its {what} is empty or not base64")
        return decoded

    def _hmac(self, key: bytes, data: bytes) -> bytes:
        return hmac.digest(key, data, self._hash)

    def _refused(self, why: str) -> SaslAuthenticationError:
        return SaslAuthenticationError(f"SASL {self.name}: the login failed, because of the server: {why}.")


class ScramSha256Mechanism(_ScramMechanism):
    name: ClassVar[str] = "SCRAM-SHA-256"
    _hash: ClassVar[str] = "sha256"


class ScramSha512Mechanism(_ScramMechanism):
    name: ClassVar[str] = "SCRAM-SHA-512"
    _hash: ClassVar[str] = "sha512"
