"""Serves the files of `edge/web/` to browsers: at `/web/…`, and `index.html` also at `/`.

The list of files is made when the edge starts, so the path of a request is never used as a path on
disk. Each request reads its file anew, so that a browser shows an edited file after a reload.
"""

from __future__ import annotations

import gzip
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import zstandard
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.edge.access.authenticator import FIRST_PAGE, WEB_PATH
from tailrace.edge.content_coding import coding_weights
from tailrace.ledger.errors import NotFound

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
"""Media types by suffix; files with other suffixes are not served. Python's `mimetypes` depends on
the machine's configuration."""
HEADERS = {
    # A file keeps its name when its contents change, so caches must revalidate it for each use.
    # If it has not changed, the answer is a short 304.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'nonce-{nonce}'", "style-src 'self'"),
        *("font-src 'self'", "img-src 'self' data:", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
"""The Content-Security-Policy of a page. A script runs only if its tag has the nonce of this one
response, or if such a script imports it. `'self'` would be unsafe: it would also allow scripts that
others wrote to streams of this edge."""
NONCE_BYTES = 16
_SCRIPT = re.compile(rb"<script\b")
COMPRESSED_TYPES = (".css", ".js", ".svg")
"""Suffixes of files that are sent compressed. Images and fonts are compressed already. Pages would
have to be compressed for each response, because each response has another nonce."""
MIN_COMPRESSED_BYTES = 512
"""Minimum size of a file to compress, in bytes: a smaller one fits into one packet anyway."""
GZIP_LEVEL, ZSTD_LEVEL = 9, 19
"""Compression levels. They are high, because each version of a document is compressed only once."""


class Representation(NamedTuple):
    """The bytes of a document in one content coding."""

    data: bytes
    tag: str
    coding: str
    """The value of Content-Encoding; `identity` if the file is sent uncompressed."""


class StaticDocument:
    """A document that is the same for every client; keeps its compressed forms."""

    def __init__(
        self, media_type: str, load: Callable[[], bytes], *, is_compressed: bool = True
    ) -> None:
        """Prepare the document; `load` returns its current contents, and may block."""
        self.media_type = media_type
        self.is_compressed = is_compressed
        self._load = load
        self._made: dict[str, Representation] = {}
        self._digest = b""

    async def answer(self, request: Request) -> Response:
        """Return the document, or 304 if the client has it already (RFC 9110, 13.1.2)."""
        codings = accepted_codings(request.headers)
        data, tag, coding = await to_thread.run_sync(self.read, codings)
        headers = HEADERS | {"ETag": tag}
        if self.is_compressed:
            headers["Vary"] = "Accept-Encoding"
        if _names(request.headers.get("if-none-match", ""), tag):
            return Response(None, 304, headers)
        if coding != "identity":
            headers["Content-Encoding"] = coding
        return Response(data, 200, headers | {"Content-Type": self.media_type})

    def read(self, codings: Sequence[str]) -> Representation:
        """Return the current document, compressed by the first of `codings` that makes it smaller.

        If no coding does, the document is returned uncompressed (`identity`). This call blocks.
        """
        data = self._load()
        digest = sha256(data).digest()
        if digest != self._digest:
            self._made, self._digest = {}, digest
        for coding in codings if self.is_compressed and len(data) >= MIN_COMPRESSED_BYTES else ():
            if coding not in self._made:
                tag = f'"{digest.hex()[:32]}-{coding}"'
                self._made[coding] = Representation(ENCODERS[coding](data), tag, coding)
            if len(self._made[coding].data) < len(data):
                return self._made[coding]
        return Representation(data, f'"{digest.hex()[:32]}"', "identity")


class WebFile(StaticDocument):
    """One file of the folder, read from disk for each request."""

    def __init__(self, path: Path) -> None:
        is_compressed = path.suffix in COMPRESSED_TYPES
        super().__init__(TYPES[path.suffix], path.read_bytes, is_compressed=is_compressed)
        self.is_page = path.suffix == ".html"


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, GZIP_LEVEL, mtime=0)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


ENCODERS: dict[str, Callable[[bytes], bytes]] = {"zstd": _zstd, "gzip": _gzip}
"""Maps content codings to functions that compress bytes, the preferred coding first."""


def web_routes(
    folder: Path = FOLDER, opened: Callable[[Request], None] = lambda request: None
) -> list[Route]:
    """Return the routes of all files in `folder`; `opened` is called for requests of index.html."""
    files = {name: WebFile(path) for name, path in _files_in(folder)}

    async def serve(request: Request) -> Response:
        """Handle GET and HEAD of /web/{path}, and of /, which shows index.html."""
        asked = request.path_params.get("path", INDEX)
        if asked == INDEX:
            opened(request)
        file = files.get(asked)
        if file is None:
            raise NotFound(f"nothing is served at {request.url.path}")
        if not file.is_page:
            return await file.answer(request)
        page = await to_thread.run_sync(file.read, ())
        return _page(page.data, HEADERS | {"Content-Type": file.media_type})

    return [Route(FIRST_PAGE, serve), Route(f"{WEB_PATH}{{path:path}}", serve)]


def accepted_codings(headers: Headers) -> list[str]:
    """Return the content codings that a client accepts, the preferred one first (RFC 9110, 12.5.3).

    The list is empty for a range request: its offsets would refer to the compressed bytes.
    """
    if "range" in headers:
        return []
    weights = coding_weights(headers.getlist("accept-encoding"))
    others = weights.get("*", 0.0)
    accepted = [coding for coding in ENCODERS if weights.get(coding, others) > 0]
    return sorted(accepted, key=lambda coding: -weights.get(coding, others))


def _page(data: bytes, headers: dict[str, str]) -> Response:
    """Return a page whose scripts have a fresh nonce. Caches must not store it."""
    nonce = secrets.token_urlsafe(NONCE_BYTES)
    policy = {"Content-Security-Policy": PAGE_POLICY.format(nonce=nonce)}
    page = _SCRIPT.sub(b'<script nonce="%b"' % nonce.encode(), data)
    return Response(page, 200, headers | policy | {"Cache-Control": "no-store"})


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each file that is served, with its path below `/web/`."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in TYPES and "node_modules" not in name.parts and path.is_file():
            yield name.as_posix(), path


def _names(if_none_match: str, tag: str) -> bool:
    """Return True if `If-None-Match` has `tag`, so the client has this file (RFC 9110, 13.1.2)."""
    members = [member.strip().removeprefix("W/") for member in if_none_match.split(",")]
    return tag in members or members == ["*"]
