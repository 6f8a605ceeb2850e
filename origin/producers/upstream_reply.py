"""Parses the answers of OpenAI-compatible servers: events from bytes, and their meaning.

The routes for chats and for plain prompts send logprobs in different forms. Logprobs are optional,
so malformed ones are left out. These servers do not send token ids, which are 0 here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tailrace.ledger.errors import CallerError, TailraceError, Unavailable
from tailrace.ledger.frame import FinishReason, Score, TokenScores
from tailrace.origin.tool_calls import CallPiece

MAX_LINE_BYTES = 1 << 20
MAX_EVENT_BYTES = 1 << 20
"""Maximum bytes of an event's data lines together."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

UNKNOWN_ID = 0
MAX_TOP = 20
DONE = "[DONE]"
MAX_SAID_CHARS = 300
"""Maximum characters of a server's own error message."""
MAX_RETRY_AFTER_S = 30
"""Maximum Retry-After in seconds that is respected."""
MAX_DIGITS = 9
MAX_COUNT = 2**53
"""Maximum count of tokens: the integers that JSON numbers hold exactly."""
REASONING = ("reasoning", "reasoning_content")
"""Names that servers use for a model's reasoning; some send the same text under both."""
FINISH = {
    "content_filter": FinishReason.FILTERED,
    "function_call": FinishReason.TOOL_CALLS,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
}
"""Maps the finish reasons of servers to ours. Names that are not listed, such as stop or eos, count
as STOP."""
STOPPED_BY = ("stop_reason", "matched_stop")
"""Fields in which vLLM and SGLang give the stop sequence, or the id of the token, that ended the
answer."""
BROKEN = frozenset(("abort", "aborted", "cancelled", "error"))
"""Finish reasons by which a server says that it gave up in the middle of its answer."""
WORTH_ANOTHER_TRY = frozenset((408, 425, 429))
"""Statuses below 500 for which a retry may help, because they report a temporary condition."""
STARTING = frozenset((502, 503, 504))
"""Statuses of a server that is starting, or of a proxy in front of it; other statuses from 500 on
mean that the server is broken."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event; `name` is `message` if the server gave none."""

    name: str
    data: str


