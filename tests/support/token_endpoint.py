"""A token endpoint: an https server for one test, on the loopback interface."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.certificates import Authority
from support.fake_clock import FakeClock

from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.oidc import ClientCredentials, OidcTokenProvider

CANARY = "canary secret:%&"
Respond = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Endpoint:
    """An https server. `respond` answers; requests are kept."""

    url: str
    authority_file: Path
    context: ssl.SSLContext
    respond: Respond
    clock: FakeClock = field(default_factory=FakeClock)
    requests: list[tuple[str, dict[str, str], str]] = field(default_factory=list)

    def provider(self, **settings: Any) -> OidcTokenProvider:
        given = {"endpoint": self.url, "client_id": "me", "client_secret": Secret(CANARY), **settings}
        return OidcTokenProvider(ClientCredentials(**given), self.clock, self.context)


def answering(status: int, body: object, **headers: str) -> Respond:
    def respond(handler: http.server.BaseHTTPRequestHandler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return respond


@contextlib.contextmanager
def token_endpoint(folder: Path) -> Iterator[Endpoint]:
    """Run an endpoint. The certificate of its authority is `folder / "authority.pem"`."""
    authority = Authority()
    made: Endpoint

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            made.requests.append((self.path, dict(self.headers), body))
            made.respond(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore errors: a client may close its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(authority.issue().write(folder / "server.pem"))
    server.socket = listening.wrap_socket(server.socket, server_side=True)
    context = ssl.create_default_context(cafile=str(authority.write(folder / "authority.pem")))
    url = f"https://localhost:{server.server_address[1]}/token"
    made = Endpoint(url, folder / "authority.pem", context, answering(200, {"access_token": "token", "expires_in": 60}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:  # a failed test must not leave a thread for which Python waits at its end
        server.shutdown()
        thread.join(10)
        server.server_close()
