"""The operator's command of exactly-once delivery: python -m spark_kafka_sink.transactions."""

from __future__ import annotations

import sys

from spark_kafka_sink.common.texts import exit_code_of
from spark_kafka_sink.sink.exactly_once.operator import main as main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
