"""One request to an OpenAI-compatible server, new or a continuation, and its streamed answer.

A continuation gives the server the text that was delivered. For a plain prompt, the text is
appended to the prompt, which every server understands. For a chat, the text is the assistant's last
message, with `add_generation_prompt: false` and `continue_final_message: true`. vLLM and SGLang
then continue the message; llama.cpp and Ollama do so by themselves and ignore the fields. If a
server refuses them (as `transformers serve` does), the stream ends as lost. A server that ignores
both the fields and the position of the message, such as OpenAI's own, begins another answer; use
`upstream_lost = "end"` there.

Only fields that the caller gave are sent: servers refuse unknown fields, and have defaults of their
own (vLLM's come from the model's `generation_config.json`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from secrets import token_hex
from typing import Any, TypeVar

import httpx

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.flow.idle_timer import LONGEST_LOOK_S, IdleTimer
from tailrace.ledger.frame import SAMPLING, FinishReason
from tailrace.origin.config import OriginConfig
from tailrace.origin.generations.admission import ALL_THERE_IS
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.producer import Reasoning, Text
from tailrace.origin.producers.upstream_reply import (
    EventReader,
    Reply,
    Usage,
    read_reply,
    refusal,
    rubbish,
)
from tailrace.origin.tool_calls import CallPiece, read_calls, read_functions

NO_TOP_K = -1
"""The `top_k` that turns the filter off for every server; 0 does, too, but SGLang refuses it."""
MAX_SEED = 2**31 - 1
"""Maximum seed that is sent. Seeds have 64 bits here, but some servers store them as signed 32-bit
integers."""

Body = dict[str, Any]

MAX_ERROR_BYTES = 64 * 1024
"""Maximum bytes of an error response's body that are read."""
LOOKS = 4
"""Number of checks during a server's silence, at the last of which the server counts as lost.

A stall of this process counts as one of them, since the server's data may lie unread in the socket
meanwhile.
"""
AFTER_FINISH_S = 2.0
"""Timeout in seconds for the usage and the end of the connection, once the text is complete."""
Piece = Text | Reasoning | CallPiece
T = TypeVar("T")


def body_of(recipe: Recipe, model: str, delivered: str, made: int) -> Body:
    """Return the JSON of a request that continues after `delivered`, which took `made` tokens."""
    body: Body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(recipe),
        **_source(recipe, delivered),
        **_extras(recipe),
        **_tools(recipe),
    }
    if recipe.max_tokens < ALL_THERE_IS:  # without a limit the server fills its context
        body["max_tokens"] = recipe.max_tokens - made
    return body


