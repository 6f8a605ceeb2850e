"""Metrics, the page that explains them, the dashboard and the alerts are of one mind."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from edge.access.connections import ConnectionLimits
from edge.origins.link import Link
from edge.telemetry.counts import Answered, Counts
from edge.telemetry.metrics import EdgeMetrics
from origin.metrics import Metrics
from tests.origin.test_metrics import LOAD

ROOT = Path(__file__).resolve().parents[1]


def edge_registry() -> CollectorRegistry:
    """Of an edge to which something of everything has happened."""
    counts = Counts()
    counts.requests[Answered("/v1/generate", "POST", 200, "h1")] += 1
    counts.error("overloaded")
    for timed in (counts.first, counts.whole):
        timed.observe("/v1/generate", 0.1)
    link = Link(("127.0.0.1", 9))
    return EdgeMetrics(counts, link, ConnectionLimits(10, 10)).registry


def origin_registry() -> CollectorRegistry:
    metrics = Metrics()
    metrics.worker_load(0, LOAD)
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
