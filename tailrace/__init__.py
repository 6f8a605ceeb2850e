"""The user's interfaces: the client, the command line and `up`. Nothing in Tailrace imports it.

`from tailrace import Client` is the start of a program. Names are imported when they are first
used, because `tailrace --help` needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.client import Client, Stream
    from tailrace.ledger.errors import (
        CallerError,
        Conflict,
        NotFound,
        Overloaded,
        TailraceError,
        Unauthorized,
        Unavailable,
    )
    from tailrace.ledger.frame import (
        Classification,
        Embedding,
        FinishReason,
        Logged,
        Notice,
        Reasoning,
        Revision,
        ScoredToken,
        Status,
        StreamEnd,
        Token,
        ToolCall,
    )

__all__ = [
    "CallerError",
    "Classification",
    "Client",
    "Conflict",
    "Embedding",
    "FinishReason",
    "Logged",
    "NotFound",
    "Notice",
    "Overloaded",
    "Reasoning",
    "Revision",
    "ScoredToken",
    "Status",
    "Stream",
    "StreamEnd",
    "TailraceError",
    "Token",
    "ToolCall",
    "Unauthorized",
    "Unavailable",
]


_HOMES = ("tailrace.ledger.errors", "tailrace.ledger.frame", "tailrace.client")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return next(vars(home)[name] for home in map(import_module, _HOMES) if name in vars(home))
