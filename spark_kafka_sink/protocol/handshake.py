"""Requests that open a connection: the versions that a node understands, and the login by SASL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message, request_type


@dataclass(frozen=True, slots=True)
class ApiVersionsRequest(VersionedRequest):
    """Ask a node for its supported versions. The request names this client (KIP-511)."""

    api_key: ClassVar[ApiKey] = ApiKey.API_VERSIONS
    software_name: str
    software_version: str

    def build(self, version: int) -> Message:
        if version < 3:
            return request_type(self.api_key, version)()
        return self._fill(
            version, {"client_software_name": self.software_name, "client_software_version": self.software_version}
        )


@dataclass(frozen=True, slots=True)
class SaslHandshakeRequest(VersionedRequest):
    """Announce the SASL mechanism."""

    api_key: ClassVar[ApiKey] = ApiKey.SASL_HANDSHAKE
    mechanism: str

    def build(self, version: int) -> Message:
        return self._fill(version, {"mechanism": self.mechanism})


@dataclass(frozen=True, slots=True)
class SaslAuthenticateRequest(VersionedRequest):
    """One message of the SASL exchange. Its bytes are secret and not in the repr."""

    api_key: ClassVar[ApiKey] = ApiKey.SASL_AUTHENTICATE
    auth_bytes: bytes = field(repr=False)

    def build(self, version: int) -> Message:
        return self._fill(version, {"auth_bytes": self.auth_bytes})
