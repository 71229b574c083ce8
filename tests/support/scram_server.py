"""A SCRAM server by RFC 5802. It misbehaves on request."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable


def _identity(text: str) -> str:
    return text


class ScramServer:
    """One exchange. `twist_first` and `twist_final` change its messages. With `check_proof` off it accepts any client,
    like a server that does not know the password.
    """

    def __init__(
        self,
        hash_name: str,
        users: dict[str, str],
        *,
        nonce: str = "3rfcNHYJY1ZVvWVs7j",
        salt: bytes = b"sixteen bytes...",
        iterations: int = 4096,
        twist_first: Callable[[str], str] = _identity,
        twist_final: Callable[[str], str] = _identity,
    ) -> None:
        self.hash_name = hash_name
        self.users = users
        self.nonce = nonce
        self.salt = salt
        self.iterations = iterations
        self.twist_first = twist_first
        self.twist_final = twist_final
        self.username = ""
        self.is_token = False
        self.is_authenticated = False
        self._first_bare = ""
        self._first = ""

    def on_client_first(self, message: bytes) -> bytes:
        header, _, bare = message.decode().partition(",,")
        assert header == "n", "channel binding without a request for it"
        pieces = dict(piece.split("=", 1) for piece in bare.split(","))
        self.username = pieces["n"].replace("=2C", ",").replace("=3D", "=")
        self.is_token = pieces.get("tokenauth") == "true"
        self._first_bare = bare
        salt = base64.b64encode(self.salt).decode()
        self._first = self.twist_first(f"r={pieces['r']}{self.nonce},s={salt},i={self.iterations}")
        return self._first.encode()

    def on_client_final(self, message: bytes) -> bytes | None:
        """Return the answer to the final message, None if the client's proof is wrong."""
        without_proof, _, proof = message.decode().rpartition(",p=")
        auth_message = f"{self._first_bare},{self._first},{without_proof}".encode()
        password = self.users.get(self.username)
        if password is None:
            return None
        salted = hashlib.pbkdf2_hmac(self.hash_name, password.encode(), self.salt, self.iterations)
        client_key = hmac.digest(salted, b"Client Key", self.hash_name)
        stored_key = hashlib.new(self.hash_name, client_key).digest()
        signature = hmac.digest(stored_key, auth_message, self.hash_name)
        recovered = bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
        self.is_authenticated = hashlib.new(self.hash_name, recovered).digest() == stored_key
        if not self.is_authenticated:
            return None
        server_key = hmac.digest(salted, b"Server Key", self.hash_name)
        final = base64.b64encode(hmac.digest(server_key, auth_message, self.hash_name)).decode()
        return self.twist_final(f"v={final}").encode()
