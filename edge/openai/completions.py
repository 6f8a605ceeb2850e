"""`/v1/completions`: text that continues a prompt, or each of several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tailrace.edge.errors import COMPLETIONS_PATH
from tailrace.edge.generate.routes import Collected
from tailrace.edge.generate.schema import Count
from tailrace.edge.openai.answers import (
    Dialect,
)
from tailrace.edge.openai.chunks import (
    AnswerShape,
    text_of,
)
from tailrace.edge.openai.request import TEXTS, ChoiceSettings, MaxTokens, open_of, read_texts
from tailrace.edge.sse import finite
from tailrace.ledger.frame import Caller, Open, TokenScores

TEXT_EXAMPLE = '{"model": "demo", "prompt": "Once upon a time"}'
DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens`, the same as OpenAI's."""
MAX_LOGPROBS = 5
"""Maximum of `logprobs`, the same as OpenAI's."""
MAX_PROMPTS = 2048
"""Maximum number of prompts of a request, the same as OpenAI's."""


class CompletionBody(ChoiceSettings):
    """The JSON body of a request."""

    cannot: ClassVar = {"echo": (False,), "suffix": ("",), "best_of": (1,), "logit_bias": ({},)}

    prompt: Any = Field(description="a string or a list of strings", json_schema_extra=TEXTS)
    max_tokens: MaxTokens = None
    logprobs: Annotated[Count | None, Field(le=MAX_LOGPROBS)] = Field(
        None, description=f"an integer from 0 to {MAX_LOGPROBS}"
    )

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """Return an Open for each prompt; raise CallerError for an invalid request."""
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
    """Return the idempotency key for the nth stream of a request whose own key is `key`."""
    return None if key is None else sha256(f"{nth} {key}".encode()).hexdigest()


class CompletionShape(AnswerShape):
    """The JSON of `/v1/completions`: chunks and whole answers have the same `object`."""

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
    """Return the scores of tokens as OpenAI's `logprobs`; `text_offset` begins at `offset`.

    In a resumed stream, offsets count from the position where it was resumed.
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
