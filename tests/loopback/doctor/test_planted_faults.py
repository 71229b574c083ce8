"""The doctor finds each planted fault by its name, over real sockets, and no other one."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.certificates import Authority, Identity
from support.planted_faults import LOOPBACK
from support.schema_registry import Registry, SchemaRegistryServer, answering, free_port
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER, ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.sasl import SaslListener
from support.scripted_broker.versions import KAFKA_2_1
from support.scripted_server import ScriptedServer
from support.tcp_proxy import TcpProxy
from support.tls_server import TlsServer, server_context

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.doctor import installation, transactions
from spark_kafka_sink.doctor.__main__ import main
from spark_kafka_sink.doctor.examination import Examination
from spark_kafka_sink.doctor.findings import Area, Finding, Status
from spark_kafka_sink.protocol.fetch import READ_COMMITTED
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once.messages import driver_id

READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS = (1 << number for number in (3, 4, 8, 10))
LIMIT_MS = 8_000
SHORT_MS = 1_000
"""For faults that show only by silence."""
DECISIONS = "decisions"
PREFIX = "orders-query"
CANARY = "canary-p4ss"
OTHER_CANARY = "canary-0ther"
LOGIN = f'ScramLoginModule required username="alice" password="{CANARY}";'
SCHEMA = {"type": "record", "name": "order", "fields": [{"name": "id", "type": "long"}]}
Options = dict[str, str]


class Planting:
    """A healthy cluster and options, to be broken. Servers end with the test."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.authority = Authority()
        self.limit_ms = LIMIT_MS
        self.cluster = ScriptedCluster(3)
        self.cluster.broker_configs["auto.create.topics.enable"] = "false"
        self.cluster.quorum_ahead_ms = 0
        self.cluster.create_topic("orders", 3).operations = WRITE | DESCRIBE
        decisions = self.cluster.create_topic(DECISIONS, 2, configs={"cleanup.policy": "compact"})
        decisions.operations = READ | WRITE | DESCRIBE | DESCRIBE_CONFIGS

    @property
    def orders(self) -> Any:
        return self.cluster.topics["orders"]

    def options(self, **more: str) -> Options:
        """Start the cluster, and return options that fit it."""
        server = self.stack.enter_context(ScriptedServer(self.cluster))
        return {"kafka.bootstrap.servers": ",".join(server.bootstrap_servers), "topic": "orders", **dotted(more)}

    def exactly_once(self, **more: str) -> Options:
        given = {"delivery_guarantee": "exactly-once", "decision_topic": DECISIONS}
        return self.options(**given, transactional_id_prefix=PREFIX, **more)

    def tls(self, identity: Identity, *, wants_client: bool = False) -> Options:
        """Start a TLS server, which is no Kafka, and return options that trust its authority."""
        authority = self.authority if wants_client else None
        server = self.stack.enter_context(TlsServer(server_context(identity, authority)))
        return self.trusting(server.address)

    def trusting(self, address: str) -> Options:
        return {"kafka.bootstrap.servers": address, "topic": "orders", **prefixed(self.authority.settings(address))}

    def registry(self, server: SchemaRegistryServer, **more: str) -> Options:
        self.stack.enter_context(server)
        return self.options(**formats(server.url), **more)

    def fail(self, api_key: int, code: int) -> None:
        self.cluster.on(api_key, faults.fail_with(code), times=None)


def dotted(options: dict[str, str]) -> Options:
    """Return options whose names have underscores for dots."""
    return {name.replace("_", "."): value for name, value in options.items()}


def prefixed(settings: dict[str, Any]) -> Options:
    return {f"kafka.{name}": str(value) for name, value in settings.items()}


def formats(url: str) -> Options:
    return {
        "value.format": "avro",
        "value.schema": json.dumps(SCHEMA),
        "schema.registry.url": url,
        "schema.registry.basic.auth.user.info": f"alice:{CANARY}",
    }


def sasl(protocol: str = "SASL_PLAINTEXT", mechanism: str = "SCRAM-SHA-256") -> Options:
    return {
        "kafka.security.protocol": protocol,
        "kafka.sasl.mechanism": mechanism,
        "kafka.sasl.jaas.config": LOGIN,
    }


# ---- what is planted: one function for each name -------------------------------------------------------------------

Plant = Callable[[Planting], Options]
PLANTS: dict[str, Plant] = {}


