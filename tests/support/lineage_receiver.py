"""An HTTP server that receives OpenLineage's events, and the check of an event by the schemas that OpenLineage
publishes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

SCHEMAS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "openlineage").glob("*.json"))]
REGISTRY: Any = Registry().with_resources((each["$id"], Resource.from_contents(each)) for each in SCHEMAS)
"""The only schemas: a reference to another one is an error, and nothing is downloaded."""


def _validate(value: Any, schema: str) -> None:
    Draft202012Validator({"$ref": schema}, registry=REGISTRY, format_checker=FormatChecker()).validate(value)


def check_event(event: dict[str, Any]) -> None:
    """Raise an error for an event that is not valid, with each of its facets by the facet's own schema."""
    assert event["schemaURL"].endswith("OpenLineage.json#/$defs/RunEvent")
    _validate(event, event["schemaURL"])
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    holders = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    facets = [each.get(kind, {}) for each in holders for kind in ("facets", "inputFacets", "outputFacets")]
    for name, facet in (pair for each in facets for pair in each.items()):
        url = facet["_schemaURL"]
        _validate(facet, url)
        _validate({name: facet}, url.partition("#")[0])  # the file's root gives the facet's name


class Receiver:
    """What has been received, and how the server answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[dict[str, Any]] = []
        self.status = 201
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.requests = threading.Semaphore(0)
        """One for each request that has come."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.release()
            receiver.may_answer.wait(60)
            receiver.events.append(json.loads(body))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
