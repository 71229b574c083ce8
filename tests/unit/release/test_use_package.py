"""The examples of README that `make dist-test` runs."""

from __future__ import annotations

from pathlib import Path

from release.use_package import batch_example, stream_example

README = Path(__file__).resolve().parents[3] / "README.md"


def test_batch_of_the_readme_gets_brokers_and_topic() -> None:
    example = batch_example(README.read_text(), "127.0.0.1:1", "new-topic")
    assert '"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "new-topic"' in example
    assert "report = sink.write(orders)" in example
    compile(example, "README.md", "exec")


def test_stream_of_the_readme_gets_brokers_topic_and_checkpoint() -> None:
    example = stream_example(README.read_text(), "127.0.0.1:1", "new-topic", "/new/checkpoint")
    assert '"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "new-topic"' in example
    assert '.option("checkpointLocation", "/new/checkpoint")' in example
    compile(example, "README.md", "exec")
