"""The package for users: the client, the command line and `tailrace up`.

The other packages of Tailrace (edge, origin, ledger, kernels) do not use these. A program begins
with `from tailrace import Client`. Each name is imported when it is first used, because
`tailrace --help` needs none of them and must be fast.
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
