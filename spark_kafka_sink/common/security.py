"""The settings of TLS and SASL, and the rules between them.

Names, types and defaults are those of Kafka (org.apache.kafka.common.config.SslConfigs and SaslConfigs of 4.x), with
two exceptions: the default type of stores is PEM, and a token endpoint has time limits.
`sasl.allow.cleartext.credentials` and `sasl.oauthbearer.token.provider` are not in Kafka. A setting without effect is
refused rather than ignored: a user who gives a truststore believes that connections are encrypted.

sasl.jaas.config is read as text. No class is loaded (compare CVE-2023-25194). Its form is that of the login
configuration of Java, with one entry (org.apache.kafka.common.security.JaasConfig): `<class of the login module>
required name="value" ... ;`. No error shows any of its text, because with a quote in the wrong place a password looks
like a name.

The default type of stores in Java is JKS, so most configurations give no type. Sources of the bytes that distinguish
JKS, PKCS12 and PEM: sun.security.provider.JavaKeyStore (magic FEEDFEED), RFC 7292 (PFX begins with version 3), RFC 7468
(PEM).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final, Literal, NamedTuple

from spark_kafka_sink.common import options as parsers
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import RefusalError, option
from spark_kafka_sink.common.texts import Secret, shown

PLAIN_MODULE: Final = "PlainLoginModule"
SCRAM_MODULE: Final = "ScramLoginModule"
OAUTHBEARER_MODULE: Final = "OAuthBearerLoginModule"
KERBEROS_MODULE: Final = "Krb5LoginModule"
MSK_IAM_MODULE: Final = "IAMLoginModule"

_MODULE_OPTIONS: Final[Mapping[str, re.Pattern[str]]] = {
    PLAIN_MODULE: re.compile("username|password"),
    SCRAM_MODULE: re.compile("username|password|tokenauth"),
    OAUTHBEARER_MODULE: re.compile("clientId|clientSecret|scope|extension_[A-Za-z]+"),
    KERBEROS_MODULE: re.compile(
        "useKeyTab|keyTab|principal|storeKey|useTicketCache|ticketCache|serviceName|doNotPrompt"
    ),
    MSK_IAM_MODULE: re.compile("awsProfileName|awsRoleArn|awsRoleSessionName|awsRoleExternalId|awsStsRegion"),
}
"""Login module, by the name of its class without the package → the options that have a meaning here."""

_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN: Final = re.compile(
    r"""\s+ | //[^\n]* | /\*.*?\*/
      | "(?P<double>(?:[^"\\\n]|\\.)*)" | '(?P<single>(?:[^'\\\n]|\\.)*)'
      | (?P<sign>[=;]) | (?P<word>[^\s"'=;]+)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_FORM: Final = 'must have the form <login module> required name="value" ... ;'


@dataclass(frozen=True, slots=True)
class JaasConfig:
    """The one entry: the login module, by the name of its class (`PLAIN_MODULE`, ...), and its options."""

    login_module: str
    options: tuple[tuple[str, Secret], ...]

    def get(self, name: str) -> str | None:
        """Return the option in clear text, or None if it is not given."""
        return next((value.reveal() for given, value in self.options if given == name), None)


def parse_jaas_config(value: object) -> JaasConfig:
    """Parse sasl.jaas.config. Raises RefusalError, which shows nothing of `value`."""
    if isinstance(value, JaasConfig):
        return value
    tokens = _tokens(value.reveal() if isinstance(value, Secret) else str(value))
    if len(tokens) < 3 or tokens[0].kind != "text" or tokens[-1] != _Token("sign", ";"):
        raise RefusalError(_FORM)
    if tokens[1].text.lower() not in _FLAGS:
        raise RefusalError(f"{_FORM}, where the second word is one of {', '.join(sorted(_FLAGS))}")
    login_module = tokens[0].text.rpartition(".")[2]
    if login_module not in _MODULE_OPTIONS:
        raise RefusalError(
            f"must name a known login module (no Java class is loaded): one of {', '.join(_MODULE_OPTIONS)}"
        )
    return JaasConfig(login_module, _jaas_options(tokens[2:-1], login_module))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`sign` for = and ;, `text` for a word or a quoted text."""
    text: str


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise RefusalError('has a quotation mark without a partner; within a value write \\"')
        at = match.end()
        if match.lastgroup == "sign":
            found.append(_Token("sign", match["sign"]))
        elif match.lastgroup == "word":
            found.append(_Token("text", match["word"]))
        elif match.lastgroup is not None:
            found.append(_Token("text", _ESCAPE.sub(_unescape, match[match.lastgroup])))
    return found


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, code)


def _jaas_options(tokens: list[_Token], login_module: str) -> tuple[tuple[str, Secret], ...]:
    if any(token == _Token("sign", ";") for token in tokens):
        raise RefusalError("must name only one login module")
    known = _MODULE_OPTIONS[login_module]
    options: dict[str, Secret] = {}
    for number, at in enumerate(range(0, len(tokens), 3), start=1):
        group = tokens[at : at + 3]
        if [token.kind for token in group] != ["text", "sign", "text"]:
            raise RefusalError(f'has an option, number {number}, that is not of the form name="value"')
        name, value = group[0].text, group[2].text
        if not known.fullmatch(name):
            choice = known.pattern.replace("|", ", ")
            raise RefusalError(f"has an unknown option of {login_module}, number {number}; known are {choice}")
        if name in options:
            raise RefusalError(f"has {name} twice")
        options[name] = Secret(value)
    return tuple(options.items())


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
"""Standard name (RFC 5246, as in Java) → name in OpenSSL. Only suites with forward secrecy."""


class TlsChoice(NamedTuple):
    versions: list[str]
    """The allowed versions, ascending; at least one."""
    older_suites: list[str]
    """The suites of TLS 1.2 by their names in OpenSSL. Empty if no suite is chosen, or TLS 1.2 is not allowed."""


def tls_choice(versions: Sequence[str], suites: Sequence[str] | None) -> TlsChoice:
    """Return the versions, ascending, that have one of `suites`. `suites` None means all.

    A function of text only, so that an unknown suite is refused before a task starts. Raises ConfigError.
    """
    if suites is None:
        return TlsChoice(list(versions), [])
    known = {**_SUITES_OF_1_2, **{name: name for name in _SUITES_OF_1_2.values()}}
    older = [known[suite] for suite in suites if suite in known]
    newer = _SUITES_OF_1_3.intersection(suites)
    if strange := [suite for suite in suites if suite not in known and suite not in newer]:
        choice = ", ".join((*sorted(_SUITES_OF_1_3), *_SUITES_OF_1_2))
        raise ConfigError(f"`ssl.cipher.suites`: {shown(strange[0])} is not known here. Known are {choice}.")
    if newer and newer != _SUITES_OF_1_3:
        raise ConfigError(
            "`ssl.cipher.suites`: Python's ssl cannot choose among the suites of TLS 1.3. Name all three"
            f" ({', '.join(sorted(_SUITES_OF_1_3))}), or none, which turns TLS 1.3 off."
        )
    left = [name for name in versions if (newer if name == "TLSv1.3" else older)]
    if not left:
        raise ConfigError(f"`ssl.cipher.suites` has no suite for the allowed TLS versions ({', '.join(versions)}).")
    return TlsChoice(left, older)


Kind = Literal["JKS", "PKCS12", "PEM"]

_JKS_MAGIC: Final = b"\xfe\xed\xfe\xed"
_DER_SEQUENCE: Final = 0x30
_VERSION_3: Final = b"\x02\x01\x03"
_START: Final = 4096
"""Bytes to read. PEM files may have text before the first block."""
_BY_SUFFIX: Final[dict[str, Kind]] = {".jks": "JKS", ".p12": "PKCS12", ".pfx": "PKCS12"}


def kind_of(data: bytes) -> Kind | None:
    """Return the kind of the store that begins with `data`. None if the bytes do not say."""
    if data.startswith(_JKS_MAGIC):
        return "JKS"
    if data and data[0] == _DER_SEQUENCE and _VERSION_3 in data[2:9]:
        return "PKCS12"
    return "PEM" if b"-----BEGIN " in data else None


def kind_at(location: str) -> tuple[Kind | None, bool]:
    """Return the kind of the store at `location`, and whether it is certain.

    If this machine cannot read the file, the kind follows from its name: the file may be on the executors only.
    """
    try:
        if Path(location).is_file():
            with Path(location).open("rb") as file:
                return kind_of(file.read(_START)), True
    except (OSError, ValueError):  # ValueError: a NUL in the path
        pass
    return _BY_SUFFIX.get(PurePath(location).suffix.lower()), False


def store_refusal(store: str, type_: str, location: str | None, *, has_password: bool) -> str | None:
    """Return the error text for a wrong type of `store` (truststore or keystore), with the remedy, or None."""
    kind, is_sure = (None, False) if location is None else kind_at(location)
    if kind == "JKS" and not is_sure and type_ == "PKCS12":
        return None  # keytool of Java 9 and later writes PKCS12 into files named .jks
    if kind == "JKS":
        return f"`ssl.{store}.location` is a JKS store, which only Java reads. {_convert(store)}"
    if kind is not None and kind != type_:
        return _other_type(store, kind, has_password=has_password)
    if type_ == "JKS":
        return f"`ssl.{store}.type`=JKS: only Java reads JKS stores. {_convert(store)}"
    if type_ == "PEM" and has_password:
        text = f"`ssl.{store}.password` does not go with `ssl.{store}.type`=PEM, the default. "
        if kind == "PEM" or location is None:
            return f"{text}{_OF_PEM[store].capitalize()}."
        other = f"If it is PKCS12, set `ssl.{store}.type`=PKCS12. If it is JKS: {_convert(store)}"
        return f"{text}If the store is PEM, {_OF_PEM[store]}. {other}"
    return None


def _other_type(store: str, kind: Kind, *, has_password: bool) -> str:
    also = f", and {_OF_PEM[store]}" if kind == "PEM" and has_password else ""
    return f"`ssl.{store}.location` is a {kind} file: set `ssl.{store}.type`={kind}{also}."


_OF_PEM: Final = {
    "truststore": "leave `ssl.truststore.password` out",
    "keystore": "give the password of the key as `ssl.key.password` instead of `ssl.keystore.password`",
}


def _convert(store: str) -> str:
    return (
        "Convert it: keytool -importkeystore -srckeystore <store>.jks -destkeystore <store>.p12 -deststoretype PKCS12."
        f" Then set `ssl.{store}.type`=PKCS12 and `ssl.{store}.location` to the new file."
    )


TLS_VERSIONS: Final = ("TLSv1.2", "TLSv1.3")

_LOGIN_MODULES: Final[Mapping[str, str]] = {
    "GSSAPI": KERBEROS_MODULE,
    "PLAIN": PLAIN_MODULE,
    "SCRAM-SHA-256": SCRAM_MODULE,
    "SCRAM-SHA-512": SCRAM_MODULE,
    "OAUTHBEARER": OAUTHBEARER_MODULE,
    "AWS_MSK_IAM": MSK_IAM_MODULE,
}
"""SASL mechanism → the login module that sasl.jaas.config must name."""
_SENDS_NO_CREDENTIAL: Final = frozenset({"GSSAPI", "SCRAM-SHA-256", "SCRAM-SHA-512"})
"""Mechanisms that prove the password without sending it. All others send a password or a token."""

_store_type = parsers.one_of("PEM", "PKCS12", "JKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """The settings of TLS and SASL, typed and checked; a part of `ProducerConfig`."""

    security_protocol: str = option(
        parsers.one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
        "PLAINTEXT",
        "string",
        "How connections are secured: SSL and SASL_SSL by TLS, SASL_PLAINTEXT and SASL_SSL with a login.",
    )
    ssl_truststore_type: str = option(
        _store_type, "PEM", "string", "PEM, or PKCS12 with the extra `pkcs12`. Kafka's own default is JKS."
    )
    ssl_truststore_location: str | None = option(
        parsers.path,
        None,
        "string",
        "File with the certificate authorities to trust. Without it, the authorities that the system trusts.",
        is_secret=True,
    )
    ssl_truststore_certificates: Secret | None = option(
        parsers.secret_pem("CERTIFICATE"),
        None,
        "password",
        "The certificate authorities to trust, as PEM text instead of a file.",
        is_secret=True,
    )
    ssl_truststore_password: Secret | None = option(
        parsers.secret, None, "password", "Password of a PKCS12 truststore.", is_secret=True
    )
    ssl_keystore_type: str = option(
        _store_type, "PEM", "string", "PEM, or PKCS12 with the extra `pkcs12`. Kafka's own default is JKS."
    )
    ssl_keystore_location: str | None = option(
        parsers.path,
        None,
        "string",
        "File with this client's private key and certificate chain, for brokers that ask for a certificate.",
        is_secret=True,
    )
    ssl_keystore_certificate_chain: Secret | None = option(
        parsers.secret_pem("CERTIFICATE"),
        None,
        "password",
        "This client's certificate chain as PEM text, instead of a file.",
        is_secret=True,
    )
    ssl_keystore_key: Secret | None = option(
        parsers.secret_pem("PRIVATE KEY"),
        None,
        "password",
        "This client's private key as PEM text, preferably encrypted.",
        is_secret=True,
    )
    ssl_keystore_password: Secret | None = option(
        parsers.secret, None, "password", "Password of a PKCS12 keystore.", is_secret=True
    )
    ssl_key_password: Secret | None = option(
        parsers.secret,
        None,
        "password",
        "Password of this client's private key, if it is encrypted.",
        is_secret=True,
    )
    ssl_endpoint_identification_algorithm: str = option(
        parsers.one_of("https", ""),
        "https",
        "string",
        "https: a broker's certificate must be for the host that we connect to. Empty: any host, which is not secure.",
    )
    ssl_enabled_protocols: tuple[str, ...] = option(
        parsers.some_of(*TLS_VERSIONS), "TLSv1.2,TLSv1.3", "list", "TLS versions that may be used."
    )
    ssl_protocol: str = option(
        parsers.one_of("TLS", *TLS_VERSIONS), "TLSv1.3", "string", "The newest TLS version that may be used."
    )
    ssl_cipher_suites: tuple[str, ...] | None = option(
        parsers.names,
        None,
        "list",
        "Cipher suites that may be used, by their standard names. Name all three suites of TLS 1.3, or none.",
    )
    sasl_mechanism: str = option(
        parsers.one_of(*_LOGIN_MODULES), "GSSAPI", "string", f"How to log in: {', '.join(_LOGIN_MODULES)}."
    )
    sasl_jaas_config: JaasConfig | None = option(
        parse_jaas_config,
        None,
        "password",
        "User and password, or other options of the login, in the form of Java's login module. It is read as text; no"
        " class is loaded.",
        is_secret=True,
    )
    sasl_allow_cleartext_credentials: bool = option(
        parsers.boolean,
        False,
        "boolean",
        "Let PLAIN send its password, and OAUTHBEARER or AWS_MSK_IAM its token, over SASL_PLAINTEXT. Kafka does not"
        " have this setting.",
    )
    sasl_kerberos_service_name: str | None = option(
        parsers.non_empty_text, None, "string", "First part of the brokers' Kerberos principal, mostly kafka."
    )
    sasl_login_refresh_window_factor: float = option(
        parsers.number_between(0.5, 1.0), 0.8, "double", "A token is renewed after this part of its lifetime."
    )
    sasl_login_refresh_window_jitter: float = option(
        parsers.number_between(0.0, 0.25),
        0.05,
        "double",
        "A random number from 0 to this is added to sasl.login.refresh.window.factor.",
    )
    sasl_login_refresh_min_period_seconds: int = option(
        parsers.between(0, 900), 60, "int", "A token is not renewed sooner than this after the last time."
    )
    sasl_login_refresh_buffer_seconds: int = option(
        parsers.between(0, 3_600), 300, "int", "A token is renewed at least this long before it ends."
    )
    sasl_login_connect_timeout_ms: int = option(
        parsers.int_ms,
        10_000,
        "int",
        "How long it may take to connect to the token endpoint. Kafka has no limit.",
    )
    sasl_login_read_timeout_ms: int = option(
        parsers.int_ms, 10_000, "int", "How long the token endpoint may take to answer. Kafka has no limit."
    )
    sasl_login_retry_backoff_ms: int = option(
        parsers.long_ms, 100, "long", "Pause before the next request to the token endpoint; it doubles."
    )
    sasl_login_retry_backoff_max_ms: int = option(
        parsers.long_ms, 10_000, "long", "The longest pause before the next request to the token endpoint."
    )
    sasl_oauthbearer_token_provider: parsers.Function | None = option(
        parsers.function,
        None,
        "function or string",
        "A Python function that returns a new token and its end in ms since the epoch, or its name as module:function."
        " Kafka has no such setting.",
        is_secret=True,
    )
    sasl_oauthbearer_token_endpoint_url: str | None = option(
        parsers.https_url, None, "string", "URL of the token endpoint; it must be https.", is_secret=True
    )
    sasl_oauthbearer_client_credentials_client_id: str | None = option(
        parsers.non_empty_text, None, "string", "Client id for the token endpoint."
    )
    sasl_oauthbearer_client_credentials_client_secret: Secret | None = option(
        parsers.secret, None, "password", "Client secret for the token endpoint.", is_secret=True
    )
    sasl_oauthbearer_scope: str | None = option(
        parsers.non_empty_text, None, "string", "Scope in the request for a token."
    )
    sasl_oauthbearer_header_urlencode: bool = option(
        parsers.boolean, False, "boolean", "Whether client id and secret are URL-encoded in the request for a token."
    )

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol in {"SSL", "SASL_SSL"}

    @property
    def tls_choice(self) -> TlsChoice:
        """The versions and cipher suites to use. Raises ConfigError for an unknown suite, or if no version is left."""
        versions = [name for name in self.ssl_enabled_protocols if not (self.ssl_protocol == "TLSv1.2" < name)]
        return tls_choice(versions, self.ssl_cipher_suites)

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol in {"SASL_PLAINTEXT", "SASL_SSL"}

    @property
    def login_module(self) -> str:
        """The login module for sasl.mechanism."""
        return _LOGIN_MODULES[self.sasl_mechanism]

    def jaas_option(self, name: str) -> str | None:
        """Return an option of sasl.jaas.config in clear text, or None if it is not given."""
        return self.sasl_jaas_config.get(name) if self.sasl_jaas_config is not None else None

    def check_security(self, given: frozenset[str]) -> None:
        """Raise ConfigError if settings contradict each other. `given`: the keys that the caller set."""
        for prefix, protocols, is_used in (
            ("ssl.", "SSL or SASL_SSL", self.uses_tls),
            ("sasl.", "SASL_SSL or SASL_PLAINTEXT", self.uses_sasl),
        ):
            idle = sorted(key for key in given if key.startswith(prefix))
            if idle and not is_used:
                raise ConfigError(
                    f"`{idle[0]}` has no effect with `security.protocol`={self.security_protocol}:"
                    f" set {protocols}, or leave it out."
                )
        for is_broken, text in (_TLS_RULES if self.uses_tls else ()) + (_SASL_RULES if self.uses_sasl else ()):
            if is_broken(self):
                raise ConfigError(text.format(config=self))
        if self.uses_tls:
            self._check_stores()
            _ = self.tls_choice

    def _check_stores(self) -> None:
        for store, type_, location, password in (
            ("truststore", self.ssl_truststore_type, self.ssl_truststore_location, self.ssl_truststore_password),
            ("keystore", self.ssl_keystore_type, self.ssl_keystore_location, self.ssl_keystore_password),
        ):
            if text := store_refusal(store, type_, location, has_password=password is not None):
                raise ConfigError(text)


_Rules = tuple[tuple[Callable[[SecurityConfig], bool], str], ...]

_TLS_RULES: Final[_Rules] = (
    (
        lambda c: c.ssl_truststore_location is not None and c.ssl_truststore_certificates is not None,
        "`ssl.truststore.location` and `ssl.truststore.certificates` are both given: leave one out.",
    ),
    (
        lambda c: (
            c.ssl_keystore_location is not None
            and (c.ssl_keystore_key is not None or c.ssl_keystore_certificate_chain is not None)
        ),
        "`ssl.keystore.location` is given, and so is `ssl.keystore.key` or `ssl.keystore.certificate.chain`: leave one"
        " out.",
    ),
    (
        lambda c: (c.ssl_keystore_key is None) != (c.ssl_keystore_certificate_chain is None),
        "`ssl.keystore.key` and `ssl.keystore.certificate.chain` go together: one of them is missing.",
    ),
    (
        lambda c: c.ssl_truststore_type == "PKCS12" and c.ssl_truststore_location is None,
        "`ssl.truststore.type`=PKCS12 needs `ssl.truststore.location`, the file.",
    ),
    (
        lambda c: c.ssl_keystore_type == "PKCS12" and c.ssl_keystore_location is None,
        "`ssl.keystore.type`=PKCS12 needs `ssl.keystore.location`, the file.",
    ),
    (
        lambda c: c.ssl_key_password is not None and c.ssl_keystore_location is None and c.ssl_keystore_key is None,
        "`ssl.key.password` is given, but no key: set `ssl.keystore.location`, or `ssl.keystore.key`.",
    ),
    (
        lambda c: c.ssl_protocol == "TLSv1.2" and "TLSv1.2" not in c.ssl_enabled_protocols,
        "`ssl.protocol`=TLSv1.2 rules out `ssl.enabled.protocols`=TLSv1.3: no version is left. Leave"
        " `ssl.protocol` out.",
    ),
)

_SASL_RULES: Final[_Rules] = (
    (
        lambda c: c.sasl_jaas_config is None and c.sasl_mechanism in {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"},
        "`sasl.jaas.config` is missing: `sasl.mechanism`={config.sasl_mechanism} needs a user. Set it to"
        ' org.apache.kafka.common.security....{config.login_module} required username="..." password="...";',
    ),
    (
        lambda c: c.sasl_jaas_config is not None and c.sasl_jaas_config.login_module != c.login_module,
        "`sasl.jaas.config` names another login module than `sasl.mechanism`={config.sasl_mechanism} needs, which is"
        " {config.login_module}.",
    ),
    (
        lambda c: (
            c.sasl_jaas_config is not None
            and c.login_module in {PLAIN_MODULE, SCRAM_MODULE}
            and not (c.sasl_jaas_config.get("username") and c.sasl_jaas_config.get("password"))
        ),
        "`sasl.jaas.config` must have a username and a password for `sasl.mechanism`={config.sasl_mechanism}.",
    ),
    (
        lambda c: (
            c.security_protocol == "SASL_PLAINTEXT"
            and c.sasl_mechanism not in _SENDS_NO_CREDENTIAL
            and not c.sasl_allow_cleartext_credentials
        ),
        "`sasl.mechanism`={config.sasl_mechanism} with `security.protocol`=SASL_PLAINTEXT would send the password or"
        " token unencrypted: set `security.protocol`=SASL_SSL, or `sasl.allow.cleartext.credentials`=true on a network"
        " that you trust.",
    ),
    (
        lambda c: (
            c.sasl_mechanism == "OAUTHBEARER"
            and c.sasl_oauthbearer_token_provider is not None
            and c.sasl_oauthbearer_token_endpoint_url is not None
        ),
        "`sasl.oauthbearer.token.provider` and `sasl.oauthbearer.token.endpoint.url` are both given: leave one out.",
    ),
    (
        lambda c: (
            c.sasl_mechanism == "OAUTHBEARER"
            and c.sasl_oauthbearer_token_provider is None
            and c.sasl_oauthbearer_token_endpoint_url is None
        ),
        "`sasl.mechanism`=OAUTHBEARER needs tokens: set `sasl.oauthbearer.token.endpoint.url`, or give a function, or"
        " its name, as `sasl.oauthbearer.token.provider`.",
    ),
    (
        lambda c: (
            c.sasl_mechanism == "OAUTHBEARER"
            and c.sasl_oauthbearer_token_endpoint_url is not None
            and not (
                (c.sasl_oauthbearer_client_credentials_client_id or c.jaas_option("clientId"))
                and (c.sasl_oauthbearer_client_credentials_client_secret or c.jaas_option("clientSecret"))
            )
        ),
        "`sasl.oauthbearer.token.endpoint.url` needs `sasl.oauthbearer.client.credentials.client.id` and .client.secret"
        " (or clientId and clientSecret in `sasl.jaas.config`).",
    ),
    (
        lambda c: c.sasl_mechanism == "AWS_MSK_IAM" and bool(c.jaas_option("awsRoleExternalId")),
        "`sasl.jaas.config`: only the Java module knows awsRoleExternalId. Name a profile that has it.",
    ),
    (
        lambda c: c.sasl_mechanism == "AWS_MSK_IAM" and bool(c.jaas_option("awsStsRegion")),
        "`sasl.jaas.config`: only the Java module knows awsStsRegion. Name a profile that has the region.",
    ),
    (
        lambda c: (
            c.sasl_mechanism == "AWS_MSK_IAM"
            and bool(c.jaas_option("awsProfileName"))
            and bool(c.jaas_option("awsRoleArn"))
        ),
        "`sasl.jaas.config`: awsProfileName and awsRoleArn are both given: leave one out.",
    ),
    (
        lambda c: c.sasl_mechanism == "GSSAPI" and not (c.sasl_kerberos_service_name or c.jaas_option("serviceName")),
        "`sasl.mechanism`=GSSAPI (Kafka's default) needs `sasl.kerberos.service.name`, mostly kafka. For another way to"
        " log in, set `sasl.mechanism`.",
    ),
)

_NO_CLASS: Final = "no Java class is loaded here"
_TICKETS: Final = "a keytab's ticket is renewed after half its lifetime, a cache's never; leave it out"
_CHECKS: Final = "the broker checks a token, not this client; leave it out"
_ASSERTIONS: Final = (
    "this client gets tokens by client credentials; for another way give `sasl.oauthbearer.token.provider`"
)
JAVA_ONLY_SECURITY: Final[Mapping[str, str]] = {
    "ssl.provider": "OpenSSL does TLS here; leave it out",
    "ssl.engine.factory.class": f"{_NO_CLASS}; leave it out",
    "ssl.keymanager.algorithm": "OpenSSL does TLS here; leave it out",
    "ssl.trustmanager.algorithm": "OpenSSL does TLS here; leave it out",
    "ssl.secure.random.implementation": "OpenSSL does TLS here; leave it out",
    "ssl.client.auth": "it is a setting of brokers; give this client a certificate by `ssl.keystore.*`",
    "sasl.login.class": f"{_NO_CLASS}; leave it out: `sasl.mechanism` sets the way to log in",
    "sasl.client.callback.handler.class": f"{_NO_CLASS}; leave it out: `sasl.mechanism`=AWS_MSK_IAM signs by itself",
    "sasl.login.callback.handler.class": f"{_NO_CLASS}; leave it out: OAUTHBEARER gets its tokens by"
    " `sasl.oauthbearer.token.endpoint.url`, or by `sasl.oauthbearer.token.provider`",
    "sasl.oauthbearer.jwt.retriever.class": f"{_NO_CLASS}; leave it out: OAUTHBEARER gets its tokens by"
    " `sasl.oauthbearer.token.endpoint.url`, or by `sasl.oauthbearer.token.provider`",
    "sasl.oauthbearer.jwt.validator.class": f"{_NO_CLASS}, and {_CHECKS}",
    "sasl.kerberos.kinit.cmd": "no command is run here; keep the ticket fresh, or give a keytab",
    "sasl.kerberos.min.time.before.relogin": _TICKETS,
    "sasl.kerberos.ticket.renew.jitter": _TICKETS,
    "sasl.kerberos.ticket.renew.window.factor": _TICKETS,
    "sasl.oauthbearer.assertion.algorithm": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.aud": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.exp.seconds": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.iss": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.jti.include": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.nbf.seconds": _ASSERTIONS,
    "sasl.oauthbearer.assertion.claim.sub": _ASSERTIONS,
    "sasl.oauthbearer.assertion.file": _ASSERTIONS,
    "sasl.oauthbearer.assertion.private.key.file": _ASSERTIONS,
    "sasl.oauthbearer.assertion.private.key.passphrase": _ASSERTIONS,
    "sasl.oauthbearer.assertion.template.file": _ASSERTIONS,
    "sasl.oauthbearer.clock.skew.seconds": _CHECKS,
    "sasl.oauthbearer.expected.audience": _CHECKS,
    "sasl.oauthbearer.expected.issuer": _CHECKS,
    "sasl.oauthbearer.jwks.endpoint.refresh.ms": _CHECKS,
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": _CHECKS,
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms": _CHECKS,
    "sasl.oauthbearer.jwks.endpoint.url": _CHECKS,
    "sasl.oauthbearer.scope.claim.name": _CHECKS,
    "sasl.oauthbearer.sub.claim.name": _CHECKS,
}
"""Settings of the Java client's security that have no meaning here: key → why."""
