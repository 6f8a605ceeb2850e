"""The promised times to the first token (SLOs) by priority class, and how many streams kept them.

A stream keeps the promise of its class if its first frame other than a notice of the origin is
released within the promised time of its admission. The time in which the stream waits for its model
counts, too. A stream that ends as failed or lost before that frame has missed the promise. A stream
that is cancelled before that frame counts only if the promised time was over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.ledger.frame import FinishReason

LOST = (FinishReason.FAILED, FinishReason.ORIGIN_LOST)
"""Finish reasons of streams that ended without a first token and so missed the promise."""


@dataclass(slots=True)
class SloCount:
    """Number of streams of one class and model, and number of them that missed the promise."""

    streams: int = 0
    missed: int = 0


class SloCounts:
    """Counts the streams of one origin by class and model, for the classes that have a promise.

    `promised_s` has the promised time of each of these classes in seconds, by the class's name.
    """

    def __init__(self, promised_s: Mapping[str, float] | None = None) -> None:
        self.promised_s = dict(promised_s or {})
        self.counts: dict[tuple[str, str], SloCount] = {}

    def first_token(self, priority: str, model: str, waited_s: float) -> None:
        """Count a stream whose first token was released `waited_s` seconds after admission."""
        if (promised_s := self.promised_s.get(priority)) is not None:
            self._count(priority, model, missed=waited_s > promised_s)

    def ended(self, priority: str, model: str, waited_s: float, reason: FinishReason) -> None:
        """Count a stream that ended `waited_s` seconds after admission without a first token."""
        promised_s = self.promised_s.get(priority)
        if promised_s is None:
            return
        is_late = waited_s > promised_s
        if is_late or reason is not FinishReason.CANCELLED:
            self._count(priority, model, missed=is_late or reason in LOST)

    def _count(self, priority: str, model: str, *, missed: bool) -> None:
        count = self.counts.setdefault((priority, model), SloCount())
        count.streams += 1
        count.missed += missed


class SloCollector(Collector):
    """Prometheus metrics of the promises, which are read at each scrape."""

    def __init__(self, slo: SloCounts) -> None:
        self._slo = slo

    def collect(self) -> Iterator[Metric]:
        promised = GaugeMetricFamily(
            "tailrace_slo_seconds", "Promised time to the first token", labels=("priority",)
        )
        for priority, seconds in self._slo.promised_s.items():
            promised.add_metric((priority,), seconds)
        yield promised
        labels = ("priority", "model")
        streams = CounterMetricFamily(
            "tailrace_slo_streams", "Streams of classes with a promised time", labels=labels
        )
        missed = CounterMetricFamily(
            "tailrace_slo_missed",
            "Streams whose first token came later than promised, or never",
            labels=labels,
        )
        for key, count in self._slo.counts.items():
            streams.add_metric(key, count.streams)
            missed.add_metric(key, count.missed)
        yield streams
        yield missed
