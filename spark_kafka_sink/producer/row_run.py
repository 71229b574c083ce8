"""Rows that came into a batch one by one, as columns until they are encoded together. Guarded as their batch is."""

from __future__ import annotations

from spark_kafka_sink.producer.futures import Headers
from spark_kafka_sink.record.encoder import EncodedRun, encode_rows


class RowRun:
    """`place`: where its bytes go among the batch's chunks. `base_offset_delta`: how many records come before it in the
    batch.
    """

    __slots__ = ("base_offset_delta", "headers", "keys", "place", "timestamps_ms", "values")

    def __init__(self, place: int, base_offset_delta: int) -> None:
        self.place = place
        self.base_offset_delta = base_offset_delta
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[Headers] = []
        self.timestamps_ms: list[int] = []

    def cut(self, end: int) -> None:
        """Keep the rows before number `end` of the batch."""
        rows = end - self.base_offset_delta
        for column in (self.keys, self.values, self.headers, self.timestamps_ms):
            del column[rows:]

    def encode(self, base_timestamp_ms: int) -> EncodedRun:
        """The rows as records of a batch with this base timestamp. Raises SerializationError for a row that does not
        fit.
        """
        return encode_rows(
            self.keys, self.values, self.headers, self.timestamps_ms, self.base_offset_delta, base_timestamp_ms
        )
