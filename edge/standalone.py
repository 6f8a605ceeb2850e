"""The ASGI application that configures itself, for any server: `hypercorn tailrace.edge:app`.

Settings come from `tailrace.toml` in the working directory and from the environment, as for
`tailrace edge`. The lifespan of the server starts and ends the links to the origins.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack

import structlog
from starlette.types import Message, Receive, Scope, Send

from tailrace.edge.access.hosts import is_loopback
from tailrace.edge.assembly import Edge, assemble
from tailrace.edge.config import EdgeConfig
from tailrace.edge.errors import error_response
from tailrace.edge.reload import open_authenticator, reloading, watched_keys
from tailrace.ledger.errors import ConfigError, Unavailable
from tailrace.ledger.process.logging_setup import configure_logging
from tailrace.ledger.telemetry.traces import Traces

log = structlog.get_logger("tailrace.edge")


class StandaloneApplication:
    """The ASGI application of an edge that is assembled when its ASGI server starts."""

    def __init__(self) -> None:
        self._edge: Edge | None = None
        self._needs_keys = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; for the lifespan scope, run from startup to shutdown."""
        if scope["type"] == "lifespan":
            await self._run(scope, receive, send)
            return
        if self._edge is None:
            raise RuntimeError("the edge has not started: run the server with ASGI lifespan")
        if self._needs_keys and scope["type"] == "http" and not _is_local(scope):
            error = Unavailable(
                "this edge has no API keys, and its settings allow this machine only",
                hint="set edge.http to the addresses of the server, and make keys:"
                " tailrace key add NAME",
            )
            log.error("request from another machine refused", hint=error.hint)
            await error_response(error)(scope, receive, send)
            return
        await self._edge.app(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            try:
                edge = await self._start(stack)
            except ConfigError as error:
                await receive()
                failed: Message = {"type": "lifespan.startup.failed", "message": str(error)}
                await send(failed)
                return
            self._edge = edge
            await edge.app(scope, receive, send)

    async def _start(self, stack: AsyncExitStack) -> Edge:
        """Load the settings and return the edge. Raises ConfigError if a setting is not valid."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError(
                "the edge runs on asyncio only",
                hint="use a worker class on asyncio: hypercorn -k asyncio, or -k uvloop",
            ) from None
        config = EdgeConfig.load()
        configure_logging(config.log_level)
        authenticator = open_authenticator(config)
        traces = Traces.open(config.traces, "tailrace-edge", "edge.traces")
        if traces is not None:
            stack.callback(traces.close)
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        edge = assemble(config, open_files, authenticator, traces)
        self._needs_keys = authenticator.ring is None and not config.allow_public_without_keys
        await stack.enter_async_context(
            reloading(watched_keys(config, authenticator), by_signal=False)
        )
        return edge


def _is_local(scope: Scope) -> bool:
    """Return True if the server's address for this request is reachable from this machine only."""
    server = scope.get("server")
    return server is None or server[1] is None or is_loopback(server[0])


application = StandaloneApplication()
