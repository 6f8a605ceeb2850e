"""The stage `model`: another model of the same origin, whose output is a stream in the ledger.

The stream belongs to a tenant of its own, so no client can read it. Its idempotency key is made
from the ids of the pipeline's stream and of the stage: a worker that runs the stages again reads
the same stream again, from the ledger, instead of sampling other tokens.

The first model of a pipeline gets the prompt of the request. A later one gets the text of the stage
before it, once that is complete, as the prompt in its option `prompt`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from pydantic import Field, field_validator

from tailrace.ledger.errors import CallerError
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
from tailrace.origin.generations.stream_log import RETRIED
from tailrace.origin.pipelines.stage import (
    Item,
    Items,
    Prompt,
    Stage,
    StageContext,
    StageOptions,
)
from tailrace.origin.producer import Data, End, Label, Output, Reasoning, Remark, Text, Vector

TENANT_PREFIX = "pipelines:"
"""Beginning of the tenants of inner streams. A tenant of API keys has no colon in its name."""
UNREAD_S = 30
"""Seconds after which an inner stream is paused if the pipeline does not read it."""
MAX_CHAINED_CHARS = 1 << 20
"""Maximum number of characters of the text that a model gets from the stage before it."""
TEXT_MARK = "{text}"
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of a text that the next model gets."""


class ModelOptions(StageOptions):
    """The options of the stage `model`."""

    model: str = Field(min_length=1, description="Name of the model to ask.")
    prompt: str = Field(
        TEXT_MARK,
        description="Prompt of a model that follows other stages with text. {text} stands for the"
        " text of the stage before it.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Maximum number of tokens. Default: that of the request."
    )

    @field_validator("prompt")
    @classmethod
    def _has_mark(cls, prompt: str) -> str:
        if TEXT_MARK not in prompt:
            raise ValueError(f"the prompt must contain {TEXT_MARK}")
        return prompt


class ModelStage(Stage[ModelOptions]):
    """Replaces a prompt by the output of a model."""

    Options = ModelOptions

    def __init__(self, options: ModelOptions, context: StageContext) -> None:
        """Begin without a prompt."""
        super().__init__(options, context)
        self._had_prompt = False
        self._text: list[str] = []
        self._chars = 0
        self._stream: bytes | None = None  # the inner stream, until it has ended
        self.counted: End | None = None
        """The End of the model's stream, which has its numbers of tokens."""

    def process(self, item: Item) -> Items:
        """Ask the model, if the item is a prompt; gather text for the prompt otherwise."""
        match item:
            case Prompt():
                self._had_prompt = True
                return self._outputs(item)
            case Text(text=text):
                self._gather(text)
                return ()
            case producer.Revision(text=text, final=True):
                self._gather(text)
                return ()
            case producer.Revision() | Reasoning():
                return ()
        return (item,)

    def finish(self, end: End) -> Items:
        """Ask the model with the text that was gathered, if that is complete."""
        if self._had_prompt or end.reason not in COMPLETE:
            return ()
        text = self.options.prompt.replace(TEXT_MARK, "".join(self._text))
        return self._outputs(Prompt(text))

    def close(self, has_ended: bool) -> None:
        """Cancel the inner stream if that of the pipeline has ended before it."""
        if has_ended and self._stream is not None and self.context.origin is not None:
            self.context.origin.cancel(self._stream, caller_of(self.context.recipe.tenant))

    def _gather(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > MAX_CHAINED_CHARS:
            raise CallerError(f"the text has more than {MAX_CHAINED_CHARS} characters")
        self._text.append(text)

    async def _outputs(self, prompt: Prompt) -> AsyncIterator[Item]:
        assert self.context.origin is not None
        async for frame in self.context.origin.read(self._request(prompt)):
            if isinstance(frame, Opened):
                self._stream = frame.stream
            elif isinstance(frame, StreamEnd):
                self._stream = None
                self.counted = _end_of(frame)
                yield self.counted
            elif (output := output_of(frame)) is not None:
                yield output

    def _request(self, prompt: Prompt) -> Open:
        recipe, stream = self.context.recipe, self.context.stream
        given = {name: getattr(recipe.sampling, name) for name in recipe.given or ()}
        sampling = Sampling(**given)
        if sampling.seed is None:
            # The same tokens again, even if a power cut takes the inner stream from the ledger.
            sampling = replace(sampling, seed=int.from_bytes(stream[:8], "little"))
        messages = tuple(Message(*message) for message in prompt.messages)  # type: ignore[arg-type]
        return Open(
            self.options.model,
            prompt=prompt.text,
            messages=messages,
            max_tokens=self.options.max_tokens or recipe.max_tokens,
            sampling=sampling,
            stop=recipe.stop,
            ignore_eos=recipe.ignore_eos,
            priority=Priority.from_word(recipe.priority),
            unread=Unread.PAUSE,
            unread_after_s=UNREAD_S,
            idempotency_key=f"{stream.hex()}:{self.context.name}",
            caller=caller_of(recipe.tenant),
            trace=recipe.trace,
        )


def caller_of(tenant: str) -> Caller:
    """Return the caller of the inner streams of a tenant's pipelines."""
    return Caller(TENANT_PREFIX + tenant, Right.GENERATE | OF_A_STREAM)


def output_of(frame: Frame) -> Output | None:
    """Return a logged frame of an inner stream as the output of a producer; None leaves it out.

    A Revision replaces all text since the last final one, so its index is not needed.
    """
    match frame:
        case Token(text=text):
            return Text(text)
        case ScoredToken(text=text, scores=scores):
            return Text(text, scores)
        case ReasoningFrame(text=text):
            return Reasoning(text)
        case Revision():
            return producer.Revision(frame.text, frame.final)
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
