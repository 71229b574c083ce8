"""EmbeddedKafka: a real Kafka cluster of one or three nodes on this machine. Not thread-safe."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.admin import Admin, TopicDescription
from spark_kafka_sink.local.class_archive import drop_class_archive, with_class_archive
from spark_kafka_sink.local.jars import cache_dir, fetch_jars
from spark_kafka_sink.local.jvm import CURRENT, TUNINGS, Jvm, find_java, find_release
from spark_kafka_sink.local.node import Node, new_cluster_id
from spark_kafka_sink.local.properties import (
    HOST,
    NodeAddress,
    PropertyValue,
    ReservedPort,
    refuse_owned,
    server_properties,
)
from spark_kafka_sink.local.security import BrokerSecurity
from spark_kafka_sink.local.watchdog import Watchdog

_SHUTDOWN_TIMEOUT_S = 10.0


class EmbeddedKafka:
    """Apache Kafka in KRaft mode on free ports of the loopback interface. Each node is broker and controller, in one
    JVM.

    As a context manager it starts and stops the cluster. The JVMs end with this process, however it ends.

    - `nodes`: 1 or 3, with ids from 1. With three, internal topics have three replicas, and two must be in sync.
    - `version`: the Kafka release, "4.3.1" or "3.9.1".
    - `properties`: broker properties for every node, over Kafka's defaults (topics are auto-created, with one
      partition).
    - `features`: levels of finalized features, such as `{"transaction.version": 1}`; others as the release prefers.
    - `advertised`: by node id, the `host:port` of a proxy in front of the node, as for a test that disturbs
      connections. The node then has a second listener at `proxied_address`, which advertises the proxy. The nodes, and
      the clients of `bootstrap_servers`, do not use the proxies.
    - `security`: listeners with TLS or login, beside the PLAINTEXT one; see `secured_servers`.
    - `plugins`: jars with classes that `properties` name, such as a metric.reporters.
    - `log_dirs`: the number of folders for a node's partitions, like a broker's disks.
    - `data_dir`: the folder of the data. A later cluster may use it again; two at once may not. None: a temporary
      folder, which is removed at stop.
    - `tuned_for`: "start" starts in a second or two, but the broker then runs slowly, most of all with TLS.
      "throughput", for measurements, uses the JVM flags of Kafka's own start script, with all compilers.
    - `start_timeout_s`: the limit for formatting and starting, in seconds, without downloads.

    Raises LocalBrokerError.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        version: str = CURRENT.version,
        properties: Mapping[str, PropertyValue] | None = None,
        features: Mapping[str, int] | None = None,
        advertised: Mapping[int, str] | None = None,
        security: BrokerSecurity | None = None,
        plugins: Sequence[Path] = (),
        log_dirs: int = 1,
        data_dir: Path | None = None,
        tuned_for: str = "start",
        start_timeout_s: float = 60.0,
    ) -> None:
        if nodes not in (1, 3):
            raise LocalBrokerError(f"An embedded cluster has 1 or 3 nodes, not {nodes}.")
        if tuned_for not in TUNINGS:
            raise LocalBrokerError(f"A broker is tuned for {' or '.join(TUNINGS)}, not for {tuned_for}.")
        self._node_count = nodes
        self._release = find_release(version)
        self._properties = dict(properties or {})
        refuse_owned(self._properties)
        self._features = dict(features or {})
        self._advertised = dict(advertised or {})
        self._security = security
        self._plugins = [jar.absolute() for jar in plugins]  # each broker runs in its own folder
        self._log_dirs = log_dirs
        self._data_dir = data_dir.absolute() if data_dir is not None else None
        self._tuned_for = tuned_for
        self._start_timeout_s = start_timeout_s
        self._nodes: dict[int, Node] = {}
        self._ports: list[ReservedPort] = []
        self._watchdog: Watchdog | None = None
        self._claim: IO[str] | None = None
        self._archive: Path | None = None
        self._process_id = os.getpid()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ---- the cluster -------------------------------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of all nodes, comma-separated, including nodes that do not run."""
        self._require_started()
        return ",".join(node.address.bootstrap_server for node in self._nodes.values())

    def secured_servers(self, listener: str) -> str:
        """Return `host:port` of a secured listener on all nodes, comma-separated."""
        self._require_started()
        if self._security is None or listener not in self._security.listeners:
            raise LocalBrokerError(f"There is no secured listener {listener}: name it in `security`.")
        return ",".join(f"{HOST}:{node.address.secured_ports[listener]}" for node in self._nodes.values())

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(self._nodes)

    @property
    def running(self) -> bool:
        """Whether the cluster was started and the JVMs of all nodes run."""
        return bool(self._nodes) and all(node.running for node in self._nodes.values())

    def start(self) -> None:
        """Fetch missing jars, format new data folders, start all nodes, and wait until each node knows the others.

        On failure all processes end and all files are removed except the logs. The error names their folder.
        """
        if self._nodes:
            raise LocalBrokerError("This embedded cluster is started already.")
        self._process_id = os.getpid()
        cache = cache_dir()
        jars = fetch_jars(self._release.lock_path, cache=cache)
        jvm = with_class_archive(Jvm(find_java(), self._release, jars), cache)
        self._archive = jvm.archive
        properties = self._security.system_properties() if self._security is not None else {}
        jars = [*jars, *self._plugins]  # behind those of the archive, which may be only a beginning of the class path
        jvm = replace(jvm, jars=jars, system_properties=properties, tuned_for=self._tuned_for)
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._claim_data()
            self._make_nodes(jvm)
            self._format(deadline)
            for node in self._nodes.values():
                node.begin_start()
            for node in self._nodes.values():
                node.await_start(deadline)
            for node in self._nodes.values():
                node.await_members(set(self._nodes), deadline)
        except LocalBrokerError as error:
            logs = self._data_dir or self._saved_logs()
            crash = self._drop_archive_of_crash()
            self.stop()
            raise LocalBrokerError(f"{error}{crash}\nLogs: {logs}") from error
        except OSError as error:  # such as a folder that cannot be made, or a full disk
            self.stop()
            raise LocalBrokerError(f"The cluster's files cannot be written: {error}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all nodes. A temporary data folder is removed. Nodes with a folder to keep shut down in order first. In a
        forked child it does nothing, because the nodes belong to the parent.
        """
        if os.getpid() != self._process_id:
            return
        running = [node for node in self._nodes.values() if node.running]
        if self._data_dir is not None:
            # All at once. The last ones of three have no quorum to shut down with, and are killed at the deadline.
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            for node in running:
                node.terminate()
            for node in running:
                node.await_end(max(0.0, deadline - time.monotonic()))
        else:
            for node in running:
                node.kill()
        self._nodes.clear()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        for port in self._ports:
            port.release()
        self._ports.clear()
        if self._claim is not None:
            fcntl.flock(self._claim, fcntl.LOCK_UN)  # a forked child may hold the file open
            self._claim.close()
            self._claim = None

    def save_logs(self, target: Path | None = None) -> Path:
        """Copy the logs and configuration of all nodes to `target`, or to a temporary folder, and return the folder."""
        try:
            target = target or Path(tempfile.mkdtemp(prefix="spark-kafka-sink-logs-"))
            for node in self._nodes.values():
                copy = target / node.folder.name
                copy.mkdir(parents=True, exist_ok=True)
                for name in (node.log_file.name, "server.properties", "hs_err.log"):
                    if (node.folder / name).exists():
                        shutil.copy(node.folder / name, copy)
        except OSError as error:
            raise LocalBrokerError(f"The logs cannot be saved: {error}") from error
        return target

    # ---- single nodes ------------------------------------------------------------------------------------------------

    def start_node(self, *node_ids: int) -> None:
        """Start nodes that were stopped or killed, with their ports and data, and wait until each is a live member.
        They start together, because a minority is no quorum.
        """
        nodes = [self._node(node_id) for node_id in node_ids]
        deadline = time.monotonic() + self._start_timeout_s
        for node in nodes:
            node.begin_start()
        try:
            for node in nodes:
                node.await_start(deadline)
        except LocalBrokerError as error:
            raise LocalBrokerError(f"{error}{self._drop_archive_of_crash()}\nLogs: {self._saved_logs()}") from error

    def stop_node(self, node_id: int) -> None:
        """Shut a node down in order (SIGTERM). It is killed after 30 s."""
        node = self._node(node_id)
        node.terminate()
        node.await_end()

    def kill_node(self, node_id: int) -> None:
        """End a node at once (SIGKILL), suspended or not."""
        self._node(node_id).kill()

    def restart_node(self, node_id: int, *, version: str | None = None) -> None:
        """Stop in order, then start. With `version` the node starts with that release, on the data that it has: a step
        of an upgrade of all nodes, one after the other. It starts more slowly from then on.
        """
        release = find_release(version) if version is not None else None
        jars = fetch_jars(release.lock_path) if release is not None else []
        self.stop_node(node_id)
        if release is not None:
            self._node(node_id).upgrade(release, [*jars, *self._plugins])
        self.start_node(node_id)

    def suspend_node(self, node_id: int) -> None:
        """Freeze a node (SIGSTOP): its connections stay open and nothing answers."""
        self._node(node_id).suspend()

    def resume_node(self, node_id: int) -> None:
        """Resume a suspended node (SIGCONT)."""
        self._node(node_id).resume()

    def node_running(self, node_id: int) -> bool:
        """Return whether the node's JVM exists, suspended or not."""
        return self._node(node_id).running

    def node_pid(self, node_id: int) -> int:
        """Return the process id of the node's JVM."""
        return self._node(node_id).pid

    def node_address(self, node_id: int) -> str:
        """Return the node's `host:port`."""
        return self._node(node_id).address.bootstrap_server

    def log_dirs(self, node_id: int) -> tuple[Path, ...]:
        """Return the folders of the node's partitions. The first one also has the cluster's metadata."""
        return self._node(node_id).log_dirs

    def proxied_address(self, node_id: int) -> str:
        """Return the `host:port` to which the proxy in front of the node connects."""
        port = self._node(node_id).address.proxied_port
        if port is None:
            raise LocalBrokerError(f"Node {node_id} has no proxy: name its address in `advertised`.")
        return f"{HOST}:{port}"

    # ---- topics ------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        config: Mapping[str, str | int] | None = None,
    ) -> None:
        """Create a topic and wait until every node that answers shows all its partitions with a leader."""
        self._admin().create_topic(name, partitions, replication_factor, config)

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until no node that answers shows it any more."""
        self._admin().delete_topic(name)

    def describe_topic(self, name: str) -> TopicDescription:
        """Return the topic's partitions with leader, replicas and in-sync replicas."""
        return self._admin().describe_topic(name)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _drop_archive_of_crash(self) -> str:
        """Drop the class archive if a JVM crashed with it, and return a text for the user."""
        archive = self._archive
        if archive is None or not any(node.has_crashed for node in self._nodes.values()):
            return ""
        self._archive = None
        for node in self._nodes.values():
            node.forget_archive()
        return f"\n{drop_class_archive(archive)}"

    def _claim_data(self) -> None:
        """Lock the data folder before a file is written there. Another cluster's nodes could not restart with our
        ports.
        """
        if self._data_dir is None:
            return
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._claim = (self._data_dir / "lock").open("w", encoding="ascii")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LocalBrokerError(f"Another embedded cluster runs in {self._data_dir}.") from None

    def _make_nodes(self, jvm: Jvm) -> None:
        folder = self._data_dir or Path(tempfile.mkdtemp(prefix="spark-kafka-sink-"))
        self._watchdog = Watchdog(removed_folder=None if self._data_dir else folder)
        addresses = [self._address(node_id) for node_id in range(1, self._node_count + 1)]
        for address in addresses:
            node = Node(address, folder / f"node-{address.node_id}", jvm, self._watchdog, self._log_dirs)
            self._nodes[address.node_id] = node
            node.write_files(server_properties(address, addresses, node.log_dirs, self._properties, self._security))

    def _address(self, node_id: int) -> NodeAddress:
        listeners = self._security.listeners if self._security is not None else ()
        secured = {name: self._reserve_port() for name in listeners}
        own = NodeAddress(node_id, self._reserve_port(), self._reserve_port(), secured_ports=secured)
        if node_id not in self._advertised:
            return own
        return replace(own, proxied_port=self._reserve_port(), advertised=self._advertised[node_id])

    def _reserve_port(self) -> int:
        port = ReservedPort()
        self._ports.append(port)
        return port.number

    def _format(self, deadline: float) -> None:
        cluster_id = next((node.cluster_id for node in self._nodes.values() if node.cluster_id), new_cluster_id())
        new = [node for node in self._nodes.values() if node.cluster_id is None]
        if self._features and len(new) < len(self._nodes):
            raise LocalBrokerError(
                f"{self._data_dir} holds a formatted cluster: features can only be chosen for a new folder."
            )
        for node in new:
            users = self._security.format_arguments() if self._security is not None else []
            node.begin_format(cluster_id, self._features, users)
        for node in new:
            node.await_format(deadline)

    def _saved_logs(self) -> Path | LocalBrokerError:
        """Return the folder of the logs, or why there is none. A full disk must not hide the error that is reported."""
        try:
            return self.save_logs()
        except LocalBrokerError as error:
            return error

    def _admin(self) -> Admin:
        answering = [
            node.address.bootstrap_server for node in self._nodes.values() if node.running and not node.suspended
        ]
        if not answering:
            raise LocalBrokerError("No node of the embedded cluster runs.")
        return Admin(",".join(answering))

    def _node(self, node_id: int) -> Node:
        self._require_started()
        if node_id not in self._nodes:
            raise LocalBrokerError(f"No node {node_id}: the nodes are {', '.join(map(str, self._nodes))}.")
        return self._nodes[node_id]

    def _require_started(self) -> None:
        if not self._nodes:
            raise LocalBrokerError("The embedded cluster is not started: call start() or use it as a context manager.")
