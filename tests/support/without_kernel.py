"""Encoding without the kernel, for comparisons with it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_kafka_sink.serialization import column_encoder
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import EncodedColumn


def without_kernel(
    encoder: ColumnEncoder, column: pa.Array, most_bytes: int, patch: pytest.MonkeyPatch
) -> EncodedColumn:
    with patch.context() as inner:
        inner.setattr(column_encoder, "KERNEL", None)
        return encoder.encode(column, most_bytes)
