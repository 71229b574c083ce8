"""Client credentials against a real https server of the test, on the loopback interface."""

from __future__ import annotations

import base64
import http.server
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.token_endpoint import CANARY, Endpoint, answering, token_endpoint

from spark_kafka_sink.common.errors import RetriableError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.oidc import ClientCredentials, OidcTokenProvider


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with token_endpoint(tmp_path) as made:
        yield made


def test_token_and_its_expiry_are_returned(endpoint: Endpoint) -> None:
    token, end_ms = endpoint.provider()()
    assert (token, end_ms) == ("token", endpoint.clock.wall_ms() + 60_000)
    ((path, headers, body),) = endpoint.requests
    assert path == "/token"
    assert body == "grant_type=client_credentials"
    assert headers["Authorization"] == "Basic " + base64.b64encode(f"me:{CANARY}".encode()).decode()


def test_keys_of_a_connection_are_written_to_no_file(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: SSLKEYLOGFILE was used for the token endpoint, and not for brokers."""
    keys = tmp_path / "keys.log"
    monkeypatch.setenv("SSLKEYLOGFILE", str(keys))
    monkeypatch.setenv("SSL_CERT_FILE", str(endpoint.authority_file))
    credentials = ClientCredentials(endpoint.url, "me", Secret(CANARY))
    assert OidcTokenProvider(credentials, endpoint.clock)()[0] == "token"
    assert "SECRET" not in (keys.read_text() if keys.exists() else "")


def test_scope_and_credentials_are_url_encoded(endpoint: Endpoint) -> None:
    endpoint.provider(client_id="me:you", scope="kafka read", url_encodes_header=True)()
    ((_, headers, body),) = endpoint.requests
    assert body == "grant_type=client_credentials&scope=kafka+read"
    assert base64.b64decode(headers["Authorization"].split()[1]) == b"me%3Ayou:canary+secret%3A%25%26"


def test_endpoint_without_http_is_a_retriable_error(endpoint: Endpoint) -> None:
    def greet(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"220 mail\r\n")

    endpoint.respond = greet
    with pytest.raises(RetriableError, match=r"The token endpoint .* cannot be asked for a token: 220 mail"):
        endpoint.provider()()


def jwt(**claims: object) -> str:
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{part}.sig"


@pytest.mark.parametrize(
    ("answer", "end_ms"),
    [
        ({"access_token": jwt(exp=2_000_000_000)}, 2_000_000_000_000),
        ({"access_token": jwt(exp=2_000_000_000), "expires_in": "30"}, 1_700_000_030_000),
        ({"access_token": "opaque", "expires_in": 1.5}, 1_700_000_001_500),
    ],
)
def test_expiry_comes_from_the_answer_or_the_token(endpoint: Endpoint, answer: dict[str, Any], end_ms: int) -> None:
    endpoint.respond = answering(200, answer)
    assert endpoint.provider()()[1] == end_ms


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        b"<html>",
        b"\xff",
        b"[" * 10_000,
        {"access_token": ""},
        {"access_token": 5, "expires_in": 60},
        {"access_token": "opaque"},
        {"access_token": "a.b.c"},
        {"access_token": jwt(exp="soon")},
        {"access_token": "opaque", "expires_in": -1},
        {"access_token": "opaque", "expires_in": True},
        {"access_token": "opaque", "expires_in": 1e300},
        {"access_token": "opaque", "expires_in": "9" * 5_000},
    ],
)
def test_malformed_answer_is_a_retriable_error(endpoint: Endpoint, answer: object) -> None:
    endpoint.respond = answering(200, answer)
    with pytest.raises(RetriableError, match="The token endpoint localhost:"):
        endpoint.provider()()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_refused_login_is_final_one_line_and_without_secrets(endpoint: Endpoint, status: int) -> None:
    reported = {"error": "invalid_client", "error_description": f"no\nsuch {CANARY}" + "x" * 5_000}
    endpoint.respond = answering(status, reported)
    with pytest.raises(
        SaslAuthenticationError, match=rf"HTTP status {status}, invalid_client, no\?such \*\*\*"
    ) as caught:
        endpoint.provider()()
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("is_encoded", [False, True])
def test_endpoint_that_repeats_its_request_shows_no_secret(endpoint: Endpoint, is_encoded: bool) -> None:
    def repeat(handler: http.server.BaseHTTPRequestHandler) -> None:
        given = handler.headers["Authorization"]
        text = f"{given} is {base64.b64decode(given.split()[1]).decode()}"
        answering(401, {"error": "invalid_client", "error_description": text})(handler)

    endpoint.respond = repeat
    with pytest.raises(SaslAuthenticationError, match=r"invalid_client, Basic \*\*\* is me:\*\*\*\.$"):
        endpoint.provider(url_encodes_header=is_encoded)()


def test_query_of_the_endpoint_is_not_shown(endpoint: Endpoint) -> None:
    """Some providers want a key there."""
    url = f"{endpoint.url}?code=hunter2"
    words = f"no code=hunter2, see {url}"
    endpoint.respond = answering(401, {"error": "invalid_client", "error_description": words})
    provider = endpoint.provider(endpoint=url)
    with pytest.raises(SaslAuthenticationError, match="invalid_client") as caught:
        provider()
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(ClientCredentials(url, "me", Secret("s")))


def test_deadline_is_connect_plus_read_timeout(endpoint: Endpoint) -> None:
    takes_ms = 30_000

    def respond(handler: http.server.BaseHTTPRequestHandler) -> None:
        endpoint.clock.advance(takes_ms)
        answering(200, {"access_token": "token", "expires_in": 60})(handler)

    endpoint.respond = respond
    provider = endpoint.provider(connect_timeout_ms=10_000, read_timeout_ms=20_000)
    assert provider()[0] == "token"
    takes_ms += 1
    with pytest.raises(RetriableError, match=r"did not answer in time \(sasl\.login\.read\.timeout\.ms\)"):
        provider()


def test_proxy_of_the_environment_is_asked_for_a_tunnel(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        asked: list[bytes] = []

        def refuse() -> None:
            connection, _ = proxy.accept()
            with connection:
                asked.append(connection.recv(65_536))
                connection.sendall(b"HTTP/1.0 403 Forbidden\r\n\r\n")

        proxy.settimeout(10)
        refusing = threading.Thread(target=refuse)
        refusing.start()
        with pytest.raises(RetriableError, match="cannot be asked for a token: Tunnel connection failed: 403"):
            endpoint.provider(endpoint="https://id.example/token")()
        refusing.join()
    assert asked[0].startswith(b"CONNECT id.example:443 ")
    assert b"Authorization" not in asked[0]
    assert endpoint.requests == []


@pytest.mark.parametrize("status", [500, 503, 429])
def test_retriable_status_is_a_retriable_error(endpoint: Endpoint, status: int) -> None:
    endpoint.respond = answering(status, b"busy")
    with pytest.raises(RetriableError, match=f"HTTP status {status}"):
        endpoint.provider()()


@pytest.mark.parametrize("target", ["/elsewhere", "http://localhost:1/", "file:///etc/passwd"])
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(endpoint: Endpoint, status: int, target: str) -> None:
    endpoint.respond = answering(status, b"", Location=target)
    with pytest.raises(SaslAuthenticationError, match="not followed"):
        endpoint.provider()()
    assert len(endpoint.requests) == 1


def test_answer_without_end_is_refused(endpoint: Endpoint) -> None:
    def respond(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x" * (1 << 16))

    endpoint.respond = respond
    with pytest.raises(RetriableError, match="more than 1048576 bytes"):
        endpoint.provider()()


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
    ],
    ids=["header", "size of a chunk", "body"],
)
def test_slow_bytes_exceed_the_deadline(endpoint: Endpoint, begun: bytes) -> None:
    def respond(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.connection.sendall(begun)
        for _ in range(100):
            handler.connection.sendall(b"0")
            endpoint.clock.advance(500)

    endpoint.respond = respond
    with pytest.raises(RetriableError, match=r"sasl\.login\.read\.timeout\.ms"):
        endpoint.provider()()


def test_connection_has_its_own_timeout(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, timeout: float, *__: object) -> None:
        raise OSError(f"refused within {timeout} s")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(RetriableError, match=r"refused within 0\.1 s"):
        endpoint.provider(connect_timeout_ms=100, read_timeout_ms=60_000)()


def test_silent_endpoint_fails_at_the_read_timeout(endpoint: Endpoint) -> None:
    release = threading.Event()
    endpoint.respond = lambda _: assert_waits(release)
    try:
        with pytest.raises(RetriableError, match="timed out"):
            endpoint.provider(connect_timeout_ms=60_000, read_timeout_ms=100)()
    finally:
        release.set()


def assert_waits(release: threading.Event) -> None:
    assert release.wait(10)


def test_untrusted_certificate_is_refused(endpoint: Endpoint) -> None:
    endpoint.context = ssl.create_default_context()
    with pytest.raises(RetriableError, match="certificate verify failed"):
        endpoint.provider()()
    assert endpoint.requests == []


def test_unreachable_endpoint_is_a_retriable_error(endpoint: Endpoint) -> None:
    with pytest.raises(RetriableError, match="localhost:1 cannot be asked"):
        endpoint.provider(endpoint="https://localhost:1/token")()
