"""Inner streams: the generations that stages of a pipeline request from models of their origin.

An inner stream belongs to a tenant that no API key has, so no client can read it. Its idempotency
key is made from the id of the pipeline's stream, the name of the stage and the prompt. So a worker
that runs the stages again gets the same inner stream from the ledger, instead of sampling other
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from tailrace.ledger.frame import (
    Caller,
    Chunk,
    Classification,
    Embedding,
    FinishReason,
    Frame,
    Message,
    Notice,
    Open,
    Opened,
    Priority,
    Revision,
    Sampling,
    ScoredToken,
    StreamEnd,
    Token,
    Unread,
)
from tailrace.ledger.frame import Reasoning as ReasoningFrame
from tailrace.ledger.links.rights import OF_A_STREAM, Right
from tailrace.origin import producer
from tailrace.origin.generations.permissions import PIPELINES
from tailrace.origin.generations.stream_log import RETRIED
from tailrace.origin.pipelines.stage import O_co, Prompt, Stage, StageContext
from tailrace.origin.producer import Data, End, Label, Output, Reasoning, Remark, Text, Vector

UNREAD_S = 30
"""Seconds after which an inner stream is paused if the pipeline does not read it."""
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of a stream whose text another stage can use."""


class AskingStage(Stage[O_co]):
    """Base class of stages that send requests to models of the origin, one at a time."""

    def __init__(self, options: O_co, context: StageContext) -> None:
        """Begin without an inner stream."""
        super().__init__(options, context)
        self._stream: bytes | None = None  # id of the inner stream that has not ended, if any
        self.ends: list[End] = []
        """The End of each inner stream that has ended, with its numbers of tokens."""

    def close(self, has_ended: bool) -> None:
        """Cancel the inner stream if the stream of the pipeline has ended."""
        if has_ended and self._stream is not None and self.context.origin is not None:
            self.context.origin.cancel(self._stream, caller_of(self.context.recipe.tenant))

    async def ask(
        self, model: str, prompt: Prompt, sampling: Sampling, key: str = "", **more: Any
    ) -> AsyncIterator[Output]:
        """Send a request to a model, and yield its outputs. The last output is an End.

        Args:
            model: the name of the model.
            prompt: its input.
            sampling: its sampling settings.
            key: tells the inner streams of this stage apart, if it has more than one.
            more: other fields of the request.

        Raises:
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        assert self.context.origin is not None
        recipe, stream = self.context.recipe, self.context.stream
        if sampling.seed is None:
            # With a fixed seed, the same tokens are sampled again if a power cut has removed the
            # inner stream from the ledger.
            sampling = replace(sampling, seed=int.from_bytes(stream[:8], "little"))
        messages = tuple(Message(*message) for message in prompt.messages)  # type: ignore[arg-type]
        request = Open(
            model,
            prompt=prompt.text,
            messages=messages,
            sampling=sampling,
            priority=Priority.from_word(recipe.priority),
            unread=Unread.PAUSE,
            unread_after_s=UNREAD_S,
            idempotency_key=f"{stream.hex()}:{self.context.key}:{key}:{_digest(prompt)}",
            caller=caller_of(recipe.tenant),
            trace=recipe.trace,
            **more,
        )
        async for frame in self.context.origin.read(request):
            if isinstance(frame, Opened):
                self._stream = frame.stream
            elif isinstance(frame, StreamEnd):
                self._stream = None
                self.ends.append(_end_of(frame))
                yield self.ends[-1]
            elif (output := output_of(frame)) is not None:
                yield output


def _digest(prompt: Prompt) -> str:
    """Return a digest of a prompt.

    If a worker is killed just after a stage was switched, the stage is switched at another item
    later, and a model behind it may get another prompt, which needs another inner stream.
    """
    return hashlib.sha256(repr(prompt).encode(errors="replace")).hexdigest()[:16]


def caller_of(tenant: str) -> Caller:
    """Return the caller with which a pipeline opens inner streams for requests of a tenant."""
    return Caller(PIPELINES + tenant, Right.GENERATE | OF_A_STREAM)


def output_of(frame: Frame) -> Output | None:
    """Convert a logged frame of an inner stream to an output, or to None to leave it out.

    A Revision replaces all text since the last final Revision, so its index is not needed.
    """
    match frame:
        case Token(text=text):
            return Text(text)
        case ScoredToken(text=text, scores=scores):
            return Text(text, scores)
        case ReasoningFrame(text=text):
            return Reasoning(text)
        case Revision():
            return producer.Revision(frame.text, frame.final, frame.stability)
        case Chunk():
            return Data(frame.data)
        case Embedding(values=values):
            return Vector(values)
        case Classification():
            return Label(frame.label, frame.confidence)
        case Notice(code=code, message=message) if code != RETRIED:
            return Remark(code, message)
    return None


def _end_of(frame: StreamEnd) -> End:
    return End(
        frame.finish_reason,
        total_tokens=frame.total_tokens,
        prompt_tokens=frame.prompt_tokens,
        message=frame.message,
        retryable=frame.retryable,
    )
