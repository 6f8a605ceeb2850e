"""Histograms that cost the path of a token little: counting here, Prometheus on request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Latency(Collector):
    """Seconds by one label, whose values are given once and for all.

    An observation takes a quarter of the time of prometheus_client's own histogram, which locks
    a number of its own for each bucket. They come from one thread only; one that reads meanwhile
    may miss the last.
    """

    def __init__(
        self, name: str, help_: str, label: str, values: Iterable[str], buckets_s: Sequence[float]
    ) -> None:
        self._name, self._help, self._label = name, help_, label
        self._buckets_s = buckets_s
        self._counts = {value: [0] * (len(buckets_s) + 1) for value in values}
        self._sums_s = dict.fromkeys(self._counts, 0.0)

    def observe(self, value: str, seconds: float) -> None:
        """`seconds` for one of the label's values."""
        self._counts[value][bisect_left(self._buckets_s, seconds)] += 1
        self._sums_s[value] += seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=(self._label,))
        bounds = [*map(str, self._buckets_s), "+Inf"]
        for value, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((value,), buckets, self._sums_s[value])
        yield family
