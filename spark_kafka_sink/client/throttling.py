"""From which version on a broker answers a throttled request at once and leaves the waiting to the client (KIP-219)."""

from __future__ import annotations

from typing import Final

from spark_kafka_sink.protocol.messages import ApiKey, Message, to_ms

_FIRST_CLIENT_THROTTLED: Final = {
    ApiKey.PRODUCE: 6,
    ApiKey.FETCH: 8,
    ApiKey.LIST_OFFSETS: 3,
    ApiKey.METADATA: 6,
    ApiKey.OFFSET_FETCH: 4,
    ApiKey.FIND_COORDINATOR: 2,
    ApiKey.API_VERSIONS: 2,
    ApiKey.CREATE_TOPICS: 3,
    ApiKey.INIT_PRODUCER_ID: 1,
    ApiKey.ADD_PARTITIONS_TO_TXN: 1,
    ApiKey.ADD_OFFSETS_TO_TXN: 1,
    ApiKey.END_TXN: 1,
    ApiKey.TXN_OFFSET_COMMIT: 1,
}


def client_throttle_ms(api_key: ApiKey, response: Message) -> int:
    """How long nothing may be sent to the node after this response, in ms; older versions were held back already."""
    first_version = _FIRST_CLIENT_THROTTLED.get(api_key)
    if first_version is None or response.__version__ < first_version:
        return 0
    return max(to_ms(response.throttle_time), 0)
