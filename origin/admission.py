"""What a request may ask for: every range is checked here, for every dialect.

Plain functions over values: an `Open` goes in, a `Recipe` comes out, or an error that
names the field and says what would be right.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from ledger.errors import CallerError, NotFound
from ledger.frame import Open, encode
from origin.prompt import PromptReader
from origin.recipe import Recipe, prompt_hash

MAX_TEMPERATURE = 2.0
MAX_STOPS = 8
MAX_STOP_CHARS = 128
MAX_KEY_CHARS = 255
MAX_TOP_K = 1 << 20
DEFAULT_MAX_TOKENS = 256


def admit(
    request: Open,
    *,
    model: str,
    fingerprint: str,
    reader: PromptReader,
    draw_seed: Callable[[], int],
) -> Recipe:
    """Check `request` for `model` and settle everything that it left open."""
    if request.model != model:
        raise NotFound(
            f"no model {request.model!r}",
            code="unknown_model",
            field="model",
            hint=f"this origin serves {model!r}",
        )
    if (request.prompt is None) == (not request.messages):
        raise CallerError("give either prompt or messages", field="prompt")
    _check_ranges(request)
    ids = reader.ids(request.prompt, request.messages)
    room = reader.context - len(ids)
    asked = request.max_tokens if request.max_tokens is not None else DEFAULT_MAX_TOKENS
    return Recipe(
        model=model,
        fingerprint=fingerprint,
        prompt_ids=ids,
        prompt_sha256=prompt_hash(ids),
        max_tokens=min(asked, room),
        temperature=_or(request.temperature, reader.temperature),
        top_k=request.top_k if request.top_k is not None else reader.top_k,
        top_p=_or(request.top_p, reader.top_p),
        seed=request.seed if request.seed is not None else draw_seed(),
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        priority=request.priority.word,
    )


def request_hash(request: Open) -> bytes:
    """What must be equal for an idempotency key to mean the same request: all but the credit."""
    same = {name: getattr(request, name) for name in Open.__match_args__ if name != "credit"}
    return hashlib.sha256(encode(Open(**same, credit=0))).digest()


def _check_ranges(request: Open) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise CallerError("is 0", field="max_tokens", hint="at least 1")
    temperature, top_p = request.temperature, request.top_p
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise CallerError(
            f"is {temperature}", field="temperature", hint=f"from 0 to {MAX_TEMPERATURE:g}"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise CallerError(f"is {top_p}", field="top_p", hint="above 0, at most 1")
    if request.top_k is not None and request.top_k > MAX_TOP_K:
        raise CallerError(f"is {request.top_k}", field="top_k", hint=f"0 (off) to {MAX_TOP_K}")
    if len(request.stop) > MAX_STOPS:
        raise CallerError(
            f"{len(request.stop)} sequences", field="stop", hint=f"at most {MAX_STOPS}"
        )
    for at, stop in enumerate(request.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise CallerError(
                f"has {len(stop)} characters",
                field=f"stop[{at}]",
                hint=f"1 to {MAX_STOP_CHARS} characters",
            )
    key = request.idempotency_key
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
        raise CallerError(
            f"has {len(key)} characters", field="idempotency_key", hint=f"1 to {MAX_KEY_CHARS}"
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None or math.isnan(value) else value
