"""The schema registry: a column's schema is looked up or registered there, once, on the driver.

The registry is a service with an HTTP API: Confluent's, which others speak too. It keeps schemas by subject. It gives
each an id, and newer registries a GUID too. A record names its schema by the id before the value (00 and four bytes),
or by the GUID in a header (01 and 16 bytes). Protobuf's message indexes follow either. Readers fetch the schema by it.

Confluent's client for Python makes the requests. It is imported only here and only inside functions, because tasks
never talk to the registry, and because it belongs to the extra `registry`. Whatever it raises becomes a KafkaError.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    KafkaError,
    RegistryError,
    SchemaError,
)
from spark_kafka_sink.common.texts import one_line, without_logins
from spark_kafka_sink.serialization.column_format import AVRO, JSON_SCHEMA, PROTOBUF, ColumnFormat
from spark_kafka_sink.serialization.message_indexes import find_message, index_bytes, outer_messages
from spark_kafka_sink.serialization.protobuf_parser import WELL_KNOWN
from spark_kafka_sink.serialization.registry_settings import IN_HEADER, IN_PREFIX, PREFIX, RegistrySettings
from spark_kafka_sink.serialization.subjects import subject_of

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient

log = logging.getLogger(__name__)

_TYPES: Final[Mapping[str, str]] = {AVRO: "AVRO", PROTOBUF: "PROTOBUF", JSON_SCHEMA: "JSON"}
"""The registry's names of the formats. `json` has no schema, so the registry has no part in it."""
_WRITING: Final = frozenset({"WRITE", "WRITEREAD"})
"""Modes of rules that change or check a value before it is written."""
_MAY_PASS: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which the next address is tried, as Confluent's client does."""
_MOST_ID: Final = 2**31 - 1
_NOT_FOUND: Final = 404
_NO_SUBJECT: Final = 40401
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's name of the error."""
NO_CONNECTION: Final = "no connection"
UNTRUSTED: Final = "certificate"
NO_REGISTRY: Final = "no registry"
BUSY: Final = "error of the server"
"""Values of `RegistryError.fault`."""
_UNKNOWN_ERROR: Final = "Unknown Schema Registry Error: "
"""Confluent's client begins so, if the answer is not the registry's JSON."""


_HEADER: Final = re.compile(r"(?i)\b(bearer)\s+[^\s\"',;]{8,}")
"""What a registry may repeat of the header Authorization, with a token that the client has fetched."""


class _Found(NamedTuple):
    """A schema as the registry has it."""

    schema_id: int
    guid: uuid.UUID | None
    schema: Schema


def registered(
    column_format: ColumnFormat,
    settings: RegistrySettings,
    strategy: str,
    topic: str | None,
) -> ColumnFormat:
    """Look up or register the schema of a column. Return the format with its prefix or header, and with the schema that
    the registry has by this id, which the column must fit. Returns `json` as it is.

    `strategy` is that of the subject's name, `topic` the option. Tries the addresses in their order: a request takes at
    most (max.retries + 1) x timeout at each, and the pauses between.

    Raises ConfigError for a setting that cannot work; SchemaError if the registry refuses or does not have the schema,
    or if the schema has rules for writing, which nothing here would run; AuthenticationError; AuthorizationError; and
    RegistryError if no address answers as a registry.
    """
    if column_format.name not in _TYPES:
        return column_format
    subject = subject_of(column_format, strategy, topic)
    _warn_of_clear_text(settings)
    found = _ask(column_format, settings, subject)
    _check_schema(found.schema, column_format, subject)
    # Not our own text: two registries behind one address may give one id to two schemas.
    column_format = replace(column_format, schema=found.schema.schema_str)
    indexes = b""
    if column_format.name == PROTOBUF:
        indexes = index_bytes(find_message(column_format.schema or "", column_format.message).indexes)
    log.info("%s.format=%s: schema %d of subject %s", column_format.field, column_format.name, found.schema_id, subject)
    if settings.id_location != IN_HEADER:
        return replace(column_format, prefix=b"\0" + found.schema_id.to_bytes(4, "big") + indexes)
    if found.guid is None:
        raise SchemaError(
            f"schema.id.location={IN_HEADER} needs a registry that gives schemas a GUID, and this one gave none"
            f" for subject {subject}: set schema.id.location={IN_PREFIX}."
        )
    return replace(column_format, header=(column_format.schema_id_header, b"\1" + found.guid.bytes + indexes))


