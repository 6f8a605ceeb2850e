"""Admission of requests: checks all fields of a request, from whichever API of an edge it comes.

The functions turn an `Open` into a `Recipe`, or raise an error that names the field and says what
would be right. They do no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tailrace.ledger.errors import CallerError, Conflict, NotFound, TooLarge
from tailrace.ledger.frame import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    SAMPLING,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Sampling,
    ToolChoice,
    encode,
)
from tailrace.ledger.telemetry.traces import TraceContext
from tailrace.origin.core.quotas import tenant_of
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.generations.stage_switches import Stages, skipped_stages
from tailrace.origin.tool_calls import ToolUse, read_functions

if TYPE_CHECKING:  # the import needs the package tokenizers, which an origin may lack
    from tailrace.origin.checkpoint.prompt import PromptReader

MAX_STOPS = 8
MAX_STOP_CHARS = 128
MAX_LOGPROBS = 20
MAX_CHOICES = 16
DEFAULT_MAX_TOKENS = 256
ALL_THERE_IS = 1 << 20
"""A `max_tokens` of at least this means "as many tokens as the context has room for"."""
TOOLS_UNUSED = (
    "this model was not trained to call tools, so it answers in text;"
    ' "tool_choice": "required" makes it call one, as well as it can'
)
MAX_NOTE_CHARS = 256 * 1024
DEFAULT_UNREAD_S = 30
MAX_UNREAD_S = 86_400
"""Maximum of `unread_after_s`, the seconds after which an unread stream is paused or cancelled."""


def admit(
    request: Open,
    *,
    model: str,
    fingerprint: str,
    reader: PromptReader | None,
    offers: Collection[str] = (),
    stages: Stages | None = None,
    draw_seed: Callable[[], int],
) -> Recipe:
    """Return the recipe of a request, with a value for every setting.

    `model` and `fingerprint` are those of the model that will serve the request. `reader` tokenizes
    prompts for the model. If it is None, the recipe is for a worker of kind `text`, which takes
    text instead of tokens, and `offers` has the optional fields that this worker supports. `stages`
    are those of the model if it is a pipeline.

    Raises:
        CallerError: A field of the request is invalid, or the worker does not support it.
        NotFound: The request names another model.
    """
    if request.model != model:
        raise NotFound(
            f"no model {request.model!r}",
            code="unknown_model",
            field="model",
            hint=f"this origin serves {model!r}",
        )
    if (request.prompt is None) == (not request.messages):
        raise CallerError("give either prompt or messages", field="prompt")
    check_ranges(request)
    skipped = skipped_stages(request.stages, stages or {}, model)
    defaults = Sampling() if reader is None else reader.defaults
    drawn = Sampling(seed=draw_seed() if request.sampling.seed is None else None)
    sampling = settled(request.sampling, defaults, drawn)
    if reader is None:
        return _text_recipe(request, fingerprint, sampling, offers, skipped)
    return _token_recipe(request, fingerprint, sampling, reader)


def _token_recipe(
    request: Open, fingerprint: str, sampling: Sampling, reader: PromptReader
) -> Recipe:
    asked = request.max_tokens or DEFAULT_MAX_TOKENS
    is_dropping = request.overflow is Overflow.DROP_OLDEST
    # Number of tokens that must stay free for the output when older messages are dropped to fit the
    # context. A request for "as many tokens as fit" needs only one token.
    room = 1 if request.max_tokens is None or asked >= ALL_THERE_IS else asked
    tools = _tool_use(request, reader)
    notices: list[tuple[str, str]] = []
    if tools is not None and tools.markup is None:
        tools = None
        notices.append(("tools_unused", TOOLS_UNUSED))
    functions = [] if tools is None else read_functions(tools.functions)
    read = reader.read(request.prompt, request.messages, room if is_dropping else None, functions)
    if read.dropped:
        notices.append(("truncated", _dropped(read.dropped)))
    prompt_ids = packed_ids(read.ids)
    form = request.format
    held = tools is not None and (tools.forced or form is not None)
    if form is not None or held:
        # Imported late: numpy and llguidance would add 0.2 s to every start of an origin.
        from tailrace.origin.engine.grammar import check_format, check_tools

        is_open = reader.open_objects
        if form is not None:
            form = check_format(form.kind, form.source, open_objects=is_open)
        if tools is not None and held:
            if tools.forced:
                form = None  # the output has only tool calls, and no text to format
            tools = check_tools(tools, form, open_objects=is_open)
    return Recipe(
        **_any_kind(request, fingerprint, sampling, form),
        prompt_ids=prompt_ids,
        prompt_sha256=prompt_hash(prompt_ids),
        max_tokens=min(asked, reader.context - len(read.ids)),
        completes=request.prompt is not None,
        tools=tools,
        notices=tuple(notices),
    )


def _tool_use(request: Open, reader: PromptReader | None) -> ToolUse | None:
    """Return the tools that the stream may call; None if it may call none.

    The result has the markup in which the model writes calls, if it is known.
    """
    tools = request.tools
    if tools is None or tools.choice is ToolChoice.NONE:
        return None
    functions = read_functions(tools.functions)
    if not functions:
        raise CallerError("names no function", field="tools")
    forced = tools.choice is ToolChoice.REQUIRED
    if tools.only is not None and (
        not forced or tools.only not in [function["name"] for function in functions]
    ):
        raise CallerError(
            f"requires {tools.only!r}, which is not one of the functions", field="tools"
        )
    if request.prompt is not None:
        raise CallerError("can be used with messages, but not with a prompt", field="tools")
    return ToolUse(
        functions=tools.functions,
        choice=tools.choice.word,
        only=tools.only,
        parallel=tools.parallel and tools.only is None,
        markup=None if reader is None else reader.markup(forced=forced),
    )


def _text_recipe(
    request: Open,
    fingerprint: str,
    sampling: Sampling,
    offers: Collection[str],
    skipped: tuple[str, ...],
) -> Recipe:
    """Return a recipe for a worker of kind `text`; refuse fields that the worker cannot serve."""
    for name in _ENGINE_ONLY:
        if getattr(request, name) is not None and name not in offers:
            raise unsupported(name)
    form = request.format
    if form is not None and form.kind is not FormatKind.JSON_SCHEMA:
        raise unsupported("format")
    if request.overflow is not Overflow.REFUSE:
        raise unsupported("overflow")
    asked = request.max_tokens or DEFAULT_MAX_TOKENS
    return Recipe(
        **_any_kind(request, fingerprint, sampling, form),
        prompt_ids=packed_ids(()),
        prompt_sha256=prompt_hash(()),
        prompt=request.prompt,
        messages=tuple(map(turn, request.messages)),
        tools=_tool_use(request, None),
        max_tokens=min(asked, ALL_THERE_IS),
        given=tuple(name for name in SAMPLING if getattr(request.sampling, name) is not None),
        skipped_stages=skipped,
    )


def settled(*said: Sampling) -> Sampling:
    """Merge sampling settings; earlier arguments take precedence.

    A setting that no argument has gets its neutral value, which does not change the sampling.
    """
    settled: dict[str, Any] = {name: setting.neutral for name, setting in SAMPLING.items()}
    for each in reversed(said):
        values = {name: getattr(each, name) for name in SAMPLING}
        settled |= {name: value for name, value in values.items() if value is not None}
    return Sampling(**settled)


def _any_kind(
    request: Open, fingerprint: str, sampling: Sampling, form: OutputFormat | None
) -> dict[str, Any]:
    """Return the fields of a recipe that do not depend on the kind of its worker."""
    return {
        "model": request.model,
        "fingerprint": fingerprint,
        "sampling": sampling,
        "logprobs": request.logprobs,
        "format": None if form is None else (form.kind.word, form.source),
        "stop": request.stop,
        "ignore_eos": request.ignore_eos,
        "tenant": tenant_of(request.caller),
        **new_stream(request),
    }


def new_stream(request: Open) -> dict[str, Any]:
    """Return the recipe fields that always come from the request, even from that of a branch.

    A branch takes most of its other fields from its parent's recipe.
    """
    return {
        "priority": request.priority.word,
        "unread": request.unread.word,
        "unread_after_s": request.unread_after_s or DEFAULT_UNREAD_S,
        "key": "" if request.caller is None else request.caller.key,
        "note": request.note,
        "trace": _trace(request),
    }


def _trace(request: Open) -> str | None:
    given = None if request.trace is None else TraceContext.parse(request.trace)
    return None if given is None else given.text


_ENGINE_ONLY = ("logprobs", "format", "tools")


def asks_of_engine(request: Open) -> bool:
    """Return True if a request has optional fields that some `text` workers cannot serve."""
    return any(getattr(request, name) is not None for name in _ENGINE_ONLY)


def turn(message: Message) -> tuple[str | None, ...]:
    if message.tool_calls is None and message.tool_call_id is None:
        return message.role, message.content
    return message.role, message.content, message.tool_calls, message.tool_call_id


def check_count(request: Open) -> None:
    """Check the number of streams of a request, before each of them causes work."""
    if not 1 <= request.n <= MAX_CHOICES:
        raise CallerError(f"is {request.n}", field="n", hint=f"from 1 to {MAX_CHOICES}")


def request_hash(request: Open) -> bytes:
    """Return the hash of a request, by which a repeated idempotency key is checked.

    A request that repeats a key must have an equal hash. Credit, trace and the token of the stream
    that is branched are left out, because they may differ. The caller is left out, because each
    tenant has idempotency keys of its own.
    """
    branch = None if request.branch is None else replace(request.branch, token=None)
    same = replace(request, credit=0, credit_bytes=None, caller=None, trace=None, branch=branch)
    return hashlib.sha256(encode(same)).digest()


def check_ranges(request: Open) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise CallerError("is 0", field="max_tokens", hint="at least 1")
    for name, setting in SAMPLING.items():
        value = getattr(request.sampling, name)
        if value is not None and not setting.allows(value):
            raise CallerError(f"is {value}", field=name, hint=setting.hint)
    for name, least, most in _RANGES:
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            raise CallerError(f"is {value}", field=name, hint=f"from {least} to {most}")
    _check_stops(request.stop)
    if len(request.note or "") > MAX_NOTE_CHARS:
        raise TooLarge(
            f"{len(request.note or '')} characters", field="note", hint=f"at most {MAX_NOTE_CHARS}"
        )
    key = request.idempotency_key
    if key is not None and not 0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS:
        raise CallerError(
            f"has {len(key)} characters",
            field="idempotency_key",
            hint=f"1 to {MAX_IDEMPOTENCY_KEY_CHARS}",
        )


def _check_stops(stops: tuple[str, ...]) -> None:
    """Check the number of stop sequences of a request, and the length of each."""
    if len(stops) > MAX_STOPS:
        raise CallerError(f"has {len(stops)} sequences", field="stop", hint=f"at most {MAX_STOPS}")
    for at, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise CallerError(
                f"has {len(stop)} characters",
                field=f"stop[{at}]",
                hint=f"1 to {MAX_STOP_CHARS} characters",
            )


_RANGES = (("logprobs", 0, MAX_LOGPROBS), ("unread_after_s", 1, MAX_UNREAD_S))


def unsupported(field: str) -> Conflict:
    return Conflict(
        "this model's worker takes text, not tokens, and does not support this field",
        code="unsupported",
        field=field,
        hint="leave the field out",
    )


def _dropped(messages: int) -> str:
    turns = "message was" if messages == 1 else "messages were"
    return f"{messages} older {turns} dropped to fit the context"
