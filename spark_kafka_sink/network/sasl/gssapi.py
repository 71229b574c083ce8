"""GSSAPI (RFC 4752): Kerberos, with mutual authentication and no security layer, as Kafka's brokers speak it.

The library (`pip install spark-kafka-sink[kerberos]`) is imported only when a context is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from spark_kafka_sink.common.errors import RetriableError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret, one_line

_NO_SECURITY_LAYER: Final = 1
_OUR_CHOICE: Final = bytes((_NO_SECURITY_LAYER, 0, 0, 0))
"""No security layer, a buffer size of 0 for it, and no authorization id."""
_OFFER_BYTES: Final = 4
_MOST_ROUNDS: Final = 10
_PASSING: Final = frozenset({-1765328228 & 0xFFFFFFFF, -1765328350 & 0xFFFFFFFF})
"""KRB5_KDC_UNREACH and KRB5KRB_AP_ERR_REPEAT, as the library's unsigned codes. A retry may succeed."""


class GssContext(Protocol):
    """The used part of `gssapi.SecurityContext`. Each call may raise the library's GSSError."""

    @property
    def complete(self) -> bool: ...

    @property
    def is_mutual(self) -> bool: ...

    def step(self, token: bytes | None) -> bytes | None: ...

    def unwrap(self, message: bytes) -> bytes: ...

    def wrap(self, message: bytes) -> bytes: ...


class GssapiMechanism:
    """Exchanges tokens until both sides are authenticated, then refuses the security layers that the server offers."""

    name: ClassVar[str] = "GSSAPI"
    is_slow: ClassVar[bool] = True

    def __init__(self, open_context: Callable[[], GssContext]) -> None:
        """`open_context` gets the credentials. It may wait for a KDC, as each call of the context may."""
        self._open_context = open_context
        self._context: GssContext | None = None
        self._rounds = 0
        self._is_chosen = False

    @property
    def secrets(self) -> Sequence[Secret]:
        return ()

    def respond(self, challenge: bytes) -> bytes | None:
        self._rounds += 1
        if self._rounds > _MOST_ROUNDS:
            raise _refused(f"it is not complete after {_MOST_ROUNDS} messages")
        try:
            return self._respond(challenge)
        except (SaslAuthenticationError, RetriableError):
            raise
        except Exception as error:  # the library's error classes exist only where it is installed
            raise _failure(error) from None

    def _respond(self, challenge: bytes) -> bytes | None:
        if self._is_chosen:
            if challenge:
                raise _refused("it sent a message after the end of the exchange")
            return None
        if self._context is None:
            self._context = self._open_context()
            return self._context.step(None) or b""
        if not self._context.complete:
            return self._context.step(challenge) or b""
        if not self._context.is_mutual:
            raise _refused("it did not prove its identity")
        offer = self._context.unwrap(challenge)
        if len(offer) != _OFFER_BYTES or not offer[0] & _NO_SECURITY_LAYER:
            raise _refused("it requires a security layer of SASL; Kafka uses TLS (SASL_SSL)")
        self._is_chosen = True
        return self._context.wrap(_OUR_CHOICE)


@dataclass(frozen=True, slots=True)
class KerberosLogin:
    """The principal whose ticket is used for `service`. With a keytab the library fetches the ticket, and fetches it
    again when half its time is over. Without one the ticket is in the cache (kinit; KRB5CCNAME or `ticket_cache` names
    another cache).
    """

    service: str
    principal: str | None = None
    keytab: str | None = None
    ticket_cache: str | None = None

    def open_context(self, host: str) -> GssContext:
        """Return a context for the service at `host`. May wait for a KDC. Raises the library's GSSError."""
        import gssapi

        kerberos = gssapi.MechType.kerberos
        client = gssapi.Name(self.principal, gssapi.NameType.kerberos_principal) if self.principal else None
        store = {"ccache": self.ticket_cache} if self.ticket_cache else None
        if self.keytab:
            store = {"client_keytab": self.keytab, "ccache": f"MEMORY:{self.principal or self.keytab}"}
        credentials = gssapi.Credentials(name=client, mechs=[kerberos], usage="initiate", store=store)
        flags = gssapi.RequirementFlag
        chosen = [flags.mutual_authentication, flags.replay_detection, flags.out_of_sequence_detection, flags.integrity]
        name = gssapi.Name(f"{self.service}@{host}", gssapi.NameType.hostbased_service)
        context = gssapi.SecurityContext(name=name, creds=credentials, mech=kerberos, usage="initiate", flags=chosen)
        return _KerberosContext(context, flags.mutual_authentication)


class _KerberosContext:
    def __init__(self, context: Any, mutual: Any) -> None:
        self._context = context
        self._mutual = mutual

    @property
    def complete(self) -> bool:
        return bool(self._context.complete)

    @property
    def is_mutual(self) -> bool:
        return self._mutual in self._context.actual_flags

    def step(self, token: bytes | None) -> bytes | None:
        answer: bytes | None = self._context.step(token)
        return answer

    def unwrap(self, message: bytes) -> bytes:
        return bytes(self._context.unwrap(message).message)

    def wrap(self, message: bytes) -> bytes:
        return bytes(self._context.wrap(message, False).message)


def _failure(error: Exception) -> SaslAuthenticationError | RetriableError:
    text = f"SASL GSSAPI: {one_line(str(error))}"
    return RetriableError(text) if getattr(error, "min_code", 0) in _PASSING else SaslAuthenticationError(text)


def _refused(why: str) -> SaslAuthenticationError:
    return SaslAuthenticationError(f"SASL GSSAPI: the login failed, because of the server: {why}.")
