"""What of a request decides whether it is let in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Head(NamedTuple):
    """The head of one request, a WebSocket's too; names of `headers` are in lower case.

    `address` is the client's, without its port, and empty where there is none (a Unix socket).
    """

    method: str
    path: str
    scheme: str
    address: str
    headers: tuple[tuple[bytes, bytes], ...]

    def value(self, name: bytes) -> str | None:
        """Of the first header field of that name."""
        return next((text for key, text in self._texts() if key == name), None)

    def values(self, name: bytes) -> list[str]:
        """The members of a header field that is a list (RFC 9110, 5.6.1), in their order."""
        joined = ",".join(text for key, text in self._texts() if key == name)
        return [member for part in joined.split(",") if (member := part.strip())]

    @property
    def host(self) -> str:
        """The name and port that the client asked for; empty where it did not say."""
        return self.value(b"host") or ""

    def _texts(self) -> Iterable[tuple[bytes, str]]:
        return ((key, value.decode("latin-1")) for key, value in self.headers)
