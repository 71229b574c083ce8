"""Every reader of data from a peer, a file or a topic, as a function of bytes.

A target returns, or raises an error of this package. Any other result is a fault, also too much time or memory. Corpus
and test: tests/unit/hostile. To find new inputs: `python tests/unit/hostile/explore.py TARGET` (needs atheris).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from crc32c import crc32c
from support.fake_clock import FakeClock

from spark_kafka_sink.client.api_versions import ApiVersions, VersionDiscovery
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.metadata_updater import DefaultMetadataUpdater
from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.options import RefusalError
from spark_kafka_sink.common.security import parse_jaas_config
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.channel import Channel
from spark_kafka_sink.network.sasl.authenticator import SaslAuthenticator
from spark_kafka_sink.network.sasl.gssapi import GssapiMechanism
from spark_kafka_sink.network.sasl.oauthbearer import OAuthBearerMechanism
from spark_kafka_sink.network.sasl.oidc import ClientCredentials, OidcTokenProvider
from spark_kafka_sink.network.sasl.scram import ScramSha256Mechanism
from spark_kafka_sink.network.transport import WOULD_BLOCK
from spark_kafka_sink.producer.produce_response import _outcomes
from spark_kafka_sink.protocol.fetch import group_offsets_of
from spark_kafka_sink.protocol.framing import parse_response
from spark_kafka_sink.protocol.metadata import coordinator_of
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, request_type
from spark_kafka_sink.record.decoder import BatchLimits, decode_batches
from spark_kafka_sink.sink.exactly_once.messages import Decision, FirstUse

OURS = (KafkaError, RefusalError)
"""The errors that a target may raise."""
CANARY = "hunter2hunter2"
"""A secret that no refusal may show."""
MAX_SIZE = 1 << 20

RESPONSES = [
    (api_key, version)
    for api_key, versions in SUPPORTED_VERSIONS.items()
    for version in range(versions.oldest, versions.latest + 1)
]
"""The first two bytes of an input select one of them."""
_CLOCK = FakeClock()


def response(data: bytes) -> None:
    """Read a response of any API and version, and handle it."""
    api_key, version = RESPONSES[int.from_bytes(data[:2], "big") % len(RESPONSES)]
    _, entity = parse_response(request_type(api_key, version), data[2:])
    _USE.get(api_key, lambda _: None)(entity)


def _use_metadata(entity: Any) -> None:
    metadata = Metadata(100, 1_000, 300_000, random.Random(1))
    update = MetadataResponse.from_entity(entity)
    if update.brokers:
        metadata.update(metadata.update_version, update, False, 0)
        cluster = metadata.fetch()
        for topic in cluster.topics:
            cluster.available_partitions_for_topic(topic)


_UPDATER = DefaultMetadataUpdater(Metadata(100, 1_000, 300_000, random.Random(1)), 1_000, 50, "rebootstrap", 300_000)


def _use_versions(entity: Any) -> None:
    discovery = VersionDiscovery(ApiVersions(), _UPDATER)
    discovery.begin("1")
    discovery.on_versions("1", discovery.take("1")[1], entity)


_USE: Mapping[int, Callable[[Any], object]] = {
    ApiKey.PRODUCE: _outcomes,
    ApiKey.METADATA: _use_metadata,
    ApiKey.API_VERSIONS: _use_versions,
    ApiKey.FIND_COORDINATOR: lambda entity: coordinator_of(entity, "k"),
    ApiKey.OFFSET_FETCH: lambda entity: group_offsets_of(entity, "g"),
}


class _Pieces:
    """A transport that returns its data in pieces. The first bytes give their sizes."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def recv_into(self, buffer: memoryview) -> int:
        if self._at >= len(self._data):
            return 0
        length = min(len(buffer), 1 + self._data[self._at] % 64, len(self._data) - self._at)
        if length == 64:
            self._at += 1
            return WOULD_BLOCK
        buffer[:length] = self._data[self._at : self._at + length]
        self._at += length
        return length


def frames(data: bytes) -> None:
    """Read the bytes of a connection, to its end."""
    transport: Any = _Pieces(data)
    channel = Channel("1", "Node 1 at there:1", transport, MAX_SIZE)
    channel.is_connected = True
    for _ in range(2 * len(data) + 2):
        channel.read()
    raise AssertionError("an ended connection is read without end")


def batches(data: bytes) -> None:
    """Read record batches."""
    list(decode_batches(data, BatchLimits(MAX_SIZE)))


