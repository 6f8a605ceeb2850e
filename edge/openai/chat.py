"""`/v1/chat/completions`: its requests, its chunks and its documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from tailrace.edge.errors import CHAT_PATH
from tailrace.edge.generate.routes import Collected
from tailrace.edge.generate.schema import Count
from tailrace.edge.openai.answers import (
    Dialect,
)
from tailrace.edge.openai.chunks import (
    AnswerShape,
    scores_of,
)
from tailrace.edge.openai.messages import (
    MESSAGE_SCHEMA,
    TOOL_SCHEMA,
    read_messages,
    read_tools,
)
from tailrace.edge.openai.request import (
    ALL_THERE_IS,
    ChoiceSettings,
    MaxTokens,
    open_of,
    output_format,
)
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, Open, OutputFormat, TokenScores, ToolCall

EXAMPLE = '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}'


class ChatBody(ChoiceSettings):
    """The JSON body of a request."""

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
        None,
        description="a list of functions that the model may call",
        json_schema_extra={"items": TOOL_SCHEMA},
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='"none", "auto", "required", or an object that names a function'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    response_format: dict[str, Any] | None = Field(
        None, description='an object such as {"type": "json_object"}'
    )

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """Return a list with the Open of the request; raise CallerError if it is invalid."""
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
    """The JSON of `/v1/chat/completions`: chunks and whole answers."""

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
