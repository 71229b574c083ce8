"""The sink's options: one table, parsed once on the driver into a `SinkConfig`.

Names are those of Spark's own Kafka sink: `topic`, and `kafka.` before every producer setting. Spark hands options
over with keys in any case, so case does not count here. Nothing is ignored: an unknown option is an error that names
the nearest known one, and an option that cannot work here is an error that says why and what to use instead.

Plain values that pickle; used by the driver's thread and by a task's alike.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError

KAFKA_PREFIX: Final = "kafka."
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"

_OPTIONS: Final = ("topic", "delivery.guarantee", "metrics.port")

_EXACTLY_ONCE_IS_MISSING: Final = (
    "delivery.guarantee=exactly-once is not there yet: leave the option out, or set at-least-once. foreach and"
    " foreachPartition will never offer it, because Spark calls nothing on the driver for them that could commit; it is"
    ' meant for format("kafka_sink") and foreachBatch.'
)

_REFUSED: Final[Mapping[str, str]] = {
    "transactional.id.prefix": "it belongs to delivery.guarantee=exactly-once, which is not there yet; leave it out",
    "decision.topic": "it belongs to delivery.guarantee=exactly-once, which is not there yet; leave it out",
    "includeheaders": "it steers Spark's source; this sink writes headers whenever there is a 'headers' column",
    "kafka.transactional.id": "the rows of many tasks cannot share one transactional id; leave it out",
}
"""Options with a meaning elsewhere, or later: lower-case key → why not here."""


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """Every option, typed and checked. Make one with `from_options`."""

    producer: ProducerConfig
    topic: str | None = None
    """Where every row goes; None: each row says so in its `topic` column."""
    metrics_ports: range | None = None
    """Where a worker may show its producer's metrics to Prometheus."""
    given: tuple[str, ...] = field(default=(), compare=False)
    """Producer settings that the caller named, for `describe`."""

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> SinkConfig:
        """Check and parse `options`. Raises ConfigError before any I/O."""
        by_key = _lower_case(options)
        for key in by_key:
            _refuse(key)
        settings = {key.removeprefix(KAFKA_PREFIX): v for key, v in by_key.items() if key.startswith(KAFKA_PREFIX)}
        _check_guarantee(by_key.get("delivery.guarantee"))
        return cls(
            producer=_producer_config(settings),
            topic=_topic(by_key.get("topic")),
            metrics_ports=_metrics_ports(by_key.get("metrics.port")),
            given=tuple(key for key in settings if settings[key] is not None),
        )

    def describe(self) -> str:
        """The options on one line, as parsed; a secret shows as such."""
        shown = [] if self.topic is None else [f"topic={self.topic!r}"]
        for key in self.given:
            value = getattr(self.producer, key.replace(".", "_"))
            if key == "bootstrap.servers":
                value = ",".join(f"{host}:{port}" for host, port in value)
            shown.append(f"{KAFKA_PREFIX}{key}={value!r}")
        return ", ".join(shown)


def _lower_case(options: Mapping[str, object]) -> dict[str, object]:
    by_key: dict[str, object] = {}
    for key, value in options.items():
        lower = key.strip().lower()
        if lower in by_key:
            raise ConfigError(f"The option {key} is given twice: case does not count in option names.")
        by_key[lower] = value
    return by_key


def _refuse(key: str) -> None:
    if key in _REFUSED:
        raise ConfigError(f"The option {key} cannot be used here: {_REFUSED[key]}.")
    if key in _OPTIONS or key.startswith(KAFKA_PREFIX):
        return
    settings = ProducerConfig.keys()
    if key in settings:
        nearest = KAFKA_PREFIX + key
    else:
        known = [*_OPTIONS, *sorted(KAFKA_PREFIX + setting for setting in settings)]
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"There is no option {key}. The nearest one is {nearest}.")


def _check_guarantee(value: object) -> None:
    guarantee = AT_LEAST_ONCE if value is None else str(value).strip().lower()
    if guarantee == EXACTLY_ONCE:
        raise ConfigError(_EXACTLY_ONCE_IS_MISSING)
    if guarantee != AT_LEAST_ONCE:
        raise ConfigError(f"delivery.guarantee={value!r}: {AT_LEAST_ONCE} or {EXACTLY_ONCE} is wanted.")


def _producer_config(settings: Mapping[str, object]) -> ProducerConfig:
    try:
        return ProducerConfig.from_mapping(settings)
    except ConfigError as error:
        # every text of ProducerConfig's begins with the setting's own name
        raise ConfigError(f"{KAFKA_PREFIX}{error}") from None


def _topic(value: object) -> str | None:
    if value is None:
        return None
    topic = str(value).strip()
    if not topic:
        raise ConfigError("The option topic is empty: give it the name of a topic, or leave it out.")
    return topic


def _metrics_ports(value: object) -> range | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value).strip())
    if found is None or not 0 < (first := int(found[1])) <= (last := int(found[2] or first)) <= 65_535:
        raise ConfigError(f"metrics.port={value}: a port or a range of ports, such as 9250-9299, is wanted.")
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "metrics.port needs the package prometheus_client: pip install 'spark-kafka-sink[prometheus]'."
        )
    return range(first, last + 1)
