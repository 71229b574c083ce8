"""Spark itself killed, driver, JVM and Python workers at once, and started again with other partitions.

EXACTLY_ONCE_KILLS=100 kills 24 (2 by default); EXACTLY_ONCE_SEED=7 begins there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support.exactly_once_streams import Stream

from spark_kafka_sink.local import Admin

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("EXACTLY_ONCE_KILLS", "12")) // 8
SEED = int(os.environ.get("EXACTLY_ONCE_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
FILES_AHEAD = 40


def start(stream: Stream, partitions: int, *dies_after: int) -> subprocess.Popen[bytes]:
    arguments = [stream.servers, stream.topic, str(stream.folder), stream.form, str(partitions), *map(str, dies_after)]
    return subprocess.Popen(
        [sys.executable, "-m", "support.exactly_once_job", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("form", ["format", "foreachBatch"])
def test_spark_killed_whole_costs_and_doubles_nothing(kafka_broker: Admin, tmp_path: Path, form: str) -> None:
    rng = random.Random(SEED)
    topic = f"killed-{uuid.uuid4().hex[:8]}"
    kafka_broker.create_topic(topic, 3)
    stream = Stream(kafka_broker.bootstrap_servers, topic, tmp_path, form)
    files = 0
    for number in range(KILLS):
        before = stream.last_batch()
        ahead = before + 1 + FILES_AHEAD - files
        stream.write_files(files, ahead)
        files += ahead
        if form == "foreachBatch" and number % 2 == 0:  # after a certain request of the driver's
            process = start(stream, rng.randint(1, 4), rng.randrange(30))
            assert process.wait(timeout=240) == -signal.SIGKILL, f"seed {SEED}, kill {number}"
            continue
        process = start(stream, rng.randint(1, 4))
        deadline = time.monotonic() + 120
        while stream.last_batch() <= before:  # until it is at work
            assert process.poll() is None, f"seed {SEED}, kill {number}: the query ended by itself"
            assert time.monotonic() < deadline, f"seed {SEED}, kill {number}: the query does not get on"
            time.sleep(0.02)
        time.sleep(rng.random() * 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process = start(stream, 2)
    assert process.wait(timeout=240) == 0, f"seed {SEED}"
    try:
        stream.check(files)
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={SEED}: {error}") from error
