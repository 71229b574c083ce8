"""What logs and errors show of a text."""

from __future__ import annotations

import pickle

from spark_kafka_sink.common.texts import Secret


def test_secret_is_shown_only_by_reveal() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2") != Secret("other")
    assert secret != "hunter2"
    assert hash(secret) == hash(Secret("hunter2"))


def test_secret_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Secret("hunter2"))).reveal() == "hunter2"
