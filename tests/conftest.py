"""What every test may use."""

from __future__ import annotations

pytest_plugins = ["spark_kafka_sink.local.pytest_plugin", "support.spark_fixture", "support.secured_broker"]