def plants(name: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        PLANTS[name] = plant
        return plant

    return keep


@plants("option-wrong")
def _option_wrong(planting: Planting) -> Options:
    return planting.options(kafka_lingr_ms="5")


@plants("host-unresolved")
def _host_unresolved(_: Planting) -> Options:
    return {"kafka.bootstrap.servers": "no-such-host.invalid:9092", "topic": "orders"}


@plants("connection-refused")
def _connection_refused(_: Planting) -> Options:
    return {"kafka.bootstrap.servers": f"127.0.0.1:{free_port()}", "topic": "orders"}


@plants("connection-timeout")
def _connection_timeout(planting: Planting) -> Options:
    planting.limit_ms = SHORT_MS
    proxy = planting.stack.enter_context(TcpProxy())
    proxy.black_hole()
    return {"kafka.bootstrap.servers": proxy.address, "topic": "orders"}


@plants("port-speaks-tls")
def _port_speaks_tls(planting: Planting) -> Options:
    options = planting.tls(planting.authority.issue())
    return {"kafka.bootstrap.servers": options["kafka.bootstrap.servers"], "topic": "orders"}


@plants("port-speaks-plaintext")
def _port_speaks_plaintext(planting: Planting) -> Options:
    return planting.trusting(planting.options()["kafka.bootstrap.servers"])


@plants("port-speaks-http")
def _port_speaks_http(planting: Planting) -> Options:
    server = planting.stack.enter_context(SchemaRegistryServer())
    return {"kafka.bootstrap.servers": server.url.removeprefix("http://"), "topic": "orders"}


@plants("port-speaks-zookeeper")
def _port_speaks_zookeeper(planting: Planting) -> Options:
    address = planting.stack.enter_context(saying(lambda asked: b"Zookeeper version: 3.9" if asked == b"srvr" else b""))
    return {"kafka.bootstrap.servers": address, "topic": "orders"}


@plants("port-not-kafka")
def _port_not_kafka(planting: Planting) -> Options:
    address = planting.stack.enter_context(saying(lambda _: b"\0\0\0\x08nonsense"))
    return {"kafka.bootstrap.servers": address, "topic": "orders"}


@plants("tls-files-wrong")
def _tls_files_wrong(planting: Planting) -> Options:
    missing = str(planting.folder / "missing.pem")
    return planting.options(kafka_security_protocol="SSL", kafka_ssl_truststore_location=missing)


@plants("certificate-expired")
def _certificate_expired(planting: Planting) -> Options:
    return planting.tls(planting.authority.issue_expired())


@plants("certificate-not-yet-valid")
def _certificate_not_yet_valid(planting: Planting) -> Options:
    return planting.tls(planting.authority.issue_not_yet_valid())


@plants("certificate-of-unknown-authority")
def _certificate_of_unknown_authority(planting: Planting) -> Options:
    return planting.tls(Authority("another authority").issue())


@plants("certificate-for-another-host")
def _certificate_for_another_host(planting: Planting) -> Options:
    return planting.tls(planting.authority.issue("broker.example"))


@plants("client-certificate-refused")
def _client_certificate_refused(planting: Planting) -> Options:
    return planting.tls(planting.authority.issue(), wants_client=True)


@plants("tls-versions-differ")
def _tls_versions_differ(planting: Planting) -> Options:
    context = server_context(planting.authority.issue())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    server = planting.stack.enter_context(TlsServer(context))
    return {**planting.trusting(server.address), "kafka.ssl.enabled.protocols": "TLSv1.3"}


@plants("login-settings-wrong")
def _login_settings_wrong(planting: Planting) -> Options:
    provider = {"kafka.sasl.oauthbearer.token.provider": "no_such_module_of_tokens:fetch"}
    login = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "OAUTHBEARER"}
    return {**planting.options(), **login, **provider}


@plants("login-refused")
def _login_refused(planting: Planting) -> Options:
    planting.cluster.sasl = SaslListener(users={"alice": OTHER_CANARY})
    return {**planting.options(), **sasl()}


@plants("login-failed")
def _login_failed(planting: Planting) -> Options:
    planting.limit_ms = SHORT_MS
    planting.cluster.sasl = SaslListener(users={"alice": CANARY})
    planting.cluster.on(ApiKey.SASL_HANDSHAKE, faults.lose_response(), times=None)
    return {**planting.options(), **sasl()}


@plants("mechanism-not-offered")
def _mechanism_not_offered(planting: Planting) -> Options:
    planting.cluster.sasl = SaslListener(mechanisms=["SCRAM-SHA-512"], users={"alice": CANARY})
    return {**planting.options(), **sasl()}


@plants("login-not-offered")
def _login_not_offered(planting: Planting) -> Options:
    return {**planting.options(), **sasl()}


@plants("login-required")
def _login_required(planting: Planting) -> Options:
    planting.cluster.sasl = SaslListener(users={"alice": CANARY})
    return planting.options()


