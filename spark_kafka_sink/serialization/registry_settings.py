"""The settings of a schema registry: options `schema.registry.*`, parsed once on the driver.

Names and meanings are those of Confluent's client for Python (confluent_kafka.schema_registry 2.16), of its serializers
(auto.register.schemas to use.schema.id), and `url`, with two exceptions: `timeout` has a default, because Confluent's
client waits without limit, and the certificate of a registry cannot be left unchecked. A setting without effect is an
error. No secret is in a repr or an error, nor is what stands before the @ of an address, nor the query of one, nor the
text of a key that stands where its path should.

Plain values that pickle.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from spark_kafka_sink.common import options as parsers
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import (
    OptionRow,
    RefusalError,
    field_name_of,
    nearest,
    option,
    parse_value,
    row_of,
    table_of,
)
from spark_kafka_sink.common.texts import Secret, shown

PREFIX: Final = "schema.registry."
LOCATION_OPTION: Final = "schema.id.location"
IN_PREFIX: Final = "prefix"
IN_HEADER: Final = "header"

_STATIC: Final = "STATIC_TOKEN"
_OIDC: Final = "OAUTHBEARER"
_AZURE: Final = "OAUTHBEARER_AZURE_IMDS"
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    _STATIC: ("bearer.auth.token", "bearer.auth.logical.cluster"),
    _OIDC: (
        "bearer.auth.client.id",
        "bearer.auth.client.secret",
        "bearer.auth.scope",
        "bearer.auth.issuer.endpoint.url",
        "bearer.auth.logical.cluster",
    ),
    _AZURE: ("bearer.auth.logical.cluster",),
}
"""bearer.auth.credentials.source → the settings that it needs."""
_OF_ENDPOINT: Final = frozenset({"bearer.auth.issuer.endpoint.url", "bearer.auth.issuer.endpoint.query"})
_OF_SOURCE: Final[Mapping[str, frozenset[str]]] = {
    _STATIC: frozenset({*_NEEDED[_STATIC], "bearer.auth.identity.pool.id"}),
    _OIDC: frozenset({*_NEEDED[_OIDC], "bearer.auth.identity.pool.id"}),
    _AZURE: frozenset({*_NEEDED[_AZURE], "bearer.auth.identity.pool.id", *_OF_ENDPOINT}),
}
"""bearer.auth.credentials.source → the settings that have an effect."""
_CHOICES: Final = ("use.latest.version", "use.schema.id", "auto.register.schemas")
REFUSED: Final[Mapping[str, str]] = {
    "bearer.auth.custom.provider.config": "tokens come from bearer.auth.token or from an endpoint (OAUTHBEARER)",
    "bearer.auth.custom.provider.function": "tokens come from bearer.auth.token or from an endpoint (OAUTHBEARER)",
    "cache.capacity": "each schema is looked up once, so there is no cache",
    "cache.latest.ttl.sec": "each schema is looked up once, so there is no cache",
    "subject.name.strategy": "set value.subject.name.strategy, or key.subject.name.strategy",
    "subject.name.strategy.type": "set value.subject.name.strategy, or key.subject.name.strategy",
    "use.latest.with.metadata": "set schema.registry.use.schema.id to the id of that schema",
    "basic.auth.credentials.source": "it is a setting of Java; set schema.registry.basic.auth.user.info alone",
    "ssl.truststore.location": "it is a setting of Java; set schema.registry.ssl.ca.location to a PEM file",
    "ssl.keystore.location": "it is a setting of Java; set schema.registry.ssl.certificate.location to a PEM file",
}
"""Settings that registries' users know, and why they are not here."""


def _user_info(value: object) -> Secret:
    found = parsers.secret(value)
    if ":" not in found.reveal():
        raise RefusalError("must have the form user:password")
    return found


def _path(value: object) -> str:
    found = parsers.non_empty_text(value)
    if "-----BEGIN" in found:
        raise RefusalError("must be the path of a PEM file, not its text")
    return found