def _check_schema(schema: Schema, column_format: ColumnFormat, subject: str) -> None:
    """Raises SchemaError for a schema by which this sink cannot or must not write."""
    where = f"Schema of subject {subject}"
    wanted = _TYPES[column_format.name]
    if schema.schema_type != wanted:
        raise SchemaError(
            f"{where}: it is {one_line(str(schema.schema_type))}, and {column_format.field}.format="
            f"{column_format.name} needs {wanted}."
        )
    others = [str(each.name) for each in schema.references or () if not str(each.name).startswith(WELL_KNOWN)]
    if others:
        other = one_line(others[0])
        raise SchemaError(
            f"{where}: it refers to another schema, {other}, and this sink follows no references. Write the types into"
            " the schema itself."
        )
    is_own = schema.schema_str == column_format.schema
    if column_format.name == PROTOBUF and column_format.message is None and not is_own:
        _refuse_several(outer_messages(schema.schema_str or ""), column_format.field, where)
    rules = schema.rule_set and [*(schema.rule_set.domain_rules or ()), *(schema.rule_set.encoding_rules or ())]
    writing = [rule for rule in rules or () if str(rule.mode) in _WRITING and not rule.disabled]
    if writing:
        raise SchemaError(
            f"{where}: its rule {one_line(str(writing[0].name))} ({one_line(str(writing[0].type))}) is for writers, and"
            " this sink runs no rules: a field that must be encrypted would go out in clear. Write this topic with"
            " Confluent's serializers, or take the rule out of the schema."
        )


def _refuse_several(messages: Sequence[str], field: str, where: str) -> None:
    """A new version of a schema may begin with another message, which the column fits as well."""
    if len(messages) > 1:
        raise ConfigError(
            f"{where}: it has the messages {', '.join(map(one_line, messages))}. Say which one the column is:"
            f" {field}.schema.message={one_line(messages[0])}.",
            setting=f"{field}.schema.message",
        )


class Examined(NamedTuple):
    """What one address says about a subject: an error, or whether the given schema may become its next version."""

    address: str
    error: KafkaError | None = None
    is_known: bool = True
    """False: the registry does not have the subject."""
    is_compatible: bool | None = None
    """None: no schema was given, or it is compatible with nothing yet."""


def examined(
    column_format: ColumnFormat, settings: RegistrySettings, strategy: str, topic: str | None
) -> list[Examined]:
    """Ask each address for the schema of a column, and register nothing. A format without a schema is only compared
    with the subject's newest version if that is what the column is written by.

    Raises ConfigError and SchemaError of the settings. Errors of addresses are in the result.
    """
    subject = subject_of(column_format, strategy, topic)
    found = []
    for address in settings.url:
        try:
            with _client(settings, address) as client, _in_our_words(settings, address, subject, column_format):
                found.append(_examined(client, address, column_format, settings, subject))
        except ConfigError:
            raise
        except KafkaError as error:
            found.append(Examined(address, error))
    return found