def records(data: bytes) -> None:
    """Read records in a batch with a correct checksum. The first bytes: attributes, and the number of records."""
    if len(data) < 3:
        return
    attributes, count = data[0] & 0x3F, struct.unpack_from(">h", data, 1)[0]
    covered = struct.pack(">hiqqqhii", attributes, count - 1, 0, 0, -1, -1, -1, count) + data[3:]
    list(
        decode_batches(
            struct.pack(">qiibI", 0, len(covered) + 9, -1, 2, crc32c(covered)) + covered, BatchLimits(MAX_SIZE)
        )
    )


def _scram() -> ScramSha256Mechanism:
    mechanism = ScramSha256Mechanism("user", Secret(CANARY), nonce=lambda: "nonce")
    mechanism.respond(b"")
    return mechanism


_SCRAM_FIRST = b"r=nonceandmore,s=QSXCR+Q6sek8bf92,i=4096"


def scram_first(data: bytes) -> None:
    if b"i=" in data and max(map(len, data.split(b"i="))) > 60:  # a million iterations may take long
        return
    _scram().respond(data)


def scram_final(data: bytes) -> None:
    mechanism = _scram()
    mechanism.respond(_SCRAM_FIRST)
    mechanism.respond(data)
    raise AssertionError("a server that does not know the password was believed")


def oauthbearer(data: bytes) -> None:
    mechanism = OAuthBearerMechanism(lambda: Secret(CANARY), {})
    mechanism.respond(b"")
    if mechanism.respond(data) is not None:
        mechanism.respond(b"")
        raise AssertionError("a refusal was ignored")


def gssapi(data: bytes) -> None:
    context: Any = SimpleNamespace(
        complete=True, is_mutual=True, step=lambda _: b"", unwrap=lambda message: message, wrap=lambda message: message
    )
    mechanism = GssapiMechanism(lambda: context)
    mechanism.respond(b"")
    assert mechanism.respond(data) == b"\x01\0\0\0"


class _Words:
    name: ClassVar[str] = "TEST"
    is_slow: ClassVar[bool] = False
    secrets = (Secret(CANARY),)

    def respond(self, challenge: bytes) -> bytes | None:
        return b"more" if challenge else b""


_SPOKEN = struct.pack(">hihhhhhh", 0, 2, 17, 0, 1, 36, 0, 2)


def login(data: bytes) -> None:
    """A response in the SASL exchange; the first byte chooses the request."""
    if not data:
        return
    authenticator = SaslAuthenticator(
        "Node 1 at there:1", _Words, "client", random.Random(1), lambda *_: _no_step(), lambda: None
    )
    authenticator.begin()
    for answer in (_SPOKEN, struct.pack(">hi", 0, 0))[: data[0] % 3]:
        authenticator.receive(_id_of(authenticator) + answer, 0)
    authenticator.receive(_id_of(authenticator) + data[1:], 0)


def _id_of(authenticator: SaslAuthenticator) -> bytes:
    frame = authenticator.take_outgoing()
    assert frame is not None
    return b"".join(frame)[8:12]


def _no_step() -> Any:
    raise AssertionError("nothing here is slow")


def jaas(data: bytes) -> None:
    """Read sasl.jaas.config; its refusal shows no part of it."""
    parse_jaas_config(data.decode("utf-8", "replace"))


_PROVIDER = OidcTokenProvider(ClientCredentials("https://there/", "me", Secret(CANARY)), _CLOCK)


def token_answer(data: bytes) -> None:
    """Read the answer of a token endpoint."""
    _PROVIDER._token_of(data)


def decision(data: bytes) -> None:
    """Read a record of the decision topic."""
    Decision.from_bytes(data, "decisions-0 at offset 1", "P")


def first_use(data: bytes) -> None:
    """Read the first-use record of a prefix in the decision topic."""
    FirstUse.from_bytes(data, "decisions-0 at offset 1")


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        response, frames, batches, records, scram_first, scram_final, oauthbearer, gssapi, login, jaas, token_answer,
        decision, first_use,
    )
}  # fmt: skip


def run(name: str, data: bytes) -> None:
    """Run one input. Raises the error of a fault."""
    try:
        TARGETS[name](data)
    except OURS as error:
        if CANARY in str(error):
            raise AssertionError("a secret was shown") from error


def mutations(data: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield inputs that are similar to this one: bytes flipped, removed, duplicated, or replaced by large numbers."""
    wild = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0", b"\xff\xff\xff\xff\x07", b"\x01")
    for _ in range(count):
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 6))):
            at = rng.randrange(len(made) + 1)
            kind = rng.randrange(5)
            if kind == 0 and at < len(made):
                made[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 1:
                del made[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                made[at:at] = made[at : at + rng.randrange(1, 65)]
            elif kind == 3:
                number = rng.choice(wild)
                made[at : at + len(number)] = number
            else:
                del made[at:]
        yield bytes(made)
