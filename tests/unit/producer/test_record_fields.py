from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.producer.record_fields import check_place, checked_headers


@pytest.mark.parametrize("number", [1.0, np.float64(1_700_000_000_000.5), "1", b"1"])
def test_a_partition_or_timestamp_that_is_no_int_is_refused_by_send(number: Any) -> None:
    with pytest.raises(SerializationError, match=r"partition=.*give an int"):
        check_place(number, None)
    with pytest.raises(SerializationError, match=r"timestamp_ms=.*as an int"):
        check_place(None, number)


def test_any_int_is_taken() -> None:
    check_place(np.int32(1), np.int64(2))  # type: ignore[arg-type]
    check_place(0, 0)


@pytest.mark.parametrize("headers", [{"id": b"7"}, {"origin": b"7"}, ["id"], [("id",)], [7]])
def test_headers_that_are_no_pairs_are_refused_by_send(headers: Any) -> None:
    with pytest.raises(SerializationError, match="A header of a record is not a"):
        checked_headers(headers)