@plants("listener-unreachable")
def _listener_unreachable(planting: Planting) -> Options:
    options = planting.options()
    planting.cluster.nodes[2].port = free_port()
    return options


@plants("some-servers-unreachable")
def _some_servers_unreachable(planting: Planting) -> Options:
    options = planting.options()
    down = f"127.0.0.1:{free_port()}"
    return {**options, "kafka.bootstrap.servers": f"{down},{options['kafka.bootstrap.servers']}"}


@plants("brokers-too-old")
def _brokers_too_old(planting: Planting) -> Options:
    planting.cluster.versions = KAFKA_2_1
    return planting.exactly_once()


@plants("topic-name-invalid")
def _topic_name_invalid(planting: Planting) -> Options:
    planting.cluster.on(ApiKey.METADATA, faults.refuse_topic("orders", 17), times=None)
    return planting.options()


@plants("topic-missing")
def _topic_missing(planting: Planting) -> Options:
    planting.cluster.delete_topic("orders")
    return planting.options()


@plants("topic-would-be-created")
def _topic_would_be_created(planting: Planting) -> Options:
    planting.cluster.delete_topic("orders")
    planting.cluster.broker_configs["auto.create.topics.enable"] = "true"
    return planting.options()


@plants("partition-without-leader")
def _partition_without_leader(planting: Planting) -> Options:
    planting.cluster.move_leader("orders", 1, NO_LEADER)
    return planting.options()


@plants("too-few-replicas-in-sync")
def _too_few_replicas_in_sync(planting: Planting) -> Options:
    planting.orders.configs["min.insync.replicas"] = "2"
    planting.orders.partitions[0].replica_ids = [0]
    return planting.options()


@plants("topic-takes-smaller-records")
def _topic_takes_smaller_records(planting: Planting) -> Options:
    planting.orders.configs["max.message.bytes"] = "1000"
    return planting.options()


@plants("topic-compresses-again")
def _topic_compresses_again(planting: Planting) -> Options:
    planting.orders.configs["compression.type"] = "gzip"
    return planting.options(kafka_compression_type="lz4")


@plants("topic-is-compacted")
def _topic_is_compacted(planting: Planting) -> Options:
    planting.orders.configs["cleanup.policy"] = "compact,delete"
    return planting.options()


@plants("message-format-too-old")
def _message_format_too_old(planting: Planting) -> Options:
    planting.orders.configs["message.format.version"] = "0.10.2-IV0"
    return planting.options()


@plants("describe-denied")
def _describe_denied(planting: Planting) -> Options:
    planting.cluster.on(ApiKey.METADATA, faults.refuse_topic("orders", 29), times=None)
    return planting.options()


@plants("write-denied")
def _write_denied(planting: Planting) -> Options:
    planting.orders.operations = DESCRIBE
    return planting.options()


@plants("read-denied")
def _read_denied(planting: Planting) -> Options:
    planting.cluster.topics[DECISIONS].operations = WRITE | DESCRIBE | DESCRIBE_CONFIGS
    return planting.exactly_once()


@plants("create-denied")
def _create_denied(planting: Planting) -> Options:
    planting.cluster.delete_topic("orders")
    planting.fail(ApiKey.CREATE_TOPICS, 29)
    return planting.options(topic_create="if-missing")


@plants("create-refused")
def _create_refused(planting: Planting) -> Options:
    planting.cluster.delete_topic("orders")
    return planting.options(topic_create="if-missing", topic_replication_factor="5")


@plants("idempotent-write-denied")
def _idempotent_write_denied(planting: Planting) -> Options:
    planting.fail(ApiKey.INIT_PRODUCER_ID, 31)
    return planting.options()


@plants("transactional-id-denied")
def _transactional_id_denied(planting: Planting) -> Options:
    planting.fail(ApiKey.INIT_PRODUCER_ID, 53)
    return planting.exactly_once()


@plants("group-denied")
def _group_denied(planting: Planting) -> Options:
    planting.fail(ApiKey.OFFSET_FETCH, 30)
    return planting.exactly_once()


@plants("transaction-timeout-too-long")
def _transaction_timeout_too_long(planting: Planting) -> Options:
    planting.fail(ApiKey.INIT_PRODUCER_ID, 50)
    return planting.exactly_once()


@plants("coordinator-unavailable")
def _coordinator_unavailable(planting: Planting) -> Options:
    planting.limit_ms = SHORT_MS
    planting.fail(ApiKey.FIND_COORDINATOR, 15)
    return planting.exactly_once()


