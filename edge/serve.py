"""Runs an edge on uvloop until SIGTERM or SIGINT, and shuts it down in three steps.

1. /readyz turns 503, so that load balancers send no new clients. Everything else stays the same
   for `lame_duck_s`, because some load balancers ask only every few seconds.
2. New requests are refused, and connections are asked to end: by GOAWAY, by `Connection: close`, or
   by closing idle ones. Open requests may end within `drain_s`.
3. Every stream that is still open ends with an error that tells the client to resume it elsewhere,
   after a random wait.

A second signal ends all steps at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog
import uvloop
from hypercorn.config import Config

from tailrace.edge.access.connections import RESERVED_FILES, raise_open_files
from tailrace.edge.assembly import assemble
from tailrace.edge.config import EdgeConfig, too_few_files
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.processes import Processes
from tailrace.edge.quic.listen import QuicListener
from tailrace.edge.reload import (
    Certificate,
    open_authenticator,
    reloading,
    require_keys,
    watched_keys,
)
from tailrace.edge.server.context import KEEP_ALIVE_TIMEOUT_S, TcpContext
from tailrace.edge.server.http1 import MAX_HEAD_BYTES
from tailrace.edge.server.listen import LISTEN_BACKLOG, Sockets, alt_svc, listening
from tailrace.edge.telemetry.metrics import EdgeMetrics
from tailrace.ledger.errors import Unavailable
from tailrace.ledger.objects.deployment import Deployment
from tailrace.ledger.process.lifecycle import Stop, look_less_often
from tailrace.ledger.process.logging_setup import configure_logging
from tailrace.ledger.process.tasks import first_of
from tailrace.ledger.telemetry.exposition import exposed
from tailrace.ledger.telemetry.traces import Traces

GRACEFUL_TIMEOUT_S = 2.0
"""Time for the last error responses to be sent, in seconds."""
LOOK_S = 0.05
"""Interval between two checks whether open requests have ended, while draining, in seconds."""

log = structlog.get_logger("tailrace.edge")


def shutting_down() -> Unavailable:
    """Return the error that new and unfinished requests get during a shutdown."""
    return Unavailable(
        "this edge is shutting down",
        hint="resume the stream on another edge, or on this one when it runs again",
    )


async def go_away(context: TcpContext, quic: QuicListener | None, stop: Stop) -> None:
    """Run the shutdown after the first signal, until all connections have ended.

    The second signal sets `stop.at_once`, which ends all waits.
    """
    config = context.config
    log.info("draining", lame_duck_s=config.lame_duck_s, drain_s=config.drain_s)
    await first_of(stop.at_once.wait(), asyncio.sleep(config.lame_duck_s))
    log.info("shutting down", streams=context.link.route_count)
    patience_s = 0.0 if stop.at_once.is_set() else config.drain_s + GRACEFUL_TIMEOUT_S
    ending = asyncio.create_task(quic.stop(patience_s)) if quic is not None else None
    context.link.refuse_new(shutting_down())
    for connection in context.connections.all():
        connection.protocol.drain()
    context.batch.flush()
    with suppress(TimeoutError):
        async with asyncio.timeout(config.drain_s):
            await first_of(stop.at_once.wait(), _nothing_under_way(context.link))
    context.link.refuse_all(shutting_down())
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACEFUL_TIMEOUT_S):
            await first_of(stop.at_once.wait(), _closed(context))
    for connection in context.connections.all():
        connection.abort()
    if ending is not None and not stop.at_once.is_set():
        await ending


async def _closed(context: TcpContext) -> None:
    """Ask all connections to close, and wait until they have closed.

    They were asked before, when the shutdown began. Now that every request has ended, all are idle.
    """
    for connection in context.connections.all():
        connection.protocol.drain()
    context.batch.flush()
    await context.connections.none.wait()


async def _nothing_under_way(link: OriginPool) -> None:
    while link.route_count:  # noqa: ASYNC110  (a route ends in many ways, and only this waits)
        await asyncio.sleep(LOOK_S)


GC_THRESHOLDS = (2_000, 0, 250)
"""Thresholds of Python's garbage collector (`gc.set_threshold`), which blocks the event loop while
it runs. With a first threshold of 50,000 instead of 2,000, one collection took 56 ms while 2,000
WebSockets were idle."""


def run(config: EdgeConfig, deployment: Deployment | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if an address cannot be bound."""
    configure_logging(config.log_level)
    open_files = _take_files(config)
    require_keys(config)  # raises ConfigError, so it is called before the ports are open
    sockets = Sockets.bound(config)

    def work(process: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, open_files, sockets.of(process), process, deployment))

    if config.processes == 1:
        work(0)
    else:
        Processes(sockets, config.processes, work).run()


async def serve(
    config: EdgeConfig,
    open_files: int,
    sockets: Sockets,
    process: int,
    deployment: Deployment | None = None,
) -> None:
    traces = Traces.open(config.traces, "tailrace-edge", "edge.traces")
    authenticator = open_authenticator(config)
    edge = assemble(config, open_files, authenticator, traces, deployment)
    stop = Stop()
    certificate = Certificate(config, server_config(config))
    context = edge.tcp_context(alt_svc(sockets.quic))
    state = edge.starlette.state
    look_less_often(GC_THRESHOLDS)
    async with (
        _metrics_served(state.metrics, config.metrics_address(process)),
        reloading(watched_keys(config, authenticator), *certificate.watched),
        edge.starlette.router.lifespan_context(edge.starlette),
        listening(sockets, context, lambda: certificate.context, process) as quic,
    ):
        certificate.quic, state.serves_http3 = quic, quic is not None
        await stop.asked.wait()
        state.draining = True
        await go_away(context, quic, stop)
    if traces is not None:
        await asyncio.to_thread(traces.close)


@asynccontextmanager
async def _metrics_served(
    metrics: EdgeMetrics | None, address: tuple[str, int] | None
) -> AsyncIterator[None]:
    """Serve metrics at `edge.metrics` while the block runs, if that setting is given."""
    if metrics is None or address is None:
        yield
        return
    with exposed(metrics.registry, address, "edge.metrics") as port:
        log.info("metrics", port=port)
        yield


def _take_files(config: EdgeConfig) -> int:
    """Raise the limit of open files, warn if it is still too low, and return it."""
    open_files = raise_open_files()
    if too_few_files(config, open_files):
        log.warning(
            "the limit of open files is too low for max_connections",
            limit=open_files,
            connections=max(1, open_files - RESERVED_FILES),
            wanted=config.max_connections,
            hint="raise the hard limit: ulimit -Hn, LimitNOFILE of systemd; or lower"
            " edge.max_connections",
        )
    return open_files


def server_config(config: EdgeConfig) -> Config:
    """Return Hypercorn's settings for an edge, with TLS if there is a certificate."""
    server = Config()
    if config.certificate is not None and config.key is not None:
        server.certfile, server.keyfile = str(config.certificate), str(config.key)
        server.bind = list(config.https)
        server.insecure_bind = list(config.http)
    else:
        server.bind = list(config.http)
    server.backlog = LISTEN_BACKLOG
    server.include_server_header = False
    server.accesslog = None
    server.errorlog = logging.getLogger("hypercorn.error")
    server.keep_alive_timeout = KEEP_ALIVE_TIMEOUT_S
    server.h11_max_incomplete_size = MAX_HEAD_BYTES
    return server