def _seconds(value: object) -> float:
    return parsers.number_between(0.001, 600)(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """All settings, typed and checked. Made by `from_options`."""

    url: tuple[str, ...] = dataclasses.field(
        metadata={
            "parse": lambda value: _addresses(value)[0],
            "type": "list",
            "default": None,
            "doc": "Addresses of the registry, comma-separated: http(s)://host:port, and a path if it has one. They are"
            " tried in this order. A user and a password may stand in them, as in https://user:password@host.",
        }
    )
    auto_register_schemas: bool = option(
        parsers.boolean,
        True,
        "boolean",
        "Whether a schema that the registry does not have is registered. false: it must be there. Defaults to false"
        " with use.latest.version or use.schema.id.",
    )
    use_latest_version: bool = option(
        parsers.boolean,
        False,
        "boolean",
        "Write by the newest schema of the subject. The column must fit it.",
    )
    use_schema_id: int | None = option(
        parsers.between(0, parsers.INT_MAX), None, "int", "Write by the schema with this id. The column must fit it."
    )
    normalize_schemas: bool = option(
        parsers.boolean,
        False,
        "boolean",
        "Whether the registry takes schemas that differ only in their form for the same one.",
    )
    timeout: float = option(
        _seconds, 10, "float", "Seconds until the registry must have begun to answer, for each attempt."
    )
    max_retries: int = option(
        parsers.between(0, 100),
        3,
        "int",
        "How often a request is repeated at one address, after an error that may pass.",
    )
    retries_wait_ms: int = option(parsers.int_ms, 1000, "int", "Longest pause before the first retry; it doubles.")
    retries_max_wait_ms: int = option(parsers.int_ms, 20_000, "int", "The longest pause before a retry.")
    proxy: Secret | None = option(
        parsers.secret, None, "string", "Address of a proxy, such as http://host:3128.", is_secret=True
    )
    basic_auth_user_info: Secret | None = option(
        _user_info, None, "string", "user:password. Not if they are in url.", is_secret=True
    )
    bearer_auth_credentials_source: str | None = option(
        parsers.one_of(*_NEEDED), None, "string", f"Where the token comes from: {', '.join(_NEEDED)}."
    )
    bearer_auth_token: Secret | None = option(
        parsers.secret, None, "string", "With STATIC_TOKEN: the token.", is_secret=True
    )
    bearer_auth_logical_cluster: str | None = option(
        parsers.non_empty_text,
        None,
        "string",
        "With a token: the registry's name at Confluent Cloud (lsrc-...). Other registries ignore it.",
    )
    bearer_auth_identity_pool_id: str | None = option(
        parsers.non_empty_text, None, "string", "With a token: the identity pool at Confluent Cloud."
    )
    bearer_auth_client_id: str | None = option(
        parsers.non_empty_text, None, "string", "With OAUTHBEARER: the name of this client at the identity provider."
    )
    bearer_auth_client_secret: Secret | None = option(
        parsers.secret, None, "string", "With OAUTHBEARER: its secret.", is_secret=True
    )
    bearer_auth_scope: str | None = option(
        parsers.non_empty_text, None, "string", "With OAUTHBEARER: the scope of the token."
    )
    bearer_auth_issuer_endpoint_url: str | None = option(
        parsers.endpoint_url, None, "string", "With OAUTHBEARER: the address that gives the token.", is_secret=True
    )
    bearer_auth_issuer_endpoint_query: str | None = option(
        parsers.non_empty_text,
        None,
        "string",
        "With OAUTHBEARER_AZURE_IMDS: the query of the request.",
        is_secret=True,
    )
    ssl_ca_location: str | None = option(
        _path,
        None,
        "string",
        "File or folder with the authorities (PEM) that may sign the registry's certificate. Without it: those of the"
        " package certifi, or of SSL_CERT_FILE.",
    )
    ssl_certificate_location: str | None = option(
        _path,
        None,
        "string",
        "File with this client's certificate (PEM), and with its key if it has no file.",
        is_secret=True,
    )
    ssl_key_location: str | None = option(
        _path, None, "string", "File with this client's private key (PEM).", is_secret=True
    )
    ssl_key_password: Secret | None = option(
        parsers.secret, None, "string", "Password of the private key.", is_secret=True
    )
    id_location: str = IN_PREFIX
    """The option schema.id.location: before each value, or in a header of each record."""

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> RegistrySettings | None:
        """Read schema.registry.* and schema.id.location of `options`, whose names are in lower case. None if none of
        them is given.

        Raises ConfigError for an unknown option, a malformed value, a missing schema.registry.url, or a contradiction.
        """
        given = {key: value for key, value in options.items() if value is not None}
        settings = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
        location = given.get(LOCATION_OPTION)
        if not settings and location is None:
            return None
        table = _table()
        for key in settings:
            if key not in table:
                raise ConfigError(_unknown(key), setting=PREFIX + key)
        if "url" not in settings:
            name = next((PREFIX + key for key in settings), LOCATION_OPTION)
            raise ConfigError(
                f"{name} has no effect without schema.registry.url: set that too, or leave it out.", setting=name
            )
        addresses, user_info = _parsed_url(settings.pop("url"))
        try:
            parsed: dict[str, Any] = {
                field_name_of(key): parse_value(key, value, table[key].metadata) for key, value in settings.items()
            }
        except ConfigError as error:
            raise error.named(PREFIX) from None
        names, source = frozenset(settings), parsed.get("bearer_auth_credentials_source")
        wrong = (
            *_login_contradictions(names, source, has_user=user_info is not None),
            *_contradictions(names, parsed, addresses),
        )
        if wrong:
            raise ConfigError(wrong[0]).named(PREFIX)
        if user_info is not None:
            parsed["basic_auth_user_info"] = user_info
        if parsed.get("use_latest_version") or parsed.get("use_schema_id") is not None:
            parsed["auto_register_schemas"] = False
        if location is not None:
            parsed["id_location"] = parse_value(
                LOCATION_OPTION, location, {"parse": parsers.one_of(IN_PREFIX, IN_HEADER)}
            )
        return cls(url=addresses, **parsed)

    def for_client(self, address: str) -> dict[str, Any]:
        """Return the settings as the constructor of Confluent's client takes them, with secrets in clear."""
        found: dict[str, Any] = {}
        for key, field in _table().items():
            value = getattr(self, field.name)
            if key not in _OF_SERIALIZERS and value is not None:
                found[key] = value.reveal() if isinstance(value, Secret) else value
        found["url"] = address
        if self.ssl_certificate_location is not None:
            # without a password OpenSSL would ask for one at the terminal, and wait
            found.setdefault("ssl.key.password", "")
        return found

    def secrets(self) -> list[str]:
        """Return each text that no error may show, the longest first."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        found = {value.reveal() for value in values if isinstance(value, Secret)}
        if self.basic_auth_user_info is not None:
            login = self.basic_auth_user_info.reveal()
            found |= {login.partition(":")[2], _of_basic(login)}
        if self.bearer_auth_client_secret is not None:
            found.add(_of_basic(f"{self.bearer_auth_client_id}:{self.bearer_auth_client_secret.reveal()}"))
        if self.bearer_auth_issuer_endpoint_url is not None:
            found |= _of_query(urlsplit(self.bearer_auth_issuer_endpoint_url).query)
        if self.bearer_auth_issuer_endpoint_query is not None:
            found |= _of_query(self.bearer_auth_issuer_endpoint_query)
        if self.proxy is not None:
            found |= _of_login(self.proxy.reveal())
        escaped = {form for each in found for form in (json.dumps(each)[1:-1], repr(each.encode())[2:-1])}
        return sorted(filter(None, found | escaped), key=len, reverse=True)


def _of_basic(login: str) -> str:
    """Return what stands in the header Authorization (RFC 7617)."""
    return base64.b64encode(login.encode()).decode()


_LEAST_LENGTH: Final = 6
"""Letters. A shorter part of an address, such as the 1 of version=1, may stand in any text."""


def _of_query(query: str) -> set[str]:
    """Return the query, and its values, as they are and decoded."""
    values = {value for _, value in parse_qsl(query)}
    return {query} | {each for value in values for each in (value, quote(value)) if len(each) >= _LEAST_LENGTH}


def _of_login(url: str) -> set[str]:
    """Return what stands before the @ of an address, and the password in it."""
    login, _, _ = url.rpartition("@")
    login = login.rpartition("//")[2]
    password = login.partition(":")[2]
    return {login, password, unquote(password)}


_OF_SERIALIZERS: Final = frozenset(
    {"auto.register.schemas", "use.latest.version", "use.schema.id", "normalize.schemas", "url"}
)
"""Settings that Confluent's client does not take."""


def _table() -> dict[str, Any]:
    """Return the fields with a row in the table, by their names after the prefix."""
    return {key: field for key, field in table_of(RegistrySettings).items() if field.metadata}


def registry_options() -> list[OptionRow]:
    """Return the rows of the table for documents, with whole names."""
    return [row_of(PREFIX + key, field.metadata) for key, field in _table().items()]


def _unknown(key: str) -> str:
    name = PREFIX + key
    if key in REFUSED:
        return f"The option {name} cannot be used here: {REFUSED[key]}."
    meant = nearest(key, _table())
    if meant is None:
        return f"There is no option {name}, and no option has a similar name: leave it out."
    return f"There is no option {name}. The nearest one is {PREFIX}{meant}."


def _parsed_url(value: object) -> tuple[tuple[str, ...], Secret | None]:
    try:
        return _addresses(value)
    except RefusalError as refusal:
        raise ConfigError(f"`url`={shown(value)} {refusal}.", setting="url").named(PREFIX) from None


def _addresses(value: object) -> tuple[tuple[str, ...], Secret | None]:
    """Parse the addresses. Return them without user and password, and these; None if there are none."""
    items = [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    parsed = [_address(item.strip()) for item in items if item.strip()]
    if not parsed:
        raise RefusalError("must have at least one address")
    users = {user for _, user in parsed}
    if len(users) > 1:
        raise RefusalError("must have the same user and password in all addresses: one login is used for all")
    return tuple(address for address, _ in parsed), users.pop()


def _address(text: str) -> tuple[str, Secret | None]:
    form = "must be addresses of the form http://host:port or https://host:port, separated by commas"
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or re.search(r"[\0-\x20\x7f]", text):
        raise RefusalError(form)
    if "@" in parts.path or parts.query or parts.fragment or "?" in text or "#" in text:
        raise RefusalError(
            f"{form}, without a query. In a password write %2F for /, %3F for ?, %23 for #, %2C for a comma, %40 for @"
        )
    user_info, at, host = parts.netloc.rpartition("@")
    address = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    if not at:
        return address, None
    user, colon, password = user_info.partition(":")
    if not colon:
        raise RefusalError("must have the form https://user:password@host if it has a user")
    return address, Secret(f"{unquote(user)}:{unquote(password)}")


def _login_contradictions(given: frozenset[str], source: str | None, *, has_user: bool) -> Iterator[str]:
    """Yield what is wrong with the user or the token. `has_user`: whether an address has a user."""
    if has_user and "basic.auth.user.info" in given:
        yield "`url` has a user, and so has `basic.auth.user.info`: leave one of them out."
    if source is not None and (has_user or "basic.auth.user.info" in given):
        yield "`bearer.auth.credentials.source` and a user with a password exclude each other: leave one of them out."
    if missing := [key for key in _NEEDED.get(source or "", ()) if key not in given]:
        yield f"`bearer.auth.credentials.source`={source} needs `{missing[0]}`."
    if source == _AZURE and not _OF_ENDPOINT & given:
        yield f"`bearer.auth.credentials.source`={source} needs `bearer.auth.issuer.endpoint.query`."
    of_bearer = {key for key in given if key.startswith("bearer.auth.")} - {"bearer.auth.credentials.source"}
    for key in sorted(of_bearer - _OF_SOURCE.get(source or "", frozenset())):
        if source is None:
            yield f"`{key}` has no effect without `bearer.auth.credentials.source`: set that too, or leave it out."
        yield f"`{key}` has no effect with `bearer.auth.credentials.source`={source}: leave it out."


def _contradictions(given: frozenset[str], parsed: Mapping[str, Any], addresses: tuple[str, ...]) -> Iterator[str]:
    """Yield what is wrong with the certificates and with the choice of the schema."""
    of_tls = sorted(key for key in given if key.startswith("ssl."))
    if of_tls and not any(each.startswith("https:") for each in addresses):
        yield f"`{of_tls[0]}` has no effect, because no address of `url` begins with https: leave it out."
    if {"ssl.key.location", "ssl.key.password"} & given and "ssl.certificate.location" not in given:
        yield "A private key needs its certificate: set `ssl.certificate.location` too."
    chosen = {key: parsed.get(field_name_of(key)) for key in _CHOICES}
    choices = [key for key, value in chosen.items() if value is not None and value is not False]  # 0 is an id
    if len(choices) > 1:
        yield f"`{choices[0]}` and `{choices[1]}` exclude each other: leave one of them out."
