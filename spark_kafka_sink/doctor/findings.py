"""What the doctor says: findings, and the table of all problems by name, with what to change. Plain values; no I/O.

The names and their texts are public: scripts compare the names, and docs/doctor.md has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple


class Status(Enum):
    """The value is that of the JSON."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    NOT_CHECKED = "not checked"


class Area(Enum):
    """A heading of the table, in its order."""

    MACHINE = "This machine"
    OPTIONS = "Options"
    BROKERS = "Brokers"
    TOPICS = "Topics"
    PERMISSIONS = "Permissions"
    EXACTLY_ONCE = "Exactly once"
    CLOCK = "Clock"
    REGISTRY = "Schema registry"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `what` was looked at, `seen` was found. A problem has a `name` of PROBLEMS, and `change`
    says what to do.
    """

    area: Area
    status: Status
    what: str
    seen: str
    name: str = ""
    change: str = ""


class Problem(NamedTuple):
    status: Status
    meaning: str
    change: str
    """With the names of values in braces."""


def ok(area: Area, what: str, seen: str) -> Finding:
    return Finding(area, Status.OK, what, seen)


def not_checked(area: Area, what: str, why: str) -> Finding:
    return Finding(area, Status.NOT_CHECKED, what, why)


def problem(name: str, area: Area, what: str, seen: str, **values: object) -> Finding:
    """Return the finding of a problem. `values` fill the braces of its text in PROBLEMS."""
    found = PROBLEMS[name]
    return Finding(area, found.status, what, seen, name, found.change.format(**values))


def has_fault(findings: Iterable[Finding]) -> bool:
    return any(each.status is Status.FAULT for each in findings)


def in_capitals(text: str) -> str:
    """Return a text of PROBLEMS with its braces as words in capitals, as the page shows them."""
    apart = re.sub(r"(?<=\w)(?=\{)", " ", text)  # a value may begin with its own blank
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), apart)


_FAULT, _WARNING = Status.FAULT, Status.WARNING
_ACLS: Final = "kafka-acls.sh --bootstrap-server HOST:PORT --add --allow-principal User:NAME --operation"
_CONFIGS: Final = "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name {topic}"

PROBLEMS: Final[dict[str, Problem]] = {
    # ---- this machine
    "package-missing": Problem(
        _FAULT,
        "A required Python package is not installed, or does not load.",
        "Run {python} -m pip install '{package}'. If it is installed, its error says what it needs: install that, or an"
        " older version.",
    ),
    "package-too-old": Problem(
        _FAULT,
        "A package has a version that this one does not work with.",
        "Run {python} -m pip install '{package}'. On a cluster, ship that version to the executors, too.",
    ),
    "kernel-missing": Problem(
        _WARNING,
        "The compiled kernel is not there. Plain numpy does its work, several times slower.",
        "Install a wheel for this platform, or install from source with a C compiler (gcc) present. A zip of the"
        " package has no kernel: ship it as a packed environment instead. In a checkout run pip install -e . there,"
        " because Python takes the package from the folder that it runs in.",
    ),
    "kernel-does-not-load": Problem(
        _WARNING,
        "The kernel was compiled for another machine or Python.",
        "Install spark-kafka-sink again on a machine like this one, so that the kernel is compiled for it.",
    ),
    "pyspark-missing": Problem(
        _FAULT,
        "This Python has no PySpark that works, or one before 3.5.",
        "Run the doctor with the Python of your Spark (PYSPARK_PYTHON), or install a PySpark: {python} -m pip install"
        " 'spark-kafka-sink[spark]'. Only KafkaProducer works without it.",
    ),
    "pyspark-without-format": Problem(
        _WARNING,
        "PySpark 3.5 has no data sources in Python.",
        'Use foreachBatch(sink.write_batch) and sink.write(df), or PySpark 4.0 for format("kafka_sink").',
    ),
    "pandas-missing": Problem(
        _WARNING,
        "PySpark needs pandas on the driver for KafkaSink.write and write_batch.",
        "Run {python} -m pip install '{package}', or write by format(\"kafka_sink\").",
    ),
    "java-missing": Problem(
        _FAULT,
        "No Java was found, and Spark needs one. Only Spark Connect works without it.",
        "Install Java 17, which every Spark from 3.5 on takes, or set JAVA_HOME to the folder of one.",
    ),
    "java-too-old": Problem(_FAULT, "Spark 4 needs Java 17.", "Install Java 17, and set JAVA_HOME to its folder."),
    "java-too-new": Problem(
        _FAULT,
        "Spark before 4.2 does not start with Java 23 or newer.",
        "Install Java 17, and set JAVA_HOME to its folder. Or use PySpark 4.2 or newer.",
    ),
    # ---- options
    "option-wrong": Problem(
        _FAULT,
        "An option is unknown or misspelt, has a value that cannot be used, or contradicts another one.",
        "Correct this option{place}.",
    ),
    # ---- brokers
    "host-unresolved": Problem(
        _FAULT,
        "DNS knows no address of the host.",
        "Correct {source}, or let this machine's DNS (or /etc/hosts) know {host}.",
    ),
    "connection-refused": Problem(
        _FAULT,
        "The host answers, and nothing listens at the port; or no network leads there.",
        "Correct host and port in {source}. Is the broker running, and does it listen on this interface (listeners)?",
    ),
    "connection-timeout": Problem(
        _FAULT,
        "Nothing answers in time: a firewall, a wrong address, or a broker that hangs.",
        "Open the port from this machine to {host} in firewalls and security groups, or correct {source}.",
    ),
    "port-speaks-tls": Problem(
        _FAULT,
        "The listener speaks TLS, and security.protocol asks for none.",
        "Set kafka.security.protocol=SSL (with a login: SASL_SSL), or use the port of a listener without TLS.",
    ),
    "port-speaks-plaintext": Problem(
        _FAULT,
        "security.protocol asks for TLS, and the listener speaks Kafka without it.",
        "Use the port of the SSL or SASL_SSL listener. Or, if no TLS is intended, set"
        " kafka.security.protocol=PLAINTEXT (with a login: SASL_PLAINTEXT).",
    ),
    "port-speaks-http": Problem(
        _FAULT,
        "An HTTP server is at the port: a registry, a REST proxy, Kafka Connect, or a console.",
        "Name a broker's Kafka port in kafka.bootstrap.servers, often 9092. The address of a registry belongs into"
        " schema.registry.url.",
    ),
    "port-speaks-zookeeper": Problem(
        _FAULT,
        "ZooKeeper is at the port.",
        "Name a broker's port in kafka.bootstrap.servers, often 9092, not ZooKeeper's (2181).",
    ),
    "port-not-kafka": Problem(
        _FAULT,
        "What is at the port does not answer as Kafka does.",
        "Correct {source}. A controller's listener, and one for traffic between brokers, serve no clients.",
    ),
    "tls-files-wrong": Problem(
        _FAULT,
        "A file or text of ssl.* cannot be used: it is missing, of another type, or its password is wrong.",
        "Correct the named setting. The file must be on every machine that connects: on the driver and each executor.",
    ),
    "certificate-expired": Problem(
        _FAULT,
        "The broker's certificate, or that of an authority above it, has expired.",
        "Renew the broker's certificate. If the dates look right, correct this machine's clock.",
    ),
    "certificate-not-yet-valid": Problem(
        _FAULT,
        "The broker's certificate is valid only from a later time on.",
        "Correct this machine's clock, or have the certificate issued again.",
    ),
    "certificate-expires-soon": Problem(
        _WARNING,
        "The broker's certificate expires within 14 days.",
        "Renew the broker's certificate before that day.",
    ),
    "certificate-of-unknown-authority": Problem(
        _FAULT,
        "No authority that this client trusts has signed the broker's certificate.",
        "Put the certificate of the authority {issuer} into kafka.ssl.truststore.location (PEM or PKCS12) or"
        " kafka.ssl.truststore.certificates. Without these settings the system's authorities are trusted.",
    ),
    "certificate-for-another-host": Problem(
        _FAULT,
        "The broker's certificate does not have the host name by which it was reached.",
        "Use a name of the certificate in {source}, or have it issued again with {host} among its alternative names.",
    ),
    "client-certificate-refused": Problem(
        _FAULT,
        "The broker asks for a client certificate. None is set, or the broker does not trust its authority.",
        "Set kafka.ssl.keystore.location (PEM or PKCS12) to a certificate and key of an authority in the broker's"
        " truststore.",
    ),
    "tls-versions-differ": Problem(
        _FAULT,
        "Client and broker have no TLS version or cipher suite in common.",
        "Leave out kafka.ssl.enabled.protocols and kafka.ssl.cipher.suites, and allow TLS 1.2 or 1.3 at the broker.",
    ),
    "tls-failed": Problem(
        _FAULT,
        "The TLS handshake failed for another reason, which the text names.",
        "If the broker wants client certificates, set kafka.ssl.keystore.location. Else look into the broker's log.",
    ),
    "login-settings-wrong": Problem(
        _FAULT,
        "The settings of the login cannot be used on this machine: a package or a function is missing.",
        "Follow the text, on the driver and on each executor.",
    ),
    "login-refused": Problem(
        _FAULT,
        "The broker refuses user and password, token or ticket.",
        "Correct user and password in kafka.sasl.jaas.config (or the token's settings). Users of SCRAM belong to one"
        " mechanism: SCRAM-SHA-256 and SCRAM-SHA-512 have their own passwords.",
    ),
    "mechanism-not-offered": Problem(
        _FAULT,
        "The listener does not offer this sasl.mechanism.",
        "Set kafka.sasl.mechanism to one that the listener offers, with its own login in kafka.sasl.jaas.config.",
    ),
    "login-not-offered": Problem(
        _FAULT,
        "security.protocol asks for a login by SASL, and the listener has none.",
        "Use the port of the SASL listener, or set kafka.security.protocol={without_login} and leave out kafka.sasl.*.",
    ),
    "login-required": Problem(
        _FAULT,
        "The listener requires a login by SASL, and security.protocol asks for none.",
        "Set kafka.security.protocol={with_login}, kafka.sasl.mechanism and kafka.sasl.jaas.config, or use the port"
        " of a listener without login.",
    ),
    "login-failed": Problem(
        _FAULT,
        "The login did not end: no token or ticket came, or the broker was too slow.",
        "Check the token endpoint or the Kerberos server of kafka.sasl.*, and from here the way to it.",
    ),
    "listener-unreachable": Problem(
        _FAULT,
        "A broker gives its clients an address (advertised.listeners) that does not work from this machine.",
        "Let the broker advertise an address that this machine reaches: advertised.listeners of node {node}, for the"
        " listener that bootstrap.servers names. In containers it is often localhost or an inner name.",
    ),
    "some-servers-unreachable": Problem(
        _WARNING,
        "A server of bootstrap.servers is not reached, and another one is.",
        "Correct or remove {server} in kafka.bootstrap.servers: while the others are down, no query could start.",
    ),
    "brokers-too-old": Problem(
        _FAULT,
        "The broker is older than what the options need.",
        "Upgrade the brokers to Kafka {release} or newer, or leave out {option}.",
    ),
    # ---- topics
    "topic-name-invalid": Problem(
        _FAULT,
        "The brokers refuse this name of a topic.",
        "Use another name. Some services allow fewer names than Kafka does: letters, digits and hyphens are safe.",
    ),
    "topic-missing": Problem(
        _FAULT,
        "The topic does not exist, and the brokers do not create it.",
        "Correct {option}; or create the topic: kafka-topics.sh --bootstrap-server HOST:PORT --create --topic {topic}."
        " The sink itself creates only the topic of the option topic: topic.create=if-missing.",
    ),
    "topic-would-be-created": Problem(
        _WARNING,
        "The topic does not exist, and the brokers create it at the first record, with their defaults.",
        "If {topic} is misspelt, correct {option}. Else create it before, with the partitions that you want.",
    ),
    "partition-without-leader": Problem(
        _FAULT,
        "A partition has no leader: all its replicas are down, or not in sync.",
        "Start the brokers of its replicas again.",
    ),
    "too-few-replicas-in-sync": Problem(
        _FAULT,
        "Fewer replicas are in sync than min.insync.replicas, so writes with acks=all are refused.",
        "Start the brokers that are down. If the topic has too few replicas, add some, or lower the setting: "
        + _CONFIGS
        + " --add-config min.insync.replicas=1",
    ),
    "topic-takes-smaller-records": Problem(
        _WARNING,
        "The topic takes smaller records than max.request.size lets out.",
        "Large records fail at the broker. Raise the topic's limit: "
        + _CONFIGS
        + " --add-config max.message.bytes={bytes}; or lower kafka.max.request.size.",
    ),
    "topic-compresses-again": Problem(
        _WARNING,
        "The topic's compression.type differs from the sink's, so the brokers compress each batch again.",
        "Set kafka.compression.type={codec}, or the topic's compression.type=producer.",
    ),
    "topic-is-compacted": Problem(
        _WARNING,
        "The topic keeps only the last record of each key, and refuses records without a key.",
        "Give each row a key, or change the topic: " + _CONFIGS + " --add-config cleanup.policy=delete",
    ),
    "message-format-too-old": Problem(
        _FAULT,
        "The topic's message.format.version is from before Kafka 0.11, without headers and idempotence.",
        "Raise it: " + _CONFIGS + " --add-config message.format.version=2.8",
    ),
    "describe-denied": Problem(
        _FAULT,
        "This user may not see the topic, or it does not exist: brokers answer the same.",
        f"Grant what the sink needs, which includes DESCRIBE: {_ACLS} {{operations}} --topic {{topic}}",
    ),
    "write-denied": Problem(_FAULT, "This user may not write into the topic.", f"{_ACLS} Write --topic {{topic}}"),
    "read-denied": Problem(_FAULT, "This user may not read the decision topic.", f"{_ACLS} Read --topic {{topic}}"),
    "create-denied": Problem(
        _FAULT,
        "The topic is missing, is to be created, and this user may not create topics.",
        f"Create {{topic}} by hand, or: {_ACLS} Create --topic {{topic}}",
    ),
    "create-refused": Problem(
        _FAULT,
        "The topic is missing, and the brokers would not create it as the sink asks for it.",
        "Follow the text: a policy of the cluster, more replicas than brokers, or a setting that is not valid. Or"
        " create the topic by hand.",
    ),
    "idempotent-write-denied": Problem(
        _FAULT,
        "The broker gives this user no producer id.",
        f"Grant WRITE on a topic; brokers before 2.8 need: {_ACLS} IdempotentWrite --cluster. Or set"
        " kafka.enable.idempotence=false, and accept that retries may write records twice.",
    ),
    # ---- exactly once
    "transactional-id-denied": Problem(
        _FAULT,
        "This user may not use the transactional ids of the prefix.",
        f"{_ACLS} Write --transactional-id {{prefix}} --resource-pattern-type prefixed",
    ),
    "group-denied": Problem(
        _FAULT,
        "This user may not use the groups of the prefix, in which each batch leaves a marker.",
        f"{_ACLS} Read --group {{prefix}} --resource-pattern-type prefixed",
    ),
    "transaction-timeout-too-long": Problem(
        _FAULT,
        "The brokers allow a shorter transaction.timeout.ms only (transaction.max.timeout.ms).",
        "Lower kafka.transaction.timeout.ms (it is {wanted}), or raise transaction.max.timeout.ms of all brokers. A"
        " restart must come within this time.",
    ),
    "coordinator-unavailable": Problem(
        _FAULT,
        "No broker coordinates transactions or groups: their internal topic cannot be created or led.",
        "Look at __transaction_state and __consumer_offsets. On a small cluster set"
        " transaction.state.log.replication.factor, transaction.state.log.min.isr and"
        " offsets.topic.replication.factor to at most the number of brokers ({brokers}).",
    ),
    "decision-topic-missing": Problem(
        _WARNING,
        "The decision topic does not exist yet. The first batch creates it.",
        "Nothing, if the query is new and this user may create it. For a query that ran before, correct"
        " decision.topic.",
    ),
    "decision-topic-lost": Problem(
        _FAULT,
        "The prefix was used before, and the topic with its decisions is missing.",
        "Correct decision.topic, or restore {topic} with the last decision. If it is lost, see docs/exactly-once.md on"
        " adopt.",
    ),
    "decision-topic-not-compacted": Problem(
        _FAULT,
        "Kafka deletes decisions after some time, and a batch may then be written twice.",
        _CONFIGS + " --add-config cleanup.policy=compact",
    ),
    "decision-topic-with-one-replica": Problem(
        _WARNING,
        "If one disk is lost, so are the decisions.",
        "Add replicas to {topic}: kafka-reassign-partitions.sh --bootstrap-server HOST:PORT"
        " --reassignment-json-file FILE --execute",
    ),
    "decision-topic-with-unclean-elections": Problem(
        _WARNING,
        "After the loss of brokers a replica without the last decisions may lead.",
        _CONFIGS + " --add-config unclean.leader.election.enable=false",
    ),
    "transaction-hangs": Problem(
        _FAULT,
        "A transaction is open for longer than its timeout. Readers wait behind it.",
        "See python -m spark_kafka_sink.transactions list. One that its coordinator does not end:"
        " kafka-transactions.sh --bootstrap-server HOST:PORT find-hanging --topic {topic}, then its abort.",
    ),
    "open-transaction-unknown": Problem(
        _WARNING,
        "Readers wait for a transaction that no coordinator shows to this user: it hangs, or this user may not"
        " describe it.",
        "Grant DESCRIBE on the transactional ids that write here, and run the doctor again. If none is shown then, run"
        " the exactly-once queries and writes of this topic again: they write end markers that Kafka 4.3 leaves out"
        " (KAFKA-20734). If readers still wait: kafka-transactions.sh --bootstrap-server HOST:PORT"
        " find-hanging --topic {topic}, then its abort. It aborts the rows also if they were committed.",
    ),
    # ---- clock
    "clock-differs": Problem(
        _WARNING,
        "This machine's time differs from the brokers' by more than 30 seconds.",
        "Synchronise the clocks by NTP. Timestamps of records and the validity of certificates depend on them.",
    ),
    "clock-differs-much": Problem(
        _FAULT,
        "This machine's time is more than an hour ahead of the brokers'. They refuse records from the future"
        " (message.timestamp.after.max.ms).",
        "Synchronise the clocks of this machine and of the brokers by NTP.",
    ),
    # ---- registry
    "registry-client-missing": Problem(
        _FAULT,
        "The package that talks to the registry is missing, or files of schema.registry.ssl.* cannot be used.",
        "Follow the text. The package: {python} -m pip install 'spark-kafka-sink[registry]'.",
    ),
    "registry-unreachable": Problem(
        _FAULT,
        "Nothing answers at the registry's address.",
        "Correct schema.registry.url, and open the way from this machine to it (schema.registry.proxy).",
    ),
    "registry-certificate": Problem(
        _FAULT,
        "The registry's certificate is not trusted.",
        "Name the authority that signed it by schema.registry.ssl.ca.location, a PEM file.",
    ),
    "registry-login-refused": Problem(
        _FAULT,
        "The registry refuses user and password, or the token.",
        "Correct schema.registry.basic.auth.user.info (user:password) or schema.registry.bearer.auth.*.",
    ),
    "registry-denied": Problem(
        _FAULT,
        "This user may not read the subject.",
        "Grant this user read and write on the subject, at the registry.",
    ),
    "registry-not-there": Problem(
        _FAULT,
        "A server answers, and it is not a schema registry; or its path is missing.",
        "Correct schema.registry.url. Some registries have a path, such as /apis/ccompat/v7 of Apicurio.",
    ),
    "registry-busy": Problem(
        _FAULT,
        "The registry answers with an error of its own.",
        "Look into the registry's log, and try again.",
    ),
    "schema-unusable": Problem(
        _FAULT,
        "The registry does not have the schema that must be there already, or this sink cannot write by it.",
        "Follow the text. Register the schema first, or leave out schema.registry.auto.register.schemas=false,"
        " schema.registry.use.latest.version and schema.registry.use.schema.id.",
    ),
    "schema-incompatible": Problem(
        _FAULT,
        "The given schema does not fit the subject's earlier versions.",
        "Change {option} (a new field needs a default), or the compatibility of the subject.",
    ),
}
"""Name → what it means and what to change."""
