"""The dashboard for Grafana and the rules of docs/operating.md ask only for metrics and labels that the sink serves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.producer_harness import AT_ONCE, ProducerHarness

from spark_kafka_sink.sink.prometheus import PoolCollector

DOCS = Path(__file__).resolve().parents[3] / "docs"
OPERATING = (DOCS / "operating.md").read_text()
RULES = re.search(r"```yaml\n(.*?)```", OPERATING, re.DOTALL)
DASHBOARD = DOCS / "grafana-dashboard.json"
CONTENT: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = [panel for panel in CONTENT["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """Every metric with its labels, of a producer that has written a record, and of dead letters."""
    harness = ProducerHarness(AT_ONCE)
    harness.send()
    harness.settle()
    pool: Any = SimpleNamespace(producers=lambda: [("id", 0, harness.producer)], dead_letters=lambda: {"dead": 1})
    samples = [sample for family in PoolCollector(pool).collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title} {each['refId']}" for title, each in TARGETS])
def test_query_asks_for_what_is_served(served: dict[str, set[str]], title: str, target: dict[str, str]) -> None:
    names = re.findall(r"kafka_\w+", target["expr"])
    assert names
    assert set(names) <= served.keys()
    selected = re.findall(r"(\w+)=~", target["expr"])
    grouped = [label.strip() for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(",")]
    for name in names:
        assert {*selected, *grouped} <= served[name], title
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {*grouped}
    for name in names:  # of a counter, only its growth says something
        assert name.endswith("_total") is ("rate(" in target["expr"]) or name.endswith("bytes"), title


def test_rules_ask_for_what_is_served(served: dict[str, set[str]]) -> None:
    assert RULES is not None
    rules = [rule.split("expr:")[1] for rule in RULES[1].split("- alert:")[1:]]
    for rule in rules:
        names = re.findall(r"kafka_\w+", rule)
        assert names
        assert set(names) <= served.keys()
        grouped = re.findall(r"by \((\w+)\)", rule)
        assert all({*grouped} <= served[name] for name in names)
        assert all(name.endswith("_total") is (re.search(r"(rate|increase)\(", rule) is not None) for name in names)


def test_average_without_events_is_not_served(served: dict[str, set[str]]) -> None:
    """A NaN of one idle worker made every avg() over workers NaN: the panels were empty, and the rule did not fire."""
    idle = ProducerHarness(AT_ONCE).producer
    assert math.isnan(idle.metrics()["request-latency-avg"])
    pool: Any = SimpleNamespace(producers=lambda: [("id", 0, idle)], dead_letters=dict)
    samples = [sample for family in PoolCollector(pool).collect() for sample in family.samples]
    assert not [sample.name for sample in samples if math.isnan(sample.value)]
    assert {sample.name for sample in samples} < served.keys()


def test_page_names_metrics_that_are_served(served: dict[str, set[str]]) -> None:
    names = set(re.findall(r"kafka_(?:producer|sink)_\w+", OPERATING))
    assert names
    assert names <= served.keys()


def test_variables_are_those_that_the_queries_use() -> None:
    variables = {each["name"] for each in CONTENT["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == variables


def test_panels_have_their_own_place_and_number() -> None:
    assert len({panel["id"] for panel in CONTENT["panels"]}) == len(CONTENT["panels"])
    fields = [
        (x, y)
        for place in (panel["gridPos"] for panel in CONTENT["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(fields)) == len(fields)
    assert max(x for x, _ in fields) < 24
