"""Write the orders of the web shop and those of the branches to one Kafka topic, each order once.

The sink has two flows. Each flow has its own checkpoint, and so its own name at the brokers.
"""

import os
from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

ORDERS = Path(__file__).resolve().parents[1] / "orders"

dp.create_sink(
    "orders",
    format="kafka_sink",
    options={
        "kafka.bootstrap.servers": os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:9092"),
        "topic": os.environ.get("ORDERS_TOPIC", "orders"),
        "delivery.guarantee": "exactly-once",
    },
)


def orders_of(channel: str) -> DataFrame:
    """Read the files of one channel. The key of a record is the customer, and its value the order as JSON."""
    spark = SparkSession.active()
    orders = spark.readStream.schema("number INT, customer STRING, amount DOUBLE").json(f"{ORDERS}/{channel}")
    return orders.selectExpr("customer AS key", "to_json(struct(*)) AS value")


@dp.append_flow(target="orders")
def web_orders() -> DataFrame:
    return orders_of("web")


@dp.append_flow(target="orders")
def branch_orders() -> DataFrame:
    return orders_of("branches")