def _examined(
    client: SchemaRegistryClient, address: str, column_format: ColumnFormat, settings: RegistrySettings, subject: str
) -> Examined:
    from confluent_kafka.schema_registry import Schema
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    if not settings.auto_register_schemas:
        must_be_there = settings.use_latest_version or settings.use_schema_id is not None
        if must_be_there or column_format.schema is not None:
            _check_schema(_look_up(client, column_format, settings, subject, address).schema, column_format, subject)
            return Examined(address)
    try:
        client.get_latest_version(subject)
    except SchemaRegistryError as error:
        if error.http_status_code != _NOT_FOUND:
            raise
        if error.error_code == _NO_SUBJECT:
            return Examined(address, is_known=False)
        text = f"{address}: it answered with status 404, and not as a registry that lacks a subject."
        raise _no_answer(NO_REGISTRY, f"{text} Check the path of {PREFIX}url.") from None
    if column_format.schema is None:
        return Examined(address)
    own = Schema(column_format.schema, _TYPES[column_format.name])
    return Examined(address, is_compatible=bool(client.test_compatibility(subject, own)))


# ---- the requests ----------------------------------------------------------------------------------------------------


def _ask(column_format: ColumnFormat, settings: RegistrySettings, subject: str) -> _Found:
    """Ask one address after the other, until one answers as a registry."""
    failures: list[str] = []
    for address in settings.url:
        try:
            with _client(settings, address) as client, _in_our_words(settings, address, subject, column_format):
                return _look_up(client, column_format, settings, subject, address)
        except RegistryError as error:
            failures.append(str(error))
    raise RegistryError(
        f"The schema of subject {subject} was not looked up, because no schema registry answered. {' '.join(failures)}",
        setting=f"{PREFIX}url",
    )


def _look_up(
    client: SchemaRegistryClient,
    column_format: ColumnFormat,
    settings: RegistrySettings,
    subject: str,
    address: str,
) -> _Found:
    if settings.use_schema_id is not None:
        schema = client.get_schema(settings.use_schema_id, subject)
        same = client.lookup_schema(subject, schema, settings.normalize_schemas)  # refused if it is another subject's
        return _found(settings.use_schema_id, same.guid, schema)
    if settings.use_latest_version:
        latest = client.get_latest_version(subject)
        return _found(latest.schema_id, latest.guid, latest.schema)
    from confluent_kafka.schema_registry import Schema

    own = Schema(column_format.schema, _TYPES[column_format.name])
    answer: RegisteredSchema
    if not settings.auto_register_schemas:
        answer = client.lookup_schema(subject, own, settings.normalize_schemas)
    else:
        answer = client.register_schema_full_response(subject, own, settings.normalize_schemas)
        if settings.id_location == IN_HEADER and answer.guid is None:
            answer = client.lookup_schema(subject, own, settings.normalize_schemas)
    found = _found(answer.schema_id, answer.guid, own)
    # The rules are in the stored schema. The client drops them from a look-up, and old registries from a registration.
    if settings.id_location == IN_HEADER and found.guid is not None:
        # Readers fetch the schema by the GUID. In the client's cache our own text, without rules, stands under it.
        client.clear_caches()  # type: ignore[no-untyped-call]
        schema = _read_back(partial(client.get_schema_by_guid, str(found.guid)), found, settings, address)
    else:
        schema = _read_back(partial(client.get_schema, found.schema_id), found, settings, address)
    return _found(found.schema_id, found.guid, schema)


def _read_back(get: Callable[[], Schema], found: _Found, settings: RegistrySettings, address: str) -> Schema:
    """Return the stored schema. A node of the registry that did not register it itself learns of it a little later.
    Raises RegistryError if that takes longer than all retries.
    """
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    pause_ms = settings.retries_wait_ms
    for attempt in range(settings.max_retries + 1):
        try:
            return get()
        except SchemaRegistryError as error:
            if error.http_status_code != _NOT_FOUND:
                raise
            words = _words(error, settings)
        if attempt < settings.max_retries:
            SystemClock().sleep_ms(min(pause_ms, settings.retries_max_wait_ms))
            pause_ms *= 2
    raise _no_answer(
        BUSY,
        f"{address}: it has given the schema the id {found.schema_id}, and still does not have it after"
        f" {settings.max_retries} retries: {words}. If its nodes lag behind, raise {PREFIX}max.retries.",
    )


