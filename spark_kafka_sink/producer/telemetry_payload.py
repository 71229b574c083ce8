"""The bytes of a push: which points fit, and with which codec."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from spark_kafka_sink.common.errors import CorruptBatchError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.producer.telemetry_points import Point, TelemetryPoints
from spark_kafka_sink.protocol.telemetry import Subscription
from spark_kafka_sink.record.codecs import Codec, codec_by_id, codec_for

log = logging.getLogger(__name__)

_Encode: TypeAlias = Callable[[Iterable[Point], Mapping[str, str], int, bool], bytes]
_NO_CODEC: Final = codec_for("none")
_FIT: Final = 0.9
"""Points that are left out leave names behind that others share, so a few more must go than their share."""
_warned = threading.Lock()
"""Taken for good by the first warning of this process that the extra is missing."""


class Payload(NamedTuple):
    """The metrics of a push, compressed by the codec of this id."""

    codec_id: int
    data: bytes


class PayloadMaker:
    """Makes the payload of each push. Only the Sender's thread uses it.

    `labels` returns the labels of the producer as they are now.
    """

    def __init__(self, points: TelemetryPoints, labels: Callable[[], Mapping[str, str]]) -> None:
        self._points = points
        self._labels = labels
        self._refused_codecs: set[int] = set()
        self._last_codec = _NO_CODEC
        self._warned_limit = 0
        self._is_prepared = False
        self.is_possible = True
        """False once the packages of the extra turned out to be missing."""

    def prepare(self) -> None:
        """Begin to import what a push needs, in a thread of its own: the import may take long, and the Sender's records
        must not wait for it.
        """
        if not self._is_prepared:
            self._is_prepared = True
            threading.Thread(target=_encoder, name="kafka-producer-telemetry-import", daemon=True).start()

    def make(self, subscription: Subscription, now_ms: int, wall_ms: int) -> Payload | None:
        """Return the payload, or None if no metric is wanted or none fits, or if packages are missing."""
        points = self._points.of(subscription, now_ms, wall_ms)
        encode = _encoder() if points else None
        self.is_possible = not points or encode is not None
        if encode is None:
            return None
        self._last_codec = self._codec(subscription)
        count = len(points)
        payload = self._packed(encode, points, subscription, wall_ms)
        while points and 0 < subscription.max_bytes < len(payload.data):
            points = points[
                : min(len(points) - 1, int(len(points) * _FIT * subscription.max_bytes / len(payload.data)))
            ]
            payload = self._packed(encode, points, subscription, wall_ms)
        if len(points) < count:
            self._warn_of_limit(len(points), count, subscription.max_bytes)
        if not points:
            return None
        self._points.pushed(points, wall_ms)
        return payload

    def refused(self) -> None:
        """Note that no broker took the last payload. The next one contains its counts."""
        self._points.refused()

    def refuse_codec(self) -> None:
        """Use the codec of the last payload no more."""
        self._refused_codecs.add(self._last_codec.id)

    def _codec(self, subscription: Subscription) -> Codec:
        """Return the first codec of the broker's list that is known here and was not refused, or none."""
        for codec_id in subscription.codec_ids:
            try:
                codec = codec_by_id(codec_id)
            except CorruptBatchError:  # a codec of a later Kafka
                continue
            if codec_id not in self._refused_codecs:
                return codec
        return _NO_CODEC

    def _packed(self, encode: _Encode, points: list[Point], subscription: Subscription, wall_ms: int) -> Payload:
        plain = encode(points, self._labels(), wall_ms, subscription.has_deltas)
        try:
            return Payload(self._last_codec.id, bytes(self._last_codec.compress([plain])))
        except Exception as cause:
            log.warning("Metrics are pushed without compression, because %s failed: %s", self._last_codec.name, cause)
            self.refuse_codec()
            self._last_codec = _NO_CODEC
            return Payload(_NO_CODEC.id, plain)

    def _warn_of_limit(self, fitting: int, wanted: int, max_bytes: int) -> None:
        """Log once for each limit that metrics are left out."""
        if max_bytes != self._warned_limit:
            self._warned_limit = max_bytes
            log.warning(
                "Only %d of the %d values that the brokers want are pushed: a push may have %d bytes. Raise"
                " telemetry.max.bytes of the brokers, or ask for fewer metrics.",
                fitting, wanted, max_bytes,
            )  # fmt: skip


def _encoder() -> _Encode | None:
    """Import what a push needs. Log once in a process if it cannot be imported, and return None."""
    try:
        from spark_kafka_sink.producer.otlp import encode
    except Exception as cause:  # protobuf raises errors of its own if it is too old for the package
        if _warned.acquire(blocking=False):
            log.warning(
                "The brokers ask for this producer's metrics, and it cannot push them: %s. Install the extra on the"
                " executors: pip install 'spark-kafka-sink[telemetry]'. Or set enable.metrics.push=false.",
                one_line(str(cause)),
            )
        return None
    return encode
