"""A schema registry in this process: an HTTP server on the loopback interface that speaks Confluent's API.

It keeps subjects, versions, ids and GUIDs, checks logins, and refuses what does not fit: Avro schemas that are not
valid, and Avro records that have a new field without a default (BACKWARD). Statuses, codes and texts are those of
Confluent's registry 8.0 (API reference, and the Java classes of io.confluent.kafka.schemaregistry.rest.exceptions).
A test may make it answer wrongly: `faults` are used up, one for each request.
"""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.certificates import Authority
from support.tls_server import server_context

from spark_kafka_sink.serialization.protobuf_parser import descriptor_set

Fault = Callable[["Exchange"], None]
"""Answers one request in the registry's place."""


@dataclass(frozen=True)
class Stored:
    schema_id: int
    content: Mapping[str, Any]
    """The body as it was registered: schema, schemaType, references, ruleSet."""

    @property
    def guid(self) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(self.content, sort_keys=True)))


class RefusedError(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Registry:
    """The state."""

    login: str | None = None
    """user:password, if one is needed."""
    token: str | None = None
    """The bearer token, if one is needed."""
    readers_only: bool = False
    """Whether registrations are refused."""
    has_guids: bool = True
    by_id: dict[int, Stored] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    compatibility: dict[str, str] = field(default_factory=lambda: {"": "BACKWARD"})
    """By subject; "" for all others."""

    def put(self, subject: str, schema: str, schema_type: str = "AVRO", **more: Any) -> int:
        """Add a version without any check, and return its id."""
        content = {"schema": schema, "schemaType": schema_type, "references": [], **more}
        found = next((each.schema_id for each in self.by_id.values() if each.content == content), None)
        schema_id = found or len(self.by_id) + 1
        self.by_id[schema_id] = Stored(schema_id, content)
        if schema_id not in (versions := self.subjects.setdefault(subject, [])):
            versions.append(schema_id)
        return schema_id

    # ---- the API -----------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: Mapping[str, list[str]], body: Any) -> Any:
        for allowed, pattern, act in _ROUTES:
            if allowed == method and (match := re.fullmatch(pattern, path)):
                return act(self, *map(unquote, match.groups()), body if method in {"POST", "PUT"} else query)
        raise RefusedError(404, 404, "HTTP 404 Not Found")

    def register(self, subject: str, body: Any) -> Any:
        if self.readers_only:
            raise RefusedError(403, 40301, f"User is denied operation Write on Subject: {subject}")
        self._check(body)
        if self._id_of(body, subject) is None:
            self._check_compatibility(subject, body, 409)
        schema_id = self.put(subject, body["schema"], body.get("schemaType", "AVRO"))
        return {"id": schema_id, **self._guid(schema_id)}

    def look_up(self, subject: str, body: Any) -> Any:
        self._versions(subject)
        self._check(body)
        schema_id = self._id_of(body, subject)
        if schema_id is None:
            raise RefusedError(404, 40403, "Schema not found")
        return self._full(subject, schema_id)

    def version(self, subject: str, version: str, query: Any) -> Any:
        versions = self._versions(subject)
        at = len(versions) if version == "latest" else int(version)
        if not 0 < at <= len(versions):
            raise RefusedError(404, 40402, f"Version {version} not found.")
        return _in_form(self._full(subject, versions[at - 1]), query)

    def schema(self, schema_id: str, query: Any) -> Any:
        stored = self.by_id.get(int(schema_id))
        subject = query.get("subject", [None])[0]
        if stored is None or (subject is not None and stored.schema_id not in self.subjects.get(subject, ())):
            raise RefusedError(404, 40403, f"Schema {schema_id} not found")
        return _in_form({**_shown(stored.content), **self._guid(stored.schema_id)}, query)

    def schema_by_guid(self, guid: str, query: Any) -> Any:
        for stored in self.by_id.values():
            if stored.guid == guid:
                return _in_form({**_shown(stored.content), **self._guid(stored.schema_id)}, query)
        raise RefusedError(404, 40403, f"Schema {guid} not found")

    def is_compatible(self, subject: str, version: str, body: Any) -> Any:
        self._versions(subject)
        try:
            self._check_compatibility(subject, body, 409)
        except RefusedError:
            return {"is_compatible": False}
        return {"is_compatible": True}

    def config(self, subject: str, query: Any) -> Any:
        return {"compatibilityLevel": self.compatibility.get(subject, self.compatibility[""])}

    def set_config(self, subject: str, body: Any) -> Any:
        self.compatibility[subject] = body["compatibility"]
        return body

    def _full(self, subject: str, schema_id: int) -> Any:
        version = self.subjects[subject].index(schema_id) + 1
        stored = self.by_id[schema_id]
        return {
            "subject": subject,
            "version": version,
            "id": schema_id,
            **_shown(stored.content),
            **self._guid(schema_id),
        }

    def _guid(self, schema_id: int) -> dict[str, str]:
        return {"guid": self.by_id[schema_id].guid} if self.has_guids else {}

    def _versions(self, subject: str) -> list[int]:
        if subject not in self.subjects:
            raise RefusedError(404, 40401, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _id_of(self, body: Any, subject: str) -> int | None:
        same = (each for each in self.subjects.get(subject, ()) if self.by_id[each].content["schema"] == body["schema"])
        return next(same, None)

    def _check(self, body: Any) -> None:
        if body.get("schemaType", "AVRO") != "AVRO":
            return
        try:
            json.loads(body["schema"])
        except ValueError:
            raise RefusedError(422, 42201, f"Invalid schema {body['schema']}, details: not JSON") from None

    def _check_compatibility(self, subject: str, body: Any, status: int) -> None:
        versions = self.subjects.get(subject)
        level = self.compatibility.get(subject, self.compatibility[""])
        if not versions or level == "NONE" or body.get("schemaType", "AVRO") != "AVRO":
            return
        old = {each["name"] for each in json.loads(self.by_id[versions[-1]].content["schema"])["fields"]}
        for each in json.loads(body["schema"])["fields"]:
            if each["name"] not in old and "default" not in each:
                raise RefusedError(
                    status,
                    409,
                    f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details:'
                    " [{errorType:'READER_FIELD_MISSING_DEFAULT_VALUE', description:'The field"
                    f" '{each['name']}' in the new schema has no default value and is missing in the old schema'}}]",
                )


def _shown(content: Mapping[str, Any]) -> dict[str, Any]:
    """The registry leaves out the type AVRO, and references if there are none."""
    return {
        key: value for key, value in content.items() if (key, value) not in [("schemaType", "AVRO"), ("references", [])]
    }


def _in_form(answer: dict[str, Any], query: Any) -> dict[str, Any]:
    """With `format=serialized` a Protobuf schema is a descriptor in Base64."""
    if query.get("format") != ["serialized"] or answer.get("schemaType") != "PROTOBUF":
        return answer
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    file = FileDescriptorSet.FromString(descriptor_set(answer["schema"])).file[-1]
    return {**answer, "schema": base64.b64encode(file.SerializeToString()).decode()}


_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/subjects", lambda registry, query: sorted(registry.subjects)),
    ("POST", "/subjects/([^/]+)/versions", Registry.register),
    ("POST", "/subjects/([^/]+)", Registry.look_up),
    ("GET", "/subjects/([^/]+)/versions/([^/]+)", Registry.version),
    ("GET", r"/schemas/ids/(\d+)", Registry.schema),
    ("GET", "/schemas/guids/([^/]+)", Registry.schema_by_guid),
    ("POST", "/compatibility/subjects/([^/]+)/versions/([^/]+)", Registry.is_compatible),
    ("GET", "/config(?:/)?([^/]*)", Registry.config),
    ("PUT", "/config(?:/)?([^/]*)", Registry.set_config),
]


@dataclass
class Exchange:
    """One request, and how to answer it."""

    handler: http.server.BaseHTTPRequestHandler
    stopping: threading.Event

    def send(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        self.handler.send_response(status)
        self.handler.send_header("Content-Type", content_type)
        self.handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, json.dumps(body).encode())


def answering(status: int, body: Any) -> Fault:
    """Answer with `body`: bytes as they are, anything else as JSON."""
    return lambda exchange: exchange.send(status, body if isinstance(body, bytes) else json.dumps(body).encode())


def dropping(exchange: Exchange) -> None:
    """Close the connection without an answer."""
    exchange.handler.close_connection = True


def hanging(exchange: Exchange) -> None:
    """Never answer."""
    exchange.stopping.wait(20)


class SchemaRegistryServer:
    """A context manager. With `tls_folder` it listens by TLS; `authority_file` is what a client must trust."""

    def __init__(self, registry: Registry | None = None, *, path: str = "", tls_folder: Path | None = None) -> None:
        self.registry = registry or Registry()
        self.faults: deque[Fault] = deque()
        self.every: Fault | None = None
        """A fault for each request."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, path with query, and headers."""
        self._path = path
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        scheme = "http"
        if tls_folder is not None:
            scheme, authority = "https", Authority()
            self.authority_file = authority.write(tls_folder / "authority.pem")
            self._server.socket = server_context(authority.issue()).wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://localhost:{self._server.server_address[1]}{path}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> SchemaRegistryServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    @property
    def asked(self) -> list[str]:
        """Method and path of each request."""
        return [f"{method} {path}" for method, path, _ in self.requests]

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                owner._answer(Exchange(self, owner._stopping), body)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _answer(self, exchange: Exchange, body: bytes) -> None:
        handler = exchange.handler
        self.requests.append((handler.command, handler.path, dict(handler.headers)))
        if self.faults:
            self.faults.popleft()(exchange)
        elif self.every is not None:
            self.every(exchange)
        else:
            try:
                exchange.send_json(200, self._result(handler, body))
            except RefusedError as error:
                exchange.send_json(error.status, {"error_code": error.code, "message": str(error)})

    def _result(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> Any:
        registry, given = self.registry, handler.headers.get("Authorization")
        if registry.login is not None and given != f"Basic {base64.b64encode(registry.login.encode()).decode()}":
            raise RefusedError(401, 401, "HTTP 401 Unauthorized")
        if registry.token is not None and given != f"Bearer {registry.token}":
            raise RefusedError(401, 401, "HTTP 401 Unauthorized")
        parts = urlsplit(handler.path)
        if not parts.path.startswith(self._path):
            raise RefusedError(404, 404, "HTTP 404 Not Found")
        content = json.loads(body) if body else {}
        return registry.answer(handler.command, parts.path.removeprefix(self._path), parse_qs(parts.query), content)


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore errors: a client may close its connection, and a fault may do so."""


def free_port() -> int:
    """Return a port at which nothing listens."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        return int(server.server_address[1])
