"""The scripted broker answers like real brokers. tests/integration/admin/test_cluster_client.py runs the same cases
there.
"""

from __future__ import annotations

import random

import pytest
from support.client_rig import ClientRig
from support.raw_transactions import RawTransactions
from support.transaction_table import CASES, Case, Stage

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.cluster import TopicPartition


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("marker_delay_ms", [0, 30])
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_scripted_broker_answers_like_a_real_one(run: Case, version: int, marker_delay_ms: int) -> None:
    rig = ClientRig(3)
    rig.cluster.finalized_features["transaction.version"] = version
    rig.cluster.transactions.marker_delay_ms = marker_delay_ms
    rig.cluster.create_topic("t", 2)
    coordinator = ClusterClient(rig.consumer(), rig.metadata, rig.api_versions, rig.clock, random.Random(3), 100)
    run(Stage(coordinator, RawTransactions(coordinator, version), TopicPartition("t", 0), rig.clock.advance))
