"""Asks the origin how many tokens of a message's prompt came from a KV cache.

No frame of the stream has this number, because it depends on what the cache of the last worker
held. The origin keeps it beside the StreamEnd.
"""

from __future__ import annotations

import asyncio

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import whole_answer
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import LINK_CODEC, Call, Caller, Opened, Resume
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS

TIMEOUT_S = 2.0
"""Maximum time in seconds that the last events of a message wait for the number of cached
tokens."""


async def cached_tokens(link: OriginPool, opened: Opened, caller: Caller | None) -> int:
    """Return how many prompt tokens of an ended stream were cached; 0 if no origin answers."""
    resume = Resume(opened.stream, token=opened.token or None)
    call = Call(
        CACHED_TOKENS,
        opened.stream.hex(),
        "GET",  # asking changes nothing, so the Call is repeated if the link breaks
        url="",
        body=LINK_CODEC.encode(resume),
        caller=caller,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, count = await whole_answer(link, call)
    except (TailraceError, TimeoutError):
        return 0
    return int(count)