@plants("decision-topic-missing")
def _decision_topic_missing(planting: Planting) -> Options:
    planting.cluster.delete_topic(DECISIONS)
    return planting.exactly_once()


@plants("decision-topic-lost")
def _decision_topic_lost(planting: Planting) -> Options:
    planting.cluster.delete_topic(DECISIONS)
    planting.cluster.transactions.init_producer_id(driver_id(PREFIX), 60_000, (-1, -1), 0)
    return planting.exactly_once()


@plants("decision-topic-not-compacted")
def _decision_topic_not_compacted(planting: Planting) -> Options:
    planting.cluster.topics[DECISIONS].configs["cleanup.policy"] = "delete"
    return planting.exactly_once()


@plants("decision-topic-with-one-replica")
def _decision_topic_with_one_replica(planting: Planting) -> Options:
    for partition in planting.cluster.topics[DECISIONS].partitions:
        partition.replica_ids = [partition.leader_id]
    return planting.exactly_once()


@plants("decision-topic-with-unclean-elections")
def _decision_topic_with_unclean_elections(planting: Planting) -> Options:
    planting.cluster.topics[DECISIONS].configs["unclean.leader.election.enable"] = "true"
    return planting.exactly_once()


@plants("open-transaction-unknown")
def _open_transaction_unknown(planting: Planting) -> Options:
    def stay_before_the_end(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
        answer = proceed()
        assert answer.values is not None
        for topic in answer.values["topics"]:
            for partition in topic["partitions"]:
                partition["offset"] = 5 if exchange.request.isolation_level == READ_COMMITTED else 7
        return answer

    planting.cluster.on(ApiKey.LIST_OFFSETS, stay_before_the_end, times=None)
    return planting.exactly_once()


@plants("clock-differs")
def _clock_differs(planting: Planting) -> Options:
    planting.cluster.quorum_ahead_ms = -300_000
    return planting.options()


@plants("clock-differs-much")
def _clock_differs_much(planting: Planting) -> Options:
    planting.cluster.quorum_ahead_ms = -7_200_000
    return planting.options()


@plants("registry-unreachable")
def _registry_unreachable(planting: Planting) -> Options:
    return planting.options(**formats(f"http://127.0.0.1:{free_port()}"))


@plants("registry-certificate")
def _registry_certificate(planting: Planting) -> Options:
    return planting.registry(SchemaRegistryServer(tls_folder=planting.folder))


@plants("registry-login-refused")
def _registry_login_refused(planting: Planting) -> Options:
    return planting.registry(SchemaRegistryServer(Registry(login=f"alice:{OTHER_CANARY}")))


@plants("registry-denied")
def _registry_denied(planting: Planting) -> Options:
    server = SchemaRegistryServer()
    server.every = answering(403, {"error_code": 40301, "message": "User is denied operation Read"})
    return planting.registry(server)


@plants("registry-not-there")
def _registry_not_there(planting: Planting) -> Options:
    options = planting.registry(SchemaRegistryServer(path="/apis/ccompat/v7"))
    return {**options, "schema.registry.url": options["schema.registry.url"].removesuffix("/apis/ccompat/v7")}


@plants("registry-busy")
def _registry_busy(planting: Planting) -> Options:
    server = SchemaRegistryServer()
    server.every = answering(500, {"error_code": 50001, "message": "Error in the backend data store"})
    return planting.registry(server)


@plants("registry-client-missing")
def _registry_client_missing(planting: Planting) -> Options:
    options = planting.options(**formats(f"https://127.0.0.1:{free_port()}"))
    return {**options, "schema.registry.ssl.ca.location": str(planting.folder / "missing.pem")}


@plants("schema-unusable")
def _schema_unusable(planting: Planting) -> Options:
    return planting.registry(SchemaRegistryServer(), schema_registry_auto_register_schemas="false")


@plants("schema-incompatible")
def _schema_incompatible(planting: Planting) -> Options:
    registry = Registry()
    registry.put("orders-value", json.dumps({**SCHEMA, "fields": []}))
    return planting.registry(SchemaRegistryServer(registry))


# ---- tests ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saying(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Serve connections one after the other: read once, send the answer, close. Yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(5)
                        connection.sendall(answer(connection.recv(4096)))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        is_over.set()
        thread.join(10)


@pytest.fixture
def planting(tmp_path: Path) -> Iterator[Planting]:
    with contextlib.ExitStack() as stack:
        yield Planting(stack, tmp_path)


def examine(planting: Planting, options: Options) -> list[Finding]:
    return Examination(options, lambda _: "", planting.limit_ms, SystemClock(), Random(1)).run()


def problems(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings if each.name}


def test_each_name_of_this_level_is_planted() -> None:
    assert set(PLANTS) == set(LOOPBACK)


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault_is_found_by_its_name_and_no_other(name: str, planting: Planting) -> None:
    options = PLANTS[name](planting)
    findings = examine(planting, options)
    assert set(problems(findings)) == {name}, findings
    found = problems(findings)[name]
    assert found.seen
    assert "{" not in found.change
    text = "".join(f"{each.what} {each.seen} {each.change}\n" for each in findings)
    assert CANARY not in text
    assert OTHER_CANARY not in text


@pytest.mark.parametrize("guarantee", ["at least once", "exactly once"])
def test_healthy_cluster_has_no_problem(guarantee: str, planting: Planting) -> None:
    options = planting.options() if guarantee == "at least once" else planting.exactly_once()
    findings = examine(planting, options)
    assert problems(findings) == {}
    assert [each for each in findings if each.status is Status.NOT_CHECKED] == []
    seen = {each.area for each in findings}
    wanted = {Area.OPTIONS, Area.BROKERS, Area.TOPICS, Area.PERMISSIONS, Area.CLOCK}
    assert seen == (wanted if guarantee == "at least once" else wanted | {Area.EXACTLY_ONCE})


def test_doctor_writes_no_record_creates_no_topic_and_touches_no_id_of_the_query(planting: Planting) -> None:
    planting.cluster.delete_topic("orders")
    planting.cluster.broker_configs["auto.create.topics.enable"] = "true"
    planting.cluster.auto_create_topics = True
    examine(planting, planting.exactly_once())
    assert planting.cluster.requests_of(ApiKey.PRODUCE) == []
    assert set(planting.cluster.topics) == {DECISIONS}
    assert set(planting.cluster.transactions.transactions) == {f"{PREFIX}/doctor"}


def test_missing_topic_that_the_sink_creates_is_only_asked_for(planting: Planting) -> None:
    planting.cluster.delete_topic("orders")
    findings = examine(planting, planting.options(topic_create="if-missing"))
    assert problems(findings) == {}
    assert [each.request.validate_only for each in planting.cluster.requests_of(ApiKey.CREATE_TOPICS)] == [True]
    assert "orders" not in planting.cluster.topics


def test_broker_that_names_nodes_twice_is_examined_all_the_same(planting: Planting) -> None:
    twice = faults.change(lambda values: {**values, "brokers": [*values["brokers"], *values["brokers"]]})
    planting.cluster.on(ApiKey.METADATA, twice, times=None)
    findings = examine(planting, planting.options())
    assert problems(findings) == {}
    assert len([each for each in findings if each.area is Area.BROKERS]) == 3


def test_frozen_broker_does_not_keep_the_doctor(planting: Planting) -> None:
    """Its port accepts connections, and nothing answers."""
    planting.limit_ms = SHORT_MS
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began_s = time.monotonic()
        options = {"kafka.bootstrap.servers": f"127.0.0.1:{listener.getsockname()[1]}", "topic": "orders"}
        findings = examine(planting, options)
        took_s = time.monotonic() - began_s
    assert set(problems(findings)) == {"port-not-kafka"}
    assert took_s < 20


def test_command_has_exit_codes_and_json(planting: Planting, caplog: pytest.LogCaptureFixture) -> None:
    if problems(installation.judge(installation.gather())):
        pytest.skip("this machine has a fault of its own")
    servers = planting.options()["kafka.bootstrap.servers"]
    out = io.StringIO()
    given = ["--option", f"kafka.bootstrap.servers={servers}", "--option", "topic=orders"]
    assert main([*given, "--json"], out) == 0
    assert {each["status"] for each in json.loads(out.getvalue())["findings"]} == {"ok"}
    out = io.StringIO()
    assert main([*given, "--option", "topic=missing", "--json"], out) == 1
    names = [each["name"] for each in json.loads(out.getvalue())["findings"]]
    assert "topic-missing" in names
    assert caplog.records == []


def test_open_transactions_are_judged_by_the_clock_of_the_brokers(
    planting: Planting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: on a machine whose clock was minutes ahead, each open transaction hung, with the advice to abort it."""
    judged_at: list[int] = []

    def judge(_: object, now_ms: int) -> list[Finding]:
        judged_at.append(now_ms)
        return []

    monkeypatch.setattr(transactions, "judge", judge)
    planting.cluster.quorum_ahead_ms = -300_000
    examine(planting, planting.exactly_once())
    (now_ms,) = judged_at
    assert 290_000 < SystemClock().wall_ms() - now_ms < 350_000
