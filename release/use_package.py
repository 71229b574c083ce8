"""Run README's batch and stream with the installed package: `python -P use_package.py BROKERS TOPIC`.

The stream writes to TOPIC-stream until its first rows are committed; PySpark 3.5 has no `format`, so no stream.
The last line of the output is JSON: the versions of Python and PySpark, the folder of the package, whether the kernel
is loaded, the records that the batch's report counts, and the rows of the stream's first batches.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from importlib.metadata import metadata, version
from typing import Any, Final

LIMIT_S: Final = 120


def example(readme: str, marker: str) -> str:
    """Return the one Python example of README that has the marker."""
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (found,) = [str(example) for example in examples if marker in example]
    return found


def batch_example(readme: str, brokers: str, topic: str) -> str:
    """Return the Python example that writes a batch, for these brokers and this topic."""
    return example(readme, "sink.write(").replace("127.0.0.1:9092", brokers).replace('"orders"', f'"{topic}"')


def stream_example(readme: str, brokers: str, topic: str, checkpoint: str) -> str:
    """Return the Python example that writes a stream, for these brokers, this topic and this checkpoint."""
    found = example(readme, ".writeStream.format(").replace("127.0.0.1:9092", brokers)
    return found.replace('"payments"', f'"{topic}"').replace("/tmp/payments", checkpoint)  # noqa: S108


def rows_of_stream(query: Any) -> int:
    """Wait for the first rows of a query, stop it, and return the rows of its finished batches.

    Raises TimeoutError if no batch has rows after LIMIT_S, and the query's own error.
    """
    until = time.monotonic() + LIMIT_S
    while not (rows := sum(progress["numInputRows"] for progress in query.recentProgress)):
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > until:
            raise TimeoutError(f"The stream wrote nothing in {LIMIT_S} s: {query.status}")
        time.sleep(0.1)
    query.stop()
    return int(rows)


def main(brokers: str, topic: str) -> None:
    import spark_kafka_sink
    from spark_kafka_sink.record.kernel import has_kernel

    readme = metadata("spark-kafka-sink")["Description"]
    names: dict[str, Any] = {}
    exec(batch_example(readme, brokers, topic), names)  # noqa: S102
    streamed = None
    if not version("pyspark").startswith("3."):
        with tempfile.TemporaryDirectory() as checkpoint:
            exec(stream_example(readme, brokers, f"{topic}-stream", checkpoint), names)  # noqa: S102
            streamed = rows_of_stream(names["query"])
    names["spark"].stop()
    facts = {
        "python": sys.version.split()[0],
        "pyspark": version("pyspark"),
        "folder": spark_kafka_sink.__path__[0],
        "kernel": has_kernel(),
        "records": names["report"].records,
        "streamed": streamed,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
