"""Which requests are answered past the application."""

from __future__ import annotations

from edge.server.outlet import Handler, Outlet, Request


class Routes:
    def claims(self, request: Request) -> bool:
        return False

    def serve(self, request: Request, outlet: Outlet) -> Handler | None:
        return None
