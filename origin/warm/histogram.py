"""The hybrid histogram policy of "Serverless in the Wild" (Shahrad et al., ATC 2020)."""

from __future__ import annotations

import numpy as np

from origin.warm.policies import KeepDecision
from origin.warm.trace import Indices

PREWARM_MARGIN = 0.9
KEEP_MARGIN = 1.1
OUT_OF_BOUNDS = 0.5
"""From this share of gaps beyond the bins on, the histogram says nothing."""
REPRESENTATIVE_CV = 2.0
"""Below this coefficient of variation of the bins' counts it says too little."""
FORECAST_PREWARM, FORECAST_KEEP = 0.85, 0.30
FORECAST_WEIGHT = 0.3
"""Of the newest gap in the forecast."""


class HybridHistogram:
    """Unload, load again before the 5th percentile of the gaps, and keep until past the 99th.

    For gaps beyond the bins the paper fits an ARIMA model; here an exponentially weighted mean of
    those gaps forecasts the next one. The paper's bins are 240 of one minute.
    """

    def __init__(self, bins: int = 240, width_s: float = 60.0) -> None:
        self._bins, self._width_s = bins, width_s
        self._counts: dict[str, Indices] = {}
        self._inside: dict[str, tuple[int, int]] = {}
        self._beyond: dict[str, int] = {}
        self._forecast: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "hybrid-histogram" + ("" if self._width_s == 60.0 else f"-{self._width_s:g}s")

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        counts, beyond = self._counts.get(model), self._beyond.get(model, 0)
        inside, squares = self._inside.get(model, (0, 0))
        features = {"gaps": float(inside + beyond), "out_of_bounds": float(beyond)}
        if beyond and beyond >= OUT_OF_BOUNDS * (inside + beyond):
            forecast = features["forecast_s"] = self._forecast[model]
            low, reason = FORECAST_PREWARM * forecast, "forecast"
            high = low + FORECAST_KEEP * forecast
        else:
            # Deviation over mean of the counts of the bins, by their sum and that of their squares.
            spread = max(squares * self._bins / inside**2 - 1, 0.0) ** 0.5 if inside else 0.0
            features["cv"] = spread
            if counts is None or spread < REPRESENTATIVE_CV:
                until_s = idle_since_s + self._bins * self._width_s
                return KeepDecision(until_s, "not representative", features)
            heap, reason = np.cumsum(counts), "percentiles"
            low = int(np.searchsorted(heap, 0.05 * inside)) * self._width_s * PREWARM_MARGIN
            high = (int(np.searchsorted(heap, 0.99 * inside)) + 1) * self._width_s * KEEP_MARGIN
        until_s = idle_since_s + high
        if low <= 0:  # the next request may come at once: it is not unloaded at all
            return KeepDecision(until_s, reason, features)
        return KeepDecision(idle_since_s, reason, features, idle_since_s + low, until_s)

    def observe(self, model: str, gap_s: float) -> None:
        index = int(gap_s / self._width_s)
        if index >= self._bins:
            self._beyond[model] = self._beyond.get(model, 0) + 1
            before = self._forecast.get(model, gap_s)
            self._forecast[model] = before + FORECAST_WEIGHT * (gap_s - before)
            return
        counts = self._counts.setdefault(model, np.zeros(self._bins, np.int64))
        inside, squares = self._inside.get(model, (0, 0))
        self._inside[model] = inside + 1, squares + 2 * int(counts[index]) + 1
        counts[index] += 1
