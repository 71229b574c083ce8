"""What a call to coordinators consists of, and what can become of an item it asks about. No state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.messages import Message

Item = TypeVar("Item", bound=Hashable)
Value = TypeVar("Value")


class CoordinatorApi(ABC, Generic[Item, Value]):
    """One kind of call: how to ask about items, and what the answers mean."""

    key_type: int
    """GROUP or TRANSACTION."""
    retried: ClassVar[tuple[type[KafkaError], ...]] = ()
    """Errors to be asked again after, besides those that are retriable everywhere."""
    advice: ClassVar[Mapping[int, str]] = {}
    """By error code: what it means for this call and what to change."""

    @abstractmethod
    def key(self, item: Item) -> str:
        """The group or transactional id that decides about the coordinator."""

    def node(self, item: Item) -> Node | None:  # noqa: ARG002
        """The node to ask, where that is not for a coordinator's key to decide."""
        return None

    @abstractmethod
    def describe(self, item: Item) -> str:
        """The item in an error's text."""

    def located(self, item: Item, node: Node) -> Value | None:  # noqa: ARG002
        """The item's value, where to know its coordinator is all that was wanted."""
        return None

    @abstractmethod
    def requests(self, items: Sequence[Item]) -> Iterable[tuple[Request, Sequence[Item]]]:
        """The requests to one node that ask about all of `items`, each with those it asks about."""

    @abstractmethod
    def answers(self, items: Sequence[Item], body: Message) -> Mapping[Item, Value | KafkaError]:
        """What a response says of the items; what it does not mention is asked again."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """What became of an item: a value, or an error. After its time ran out that is a KafkaTimeoutError.

    `is_in_doubt`: it was sent at least once without a clear answer, so it may have taken effect whatever `error` says.
    """

    value: Value | None
    error: KafkaError | None = None
    is_in_doubt: bool = False

    def get(self) -> Value:
        """The value; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # set where there is no error, and None may be a value
