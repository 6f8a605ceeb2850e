"""The files of `edge/web/`, for browsers: at `/web/…`, and the first page at `/`.

What there is to serve is looked up when the edge starts, so no path of a request is ever one of
the disk; what is in a file is read when it is asked for, so that who edits one has but to reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.access.rules import FIRST_PAGE, WEB_PATH
from ledger.errors import NotFound

FOLDER = Path(__file__).parent / "web"
INDEX = "index.html"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Files of other kinds are not served. The machine's own table of types may say anything."""
HEADERS = {
    # Asked again each time, and answered in a few bytes if nothing has changed: a page that is
    # served as it was written has no names that change with what a file holds.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            *("script-src 'self'", "style-src 'self'", "font-src 'self'"),
            *("img-src 'self' data:", "connect-src 'self'"),
            *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        )
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def web_routes(
    folder: Path = FOLDER, opened: Callable[[Request], None] = lambda request: None
) -> list[Route]:
    """What serves everything in `folder`; `opened` is told when the first page is asked for."""
    files = dict(_files_in(folder))

    async def serve(request: Request) -> Response:
        """GET and HEAD /web/{path}, and / for the first page."""
        asked = request.path_params.get("path", INDEX)
        if asked == INDEX:
            opened(request)
        path = files.get(asked)
        if path is None:
            raise NotFound(f"nothing is served at {request.url.path}")
        data = await to_thread.run_sync(path.read_bytes)
        tag = f'"{sha256(data).hexdigest()[:32]}"'
        headers = {**HEADERS, "ETag": tag, "Content-Type": TYPES[path.suffix]}
        if _names(request.headers.get("if-none-match", ""), tag):
            return Response(None, 304, headers)
        return Response(data, 200, headers)

    return [Route(FIRST_PAGE, serve), Route(f"{WEB_PATH}{{path:path}}", serve)]


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each file that is served, and its path below `/web/`."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in TYPES and "node_modules" not in name.parts and path.is_file():
            yield name.as_posix(), path


def _names(if_none_match: str, tag: str) -> bool:
    """Whether the client has it already (RFC 9110, 13.1.2)."""
    members = [member.strip().removeprefix("W/") for member in if_none_match.split(",")]
    return tag in members or members == ["*"]
