"""The constants behind every estimate: what a launch costs in a graph, and a gap between graphs."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from tailrace.kernels.gpu_limits import HOPPER
from tests.bench.gpu.empty_triton import LOADED_FLOATS, nothing
from tests.bench.gpu.place import Place
from tests.bench.gpu.supervisor import found
from tests.bench.gpu.timing import Timer

SIZES = ((1, 4), (HOPPER.multiprocessors, 8))
"""Programs and warps of the empty launches."""
CHAIN = 240
"""Launches of a chain; as many as a step of a model of two billion weights has, and half more."""


def constants(place: Place, timer: Timer) -> None:
    """Tell the copy bandwidth, the time of a launch in ordinary and dependent chains, and gaps."""
    copy = timer.copy_bytes_per_s()
    print(f"  copy: {copy / 1e12:.3f} TB/s, read and written")
    found("constants", "copy_bytes_per_s", copy)
    for (programs, warps), loads in product(SIZES[: 1 if place.fake else None], (False, True)):
        x = torch.zeros(programs * LOADED_FLOATS, device=place.device)
        for dependent in (False, True):
            launch = partial(nothing, x, programs, loads=loads, warps=warps, dependent=dependent)
            us = timer.microseconds([launch] * (2 if place.few else CHAIN))
            kind = "dependent" if dependent else "ordinary"
            after = " with a load before the wait" if loads else ""
            name = f"launch {kind} programs={programs} warps={warps}{after}"
            print(f"  {name:70} {us:8.3f} us", flush=True)
            found("constants", name, us)
    small = torch.zeros(64, device=place.device)
    us = timer.replay_us(partial(nothing, small, 1, loads=False, warps=4, dependent=False))
    print(f"  replay of a graph of one launch, from the one before {us:25.3f} us")
    found("constants", "graph replay", us)
