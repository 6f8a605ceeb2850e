"""`/v1/objects/{BINDING}/{name}`: objects of the origin's own classes, by the names of a file's
bindings; and telling origins of the file's classes and crons.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote_to_bytes

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge import stream
from edge.origins.link import Link, whole_answer
from ledger.deployment import DEPLOYMENT, Deployment
from ledger.errors import CallerError, NotFound, TailraceError
from ledger.frame import Call
from ledger.objects.object import MAX_KEY_CHARS
from ledger.tasks import beside

PATH = "/v1/objects/"
AGAIN_S = 5.0
"""After so long an origin is told again that has refused; its operator may have mended it."""

log = structlog.get_logger("tailrace.edge")


class Deploying:
    """Tells each origin of a deployment, again where one has not heard of it."""

    def __init__(self, link: Link, deployment: Deployment) -> None:
        self.deployment = deployment
        self._link = link
        self._refusals: dict[str, str] = {}
        self._told: set[str] = set()
        self._lost = asyncio.Event()

    @property
    def faults(self) -> list[str]:
        """Why this edge is not ready."""
        if not self._told and not self._refusals:
            return ["no origin knows of this edge's deployment yet"]
        return [f"{self._refusals[address]}" for address in sorted(self._refusals)]

    def lost(self) -> None:
        """An origin does not know of it: its ledger is another one."""
        self._lost.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with beside(self._tell_on(one.address) for one in self._link.origins):
            yield

    async def _tell_on(self, address: str) -> None:
        script, body = self.deployment.script, self.deployment.encoded()
        call = Call(DEPLOYMENT, script, "PUT", f"http://deployment/{script}", body=body)
        while True:
            self._lost.clear()
            try:
                await whole_answer(self._link, call, address)
            except TailraceError as error:
                if not error.retryable and self._refusals.get(address) != str(error):
                    self._refusals[address] = str(error)
                    log.error("deployment refused", origin=address, error=str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                self._refusals.pop(address, None)
                self._told.add(address)
                await self._lost.wait()


async def call(request: Request) -> Response:
    """Any method of /v1/objects/{BINDING}/{name}, and of what is below it"""
    deploying: Deploying | None = request.app.state.deploying
    binding, name = parse_path(request.scope["raw_path"])
    if deploying is None or binding not in deploying.deployment.bindings:
        names = () if deploying is None else sorted(deploying.deployment.bindings)
        raise NotFound(
            "no such binding",
            code="unknown_binding",
            field="path",
            hint="this edge has " + (", ".join(names) or "none"),
        )
    try:
        return await stream.pass_on(request, deploying.deployment.called(binding), name)
    except TailraceError as error:
        if error.code == "not_deployed":
            deploying.lost()
        raise


def parse_path(raw_path: bytes) -> tuple[str, str]:
    """Of a binding and an object. Raises NotFound for what can be no name."""
    binding, _, rest = raw_path.removeprefix(PATH.encode()).partition(b"/")
    try:
        name = unquote_to_bytes(rest.partition(b"/")[0]).decode()
    except UnicodeDecodeError:
        name = ""
    if not name or any(ord(char) < 0x20 or char == "\x7f" for char in name):
        hint = f"{PATH}BINDING/NAME, and what is below it"
        raise NotFound("no such object", code="unknown_object", field="path", hint=hint)
    if len(name) > MAX_KEY_CHARS:
        raise CallerError(
            "the object's name is too long",
            field="path",
            hint=f"at most {MAX_KEY_CHARS} characters",
        )
    return binding.decode("latin-1"), name


ROUTE = Route(f"{PATH}{{rest:path}}", call, methods=stream.METHODS)
