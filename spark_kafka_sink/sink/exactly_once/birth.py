"""The record of a prefix's birth: that the decision topic has known the prefix since its first driver began.

A decision topic without a decision and without a birth of a prefix is either new to the prefix, or has lost what it
knew. Versioned JSON with a checksum, under a key of its own, so that no birth ever hides a decision. Plain values.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Final

from spark_kafka_sink.common.errors import ProtocolError

_VERSION: Final = 1
_SUFFIX: Final = b"\nborn"
"""No prefix ends like this: a transactional.id.prefix is printable."""


@dataclass(frozen=True, slots=True)
class Birth:
    """`time_ms` is the driver's time of day; `partitions` and `topic_id` are those of the decision topic then.
    `is_adopted`: an operator allowed the prefix to begin at any batch.
    """

    time_ms: int
    partitions: int
    replicas: int
    topic_id: str = ""
    is_adopted: bool = False

    def to_bytes(self) -> bytes:
        content = {"version": _VERSION, "state": "born", **asdict(self)}
        return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Birth:
        """Raises ProtocolError, naming `where`, for what is not a whole birth of a version known here."""
        try:
            content: dict[str, Any] = json.loads(data)
            stated = content.pop("checksum")
            if content["version"] != _VERSION:
                raise ProtocolError(
                    f"{where}: the birth record has version {content['version']!r:.100}, and this release knows only"
                    f" {_VERSION}. A newer release wrote it, and must read it."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the birth record does not match its content.")
            time_ms, partitions, replicas = (content[name] for name in ("time_ms", "partitions", "replicas"))
            if not all(type(number) is int and 0 <= number < 2**63 for number in (time_ms, partitions, replicas)):
                raise ProtocolError(f"{where}: a number of the birth record is out of range.")
            return cls(time_ms, partitions, replicas, str(content["topic_id"]), content["is_adopted"] is True)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{where}: this is not a birth record: {type(error).__name__}.") from error


def birth_key(prefix: bytes) -> bytes:
    """The key of a prefix's birth record, which is in the partition of the prefix's decisions."""
    return prefix + _SUFFIX


def prefix_of(key: bytes) -> bytes | None:
    """The prefix whose birth record has this key; None for the key of a decision."""
    return key.removesuffix(_SUFFIX) if key.endswith(_SUFFIX) else None


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