class EventReader:
    """Strict and bounded reader of server-sent events (WHATWG HTML, 9.2.5 and 9.2.6).

    It takes bytes in any pieces, and never returns an event that was cut off. It accepts what the
    standard tells browsers to accept (comments, unknown fields, three kinds of line ends, a byte
    order mark). But it refuses bytes that are not UTF-8, and lines or events above their limits,
    because the text of the events is stored in a ledger.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0  # number of bytes of `_rest` that are known to have no line end
        self._after_cr = False  # True after a CR: an LF that follows belongs to the same line end
        self._at_start = True
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that `data` completes; raises Unavailable for a malformed stream.

        Exhaust the generator before feeding more.
        """
        self._rest += data
        while (line := self._next_line()) is not None:
            if (event := self._take(line)) is not None:
                yield event
        if len(self._rest) > MAX_LINE_BYTES:
            raise rubbish(f"a line of more than {MAX_LINE_BYTES} bytes")

    def _next_line(self) -> bytes | None:
        """Return a line without its end: CRLF, LF or CR.

        A CR ends its line without waiting for an LF.
        """
        if self._after_cr and self._rest:
            self._after_cr = False
            if self._rest[0] == 0x0A:
                del self._rest[0]
        at = _line_end(self._rest, self._searched)
        if at < 0:
            self._searched = len(self._rest)
            return None
        line = bytes(self._rest[:at])
        self._after_cr = self._rest[at] == 0x0D
        del self._rest[: at + 1]
        self._searched = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        return line

    def _take(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        try:
            field, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise rubbish("bytes that are not UTF-8") from error
        value = value.removeprefix(" ")
        if field == "data":
            self._data_bytes += len(line)
            if self._data_bytes > MAX_EVENT_BYTES:
                raise rubbish(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None  # comments (with an empty field name), `id` and `retry` are ignored

    def _dispatch(self) -> ServerEvent | None:
        event = ServerEvent(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._data_bytes = "", [], 0
        return event


def _line_end(data: bytearray, start: int) -> int:
    """Return the first CR or LF from `start` on, or -1."""
    lf = data.find(b"\n", start)
    cr = data.find(b"\r", start, lf if lf >= 0 else len(data))
    return cr if cr >= 0 else lf


def rubbish(what: str) -> Unavailable:
    return Unavailable(f"the upstream server sent {what}", code="upstream_rubbish")


def read_scores(logprobs: object) -> tuple[TokenScores, ...]:
    """Return the scores of the tokens of one event."""
    if not isinstance(logprobs, dict):
        return ()
    if isinstance(content := logprobs.get("content"), list):
        found = [_of_chat(item) for item in content]
    else:
        found = _of_completion(logprobs)
    return tuple(scores for scores in found if scores is not None)


def _of_chat(item: object) -> TokenScores | None:
    chosen = _score(item)
    if chosen is None or not isinstance(item, dict):
        return None
    top = item.get("top_logprobs")
    others = [_score(each) for each in top[:MAX_TOP]] if isinstance(top, list) else []
    return TokenScores(chosen, tuple(score for score in others if score is not None))


def _score(item: object) -> Score | None:
    if not isinstance(item, dict):
        return None
    said = item.get("bytes")
    if isinstance(said, list) and all(isinstance(n, int) and 0 <= n < 256 for n in said):
        return _made(bytes(said), item.get("logprob"))
    return _made(item.get("token"), item.get("logprob"))


def _of_completion(logprobs: Mapping[str, Any]) -> list[TokenScores | None]:
    tokens, values, tops = (
        value if isinstance(value := logprobs.get(name), list) else []
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    found: list[TokenScores | None] = []
    for token, value, top in zip_longest(tokens, values, tops[: len(tokens)]):
        chosen = _made(token, value)
        others = [_made(*each) for each in top.items()] if isinstance(top, dict) else []
        best = sorted((s for s in others if s is not None), key=lambda s: -s.logprob)
        found.append(None if chosen is None else TokenScores(chosen, tuple(best[:MAX_TOP])))
    return found


def _made(token: object, logprob: object) -> Score | None:
    """Return the token's score, or None if the token or its logprob has a wrong type."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or math.isnan(logprob):
        return None
    if isinstance(token, str):
        token = token.encode(errors="replace")
    return Score(UNKNOWN_ID, token, float(logprob)) if isinstance(token, bytes) else None


@dataclass(frozen=True, slots=True)
class Usage:
    """A server's own count of tokens; 0 for details that it does not count."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The meaning of one event.

    `done` is True for the event that marks the end of the answer. `stop` is the text that ended the
    answer, if the server names it. All fields of a keep-alive are empty. The tool calls in `calls`
    have the server's numbers, not ours.
    """

    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    done: bool = False
    reasoning: str = ""
    scores: tuple[TokenScores, ...] = ()
    calls: tuple[CallPiece, ...] = ()
    stop: str | None = None


def read_reply(event: ServerEvent) -> Reply:
    """Return the event's meaning. Raises CallerError or Unavailable if it reports an error."""
    if event.data.strip() == DONE:
        return Reply(done=True)
    said = _object(event.data)
    if said.get("error") is not None or event.name == "error":
        raise error_of(said.get("error", said))
    choices = said.get("choices")
    if not isinstance(choices, list):
        raise rubbish("an event without choices")
    text, reasoning, finish, stop = "", "", None, None
    scores: tuple[TokenScores, ...] = ()
    calls: tuple[CallPiece, ...] = ()
    for choice in choices:
        if not isinstance(choice, dict):
            raise rubbish("a choice that is not an object")
        if choice.get("index", 0) == 0:
            text += _text(choice)
            reasoning += _reasoning(choice)
            scores += read_scores(choice.get("logprobs"))
            calls += _calls(choice)
            finish = finish or _finish(choice.get("finish_reason"))
            stop = stop or _stop(choice)
    usage = _usage(said.get("usage"))
    return Reply(text, finish, usage, reasoning=reasoning, scores=scores, calls=calls, stop=stop)


def refusal(status: int, body: bytes, retry_after: str = "") -> TailraceError:
    """Return the error for an HTTP status; `retry_after` is the Retry-After header."""
    said = _said(body)
    if status in (401, 403, 407):
        return TailraceError("the upstream server does not take this origin's key", code="upstream")
    if status in WORTH_ANOTHER_TRY or status >= 500:
        return Unavailable(
            f"the upstream server answered {status}{said}",
            code="upstream_busy" if status in WORTH_ANOTHER_TRY | STARTING else "upstream_failed",
            retry_after_ms=_milliseconds(retry_after),
        )
    if 400 <= status < 500:
        return CallerError(f"the upstream server refused the request{said}", code="refused")
    return TailraceError(f"the upstream server answered {status}", code="upstream")


def _milliseconds(retry_after: str) -> int | None:
    """Return the time in a Retry-After header in ms; None if it is not a number of seconds."""
    value = retry_after.strip()
    if not value.isascii() or not value.isdigit():
        return None
    return min(int(value[:MAX_DIGITS]), MAX_RETRY_AFTER_S) * 1000


def error_of(error: object) -> TailraceError:
    """Return the error that an event reports; an error without a status counts as temporary."""
    fields = error if isinstance(error, dict) else {"message": error}
    code, message = fields.get("code"), fields.get("message")
    said = f": {message[:MAX_SAID_CHARS]}" if isinstance(message, str) else ""
    if isinstance(code, int) and 400 <= code < 500 and code not in WORTH_ANOTHER_TRY:
        return CallerError(f"the upstream server refused the request{said}", code="refused")
    return Unavailable(f"the upstream server failed{said}", code="upstream_failed")


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise rubbish("an event that is not JSON") from error
    if not isinstance(value, dict):
        raise rubbish("an event that is not a JSON object")
    return value


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a chat's delta or of a completion."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if text is None:
        return ""
    if not isinstance(text, str) or not _is_unicode(text):
        raise rubbish("a text that is not a string")
    return text


def _reasoning(choice: Mapping[str, Any]) -> str:
    """Return the reasoning of a chat's delta; values of other types are ignored."""
    delta = choice.get("delta")
    said = (delta.get(name) for name in REASONING) if isinstance(delta, dict) else ()
    return next((text for text in said if text and isinstance(text, str) and _is_unicode(text)), "")


def _calls(choice: Mapping[str, Any]) -> tuple[CallPiece, ...]:
    """Return the calls of a chat's delta; malformed calls are errors, never altered."""
    delta = choice.get("delta")
    said = delta.get("tool_calls") if isinstance(delta, dict) else None
    if said is None:
        return ()
    if not isinstance(said, list):
        raise rubbish("tool calls that are not a list")
    return tuple(_call(call, at) for at, call in enumerate(said))


def _call(call: object, at: int) -> CallPiece:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise rubbish("a tool call without a function")
    number, arguments = call.get("index", at), function.get("arguments") or ""
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    parts = (function.get("name") or "", arguments, call.get("id") or "")
    if not isinstance(number, int) or not all(isinstance(part, str) for part in parts):
        raise rubbish("a tool call with a wrong value")
    if not all(map(_is_unicode, parts)):
        raise rubbish("a text that is not a string")
    return CallPiece(number, *parts)


def _is_unicode(text: str) -> bool:
    """Return False for lone surrogates, which JSON's escapes can write and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _finish(reason: object) -> FinishReason | None:
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise rubbish("a finish_reason that is not a string")
    if reason in BROKEN:
        raise Unavailable(f"the upstream server gave up: {reason}", code="upstream_failed")
    return FINISH.get(reason, FinishReason.STOP)


def _stop(choice: Mapping[str, Any]) -> str | None:
    """Return the text that ended the answer; None if the server names a token id or nothing."""
    said = (choice.get(name) for name in STOPPED_BY)
    return next((value for value in said if value and isinstance(value, str)), None)


def _usage(usage: object) -> Usage | None:
    """Return the server's usage; None if it is malformed, which is no reason to fail."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or completion is None:
        return None
    cached = _detail(usage, "prompt_tokens_details", "cached_tokens")
    reasoning = _detail(usage, "completion_tokens_details", "reasoning_tokens")
    return Usage(prompt, completion, min(cached, prompt), min(reasoning, completion))


def _detail(usage: Mapping[str, object], group: str, name: str) -> int:
    details = usage.get(group)
    return (_count(details, name) or 0) if isinstance(details, dict) else 0


def _count(usage: Mapping[str, object], name: str) -> int | None:
    value = usage.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT:
        return value
    return None


def _said(body: bytes) -> str:
    """Return `: ` and the server's own error message, or an empty text if there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    fields = value if isinstance(value, dict) else {}
    error = fields.get("error", fields)
    found = error.get("message") if isinstance(error, dict) else error
    found = found or fields.get("detail")
    return f": {found[:MAX_SAID_CHARS]}" if isinstance(found, str) else ""
