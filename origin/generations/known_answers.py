"""Known answers: tokens in the ledger that an identical request gets without being computed.

A request is deterministic if it is greedy or names its seed: then the same engine gives the same
tokens. The identity of a request is a hash of everything on which its tokens depend, and of its
tenant. The functions do no I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Cache, FinishReason, Notice, Open, StreamEnd, decode, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.record_extra import RecordExtra
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History

CACHED = Notice("cached", "answered from the ledger, which has the end of an identical request", 0)
_DEPENDS_ON = frozenset(
    (
        *("model", "fingerprint", "prompt_sha256", "max_tokens", "stop", "ignore_eos"),
        *("completes", "logprobs", "format", "tools", "notices", "tenant"),
    )
)
"""Fields of a recipe on which the frames of its stream depend, besides the sampling settings."""
_SAME_AGAIN = frozenset(("truncated", "tools_unused", "shortened", CACHED.code))
"""Codes of notices that an identical request would get again."""
_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class KnownAnswer(NamedTuple):
    """The answer to an identical request: its first `shared` frames, and the record of its end."""

    stream: bytes
    shared: int
    end: Record


def may_answer(request: Open, *, by_default: bool) -> bool:
    """Return True if a request may be answered from the ledger.

    `by_default` is the operator's setting for requests without the field `cache`.

    Raises:
        CallerError: The request has `cache: exact`, but begins a branch or several streams.
    """
    if request.cache is Cache.EXACT and (request.branch is not None or request.n > 1):
        what = "a branch" if request.branch is not None else "several streams"
        raise CallerError(
            f"`exact` is not possible for a request that begins {what}",
            field="cache",
            hint="leave `cache` out: it is for requests for one new stream that is not a branch",
        )
    wanted = by_default if request.cache is None else request.cache is Cache.EXACT
    return wanted and request.branch is None and request.n == 1


def identity_of(recipe: Recipe, *, names_seed: bool) -> bytes:
    """Return the identity of the request that has this recipe; empty if it is not deterministic.

    `names_seed` is True if the request gives its seed. Streams of workers of kind `text` have no
    identity, because the same request may get another answer.
    """
    is_greedy = recipe.sampling.temperature == 0
    if not (recipe.prompt_ids and recipe.fingerprint and (is_greedy or names_seed)):
        return b""
    sampling = replace(recipe.sampling, seed=None) if is_greedy else recipe.sampling
    same = recipe.model_copy(update={"sampling": sampling})
    fields = same.model_dump(mode="json", include=set(_DEPENDS_ON | {"sampling"}))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def known_answer(
    stream: bytes, history: History, end: Record, fingerprint: str
) -> KnownAnswer | None:
    """Return the answer that a finished stream holds; None if other requests must not get it.

    The model must have ended the stream or reached a limit of tokens, and all frames must come from
    the engine with this `fingerprint`. No client may have added text, and the stream must neither
    have waited for its model nor have been retried after a failure.
    """
    frame = decode(end.frame)[1]
    if not isinstance(frame, StreamEnd) or frame.finish_reason not in _ENDED_WELL:
        return None
    codes = {notice.code for notice in history.notices}
    if history.steered or not codes <= _SAME_AGAIN:
        return None
    if history.engine not in (None, fingerprint):
        return None
    # An answer that was itself given from the ledger has a CACHED notice before its end. The new
    # stream gets a notice of its own, so this one is not shared.
    return KnownAnswer(stream, frame.index - (CACHED.code in codes), end)


def last_records(answer: KnownAnswer, now_ms: int) -> Sequence[Record]:
    """Return the records after the shared frames: a notice, and the end of the known answer.

    `now_ms` is the Unix time in ms to store with the first of these records.
    """
    frame = decode(answer.end.frame)[1]
    assert isinstance(frame, StreamEnd), "a known answer has ended"
    extra = RecordExtra(at_ms=now_ms).pack()
    told = Record(encode(replace(CACHED, index=answer.shared)), (), extra)
    end = Record(encode(replace(frame, index=answer.shared + 1)), answer.end.ids)
    return told, end
