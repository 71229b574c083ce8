"""The rows that Spark's own Kafka sink and this one both write, and those that both refuse, in two tables.

A case is a query over the view `rows`, which has the numbers from 0 on in the column `id`, and options. In both,
"{topic}" stands for a topic made for the case, "{second}" and "{third}" for two more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TO_THE_TOPIC = {"topic": "{topic}"}
KEYED = "SELECT CAST(id % 20 AS STRING) AS key, CAST(id AS STRING) AS value FROM rows"
UNKEYED = "SELECT CAST(id AS STRING) AS value FROM rows"


@dataclass(frozen=True)
class Case:
    """Rows that both sinks write."""

    name: str
    query: str
    options: Mapping[str, str] = field(default_factory=TO_THE_TOPIC.copy)
    rows: int = 100
    tasks: int = 1
    """With one task a partition has the order of the rows. With more the order is open, and not compared."""
    partitions: int = 4
    topic_config: Mapping[str, str | int] = field(default_factory=dict)
    is_placed: bool = True
    """Whether a row determines its partition, by key or partition column. Both sinks send other rows where their
    batches need them, so neither their partitions nor their order over several partitions are compared.
    """
    streams: bool = False
    """Also written by a stream."""
    by_format: bool = True
    """False if Spark cannot give a Python data source such rows."""

    @property
    def is_about_columns(self) -> bool:
        return not any(key.startswith("kafka.") for key in self.options)


CASES = (
    Case("strings", KEYED, streams=True),
    Case(
        "binary", "SELECT unhex(lpad(hex(id), 4, '0')) AS key, unhex(sha2(CAST(id AS STRING), 256)) AS value FROM rows"
    ),
    Case("a string key, a binary value", "SELECT CAST(id AS STRING) AS key, encode('v', 'utf-8') AS value FROM rows"),
    Case(
        "some keys null", "SELECT if(id % 3 = 0, null, 'k') AS key, CAST(id AS STRING) AS value FROM rows", partitions=1
    ),
    Case("every key null", "SELECT CAST(null AS STRING) AS key, CAST(id AS STRING) AS value FROM rows", partitions=1),
    Case("tombstones", "SELECT CAST(id AS STRING) AS key, if(id % 2 = 0, null, 'v') AS value FROM rows", streams=True),
    Case("every value null", "SELECT CAST(id AS STRING) AS key, CAST(null AS BINARY) AS value FROM rows"),
    Case("empty strings", "SELECT if(id % 2 = 0, '', 'k') AS key, if(id % 3 = 0, '', 'v') AS value FROM rows"),
    Case("empty binary", "SELECT if(id % 2 = 0, X'', X'00') AS key, if(id % 3 = 0, X'', X'00FF') AS value FROM rows"),
    Case(
        "unicode",
        "SELECT concat('ключ 🜁 ', id) AS key, concat('Ä\\u0000e\\u0301 مرحبا 𝄞', char(id), '\\n') AS value FROM rows",
        rows=300,
    ),
    Case("no key, one partition", UNKEYED, partitions=1, streams=True),
    Case("no key, many partitions", UNKEYED, rows=5_000, partitions=8, tasks=2, is_placed=False),
    Case(
        "the topic option wins over the column, and is trimmed",
        "SELECT CAST(id AS STRING) AS key, 'v' AS value, '{second}' AS topic FROM rows",
        {"topic": "  {topic}\t"},
    ),
    Case(
        "the topic option wins over a null in the column",
        "SELECT CAST(id AS STRING) AS key, 'v' AS value, CAST(null AS STRING) AS topic FROM rows",
    ),
    Case(
        "a topic column",
        "SELECT CAST(id AS STRING) AS key, CAST(id AS STRING) AS value,"
        " element_at(array('{topic}', '{second}', '{third}'), CAST(id % 7 % 3 + 1 AS INT)) AS topic FROM rows",
        {},
        rows=300,
        streams=True,
    ),
    Case("a partition column", "SELECT CAST(id % 4 AS INT) AS partition, CAST(id AS STRING) AS value FROM rows"),
    Case(
        "a partition wins over the key, null leaves it to the key",
        "SELECT if(id % 3 = 0, null, CAST(id % 4 AS INT)) AS partition, CAST(id AS STRING) AS key, 'v' AS value"
        " FROM rows",
        streams=True,
    ),
    Case(
        "partitions, keys and neither",
        "SELECT if(id % 3 = 0, null, CAST(id % 4 AS INT)) AS partition, if(id % 2 = 0, null, CAST(id AS STRING)) "
        " AS key, CAST(id AS STRING) AS value FROM rows",
        is_placed=False,
    ),
    Case(
        "headers of every kind",
        "SELECT CAST(id AS STRING) AS key, CAST(id AS STRING) AS value, CASE id % 5"
        " WHEN 0 THEN null WHEN 1 THEN array()"
        " WHEN 2 THEN array(struct('a' AS key, encode(CAST(id AS STRING), 'utf-8') AS value))"
        " WHEN 3 THEN array(struct('twice' AS key, X'01' AS value), struct('twice' AS key, X'02' AS value),"
        " struct('twice' AS key, X'01' AS value))"
        " ELSE array(struct('ü' AS key, CAST(null AS BINARY) AS value), struct('' AS key, X'' AS value)) END AS headers"
        " FROM rows",
        streams=True,
    ),
    Case(
        "headers that are all null",
        "SELECT CAST(id AS STRING) AS key, 'v' AS value,"
        " CAST(null AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS headers FROM rows",
    ),
    Case(
        "the fields of headers in capitals",
        "SELECT CAST(id AS STRING) AS key, 'v' AS value, array(struct('h' AS KEY, X'01' AS Value)) AS headers"
        " FROM rows",
    ),
    Case(
        "other columns are ignored",
        "SELECT id, CAST(id AS STRING) AS key, map('a', 1) AS m, CAST(id AS STRING) AS value, null AS nothing,"
        " struct(id, 'x') AS s, 1.5BD AS `a.b``c`, current_date() AS offset FROM rows",
        streams=True,
    ),
    Case(
        "columns of the same names in capitals are others",
        "SELECT 'wrong' AS Value, 'wrong' AS KEY, 'wrong' AS Topic, CAST(id AS STRING) AS value, id AS Partition,"
        " 1 AS Headers FROM rows",
        partitions=1,
    ),
    Case(
        "of columns with one name the first counts",
        "SELECT CAST(id AS STRING) AS key, 'first' AS value, 'second' AS value, 'other key' AS key FROM rows",
        by_format=False,
    ),
    Case("large values", "SELECT CAST(id AS STRING) AS key, repeat('x', 300000 + 6000 * id) AS value FROM rows"),
    Case(
        "10,000 keys over 50 partitions",
        "SELECT concat('customer-', id) AS key, '' AS value FROM rows",
        rows=10_000,
        partitions=50,
    ),
    Case(
        "keys of every length, high bytes too",
        "SELECT unhex(substr(repeat(sha2(CAST(id AS STRING), 512), 2), 1, 2 * (id % 70))) AS key, CAST(id AS STRING) AS"
        " value FROM rows",
        rows=2_000,
        partitions=7,
    ),
    Case("no rows", KEYED, rows=0),
    Case("tasks without rows", "SELECT 'k' AS key, CAST(id AS STRING) AS value FROM rows WHERE id = 7", tasks=8),
    Case("several tasks", KEYED, rows=5_000, tasks=4, streams=True),
    Case("rows in the order that the query gives them", f"{KEYED} ORDER BY -id", tasks=3),
    Case(
        "an aggregate", "SELECT CAST(id % 10 AS STRING) AS key, CAST(count(*) AS STRING) AS value FROM rows GROUP BY 1"
    ),
    Case("JSON of a row", "SELECT CAST(id AS STRING) AS key, to_json(struct(*)) AS value FROM rows"),
    Case("char and varchar", "SELECT CAST(id AS CHAR(6)) AS key, CAST(id AS VARCHAR(9)) AS value FROM rows"),
    Case("options in capitals", KEYED, {"TOPIC": "{topic}", "KAFKA.Compression.Type": "gzip"}),
    *(
        Case(f"{codec} batches", KEYED, {**TO_THE_TOPIC, "kafka.compression.type": codec}, rows=2_000)
        for codec in ("none", "gzip", "snappy", "lz4", "zstd")
    ),
    Case("small batches", KEYED, {**TO_THE_TOPIC, "kafka.batch.size": "100"}, rows=2_000),
    Case("acks=1", KEYED, {**TO_THE_TOPIC, "kafka.acks": "1"}),
    Case("no idempotence", KEYED, {**TO_THE_TOPIC, "kafka.enable.idempotence": "false"}),
    Case("keys that do not count", KEYED, {**TO_THE_TOPIC, "kafka.partitioner.ignore.keys": "true"}, is_placed=False),
    Case("a topic with log-append times", KEYED, topic_config={"message.timestamp.type": "LogAppendTime"}),
)


@dataclass(frozen=True)
class Refusal:
    """Rows that neither sink writes."""

    name: str
    query: str
    words: str
    """The error of Spark's sink; the whole text if the sentence is Spark's own."""
    ours: str = ""
    """The error of this sink if Spark's is from the Java client; otherwise both are the same."""
    options: Mapping[str, str] = field(default_factory=TO_THE_TOPIC.copy)
    is_early: bool = True
    """Whether the driver refuses the write, in Spark with exactly `words`; otherwise a task fails."""
    by_rows: bool = True
    """Whether the row interfaces have the same error; false if rows no longer show the column's type in Spark."""

    @property
    def is_about_rows(self) -> bool:
        return not any(key.lower().endswith(".serializer") for key in self.options)


