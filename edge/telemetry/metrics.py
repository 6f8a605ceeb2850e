"""Prometheus metrics of an edge: its counters, and the state of its links and clients.

Another thread may collect the metrics, so collections are copied before iteration.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.access.middleware import caller_of, head_of
from tailrace.edge.access.operators import sees_details
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.origin import Origin
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.route import Route
from tailrace.edge.telemetry.request_metrics import OTHER, Counts
from tailrace.ledger.errors import Forbidden, NotFound
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.frame import SCHEMA_HASH
from tailrace.ledger.links.rights import Right
from tailrace.ledger.process.version import tailrace_version
from tailrace.ledger.telemetry.exposition import rendered

PREFIX = "tailrace_edge_"
PROTOCOLS = ("h1", "h2", "h3", "ws")
STATES = ("opening", "streaming", "stalled", "waiting")
"""States of an open stream, in this order: not yet answered; sending frames; blocked, because the
client does not read; waiting for the link to the origin to come back."""


class EdgeMetrics(Collector):
    """The metrics of an edge process; `registry` also has general metrics of the process."""

    def __init__(self, counts: Counts, link: OriginPool, limits: ConnectionLimits) -> None:
        self._counts = counts
        self._link = link
        self._limits = limits
        self.registry = CollectorRegistry()
        for collector in (self, counts.relayed, counts.first, counts.whole):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(
            f"{PREFIX}build",
            "Release and wire schema of the edge",
            {"version": tailrace_version(), "schema": SCHEMA_HASH.hex()},
        )
        yield from self._counted()
        yield _gauge("connections", "Number of open connections of clients", self._limits.count)
        yield _gauge("connections_limit", "Maximum number of open connections", self._limits.most)
        yield self._streams()
        yield from _origins(self._link.origins)

    def _counted(self) -> Iterable[Metric]:
        counts = self._counts
        requests = _counter(
            "requests",
            "Number of requests that have ended",
            ("route", "method", "status", "protocol"),
        )
        for kind, count in counts.requests.copy().items():
            labels = (kind.route, kind.method, str(kind.status), kind.protocol)
            requests.add_metric(labels, count)
        yield requests
        yield _by_label(
            "errors", "Number of errors that were sent to clients", "code", counts.errors.copy()
        )
        stalls = Counter(dict.fromkeys(PROTOCOLS, 0)) | counts.stalls.copy()
        yield _by_label(
            "stalls",
            "Number of times that frames waited because their client did not read",
            "protocol",
            {protocol: stalls[protocol] for protocol in PROTOCOLS},
        )
        asked = self._link.asked.copy()
        yield _by_label(
            "stream_requests", "Number of requests of clients to origins", "kind", asked
        )
        renewals = sum(origin.relay.counters.renewals for origin in self._link.origins)
        yield _by_label(
            "resumes",
            "Number of streams resumed, by their client, or by this edge after a lost link or for a"
            " reader that fell behind",
            "by",
            {"client": asked["resume"], "edge": renewals},
        )

    def _streams(self) -> Metric:
        """Return the number of open requests to origins, by protocol and state."""
        found = Counter({(protocol, state): 0 for protocol in PROTOCOLS for state in STATES})
        for origin in self._link.origins:
            for route in origin.relay.routes():
                # `Sink` does not require a `protocol`: the sinks of tests and of other programs
                # that embed this edge may have none.
                protocol = getattr(route.sink, "protocol", OTHER)
                found[protocol, _state_of(route, origin)] += 1
        family = GaugeMetricFamily(
            f"{PREFIX}streams", "Number of open streams of clients", labels=("protocol", "state")
        )
        for labels, count in found.items():
            family.add_metric(labels, count)
        return family


def _state_of(route: Route, origin: Origin) -> str:
    if not origin.is_up:
        return "waiting"
    if route.stream is None and not route.answered:
        return "opening"
    return "stalled" if getattr(route.sink, "is_stalled", False) else "streaming"


def _origins(origins: Iterable[Origin]) -> Iterable[Metric]:
    label = ("origin",)
    up = GaugeMetricFamily(f"{PREFIX}origin_up", "1 if the link to the origin is up", labels=label)
    ready = GaugeMetricFamily(
        f"{PREFIX}origin_ready", "1 if the origin accepts new streams", labels=label
    )
    streams = GaugeMetricFamily(
        f"{PREFIX}origin_streams", "Number of streams that run or wait at the origin", labels=label
    )
    room = GaugeMetricFamily(
        f"{PREFIX}origin_room", "Maximum number of streams at the origin", labels=label
    )
    breaker = GaugeMetricFamily(
        f"{PREFIX}origin_breaker",
        "1 for the state of the origin's circuit breaker",
        labels=("origin", "state"),
    )
    losses = _counter("origin_losses", "Number of lost links to the origin", label)
    frames = _counter("frames", "Number of frames received from the origin", label)
    replayed = _counter(
        "replayed_frames",
        "Number of older frames requested by readers who joined or resumed a stream",
        label,
    )
    repeated = _counter(
        "repeated_frames",
        "Number of frames that were repeated after a lost link, and dropped",
        label,
    )
    shared = GaugeMetricFamily(
        f"{PREFIX}shared_streams",
        "Number of streams whose readers share one subscription at the origin",
        labels=label,
    )
    sharing = GaugeMetricFamily(
        f"{PREFIX}shared_readers", "Number of readers that share a subscription", labels=label
    )
    for origin in origins:
        name, heartbeat, relay = (origin.address,), origin.relay.heartbeat, origin.relay
        up.add_metric(name, int(origin.is_up))
        ready.add_metric(name, int(heartbeat is not None and heartbeat.ready))
        streams.add_metric(name, 0 if heartbeat is None else heartbeat.streams)
        room.add_metric(name, 0 if heartbeat is None else heartbeat.room)
        for state in CircuitState:
            breaker.add_metric((*name, state.value), int(origin.breaker.state is state))
        losses.add_metric(name, relay.counters.losses)
        frames.add_metric(name, relay.counters.frames)
        replayed.add_metric(name, relay.counters.replayed)
        repeated.add_metric(name, relay.counters.repeated)
        shared.add_metric(name, relay.shared_count)
        sharing.add_metric(name, relay.shared_reader_count)
    return up, ready, streams, room, breaker, losses, frames, replayed, repeated, shared, sharing


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", help_, value)


def _counter(name: str, help_: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}{name}", help_, labels=labels)


def _by_label(name: str, help_: str, label: str, counts: dict[str, int]) -> Metric:
    family = _counter(name, help_, (label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


async def metrics(request: Request) -> Response:
    """Handle GET /metrics, for keys with the right `admin`; without keys, for this machine only."""
    shown: EdgeMetrics | None = request.app.state.metrics
    config: EdgeConfig = request.app.state.config
    caller = caller_of(request)
    if caller is not None and Right.ADMIN not in Right(caller.rights):
        raise Forbidden("this API key lacks the `admin` right, which metrics need")
    told = sees_details(head_of(request.scope), request.scope["http_version"], caller, config)
    if shown is None or config.processes > 1 or not told:
        raise NotFound(
            "metrics are not served at this address",
            hint="edge.metrics sets the address at which they are served",
        )
    content_type, body = await asyncio.to_thread(
        rendered, shown.registry, request.headers.get("accept")
    )
    headers = {"Content-Type": content_type, "Cache-Control": "no-store"}
    return Response(body, headers=headers)
