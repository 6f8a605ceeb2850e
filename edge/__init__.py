"""The stateless relay between clients and an origin: no data is lost if an edge is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

# Under a second name, Python would import the package again, and each class would exist twice.
if __name__ != "tailrace.edge":
    raise ImportError(f"{__name__}: import tailrace.edge instead")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve as an ASGI application that configures itself: `hypercorn tailrace.edge:app`."""
    from tailrace.edge.standalone import application

    await application(scope, receive, send)
