"""The name and version of this package, which brokers get with ApiVersions (KIP-511)."""

from __future__ import annotations

from typing import Final

SOFTWARE_NAME: Final = "spark-kafka-sink"
VERSION: Final = "0.1.0"