def _source(recipe: Recipe, delivered: str) -> Body:
    if not recipe.messages:
        return {"prompt": (recipe.prompt or "") + delivered}
    messages = [_message(*turn) for turn in recipe.messages]
    if not delivered:
        return {"messages": messages}
    return {
        "messages": [*messages, {"role": "assistant", "content": delivered}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def _message(
    role: str | None, content: str | None, calls: str | None = None, answers: str | None = None
) -> Body:
    message: Body = {"role": role, "content": content}
    if calls is not None:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in read_calls(calls, "messages")
        ]
    if answers is not None:
        message["tool_call_id"] = answers
    return message


def _tools(recipe: Recipe) -> Body:
    tools = recipe.tools
    if tools is None:
        return {}
    functions = read_functions(tools.functions)
    choice: object = tools.choice
    if tools.only is not None:
        choice = {"type": "function", "function": {"name": tools.only}}
    body: Body = {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
    }
    return body if tools.parallel else body | {"parallel_tool_calls": False}


def _format(recipe: Recipe) -> Body | None:
    if recipe.format is None:
        return None
    _, source = recipe.format
    schema = json.loads(source)
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _sampling(recipe: Recipe) -> Body:
    """Return the request's sampling settings, with values as servers spell them."""
    settled: Body = {name: getattr(recipe.sampling, name) for name in SAMPLING}
    given = _given_before(settled) if recipe.given is None else recipe.given
    body: Body = {name: settled[name] for name in given}
    if "seed" in body:
        body["seed"] = (body["seed"] or 0) & MAX_SEED
    if body.get("top_k") == 0:
        body["top_k"] = NO_TOP_K
    return body


def _given_before(settled: Body) -> list[str]:
    """Return the settings to send for a recipe without `given`, which an earlier version wrote.

    They are those that the earlier version sent, so that its streams continue in the same way.
    """
    always = ("temperature", "seed")
    return [name for name, it in SAMPLING.items() if name in always or settled[name] != it.neutral]


def _extras(recipe: Recipe) -> Body:
    """Return the optional fields of the request body that have an effect."""
    asked: dict[str, tuple[object, object]] = {
        "stop": (list(recipe.stop), []),
        "ignore_eos": (recipe.ignore_eos, False),
        "response_format": (_format(recipe), None),
        **_logprobs(recipe),
    }
    return {name: value for name, (value, nothing) in asked.items() if value != nothing}


def _logprobs(recipe: Recipe) -> dict[str, tuple[object, object]]:
    """Return the logprobs field, which the two routes spell differently."""
    if not recipe.messages:
        return {"logprobs": (recipe.logprobs, None)}
    return {
        "logprobs": (recipe.logprobs is not None, False),
        "top_logprobs": (recipe.logprobs or 0, 0),
    }


class UpstreamCall:
    """A call, with `finish` once the answer's text is complete, and `stop` and `usage` if reported.

    Keep-alive messages of the server do not count as tokens.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        body: Body,
        config: OriginConfig,
        trace: str | None = None,
    ) -> None:
        """Prepare a call; `trace` is the traceparent header to send."""
        self._headers = {} if trace is None else {"traceparent": trace}
        self.finish: FinishReason | None = None
        self.stop: str | None = None
        self.usage: Usage | None = None
        self._client = client
        self._url = url
        self._body = body
        self._config = config
        self._timeout_s = 0.0
        self._silence = IdleTimer(0.0)
        self._timer: asyncio.TimerHandle | None = None
        # Maps the server's number of a call to our number and the call's id.
        self._calls: dict[int, tuple[int, str]] = {}
        self._count = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of text, reasoning and tool calls, to the end.

        Raises Unavailable if the server was lost, and another TailraceError if it refuses. Closing
        the generator closes the connection, which tells these servers to stop.
        """
        self._wait(self._config.upstream_first_token_s)
        try:
            async with aclosing(self._replies()) as replies:
                async for reply in replies:
                    self.usage = reply.usage or self.usage
                    for piece in self._pieces(reply) if self.finish is None else ():
                        yield piece
                        # The timeout starts only after the yield, so that the time of a slow reader
                        # does not count.
                        self._wait(self._config.upstream_between_tokens_s)
                    if reply.finish is not None and self.finish is None:
                        self.finish, self.stop = reply.finish, reply.stop
                        self._wait(AFTER_FINISH_S)
                    if reply.done:
                        self.finish = self.finish or FinishReason.STOP
                        return
        except Unavailable:
            if self.finish is None:
                raise
            return  # the text was complete; only the usage or the end of the connection is missing
        if self.finish is None:
            why = "the upstream server's answer ended before it was complete"
            raise Unavailable(why, code="upstream_lost")

    async def _replies(self) -> AsyncGenerator[Reply, None]:
        request = self._client.build_request(
            "POST", self._url, json=self._body, headers=self._headers
        )
        response = await self._within(self._client.send(request, stream=True))
        try:
            await self._check(response)
            reader, pieces = EventReader(), response.aiter_raw()
            while (data := await self._within(anext(pieces, None))) is not None:
                for event in reader.feed(data):
                    yield read_reply(event)
        finally:
            await response.aclose()

    async def _check(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            retry_after = response.headers.get("retry-after", "")
            raise refusal(response.status_code, await self._error_body(response), retry_after)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise rubbish(f"{kind or 'an answer without a type'}, not text/event-stream")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise rubbish("a compressed stream, although none was requested")

    async def _error_body(self, response: httpx.Response) -> bytes:
        body, pieces = b"", response.aiter_raw()
        with suppress(Unavailable):  # without a body the status is reported alone
            while len(body) < MAX_ERROR_BYTES and (data := await self._within(anext(pieces, None))):
                body += data
        return body[:MAX_ERROR_BYTES]

    def _pieces(self, reply: Reply) -> list[Piece]:
        pieces: list[Piece] = []
        if reply.reasoning:
            pieces.append(Reasoning(reply.reasoning))
        if reply.text:
            pieces.append(Text(reply.text, reply.scores))
        return pieces + [piece for delta in reply.calls for piece in self._call(delta)]

    def _call(self, delta: CallPiece) -> list[Piece]:
        """Return the pieces of a tool call, with our number for the call.

        Some servers give all calls the same number, so a new id also means a new call.
        """
        ours, known_id = self._calls.get(delta.call, (-1, ""))
        pieces: list[Piece] = []
        if ours < 0 or (delta.id and delta.id != known_id):
            if not delta.name:
                raise rubbish("a tool call without a name")
            ours = self._count
            self._count += 1
            id_ = delta.id or f"call_{token_hex(12)}"
            self._calls[delta.call] = (ours, delta.id)
            pieces.append(CallPiece(ours, delta.name, id=id_))
        if delta.arguments:
            pieces.append(CallPiece(ours, arguments=delta.arguments))
        return pieces

    def _wait(self, seconds: float) -> None:
        """Set the timeout for a silent server, and restart the measurement of its silence."""
        self._timeout_s = seconds
        look_s = min(seconds / LOOKS, LONGEST_LOOK_S)
        self._silence = IdleTimer(asyncio.get_running_loop().time(), look_s)

    async def _within(self, step: Awaitable[T]) -> T:
        """Await `step`, and return its result.

        Raises Unavailable if the step fails, or the server is silent for too long.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self._look(limit)
                return await step
        except TimeoutError as error:
            raise Unavailable("the upstream server stalled", code="upstream_stalled") from error
        except httpx.TransportError as error:
            raise lost(error) from error
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _look(self, limit: asyncio.Timeout) -> None:
        """Check now and then, while a step is awaited, whether the server is silent too long."""
        loop = asyncio.get_running_loop()
        left_s = self._timeout_s - self._silence.seconds(loop.time())
        if left_s <= 0:
            limit.reschedule(loop.time())
        else:
            wait_s = min(left_s, self._timeout_s / LOOKS, LONGEST_LOOK_S)
            self._timer = loop.call_later(wait_s, self._look, limit)


def lost(error: httpx.TransportError) -> Unavailable:
    """Return the error that readers get when a request to the upstream server has failed.

    It does not contain the cause, which may name the server's address and is only logged.
    """
    if isinstance(error, httpx.RemoteProtocolError) and not _is_cut_off(error):
        return rubbish("malformed HTTP")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unavailable("the upstream server cannot be reached", code="upstream_lost")
    return Unavailable("the connection to the upstream server broke", code="upstream_lost")


def _is_cut_off(error: httpx.RemoteProtocolError) -> bool:
    """Return True if the error means only that the connection ended early.

    That happens if the server is killed. httpx has no error class of its own for it.
    """
    return any(words in str(error) for words in ("disconnected", "closed connection"))
