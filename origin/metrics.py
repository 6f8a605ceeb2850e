"""Prometheus metrics of an origin; off unless `[origin] metrics` gives an address.

Names follow vLLM's and OpenTelemetry's for generative models, so that dashboards are easily
adapted. Label values are few and fixed: priority classes, finish reasons, slot numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import Metric

from tailrace.ledger.frame import FinishReason, Priority, StreamEnd, decode
from tailrace.ledger.telemetry.histogram import Histogram
from tailrace.ledger.telemetry.traces import TraceContext, Traces
from tailrace.origin.gpu.meter import GpuCollector, GpuMeter, GpuReading
from tailrace.origin.slo import SloCollector, SloCounts
from tailrace.origin.workers.liveness import ExitKind
from tailrace.origin.workers.worker_frame import Load, StageTime

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
INTER_TOKEN_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02),
    *(0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
STAGE_BUCKETS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
APPEND_BUCKETS_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
)
APPEND_BUCKETS_BYTES = tuple(float(1 << n) for n in range(5, 19))
CLASSES = tuple(priority.word for priority in Priority)

_GAUGES = {
    "batch_limit": ("batch_limit_tokens", "Current maximum of tokens in a step"),
    "row_limit": (
        "row_limit_rows",
        "Current maximum number of decoding streams, above which further streams wait",
    ),
    "turn_limit": ("turn_limit_rows", "Decoding streams in a step above which classes take turns"),
    "pages": ("kv_cache_pages", "Pages of the KV cache"),
    "pages_free": ("kv_cache_pages_free", "Pages of the KV cache that are free or can be evicted"),
}
_COUNTERS = {
    "tokens": ("generation_tokens", "Generated tokens"),
    "prompt_tokens": ("prompt_tokens", "Prefilled tokens"),
    "reused_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the KV cache"),
    "preemptions": (
        "num_preemptions",
        "Streams that gave up their KV cache pages",
    ),
    "drafted": ("spec_decode_num_draft_tokens", "Tokens proposed by speculation"),
    "accepted": (
        "spec_decode_num_accepted_tokens",
        "Speculated tokens that were accepted",
    ),
}


class Metrics:
    """Prometheus metrics of one origin. `clock` returns monotonic time in seconds.

    `traces` exports the origin's OpenTelemetry spans, or is None if that is switched off.
    `promised_s` has the promised time to the first token of each class that has one, and `slo`
    counts the streams that kept it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        traces: Traces | None = None,
        promised_s: Mapping[str, float] | None = None,
    ) -> None:
        self.clock = clock
        self.traces = traces
        self.slo = SloCounts(promised_s)
        self.registry = CollectorRegistry()
        self.registry.register(SloCollector(self.slo))
        ProcessCollector(registry=self.registry)
        self._last: dict[int, Load] = {}  # slot number -> last Load frame of its worker
        self._gpu_meter = GpuMeter()
        self._gpus: dict[int, str] = {}  # slot number -> GPU that its worker has
        by_class = ("worker", "priority")
        self._running = self._gauge(
            "num_requests_running", "Streams that the worker decodes", by_class
        )
        self._waiting = self._gauge(
            "num_requests_waiting", "Streams that wait for a place in the worker's batch", by_class
        )
        self._step = self._gauge("step_seconds", "Duration of the worker's last step", ("worker",))
        self._gauges = {
            field: self._gauge(name, help_, ("worker",)) for field, (name, help_) in _GAUGES.items()
        }
        self._counters = {
            field: self._counter(name, help_, ("worker",))
            for field, (name, help_) in _COUNTERS.items()
        }
        self.streams = self._gauge("num_streams", "Running and waiting streams", ())
        self._ended = self._counter(
            "streams_ended", "Streams that ended at this origin", ("finish_reason",)
        )
        self.overload = self._gauge(
            "overload_rung", "Load-shedding level, from 0 (normal) to 6 (no new streams)", ()
        )
        self.circuit = self._gauge(
            "circuit_state", "Circuit breaker of the workers: 0 closed, 1 half-open, 2 open", ()
        )
        by_model = ("model",)
        self._tiers = self._gauge(
            "model_tier", "Tier: 0 cold, 1 launched, 2 host, 3 device, 4 compiled, 5 hot", by_model
        )
        self._circuits = self._gauge(
            "model_circuit_state",
            "Circuit breaker of the model: 0 closed, 1 half-open, 2 open",
            by_model,
        )
        self._wanted = self._gauge(
            "model_requests", "Running and waiting requests of the model", by_model
        )
        self.model_loads = self._counter("model_loads", "Number of model loads", by_model)
        self.model_leaves = self._counter("model_leaves", "Number of model unloads", by_model)
        self._deaths = self._counter("worker_deaths", "Workers that ended unexpectedly", ("kind",))
        self._idle = self._counter(
            "idle_streams_ended",
            "Streams ended because they had neither reader nor output",
            ("state",),
        )
        self.cached = self._counter("cached_answers", "Requests answered from the ledger", ())
        self.chat_turns = self._counter("chat_turns", "Turns of chats that began", ())
        self.chat_readers = self._gauge("chat_readers", "Clients that follow a chat", ())
        self.takeovers = self._counter("takeovers", "Streams that another worker continued", ())
        self.retries = self._counter(
            "run_retries", "Streams whose run failed and was given to a worker once more", ()
        )
        self._ttft = self._latency(
            "time_to_first_token_seconds",
            "Time from admission to the release of the first frame",
            TTFT_BUCKETS_S,
        )
        self._between = self._latency(
            "inter_token_latency_seconds",
            "Time between the releases of two frames of a stream",
            INTER_TOKEN_BUCKETS_S,
        )
        self._stage_s = PrometheusHistogram(
            "stage_seconds",
            "Time that a stage of a pipeline took for one stream",
            ("model", "stage"),
            "tailrace",
            registry=self.registry,
            buckets=STAGE_BUCKETS_S,
        )
        self._append_s = self._spread(
            "ledger_append_seconds", "Time until all frames of a step are durable", APPEND_BUCKETS_S
        )
        self._append_bytes = self._spread(
            "ledger_append_bytes", "Size of the frames of a step", APPEND_BUCKETS_BYTES
        )
        self._replayed = self._counter(
            "replayed_frames", "Frames read from storage for readers that are behind", ()
        )
        self._demotions = self._counter(
            "demotions", "Readers that fell behind the frames in memory", ()
        )
        for kind in ExitKind:
            self._deaths.labels(kind.value)
        for state in ("running", "waiting"):
            self._idle.labels(state)
        for reason in FinishReason:
            self._ended.labels(reason.word)

    # ---- events to record ----

    def stages(self, model: str, times: Iterable[StageTime]) -> None:
        """Record the times of a pipeline's stages for one stream."""
        for one in times:
            self._stage_s.labels(model, one.stage).observe(one.busy_us / 1e6)

    def worker_load(self, slot: int, load: Load) -> None:
        """Record a worker's Load frame, whose counters start at 0 with each new process."""
        worker, last = str(slot), self._last.get(slot)
        for gauge, counts in ((self._running, load.running), (self._waiting, load.waiting)):
            for priority, count in zip(CLASSES, counts, strict=False):
                gauge.labels(worker, priority).set(count)
        self._step.labels(worker).set(load.step_us / 1e6)
        for field, gauge in self._gauges.items():
            gauge.labels(worker).set(getattr(load, field))
        for field, counter in self._counters.items():
            before = 0 if last is None else getattr(last, field)
            counter.labels(worker).inc(max(0, getattr(load, field) - before))
        self._last[slot] = load

    def worker_lost(self, slot: int, exit_kind: ExitKind = ExitKind.EXITED) -> None:
        """Count a worker that ended unexpectedly, and set its gauges to 0; its counters stay."""
        self._deaths.labels(exit_kind.value).inc()
        self.worker_left(slot)

    def worker_left(self, slot: int) -> None:
        """Set the gauges of a worker that has ended to 0; its counters stay."""
        worker = str(slot)
        if self._last.pop(slot, None) is None:
            return
        for gauge in (self._running, self._waiting):
            for priority in CLASSES:
                gauge.labels(worker, priority).set(0)
        for gauge in (self._step, *self._gauges.values()):
            gauge.labels(worker).set(0)

    def idle_ended(self, state: str) -> None:
        self._idle.labels(state).inc()

    def serve_model(
        self,
        name: str,
        tier: Callable[[], float],
        circuit: Callable[[], float],
        streams: Callable[[], float],
    ) -> None:
        """Export metrics of a named model; the functions are called at each scrape."""
        self._tiers.labels(name).set_function(tier)
        self._circuits.labels(name).set_function(circuit)
        self._wanted.labels(name).set_function(streams)
        for counter in (self.model_loads, self.model_leaves):
            counter.labels(name)

    def serve_gpus(self, meter: GpuMeter, gpus: Mapping[int, str]) -> None:
        """Export the figures of the workers' GPUs, which `meter` reads at each scrape."""
        self._gpu_meter, self._gpus = meter, dict(gpus)
        self.registry.register(GpuCollector(meter, [*gpus.items()]))

    def gpu_of(self, slot: int) -> GpuReading | None:
        """Return the figures of the slot's GPU; None if no GPU is assigned to the slot."""
        gpu = self._gpus.get(slot)
        return None if gpu is None else self._gpu_meter.read(gpu)

    def load_of(self, slot: int) -> Load | None:
        """Return the last Load frame of the slot's worker, or None."""
        return self._last.get(slot)

    def histograms(self) -> list[dict[str, object]]:
        """Return all histograms: the counts per bucket of each series, and the upper `bounds`."""
        families = [one for one in self.registry.collect() if one.type == "histogram"]
        return [_histogram(family) for family in families]

    def ended(self, reason: FinishReason) -> None:
        self._ended.labels(reason.word).inc()

    def ended_with(self, end: bytes) -> FinishReason:
        """Record a stream's end and return its finish reason; `end` is the encoded StreamEnd."""
        _, frame = decode(end)
        assert isinstance(frame, StreamEnd), frame
        self.ended(frame.finish_reason)
        return frame.finish_reason

    def appended(self, seconds: float, size: int) -> None:
        """Record that making `size` bytes of frames durable took `seconds`."""
        if size:
            self._append_s.observe("", seconds)
            self._append_bytes.observe("", size)

    def replayed(self, frames: int, demoted: bool) -> None:
        """Record that a reader got frames from storage.

        `demoted`: the reader got frames from memory before, and has fallen behind.
        """
        self._replayed.inc(frames)
        if demoted:
            self._demotions.inc()

    def first_release(
        self, priority: str, model: str, seconds: float, trace: str | None = None
    ) -> None:
        """Record the first release of a stream, `seconds` after its admission."""
        self.slo.first_token(priority, model, seconds)
        given = None if trace is None else TraceContext.parse(trace)
        kept = given is not None and given.sampled
        self._ttft.observe(priority, seconds, trace_id=given.trace_id if given and kept else None)

    def release(self, priority: str, seconds: float, frames: int = 1) -> None:
        """Record that frames were released, `seconds` after the stream's previous release."""
        self._between.observe(priority, seconds, frames)

    # ---- instruments ----

    def _gauge(self, name: str, help_: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(name, help_, labels, "tailrace", registry=self.registry)

    def _counter(self, name: str, help_: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, help_, labels, "tailrace", registry=self.registry)

    def _latency(self, name: str, help_: str, buckets_s: tuple[float, ...]) -> Histogram:
        latency = Histogram(f"tailrace_{name}", help_, "priority", CLASSES, buckets_s)
        self.registry.register(latency)
        return latency

    def _spread(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        spread = Histogram(f"tailrace_{name}", help_, "", ("",), buckets)
        self.registry.register(spread)
        return spread


def _histogram(family: Metric) -> dict[str, object]:
    bounds: list[str] = []
    series: dict[tuple[tuple[str, str], ...], dict[str, object]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        one = series.setdefault(tuple(labels.items()), {"labels": labels, "counts": []})
        if sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            bounds += [bound] if bound not in bounds else []
            counts = one["counts"]
            assert isinstance(counts, list)
            counts.append(int(sample.value) - sum(counts))
        elif sample.name.endswith("_sum"):
            one["sum"] = sample.value
    return {
        "name": family.name,
        "help": family.documentation,
        "bounds": [float(bound) for bound in bounds if bound != "+Inf"],
        "series": list(series.values()),
    }
