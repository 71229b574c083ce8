"""Fetches a token by OAuth's client credentials (RFC 6749, section 4.4) from a configured endpoint.

It uses only https, follows no redirects, and limits the size and the time of the answer. It blocks, so it never runs on
the loop's thread.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_plus, urlencode, urlsplit

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import KafkaError, RetriableError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret, one_line, without_logins

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LARGEST_ANSWER: Final = 1 << 20
_PIECE: Final = 1 << 16
_REFUSALS: Final = frozenset({*range(300, 400), 400, 401, 403, 404})
"""HTTP statuses after which a retry is useless: the endpoint refuses the credentials (RFC 6749, section 5.2), or is not
a token endpoint."""


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Endpoint (an https URL, whose query may hold a key) and credentials (sasl.oauthbearer.*), and the timeouts
    (sasl.login.*).
    """

    endpoint: str = field(repr=False)
    client_id: str
    client_secret: Secret
    scope: str | None = None
    url_encodes_header: bool = False
    connect_timeout_ms: int = 10_000
    read_timeout_ms: int = 10_000


class OidcTokenProvider:
    """Fetches a token at each call. It checks the endpoint's certificate against the system's store (SSL_CERT_FILE
    names another one), or as `context` says.
    """

    def __init__(self, credentials: ClientCredentials, clock: Clock, context: ssl.SSLContext | None = None) -> None:
        self._credentials = credentials
        self._clock = clock
        # Not urllib's default opener, which follows redirects and opens file: and ftp:.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _HttpsHandler(context or _system_trust(), _seconds(credentials.read_timeout_ms), self._deadline),
        ):
            self._opener.add_handler(handler)

    def __call__(self) -> tuple[str, int]:
        """Return the token and its end in ms since the epoch.

        Raises SaslAuthenticationError if the endpoint refuses the credentials, RetriableError if it cannot be reached
        or its answer is not valid.
        """
        credentials = self._credentials
        try:
            with self._opener.open(self._request(), timeout=_seconds(credentials.connect_timeout_ms)) as response:
                status, body = response.status, self._read(response)
        except (OSError, http.client.HTTPException) as error:
            why = self._without_secrets(_text(error))
            raise RetriableError(f"{self._where()} cannot be asked for a token: {why}.") from None
        if status != http.client.OK:
            raise self._refused(status, body)
        return self._token_of(body)

    def _request(self) -> urllib.request.Request:
        credentials = self._credentials
        _, proof = self._sent_secrets()
        form = {"grant_type": "client_credentials"} | ({"scope": credentials.scope} if credentials.scope else {})
        headers = {
            "Accept": "application/json",
            "Authorization": f"Basic {proof}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        body = urlencode(form).encode()
        return urllib.request.Request(credentials.endpoint, body, headers, method="POST")  # noqa: S310  # https alone

    def _sent_secrets(self) -> tuple[str, str]:
        """Return the secret as it is sent, and the value of the Authorization header."""
        credentials = self._credentials
        user, password = credentials.client_id, credentials.client_secret.reveal()
        if credentials.url_encodes_header:
            user, password = quote_plus(user), quote_plus(password)
        return password, base64.b64encode(f"{user}:{password}".encode()).decode()

    def _without_secrets(self, text: str) -> str:
        """Remove the secrets, which the endpoint may repeat."""
        query = urlsplit(self._credentials.endpoint).query
        secrets = filter(None, (self._credentials.client_secret.reveal(), *self._sent_secrets(), query))
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return without_logins(text)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while piece := response.read1(_PIECE):
            body += piece
            if len(body) > _LARGEST_ANSWER:
                raise RetriableError(f"{self._where()} answers with more than {_LARGEST_ANSWER} bytes.")
        return bytes(body)

    def _deadline(self) -> Callable[[], None]:
        """Return a check for a request that begins now. It raises RetriableError when the request's time is over."""
        credentials = self._credentials
        end_ms = self._clock.now_ms() + credentials.connect_timeout_ms + credentials.read_timeout_ms

        def check() -> None:
            if self._clock.now_ms() > end_ms:
                raise RetriableError(f"{self._where()} did not answer in time (sasl.login.read.timeout.ms).")

        return check

    def _refused(self, status: int, body: bytes) -> KafkaError:
        answer = _json_object(body) or {}
        parts = [self._without_secrets(str(answer[name])) for name in ("error", "error_description") if name in answer]
        reason = "".join(f", {one_line(part)}" for part in parts)
        if 300 <= status < 400:
            reason = ", a redirect, which is not followed: name the endpoint itself"
        text = f"{self._where()} gives no token: HTTP status {status}{reason}."
        return SaslAuthenticationError(text) if status in _REFUSALS else RetriableError(text)

    def _token_of(self, body: bytes) -> tuple[str, int]:
        answer = _json_object(body)
        token = None if answer is None else answer.get("access_token")
        if answer is None or not isinstance(token, str) or not token:
            raise RetriableError(f"{self._where()} answers without an access_token.")
        life_s = answer.get("expires_in")
        if isinstance(life_s, str) and life_s.isdecimal() and len(life_s) < 12:
            life_s = int(life_s)
        if isinstance(life_s, (int, float)) and not isinstance(life_s, bool) and 0 < life_s < 1e11:
            return token, self._clock.wall_ms() + int(life_s * 1000)
        end_s = _claims(token).get("exp")
        if isinstance(end_s, (int, float)) and not isinstance(end_s, bool) and 0 < end_s < 1e11:
            return token, int(end_s * 1000)
        raise RetriableError(
            f"{self._where()} answers with a token but not with its end (expires_in, or exp in a JWT)."
        )

    def _where(self) -> str:
        return f"The token endpoint {urlsplit(self._credentials.endpoint).netloc}"


def _system_trust() -> ssl.SSLContext:
    """Return Python's default context without SSLKEYLOGFILE. With that file a reader could decrypt secret and token."""
    context = ssl.create_default_context()
    context.keylog_filename = None  # type: ignore[assignment]
    return context


class _HttpsHandler(urllib.request.HTTPSHandler):
    """urllib's handler has a timeout for the connection. This one adds a timeout for each wait for the answer, and a
    deadline for the whole answer. A server that sends single bytes slowly, in a header, a chunk's size or the body,
    exceeds only the deadline.
    """

    def __init__(self, context: ssl.SSLContext, read_timeout_s: float, begin: Callable[[], Callable[[], None]]) -> None:
        super().__init__(context=context)
        self._given = context
        self._read_timeout_s = read_timeout_s
        self._begin = begin

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        check, read_timeout_s = self._begin(), self._read_timeout_s

        class Answer(http.client.HTTPResponse):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self.fp = io.BufferedReader(_CheckedReader(self.fp.detach(), check))

        class Connection(http.client.HTTPSConnection):
            response_class = Answer

            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(read_timeout_s)

        return self.do_open(Connection, req, context=self._given)


class _CheckedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, check: Callable[[], None]) -> None:
        self._raw = raw
        self._check = check

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        count = self._raw.readinto(buffer)
        self._check()
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _json_object(data: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _claims(token: str) -> Mapping[str, Any]:
    """Return the claims of a JWT (RFC 7519); empty for any other token. Not verified, because the broker does that."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        body = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
    except (binascii.Error, ValueError):
        return {}
    return _json_object(body) or {}


def _seconds(time_ms: int) -> float:
    """Never return 0, which makes a socket non-blocking."""
    return max(time_ms, 1) / 1000


def _text(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return one_line(str(reason))
