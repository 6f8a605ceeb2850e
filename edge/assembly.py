"""Assembles the parts of one edge, for our own server and for any other ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from starlette.applications import Starlette
from starlette.types import ASGIApp

from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.access.rules import Rules
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig, access_rules, connection_limits, open_requests
from tailrace.edge.flush import FlushBatch
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.server.asgi import AsgiApplication
from tailrace.edge.server.context import CommonHeaders, TcpContext
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.telemetry.metrics import EdgeMetrics
from tailrace.edge.telemetry.request_metrics import Counts, TelemetryMiddleware
from tailrace.ledger.objects.deployment import Deployment
from tailrace.ledger.telemetry.traces import Traces


@dataclass(frozen=True, slots=True)
class Edge:
    """The parts of an edge that answer requests, without the servers in front of them."""

    config: EdgeConfig
    counts: Counts | None
    batch: FlushBatch
    link: OriginPool
    rules: Rules
    limits: ConnectionLimits
    starlette: Starlette
    app: ASGIApp
    """The `starlette` application, wrapped by the telemetry middleware."""

    def tcp_context(self, alt_svc: Sequence[str] = ()) -> TcpContext:
        """Return the context of our own TCP server; `alt_svc` advertises HTTP/3 to clients."""
        deadlines = Deadlines(asyncio.get_running_loop(), self.batch.flush)
        return TcpContext(
            batch=self.batch,
            application=AsgiApplication(self.app, self.batch, deadlines),
            headers=CommonHeaders(alt_svc),
            deadlines=deadlines,
            body_timeout_s=self.config.body_timeout_s,
            stalled_timeout_s=self.config.stalled_timeout_s,
            counts=self.counts,
            config=self.config,
            link=self.link,
            limits=self.limits,
            rules=self.rules,
        )


def assemble(
    config: EdgeConfig,
    open_files: int,
    authenticator: Authenticator | None = None,
    traces: Traces | None = None,
    deployment: Deployment | None = None,
) -> Edge:
    """Return the parts of an edge with these settings.

    Args:
        config: The settings.
        open_files: The limit of open files of this process.
        authenticator: Checks API keys; without it no request needs one.
        traces: Exports spans, if traces are on.
        deployment: The classes, bindings and crons to send to the origins, if there are any.

    Raises:
        ConfigError: A file that the settings name cannot be read.
    """
    counts, batch = None, FlushBatch()
    if config.telemetry:
        counts = Counts(traces)
        batch = FlushBatch(clock_s=perf_counter, observe=counts.relay)
    config.origin_credentials.connects()  # reads the files, so that a missing file is an error now
    link = OriginPool(
        *config.origin_addresses,
        credentials=config.origin_credentials,
        batch=batch,
        open_requests=open_requests(config),
        unread=config.unread_default,
    )
    rules = access_rules(config, authenticator)
    limits = connection_limits(config, open_files)
    starlette = create_app(link, config, rules, deployment)
    if counts is not None:
        starlette.state.metrics = EdgeMetrics(counts, link, limits)
    app = TelemetryMiddleware(starlette, counts)
    return Edge(config, counts, batch, link, rules, limits, starlette, app)