def _type_of(name: str, expression: str, words: str, *, by_rows: bool = True) -> Refusal:
    others = ", 'v' AS value" if name != "value" else ""
    options = {} if name == "topic" else TO_THE_TOPIC
    query = f"SELECT {expression} AS {name}{others} FROM rows"
    return Refusal(
        f"{name} of type {expression}",
        query,
        f"{name} attribute unsupported type {words}",
        options=options,
        by_rows=by_rows,
    )


REFUSALS = (
    Refusal("no value", "SELECT 'k' AS key FROM rows", "Required attribute 'value' not found"),
    Refusal("a value in capitals", "SELECT 'v' AS VALUE FROM rows", "Required attribute 'value' not found"),
    Refusal(
        "no topic",
        UNKEYED,
        "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic.",
        options={},
    ),
    Refusal(
        "neither topic nor value",
        "SELECT id FROM rows",
        "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic.",
        options={},
    ),
    _type_of("value", "id", "bigint. value must be a(n) string or binary", by_rows=False),
    _type_of("value", "1.5D", "double. value must be a(n) string or binary"),
    _type_of("value", "true", "boolean. value must be a(n) string or binary"),
    _type_of(
        "value",
        "struct(id, 'x' AS name)",
        "struct<id:bigint,name:string>. value must be a(n) string or binary",
        by_rows=False,
    ),
    _type_of("key", "CAST(id AS INT)", "int. key must be a(n) string or binary"),
    _type_of("key", "null", "void. key must be a(n) string or binary", by_rows=False),
    _type_of("topic", "1", "int. topic must be a(n) string"),
    _type_of("topic", "X'00'", "binary. topic must be a(n) string"),
    _type_of("partition", "'0'", "string. partition must be a(n) int"),
    _type_of("partition", "0L", "bigint. partition must be a(n) int", by_rows=False),
    _type_of("headers", "'h'", "string. headers must be a(n) array<struct<key:string,value:binary>>"),
    _type_of(
        "headers",
        "map('h', X'00')",
        "map<string,binary>. headers must be a(n) array<struct<key:string,value:binary>>",
        by_rows=False,
    ),
    _type_of(
        "headers",
        "array(struct('h' AS key, 'v' AS value))",
        "array<struct<key:string,value:string>>. headers must be a(n) array<struct<key:string,value:binary>>",
        by_rows=False,
    ),
    _type_of(
        "headers",
        "array(struct(X'00' AS value, 'h' AS key))",
        "array<struct<value:binary,key:string>>. headers must be a(n) array<struct<key:string,value:binary>>",
        by_rows=False,
    ),
    Refusal(
        "a serializer of keys",
        UNKEYED,
        "Kafka option 'key.serializer' is not supported as keys are serialized with ByteArraySerializer.",
        options={**TO_THE_TOPIC, "kafka.key.serializer": "org.apache.kafka.common.serialization.StringSerializer"},
    ),
    Refusal(
        "a serializer of values",
        UNKEYED,
        "Kafka option 'value.serializer' is not supported as value are serialized with ByteArraySerializer.",
        options={**TO_THE_TOPIC, "kafka.Value.Serializer": "org.apache.kafka.common.serialization.StringSerializer"},
    ),
    Refusal(
        "a null topic among others",
        "SELECT 'v' AS value, if(id = 50, null, '{topic}') AS topic FROM rows",
        "The Kafka message data sent to the producer contains a null topic."
        " Use the `topic` option for setting a default topic.",
        options={},
        is_early=False,
    ),
    Refusal(
        "a partition below 0",
        "SELECT CAST(-1 AS INT) AS partition, 'v' AS value FROM rows",
        "Invalid partition: -1. Partition number should always be non-negative or null.",
        "asks for partition -1; topic {topic} has 0 to 3",
        is_early=False,
    ),
    Refusal(
        "a partition too high",
        "SELECT 4 AS partition, 'v' AS value FROM rows",
        "Partition 4 of topic {topic} with partition count 4 is not present in metadata after 700 ms.",
        "Partition 4 of topic {topic} with 4 partitions is not in the metadata within max.block.ms=700: use 0 to 3",
        {**TO_THE_TOPIC, "kafka.max.block.ms": "700"},
        is_early=False,
    ),
    Refusal(
        "a record too large",
        "SELECT repeat('x', 2000) AS value FROM rows",
        "which is larger than 1000, which is the value of the max.request.size configuration.",
        "more than max.request.size=1000: raise max.request.size",
        {**TO_THE_TOPIC, "kafka.max.request.size": "1000", "kafka.batch.size": "100"},
        is_early=False,
    ),
)
