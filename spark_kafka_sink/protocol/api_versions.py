"""What one node speaks, and the version to use with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_kafka_sink.common.errors import ProtocolError, UnsupportedVersionError
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.messages import Message, VersionRange


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
        """From an ApiVersions response of any version without error. Raises ProtocolError where a range is upside
        down.
        """
        ranges = {int(api.api_key): VersionRange(api.min_version, api.max_version) for api in response.api_keys}
        for api_key, versions in ranges.items():
            if versions.oldest > versions.latest or versions.oldest < 0:
                raise ProtocolError(f"The node claims versions {versions} of api {api_key}.")
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
        name = f"{request.api_key.name} (api {int(request.api_key)})"
        ours = VersionRange(oldest, latest)
        if theirs is None:
            raise UnsupportedVersionError(f"The node does not speak {name} at all; this request needs versions {ours}.")
        raise UnsupportedVersionError(
            f"The node speaks versions {theirs} of {name}; this request needs versions {ours}."
        )
