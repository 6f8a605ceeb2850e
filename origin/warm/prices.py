"""What a decision costs: GPU-seconds of idling, and cold starts at a price in GPU-seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledger.errors import CallerError

if TYPE_CHECKING:
    from origin.warm.trace import Seconds

COLD_COST_GPU_S = 60.0
"""What one cold start is worth unless an operator says otherwise."""
LOAD_S = 10.0
"""How long a cold start makes a request wait."""


@dataclass(frozen=True)
class WarmPrices:
    """`cold_cost_gpu_s`: a cold start is worth so much idling; `load_s`: it takes so long."""

    cold_cost_gpu_s: float = COLD_COST_GPU_S
    load_s: float = LOAD_S

    def __post_init__(self) -> None:
        for field in ("cold_cost_gpu_s", "load_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise CallerError("is to be a time above zero", field=field)


@dataclass(frozen=True)
class GapCosts:
    """Of each gap: seconds of idling on the device, and the share of a cold start that was left."""

    wasted_gpu_s: Seconds
    cold_share: Seconds

    def cost(self, prices: WarmPrices) -> Seconds:
        return self.wasted_gpu_s + prices.cold_cost_gpu_s * self.cold_share


def cost_of_gaps(
    length_s: Seconds, keep_s: Seconds, prewarm_s: Seconds, until_s: Seconds, load_s: float
) -> GapCosts:
    """Resident for `keep_s`, and again from `prewarm_s` to `until_s`, all since the gap began.

    A prewarm loads first: a request that meets it under way waits for, and is charged, the rest.
    `prewarm_s` is infinite where there is none. The arrays broadcast.
    """
    import numpy as np  # prices are asked for by origins that listen before they need numpy

    kept = np.minimum(length_s, keep_s)
    begun = np.maximum(prewarm_s, keep_s)
    with np.errstate(invalid="ignore"):
        again = np.maximum(np.minimum(length_s, until_s) - begun, 0.0)
    again = np.where(np.isfinite(begun), again, 0.0)
    in_time = (length_s > begun) & (length_s <= until_s)
    left = np.where(in_time, np.maximum(1.0 - again / load_s, 0.0), 1.0)
    return GapCosts(kept + again, np.where(length_s <= keep_s, 0.0, left))
