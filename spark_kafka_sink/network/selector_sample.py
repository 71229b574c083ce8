"""What a selector counts of its polls and connections (org.apache.kafka.common.network.Selector.SelectorMetrics)."""

from __future__ import annotations

from dataclasses import dataclass

from spark_kafka_sink.common.windows import Sample


@dataclass(slots=True)
class SelectorSample(Sample):
    """Times in ms: `wait_ms` within select, `io_ms` in the rest of the polls."""

    selects: int = 0
    wait_ms: int = 0
    io_ms: int = 0
    connections: int = 0
    """Made, TCP's handshake at least."""
    closed: int = 0
    """By whichever side, those that were never made included."""
    authentications: int = 0
    """Logins, or handshakes of TLS without a login, that succeeded. Renewals of a session are not counted."""
    failed_authentications: int = 0
