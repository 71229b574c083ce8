"""Run README's batch with the installed package: `python -P use_package.py BROKERS TOPIC`.

The last line of its output is JSON: the versions of Python and PySpark, the folder of the package, whether the kernel
is loaded, and the records that the report counts.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any


def batch_example(readme: str, brokers: str, topic: str) -> str:
    """Return the Python example that writes a batch, for these brokers and this topic."""
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (example,) = [example for example in examples if "sink.write(" in example]
    return str(example).replace("127.0.0.1:9092", brokers).replace('"orders"', f'"{topic}"')


def main(brokers: str, topic: str) -> None:
    import spark_kafka_sink
    from spark_kafka_sink.record.kernel import has_kernel

    names: dict[str, Any] = {}
    exec(batch_example(metadata("spark-kafka-sink")["Description"], brokers, topic), names)  # noqa: S102
    names["spark"].stop()
    facts = {
        "python": sys.version.split()[0],
        "pyspark": version("pyspark"),
        "folder": str(Path(spark_kafka_sink.__file__).parent),
        "kernel": has_kernel(),
        "records": names["report"].records,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
