"""Everything by which a sink is seen from outside, switched on at once: what it costs is measured as a contender.

`watch` sets up the receivers, which are servers of this process at the loopback interface, and must run before Spark
starts: the receivers' addresses are variables of the environment, which Spark's workers inherit. Every five seconds a
thread reads the metrics of the workers, as Prometheus does. The work of the receivers counts as the client's. If
WATCHED_LOG names a file, the receivers write into it what they were asked for.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

PACKAGES: Final = ("prometheus_client", "openlineage", "opentelemetry")
PORTS: Final = range(29_250, 29_260)
SCRAPE_S: Final = 5.0
OPTIONS: Final[Mapping[str, str]] = {
    "report.log": "true",
    "metrics.port": f"{PORTS[0]}-{PORTS[-1]}",
    "lineage.openlineage": "true",
    "telemetry.opentelemetry": "true",
    "write.max.records.per.second": "1000000000",
    "write.max.bytes.per.second": "1000000000000",
}
"""The limits are never reached: what is measured is that each task asks for its share."""


class _Receiver(BaseHTTPRequestHandler):
    """Takes every event, span and metric. An empty answer is a whole one in OTLP and for OpenLineage."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", self.headers["Content-Type"])
        self.send_header("Content-Length", "0")
        self.end_headers()
        if log := os.environ.get("WATCHED_LOG"):
            with Path(log).open("a") as file:
                file.write(f"{self.path}\n")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def watch() -> None:
    """Start the receivers, and name them in the environment. They end with the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=_scrape, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=address, OPENLINEAGE_URL=address)


def _scrape() -> None:
    while True:
        time.sleep(SCRAPE_S)
        for port in PORTS:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_S) as answer:
                    answer.read()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                break  # workers take the ports in order
