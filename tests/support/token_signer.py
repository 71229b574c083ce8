"""Signs tokens as an identity provider does (RFC 7519), with its own key."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

_LIFETIME_S = 300


class TokenSigner:
    """`token` has the form of `sasl.oauthbearer.token.provider`."""

    def __init__(self, audience: str, same_key_as: TokenSigner | None = None) -> None:
        self._audience = audience
        self._key: rsa.RSAPrivateKey = same_key_as._key if same_key_as else rsa.generate_private_key(65_537, 2_048)

    def keys(self) -> str:
        """Return the public key as a JWKS (RFC 7517)."""
        numbers = self._key.public_key().public_numbers()
        key = {
            "kty": "RSA",
            "kid": "one",
            "alg": "RS256",
            "use": "sig",
            "n": _number(numbers.n),
            "e": _number(numbers.e),
        }
        return json.dumps({"keys": [key]})

    def write_keys(self, path: Path) -> Path:
        path.write_text(self.keys())
        return path

    def token(self, life_s: int = _LIFETIME_S) -> tuple[str, int]:
        """Return a token; with `life_s` below 0 it has expired already."""
        ends_s = int(time.time()) + life_s
        body = self._body({"alg": "RS256", "kid": "one"}, ends_s)
        return f"{body}.{_encoded(self._key.sign(body.encode(), padding.PKCS1v15(), SHA256()))}", ends_s * 1_000

    def unsigned_token(self) -> tuple[str, int]:
        ends_s = int(time.time()) + _LIFETIME_S
        return self._body({"alg": "none"}, ends_s) + ".", ends_s * 1_000

    def _body(self, header: dict[str, str], ends_s: int) -> str:
        claims = {"sub": "alice", "aud": self._audience, "iat": ends_s - _LIFETIME_S, "exp": ends_s}
        return ".".join(_encoded(json.dumps(part).encode()) for part in (header, claims))


def _number(value: int) -> str:
    return _encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
