"""Times launches on a GPU: CUDA graphs of them, replayed between two events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

GRAPH_STEPS = 8
"""Whole steps in one graph: each has some 150 to 300 launches."""
GRAPH_LAUNCHES = 240
"""Approximate number of launches in one graph, so that its own overhead does not count."""
REPLAYS = 9
"""Replays that are timed, after two that are not; the figure is their median."""
COPY_BYTES = 2 << 30
ROTATED_BYTES = 128 << 20
"""Minimum bytes of the weights of one measurement: twice what L2 holds."""

Launch = Callable[[], object]


class GraphTimer:
    """Times on a CUDA device."""

    device = torch.device("cuda")
    spread = 0.0
    """Distance of the quartiles of the last measurement, as a share of its median."""

    def microseconds(
        self, launches: Sequence[Launch], graph_launches: int = GRAPH_LAUNCHES
    ) -> float:
        """Return the median time of one of these launches, which take turns: weights rotate."""
        rounds = max(1, graph_launches // len(launches))
        graph = self._capture(launches, rounds)
        times = [self._replay(graph) for _ in range(REPLAYS + 2)][2:]
        quarters = statistics.quantiles(times, n=4)
        self.spread = (quarters[2] - quarters[0]) / quarters[1]
        return quarters[1] * 1_000 / (rounds * len(launches))

    def replay_us(self, launch: Launch) -> float:
        """Return the time from one replay of a graph of one launch to the next."""
        graph = self._capture([launch], 1)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(GRAPH_LAUNCHES):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1_000 / GRAPH_LAUNCHES

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by the best of some copies of 2 GiB."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        us = min(self.microseconds([partial(target.copy_, source)]) for _ in range(3))
        return 2 * COPY_BYTES / us * 1e6

    def _capture(self, launches: Sequence[Launch], rounds: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:  # the first pass compiles
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for launch in launches:
                    launch()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds of one replay."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


class FakeTimer:
    """A clock without a GPU: it runs every launch once, and its results are no figures."""

    device = torch.device("cpu")
    spread = 0.0

    def microseconds(self, launches: Sequence[Launch], graph_launches: int = 1) -> float:
        started = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - started) * 1e6 / len(launches)

    def replay_us(self, launch: Launch) -> float:
        return self.microseconds([launch])

    def copy_bytes_per_s(self) -> float:
        return 1e9


class Recorder(FakeTimer):
    """Calls every launch once, while launches are recorded and not run."""

    device = torch.device("cuda")


Timer = GraphTimer | FakeTimer


def copies(bytes_each: int, few: bool) -> int:
    """Return how many sets of weights one measurement needs so that no cache holds them."""
    return 1 if few else max(2, -(-ROTATED_BYTES // bytes_each))
