"""Calls of tests to a real cluster, besides topics: its active controller, quotas, features, coordinators."""

from __future__ import annotations

from datetime import timedelta

from kio.schema.alter_client_quotas.v1 import request as alter_client_quotas
from kio.schema.alter_client_quotas.v1.response import AlterClientQuotasResponse
from kio.schema.describe_quorum.v0 import request as describe_quorum
from kio.schema.describe_quorum.v0.response import DescribeQuorumResponse
from kio.schema.types import TopicName
from kio.schema.update_features.v1 import request as update_features
from kio.schema.update_features.v1.response import UpdateFeaturesResponse
from kio.static.primitive import f64, i8, i16, i32, i32Timedelta

from spark_kafka_sink.local import Admin


def active_controller(bootstrap_servers: str) -> int:
    """Return the node id of the quorum's leader."""
    partition = describe_quorum.PartitionData(partition_index=i32(0))
    topic = describe_quorum.TopicData(topic_name=TopicName("__cluster_metadata"), partitions=(partition,))
    payload = describe_quorum.DescribeQuorumRequest(topics=(topic,))
    response = Admin(bootstrap_servers).ask(payload, DescribeQuorumResponse)
    assert not response.error_code, response.error_code
    return int(response.topics[0].partitions[0].leader_id)


def set_producer_quota(bootstrap_servers: str, client_id: str, bytes_a_second: float | None) -> None:
    """Set `producer_byte_rate` of a client id; None removes it."""
    entity = alter_client_quotas.EntityData(entity_type="client-id", entity_name=client_id)
    operation = alter_client_quotas.OpData(
        key="producer_byte_rate", value=f64(bytes_a_second or 0.0), remove=bytes_a_second is None
    )
    entry = alter_client_quotas.EntryData(entity=(entity,), ops=(operation,))
    payload = alter_client_quotas.AlterClientQuotasRequest(entries=(entry,), validate_only=False)
    for answer in Admin(bootstrap_servers).ask(payload, AlterClientQuotasResponse).entries:
        assert not answer.error_code, answer


def set_feature(bootstrap_servers: str, name: str, level: int) -> None:
    """Finalize this level of a feature such as transaction.version, up or down, as kafka-features.sh does."""
    is_upgrade = level > Admin(bootstrap_servers).finalized_features().get(name, 0)
    update = update_features.FeatureUpdateKey(
        feature=name, max_version_level=i16(level), upgrade_type=i8(1 if is_upgrade else 2)
    )
    payload = update_features.UpdateFeaturesRequest(
        feature_updates=(update,), timeout=i32Timedelta.parse(timedelta(seconds=30))
    )
    response = Admin(bootstrap_servers).ask(payload, UpdateFeaturesResponse)
    assert not response.error_code, response


def coordinator_partition(transactional_id: str, partitions: int) -> int:
    """Return the partition of __transaction_state that an id belongs to (Java's String.hashCode)."""
    code = 0
    for character in transactional_id:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    if code >= 2**31:
        code = 2**32 - code if code > 2**31 else 0
    return code % partitions