def _found(schema_id: object, guid: object, schema: Schema) -> _Found:
    """Check an answer. Raises ValueError for one that is no registry's."""
    if not isinstance(schema_id, int) or isinstance(schema_id, bool) or not 0 <= schema_id <= _MOST_ID:
        raise ValueError(f"the schema's id is {schema_id!r}")
    if not isinstance(schema.schema_str, str):
        raise ValueError("there is no schema in the answer")
    return _Found(schema_id, None if guid is None else uuid.UUID(str(guid)), schema)


@contextlib.contextmanager
def _client(settings: RegistrySettings, address: str) -> Iterator[SchemaRegistryClient]:
    """A client of one address. Raises ConfigError without the extra `registry`, or for a file that cannot be read."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{PREFIX}url needs Confluent's client on the driver, and {error.name} is not installed: pip install"
            " 'spark-kafka-sink[registry]'.",
            setting=f"{PREFIX}url",
        ) from None
    try:
        client = SchemaRegistryClient(settings.for_client(address))
    except OSError as error:  # an ssl.SSLError too
        raise ConfigError(
            f"The files of {PREFIX}ssl.* cannot be used: {_plain(str(error), settings)}. They must be PEM files that"
            f" this process can read, and the password must be that of the key."
        ) from None
    except ValueError as error:
        raise ConfigError(f"The options {PREFIX}* cannot be used: {_plain(str(error), settings)}.") from None
    except Exception as error:  # of an address of a proxy, which is in its text
        raise ConfigError(
            f"The options {PREFIX}* cannot be used ({type(error).__name__}). Check {PREFIX}proxy, and the variables"
            " HTTP_PROXY, HTTPS_PROXY and ALL_PROXY: http://host:port, with signs such as / and # of a password written"
            " as %2F and %23.",
            setting=f"{PREFIX}proxy",
        ) from None
    with client:
        yield client


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_our_words(
    settings: RegistrySettings, address: str, subject: str, column_format: ColumnFormat
) -> Iterator[None]:
    """Turn each error of the client into one that names the address. It is not chained, because a traceback would show
    the client's own text, which may have a secret in it.
    """
    from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

    raised: KafkaError
    try:
        yield
        return
    except KafkaError:
        raise
    except SchemaRegistryError as error:
        raised = _refusal(error, settings, address, subject, column_format)
    except OAuthTokenError as error:
        raised = _no_token(_plain(error.message, settings), settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raised = _strange_answer(error, settings, address)
    except Exception as error:  # the client names no type for connections that fail
        hint = _hint(error)
        text = f"{address}: {_plain(str(error), settings) or type(error).__name__}.{hint}"
        raised = _no_answer(UNTRUSTED if hint else NO_CONNECTION, text)
    raise raised from None


def _no_token(why: str, settings: RegistrySettings) -> AuthenticationError:
    endpoint = urlsplit(settings.bearer_auth_issuer_endpoint_url or "").netloc or "the endpoint"
    what = f"Check {PREFIX}bearer.auth.*."
    if _UNTRUSTED in why:
        what = (
            f"{PREFIX}ssl.ca.location is only for the registry: name the authority that signed the endpoint's"
            " certificate by the variable SSL_CERT_FILE, on the driver."
        )
    return AuthenticationError(f"No token for the schema registry came from {endpoint}: {why}. {what}")


def _strange_answer(error: Exception, settings: RegistrySettings, address: str) -> KafkaError:
    """Return the error for an answer in which the client does not find what it needs: the registry's, or that of the
    endpoint of its token.
    """
    if traceback.extract_tb(error.__traceback__)[-1].name == "token_expired":
        return _no_token(
            "its answer has no expires_in that is a number of seconds, and Confluent's client needs one", settings
        )
    why = f"{type(error).__name__}: {_plain(str(error), settings)}"
    text = f"{address}: its answer is not a schema registry's ({why}). Check the path of {PREFIX}url."
    return _no_answer(NO_REGISTRY, text)


def _no_answer(fault: str, text: str) -> RegistryError:
    error = RegistryError(text)
    error.fault = fault
    return error


_NEW_FIELD: Final = (
    " With BACKWARD compatibility a new field needs a default: {}.avro.nullable=null-first gives one to each field that"
    " may be null."
)


def _chosen(settings: RegistrySettings) -> str:
    """Return the option by which the schema must be there, the last part of its name."""
    if settings.use_schema_id is not None:
        return "use.schema.id"
    return "use.latest.version" if settings.use_latest_version else "auto.register.schemas=false"


def _refusal(
    error: Any, settings: RegistrySettings, address: str, subject: str, column_format: ColumnFormat
) -> KafkaError:
    """Return the error for an answer with an error's status, with the registry's own words."""
    words = _words(error, settings)
    status, is_registry = error.http_status_code, str(error.error_code).startswith(str(error.http_status_code))
    head = f"The schema registry at {address}"
    if status == 401:
        return AuthenticationError(
            f"{head} refuses the login: {words}. Check {PREFIX}basic.auth.user.info or the token."
        )
    if status == 403:
        return AuthorizationError(f"{head} refuses subject {subject}: {words}. Grant this user read and write on it.")
    if status == 409:
        return SchemaError(
            f"{head} refuses the schema of subject {subject}: {words}. It must fit the subject's earlier versions:"
            " change the column's type, or the compatibility of the subject."
            + (_NEW_FIELD.format(column_format.field) if column_format.name == AVRO else "")
        )
    if status == 404 and is_registry:
        chosen = _chosen(settings)
        which = "the schema" if settings.use_schema_id is None else f"schema {settings.use_schema_id} as a version"
        return SchemaError(
            f"{head} does not have {which} of subject {subject}: {words}. Register it first, or leave out"
            f" {PREFIX}{chosen}."
        )
    if status == 422:
        return SchemaError(f"{head} refuses the schema of subject {subject}: {words}.")
    text = f"{address}: it answered with status {status}: {words}."
    if status in _MAY_PASS:
        return _no_answer(BUSY, text)
    return _no_answer(NO_REGISTRY, f"{text} Check the path of {PREFIX}url.")


def _words(error: Any, settings: RegistrySettings) -> str:
    """Return the registry's own words, and its code if it gave one."""
    said = _plain(str(error.error_message or "it gave no reason").removeprefix(_UNKNOWN_ERROR), settings)
    code = error.error_code
    return f"{said} ({code})" if isinstance(code, int) and code > 0 else said


def _plain(text: str, settings: RegistrySettings) -> str:
    """Return the text on one line, without a full stop at its end and without secrets."""
    for secret in settings.secrets():
        text = text.replace(secret, "***")
    text = _HEADER.sub(r"\1 ***", text)
    return one_line(without_logins(text.strip())).rstrip(".")


def _hint(error: Exception) -> str:
    if _UNTRUSTED in str(error):
        return f" Name the authority that signed the registry's certificate by {PREFIX}ssl.ca.location."
    return ""


_warned: Final[set[tuple[str, ...]]] = set()


def _warn_of_clear_text(settings: RegistrySettings) -> None:
    """Warn once in a process if a login goes over the network in clear."""
    hosts = [each for each in settings.url if each.startswith("http:") and not _is_here(each)]
    has_login = settings.basic_auth_user_info is not None or settings.bearer_auth_credentials_source is not None
    if hosts and has_login and settings.url not in _warned:
        _warned.add(settings.url)
        log.warning("The login to the schema registry goes over the network in clear: %s. Use https.", ", ".join(hosts))


def _is_here(address: str) -> bool:
    return urlsplit(address).hostname in {"localhost", "127.0.0.1", "::1"}
