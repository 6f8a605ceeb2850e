"""`/v1/chat/completions`, and `/v1/completions`, the older route: text that goes on from a prompt,
or from each of several. Their requests, their chunks and their documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tailrace.edge.errors import CHAT_PATH, COMPLETIONS_PATH
from tailrace.edge.generate import Collected
from tailrace.edge.openai.answers import AnswerShape, Dialect, scores_of, text_of
from tailrace.edge.openai.messages import (
    MESSAGE_SCHEMA,
    TOOL_SCHEMA,
    read_messages,
    read_tools,
)
from tailrace.edge.openai.request import (
    ALL_THERE_IS,
    TEXTS,
    MaxTokens,
    StreamedSettings,
    open_of,
    output_format,
    read_texts,
)
from tailrace.edge.request import Count
from tailrace.edge.sse import finite
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, Open, OutputFormat, TokenScores, ToolCall

EXAMPLE = '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}'


class ChatBody(StreamedSettings):
    """The JSON document of a request."""

    cannot: ClassVar = {
        "logit_bias": ({},),
        "functions": ([],),
        "function_call": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "modalities": (["text"],),
    }

    messages: list[Any] = Field(
        description="a list of messages", json_schema_extra={"items": MESSAGE_SCHEMA}
    )
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: Count | None = Field(None, description="an integer from 0 to 20")
    tools: list[Any] | None = Field(
        None, description="a list of tools", json_schema_extra={"items": TOOL_SCHEMA}
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, or an object that names a function"
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    response_format: dict[str, Any] | None = Field(
        None, description='an object such as {"type": "json_object"}'
    )

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """The stream that is asked for; CallerError for what cannot be."""
        if self.top_logprobs is not None and not self.logprobs:
            raise CallerError(
                "'top_logprobs' is only allowed when 'logprobs' is true.", field="top_logprobs"
            )
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise CallerError(
                "'max_tokens' and 'max_completion_tokens' are two names of one limit: set one.",
                code="invalid_parameter_combination",
                field="max_tokens",
            )
        wanted = open_of(
            self,
            key,
            caller,
            messages=read_messages(self.messages),
            max_tokens=self.max_completion_tokens or self.max_tokens or ALL_THERE_IS,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            format=self._format(),
            tools=read_tools(self.tools, self.tool_choice, self.parallel_tool_calls),
        )
        return [wanted]

    def _format(self) -> OutputFormat | None:
        if self.response_format is None:
            return None
        named = self.response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        return output_format(self.response_format.get("type"), schema, "response_format")


class ChatShape(AnswerShape):
    """Chunks of a chat completion."""

    path = CHAT_PATH
    prefix = "chatcmpl-"
    kind = "chat.completion.chunk"
    whole = "chat.completion"

    def first(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": None if calls else ""})

    def text(
        self, index: int, text: str, scores: tuple[TokenScores, ...], offset: int = 0
    ) -> dict[str, Any]:
        return _delta(index, {"content": text}, _logprobs(scores))

    def reasoning(self, index: int, text: str) -> dict[str, Any] | None:
        return _delta(index, {"reasoning_content": text})

    def call(self, index: int, piece: ToolCall) -> dict[str, Any] | None:
        call: dict[str, Any] = {"index": piece.call}
        function = {"arguments": piece.arguments}
        if piece.name:
            call |= {"id": piece.id, "type": "function"}
            function = {"name": piece.name, **function}
        return _delta(index, {"tool_calls": [call | {"function": function}]})

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    # ---- documents ----

    def choice(self, index: int, collected: Collected, reason: str | None) -> dict[str, Any]:
        text, calls = collected.text.text, collected.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if collected.reasoning:
            message["reasoning_content"] = "".join(collected.reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(collected.scores),
            "finish_reason": reason,
        }


CHAT = Dialect(ChatBody, EXAMPLE, ChatShape())


def _logprobs(scores: Sequence[TokenScores]) -> dict[str, Any] | None:
    return {"content": scores_of(scores), "refusal": None} if scores else None


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


TEXT_EXAMPLE = '{"model": "demo", "prompt": "Once upon a time"}'
DEFAULT_MAX_TOKENS = 16
"""As in the reference."""
MAX_LOGPROBS = 5
"""As there."""
MAX_PROMPTS = 2048
"""As there."""


class CompletionBody(StreamedSettings):
    """The JSON document of a request."""

    cannot: ClassVar = {"echo": (False,), "suffix": ("",), "best_of": (1,), "logit_bias": ({},)}

    prompt: Any = Field(description="a string or a list of strings", json_schema_extra=TEXTS)
    max_tokens: MaxTokens = None
    logprobs: Annotated[Count | None, Field(le=MAX_LOGPROBS)] = Field(
        None, description=f"an integer from 0 to {MAX_LOGPROBS}"
    )

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """The streams that are asked for; CallerError for what cannot be."""
        prompts = read_texts("prompt", self.prompt, MAX_PROMPTS, "prompts")
        return [
            open_of(
                self,
                key_of(key, nth) if len(prompts) > 1 else key,
                caller,
                prompt=prompt,
                max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS,
                logprobs=self.logprobs,
            )
            for nth, prompt in enumerate(prompts)
        ]


def key_of(key: str | None, nth: int) -> str | None:
    """The idempotency key of one of several streams that a request with one makes."""
    return None if key is None else sha256(f"{nth} {key}".encode()).hexdigest()


class CompletionShape(AnswerShape):
    """Chunks and whole answers, which here have one name."""

    path = COMPLETIONS_PATH
    prefix = "cmpl-"
    kind = whole = "text_completion"

    def text(
        self, index: int, text: str, scores: tuple[TokenScores, ...], offset: int = 0
    ) -> dict[str, Any]:
        return _choice(index, text, scores, offset)

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return _choice(index, "") | {"finish_reason": reason}

    def choice(self, index: int, collected: Collected, reason: str | None) -> dict[str, Any]:
        choice = _choice(index, collected.text.text, collected.scores)
        return choice | {"finish_reason": reason}


def _choice(
    index: int, text: str, scores: Sequence[TokenScores] = (), offset: int = 0
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _text_logprobs(scores, offset) if scores else None,
        "finish_reason": None,
    }


def _text_logprobs(scores: Sequence[TokenScores], offset: int) -> dict[str, Any]:
    """Return the scores of a text that begins at `offset`, or of all of it.

    A stream that is resumed counts from where it was resumed.
    """
    tokens = [text_of(each.chosen) for each in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(each.chosen.logprob) for each in scores],
        "top_logprobs": [
            {text_of(score): finite(score.logprob) for score in (each.chosen, *each.top)}
            for each in scores
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


COMPLETIONS = Dialect(CompletionBody, TEXT_EXAMPLE, CompletionShape())
