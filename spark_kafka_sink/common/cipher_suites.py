"""Which TLS versions and cipher suites may be used: ssl.cipher.suites, by the names that Java has and OpenSSL has.

A function of text alone, so that a suite that is not offered is refused before a task starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from spark_kafka_sink.common.errors import ConfigError

_SUITES_OF_1_3: Final = frozenset({"TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256"})
_SUITES_OF_1_2: Final[Mapping[str, str]] = {
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA384": "ECDHE-ECDSA-AES256-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA384": "ECDHE-RSA-AES256-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256": "ECDHE-RSA-AES128-SHA256",
    "TLS_DHE_RSA_WITH_AES_256_GCM_SHA384": "DHE-RSA-AES256-GCM-SHA384",
    "TLS_DHE_RSA_WITH_AES_128_GCM_SHA256": "DHE-RSA-AES128-GCM-SHA256",
}
"""Standard name (RFC 5246, as Java has it) → OpenSSL's. Those with forward secrecy alone."""


class TlsChoice(NamedTuple):
    versions: list[str]
    """Those that may be spoken, ascending; at least one."""
    older_suites: list[str]
    """Of TLS 1.2, OpenSSL's names; empty where none is chosen, or that version is not spoken."""


def tls_choice(versions: Sequence[str], suites: Sequence[str] | None) -> TlsChoice:
    """Of `versions`, ascending, those for which there is one of `suites` (None: of all). Raises ConfigError."""
    if suites is None:
        return TlsChoice(list(versions), [])
    known = {**_SUITES_OF_1_2, **{name: name for name in _SUITES_OF_1_2.values()}}
    older = [known[suite] for suite in suites if suite in known]
    newer = _SUITES_OF_1_3.intersection(suites)
    if strange := [suite for suite in suites if suite not in known and suite not in newer]:
        choice = ", ".join((*sorted(_SUITES_OF_1_3), *_SUITES_OF_1_2))
        raise ConfigError(f"ssl.cipher.suites: {strange[0]!r} is not offered here. There are {choice}.")
    if newer and newer != _SUITES_OF_1_3:
        raise ConfigError(
            "ssl.cipher.suites: Python's ssl cannot choose among the suites of TLS 1.3. Name all three"
            f" ({', '.join(sorted(_SUITES_OF_1_3))}), or none, and TLS 1.3 is not spoken."
        )
    left = [name for name in versions if (newer if name == "TLSv1.3" else older)]
    if not left:
        raise ConfigError(
            f"ssl.cipher.suites has none for the TLS versions that may be spoken ({', '.join(versions)})."
        )
    return TlsChoice(left, older)
