"""A real broker's plugin for metrics of clients: compiled from MetricsReceiver.java against the broker's own jars."""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from kio.schema.incremental_alter_configs.v1 import request as alter
from kio.schema.incremental_alter_configs.v1.response import IncrementalAlterConfigsResponse
from kio.static.primitive import i8
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

from spark_kafka_sink.local import Admin
from spark_kafka_sink.local.jars import cache_dir, fetch_jars
from spark_kafka_sink.local.jvm import find_release

CLASS = "MetricsReceiver"
_SOURCE = Path(__file__).with_name(f"{CLASS}.java")
_CLIENT_METRICS = 16
_SET, _DELETE = 0, 1
_LIMIT_S = 300


class Push(NamedTuple):
    """A push as the plugin got it. `values` by name and labels."""

    at_ms: int
    client_instance_id: uuid.UUID
    is_terminating: bool
    client_id: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of org.apache.kafka.producer.`name`."""
        return self.values[f"org.apache.kafka.producer.{name}", tuple(labels.items())]

    def has_topic(self, topic: str) -> bool:
        """Return whether it has values of the topic: a push before its first batch has none."""
        return any(("topic", topic) in labels for _, labels in self.values)


class MetricsReceiver:
    """The plugin for brokers of `version`. Skips the test if there is no Java compiler."""

    def __init__(self, version: str, folder: Path) -> None:
        compiler = shutil.which("javac")
        if compiler is None:
            pytest.skip("no javac on PATH: the plugin of the broker cannot be compiled; install a JDK")
        jars = fetch_jars(find_release(version).lock_path, cache=cache_dir())
        class_path = ":".join(map(str, jars))
        command = [compiler, "-nowarn", "-proc:none", "-d", str(folder), "-cp", class_path, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        self.jar = folder / f"{CLASS}.jar"
        with zipfile.ZipFile(self.jar, "w") as jar:
            jar.write(folder / f"{CLASS}.class", f"{CLASS}.class")
        self._file = folder / "pushes"
        self.properties = {"metric.reporters": CLASS, "metrics.receiver.file": str(self._file)}

    def pushes(self) -> list[Push]:
        """Return every whole push so far."""
        text = self._file.read_text() if self._file.exists() else ""
        return [_read(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _read(line: str) -> Push:
    at_ms, instance, is_terminating, client_id, data = line.split()
    parsed = MetricsData.FromString(base64.b64decode(data))
    return Push(
        int(at_ms),
        uuid.UUID(bytes=base64.urlsafe_b64decode(instance + "==")),
        is_terminating == "true",
        client_id,
        {
            (metric.name, tuple((each.key, each.value.string_value) for each in point.attributes)): point.as_double
            for of_producer in parsed.resource_metrics
            for scope in of_producer.scope_metrics
            for metric in scope.metrics
            for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points
        },
    )


def subscribe(bootstrap_servers: str, name: str, metrics: str | None, interval_ms: int, match: str = "") -> None:
    """Set a subscription's metrics (prefixes with commas), interval and clients. Without metrics: delete it."""
    values = {"metrics": metrics, "interval.ms": str(interval_ms), "match": match or None}
    configs = tuple(
        alter.AlterableConfig(
            name=key, config_operation=i8(_DELETE if metrics is None or value is None else _SET), value=value
        )
        for key, value in values.items()
    )
    resource = alter.AlterConfigsResource(resource_type=i8(_CLIENT_METRICS), resource_name=name, configs=configs)
    payload = alter.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
    for answer in Admin(bootstrap_servers).ask(payload, IncrementalAlterConfigsResponse).responses:
        assert not answer.error_code, answer
