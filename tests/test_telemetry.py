"""Metrics, the page that explains them, the dashboard and the alerts are of one mind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.telemetry.metrics import EdgeMetrics
from tailrace.edge.telemetry.request_metrics import Answered, Counts
from tailrace.origin.config import LedgerConfig
from tailrace.origin.gpu.meter import GpuMeter
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.recorder import recorder_of
from tailrace.origin.workers.worker_frame import StageTime
from tests.origin.gpu.test_meter import FakeNvml
from tests.origin.test_metrics import LOAD

ROOT = Path(__file__).resolve().parents[1]


def edge_registry() -> CollectorRegistry:
    """Return the registry of an edge on which each metric has been counted once."""
    counts = Counts()
    counts.requests[Answered("/v1/generate", "POST", 200, "h1")] += 1
    counts.error("overloaded")
    for timed in (counts.first, counts.whole):
        timed.observe("/v1/generate", 0.1)
    link = OriginPool(("127.0.0.1", 9))
    return EdgeMetrics(counts, link, ConnectionLimits(10, 10)).registry


def origin_registry() -> CollectorRegistry:
    metrics = Metrics(promised_s={"interactive": 0.3})
    metrics.first_release("interactive", "demo", 0.1)
    metrics.worker_load(0, LOAD)
    metrics.serve_model("demo", lambda: 0, lambda: 0, lambda: 0)
    metrics.serve_gpus(GpuMeter(FakeNvml()), {0: "0"})
    recorder_of(LedgerConfig(), Path(), metrics.registry)
    metrics.stages("demo", [StageTime("model", 1, 1)])
    return metrics.registry


def exported(registry: CollectorRegistry) -> dict[str, list[str]]:
    """Our metrics by name, each with its labels."""
    found: dict[str, list[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            name = sample.name.removesuffix("_count")
            if name.startswith("tailrace_") and not name.endswith(("_bucket", "_sum", "_created")):
                found[name] = sorted(label for label in sample.labels if label != "le")
    return found


def test_the_page_of_the_docs_names_every_metric_with_its_labels() -> None:
    rows = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip(" `") for cell in row.split("|")] for row in rows if row.startswith("| `tail")
    ]
    told = {row[1]: sorted(one for one in row[2].split(", ") if one) for row in cells}
    assert told == exported(edge_registry()) | exported(origin_registry())


def expressions() -> dict[str, str]:
    """Return every query of the dashboard and every rule, by where it stands."""
    board = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))
    asked = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    alerts = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    assert len(asked) > 30 and len(alerts) > 8
    return asked | alerts


@pytest.mark.parametrize(("where", "expression"), expressions().items(), ids=str)
def test_dashboard_and_alerts_ask_for_what_is_exported(where: str, expression: str) -> None:
    known = exported(edge_registry()) | exported(origin_registry())
    for name in re.findall(r"\btailrace_\w+", expression):
        metric = name if name in known else re.sub(r"_(bucket|sum|count)$", "", name)
        assert metric in known, f"{where}: {name}"
    labels = {label for labels in known.values() for label in labels}
    labels |= {"instance", "job", "le"}  # Prometheus's own
    said = re.findall(r"by \(([^)]*)\)", expression)
    said += re.findall(r"[{,](\w+)(?:=~|!=|!~|=)", expression)
    assert {label for group in said for label in re.split(r",\s*", group)} <= labels, where


def test_what_alerts_look_for_is_what_is_said() -> None:
    """Values of labels; those of `code` are the protocol's."""
    said = {
        (label, value)
        for registry in (edge_registry(), origin_registry())
        for family in registry.collect()
        for sample in family.samples
        for label, value in sample.labels.items()
    }
    protocol = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
    said |= {("code", code) for code in re.findall(r"^\| `(\w+)` \| \d", protocol, re.MULTILINE)}
    asked = {
        (label, value)
        for expression in expressions().values()
        for label, values in re.findall(r'[{,](\w+)(?:=~|!=|=)"([^"]*)"', expression)
        for value in values.split("|")
        if label != "job"
    }
    assert len(asked) > 5 and asked <= said
