"""From a frame to its API, through the scripts, and back to a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.schema.request_header.v1.header import RequestHeader
from kio.serial import entity_reader
from support.scripted_broker import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    api_versions,
    create_topics,
    describe_configs,
    describe_producers,
    describe_quorum,
    describe_transactions,
    end_txn,
    fetch,
    find_coordinator,
    init_producer_id,
    list_offsets,
    list_transactions,
    metadata,
    offset_fetch,
    produce,
    sasl,
    telemetry,
    txn_offset_commit,
)
from support.scripted_broker.exchange import Answer, Exchange, Reply
from support.scripted_broker.responses import encode_response

from spark_kafka_sink.protocol.versions import ApiKey

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


class Api(NamedTuple):
    """One API: the action of the broker and its refusal."""

    respond: Callable[[ScriptedCluster, Exchange], Answer]
    refuse: Callable[[ScriptedCluster, Exchange, int], Mapping[str, Any]]


API_BY_KEY: dict[int, Api] = {
    ApiKey.PRODUCE: Api(produce.respond, produce.refuse),
    ApiKey.FETCH: Api(fetch.respond, fetch.refuse),
    ApiKey.LIST_OFFSETS: Api(list_offsets.respond, list_offsets.refuse),
    ApiKey.METADATA: Api(metadata.respond, metadata.refuse),
    ApiKey.OFFSET_FETCH: Api(offset_fetch.respond, offset_fetch.refuse),
    ApiKey.FIND_COORDINATOR: Api(find_coordinator.respond, find_coordinator.refuse),
    ApiKey.SASL_HANDSHAKE: Api(sasl.respond_handshake, sasl.refuse_handshake),
    ApiKey.API_VERSIONS: Api(api_versions.respond, api_versions.refuse),
    ApiKey.CREATE_TOPICS: Api(create_topics.respond, create_topics.refuse),
    ApiKey.INIT_PRODUCER_ID: Api(init_producer_id.respond, init_producer_id.refuse),
    ApiKey.ADD_PARTITIONS_TO_TXN: Api(add_partitions_to_txn.respond, add_partitions_to_txn.refuse),
    ApiKey.ADD_OFFSETS_TO_TXN: Api(add_offsets_to_txn.respond, add_offsets_to_txn.refuse),
    ApiKey.END_TXN: Api(end_txn.respond, end_txn.refuse),
    ApiKey.TXN_OFFSET_COMMIT: Api(txn_offset_commit.respond, txn_offset_commit.refuse),
    ApiKey.DESCRIBE_CONFIGS: Api(describe_configs.respond, describe_configs.refuse),
    ApiKey.SASL_AUTHENTICATE: Api(sasl.respond_authenticate, sasl.refuse_authenticate),
    ApiKey.DESCRIBE_QUORUM: Api(describe_quorum.respond, describe_quorum.refuse),
    ApiKey.DESCRIBE_PRODUCERS: Api(describe_producers.respond, describe_producers.refuse),
    ApiKey.DESCRIBE_TRANSACTIONS: Api(describe_transactions.respond, describe_transactions.refuse),
    ApiKey.LIST_TRANSACTIONS: Api(list_transactions.respond, list_transactions.refuse),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: Api(telemetry.respond_subscriptions, telemetry.refuse),
    ApiKey.PUSH_TELEMETRY: Api(telemetry.respond_push, telemetry.refuse),
}


def dispatch(
    cluster: ScriptedCluster, node_id: int, payload: bytes, now_ms: int, connection: object = None
) -> list[Reply]:
    """Return the replies to one request. Raises ValueError if the bytes are not a request that this broker can read."""
    head, _ = entity_reader(RequestHeader)(payload, 0)
    api_key, version = int(head.request_api_key), int(head.request_api_version)
    oldest, latest = cluster.ranges_of(node_id).get(api_key, (0, -1))
    if not oldest <= version <= latest:
        return _refuse_version(cluster, node_id, api_key, head.correlation_id)
    request = _read_request(api_key, version, payload)
    exchange = Exchange(
        node_id, api_key, version, int(head.correlation_id), head.client_id, request, now_ms, connection
    )
    if cluster.sasl is not None and not cluster.sasl.admits(exchange):
        return [Reply(0, b"", close=True)]
    cluster.requests.append(exchange)
    cluster.transactions.advance(now_ms)
    answer = _run_scripts(cluster, exchange)
    data = b""
    if answer.values is not None:
        response_version = version if answer.version is None else answer.version
        data = encode_response(api_key, response_version, exchange.correlation_id, answer.values)
        if answer.transform is not None:
            data = answer.transform(data)
    return [Reply(answer.delay_ms, data, answer.close)] if data or answer.close else []


def _read_request(api_key: int, version: int, payload: bytes) -> Any:
    request_type = load_request_schema(api_key, version)
    _, at = entity_reader(request_type.__header_schema__)(payload, 0)
    request, size = entity_reader(request_type)(payload, at)
    if at + size != len(payload):
        raise ValueError(f"{request_type.__name__} has {len(payload) - at - size} bytes too many")
    return request


def _run_scripts(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    api = API_BY_KEY[exchange.api_key]
    for script in cluster.scripts:
        if script.applies_to(exchange):
            return script.hook(cluster, exchange, lambda: api.respond(cluster, exchange))
    return api.respond(cluster, exchange)


def _refuse_version(cluster: ScriptedCluster, node_id: int, api_key: int, correlation_id: int) -> list[Reply]:
    """Close the connection for a version that is not supported. Only ApiVersions gets an answer, in version 0
    (KIP-511).
    """
    if api_key != ApiKey.API_VERSIONS:
        return [Reply(0, b"", close=True)]
    values = {
        "error_code": ErrorCode.unsupported_version,
        "api_keys": api_versions.ranges(cluster, node_id, {ApiKey.API_VERSIONS}),
    }
    return [Reply(0, encode_response(ApiKey.API_VERSIONS, 0, correlation_id, values))]
