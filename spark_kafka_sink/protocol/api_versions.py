"""What one node speaks, and the version to use with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_kafka_sink.common.errors import ProtocolError, UnsupportedVersionError
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.messages import Message, VersionRange
from spark_kafka_sink.protocol.releases import first_release


@dataclass(frozen=True, slots=True)
class NodeApiVersions:
    """A node's version range per api key, and the cluster's finalized features (KIP-584), such as
    transaction.version.
    """

    ranges: Mapping[int, VersionRange]
    finalized_features: Mapping[str, int] = field(default_factory=dict)
    finalized_features_epoch: int = -1

    @classmethod
    def from_response(cls, response: Message) -> NodeApiVersions:
        """Read an ApiVersions response of any version without error.

        A range that is upside down or negative is kept as it is: it holds no version that `usable_version` could
        choose, and matters only where that api is needed. Of an api that is named twice only the versions that are in
        both ranges count. Raises ProtocolError where no api is named at all, as in a message of zeroes.
        """
        if not response.api_keys:
            raise ProtocolError("The answer names no api at all.")
        ranges: dict[int, VersionRange] = {}
        for api in response.api_keys:
            oldest, latest = int(api.min_version), int(api.max_version)
            if (other := ranges.get(int(api.api_key))) is not None:
                oldest, latest = max(oldest, other.oldest), min(latest, other.latest)
            ranges[int(api.api_key)] = VersionRange(oldest, latest)
        features = {
            feature.name: int(feature.max_version_level) for feature in getattr(response, "finalized_features", ())
        }
        return cls(ranges, features, int(getattr(response, "finalized_features_epoch", -1)))

    def usable_version(self, request: Request) -> int:
        """The highest version of the request that both sides know. Raises UnsupportedVersionError with both ranges."""
        oldest, latest = request.oldest_version, request.latest_version
        theirs = self.ranges.get(request.api_key)
        if theirs is not None:
            version = min(latest, theirs.latest)
            if version >= oldest and version >= theirs.oldest:
                return version
        raise UnsupportedVersionError(_refusal(request, theirs))


def _refusal(request: Request, theirs: VersionRange | None) -> str:
    """What the request needs, what the node has, and which Kafka release brings it."""
    name = f"{request.api_key.name} (api {int(request.api_key)})"
    oldest, latest = request.oldest_version, request.latest_version
    needed = f"this request needs versions {VersionRange(oldest, latest)}"
    if theirs is not None and theirs.oldest > latest and theirs.latest >= theirs.oldest:
        return (
            f"The node speaks versions {theirs} of {name}; {needed}. The node is newer than this client: upgrade"
            " spark-kafka-sink."
        )
    release = first_release(request.api_key, oldest)
    purpose = f"{request.purpose} needs Kafka {release} or newer. " if request.purpose else ""
    remedy = "." if purpose else f": Kafka {release} or newer."
    if theirs is None:
        return f"{purpose}The node does not speak {name} at all; {needed}{remedy}"
    if theirs.oldest > theirs.latest or theirs.latest < 0:
        return f"{purpose}The node claims versions {theirs} of {name}, which hold no version; {needed}{remedy}"
    return f"{purpose}The node speaks versions {theirs} of {name}; {needed}{remedy}"
