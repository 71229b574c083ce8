"""An identity provider on the loopback interface: signed tokens for one client over https (RFC 6749, section 4.4), and
the keys of the signer over http (RFC 7517), for the broker.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

from support.token_endpoint import Endpoint, answering, token_endpoint
from support.token_signer import TokenSigner

CLIENT_ID = "spark"
CLIENT_SECRET = "canary client secret"
_BASIC = f"Basic {base64.b64encode(f'{CLIENT_ID}:{CLIENT_SECRET}'.encode()).decode()}"


@dataclass
class IdentityProvider:
    """`signer`, `life_s` and `reported_life_s` make the next tokens; a test may change them. Tokens are kept."""

    endpoint: Endpoint
    keys_url: str
    signer: TokenSigner
    life_s: int = 300
    reported_life_s: int | None = None
    """The life of a token that the endpoint reports, if that is wrong."""
    secret: str = _BASIC
    given: list[str] = field(default_factory=list)

    def revoke_client(self) -> None:
        self.secret = ""

    def respond(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        _, headers, body = self.endpoint.requests[-1]
        if headers.get("Authorization") != self.secret:
            answering(401, {"error": "invalid_client", "error_description": "unknown client or wrong secret"})(handler)
        elif parse_qs(body).get("grant_type") != ["client_credentials"]:
            answering(400, {"error": "unsupported_grant_type"})(handler)
        else:
            token, _ = self.signer.token(self.life_s)
            self.given.append(token)
            life_s = self.life_s if self.reported_life_s is None else self.reported_life_s
            answering(200, {"access_token": token, "token_type": "Bearer", "expires_in": life_s})(handler)


@contextlib.contextmanager
def key_server(signer: TokenSigner) -> Iterator[str]:
    """Return the URL of the signer's keys."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answering(200, signer.keys().encode())(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/keys"
        finally:
            server.shutdown()
            thread.join(10)


@contextlib.contextmanager
def identity_provider(folder: Path, signer: TokenSigner, keys_url: str) -> Iterator[IdentityProvider]:
    """Run a provider. The authority of its certificate is `endpoint.authority_file`."""
    with token_endpoint(folder) as endpoint:
        provider = IdentityProvider(endpoint, keys_url, signer)
        endpoint.respond = provider.respond
        yield provider
