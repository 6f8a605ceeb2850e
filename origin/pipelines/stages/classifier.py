"""The stage `classifier`: asks a model about prompts and text before they are passed on.

Text is held back in buffers of a fixed length. The stage asks the model about one buffer after the
other, and passes a buffer on after the answer. Each answer is a stream in the ledger, whose
idempotency key contains the number of the question: a worker that runs the stages again reads the
same answers. If a classifier that is not optional fails, the stream ends and no unchecked
text is passed on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from pydantic import Field

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.frame import Sampling
from tailrace.origin.pipelines.inner_stream import COMPLETE, AskingStage
from tailrace.origin.pipelines.moderation import Moderation, ModerationOptions
from tailrace.origin.pipelines.patterns import Pattern, matches
from tailrace.origin.pipelines.prompt_template import PromptTemplate, filled
from tailrace.origin.pipelines.stage import Item, Items, Prompt, StageContext
from tailrace.origin.pipelines.text_cutter import TextCutter
from tailrace.origin.producer import End, Label, Reasoning, Revision, Text

DEFAULT_BUFFER_CHARS = 400
MAX_BUFFER_CHARS = 65_536
DEFAULT_ANSWER_TOKENS = 16


class ClassifierOptions(ModerationOptions):
    """The options of the stage `classifier`."""

    model: str = Field(min_length=1, description="Name of the model to ask.")
    prompt: PromptTemplate = Field(
        description="The question to the model. {text} stands for the text that is checked."
    )
    block_if: Pattern = Field(
        description="Regular expression in the syntax of Python's re module, matched without regard"
        " to case. The text is blocked if a part of the model's answer matches it."
    )
    buffer_chars: int = Field(
        DEFAULT_BUFFER_CHARS,
        ge=1,
        le=MAX_BUFFER_CHARS,
        description="Number of characters of text that are checked, and held back, together.",
    )
    max_tokens: int = Field(
        DEFAULT_ANSWER_TOKENS, ge=1, description="Maximum number of tokens of an answer."
    )

    @property
    def asked_models(self) -> tuple[str, ...]:
        """The names of the models that the stage may ask."""
        return (self.model,)


class Classifier(AskingStage[ClassifierOptions]):
    """Ends a stream, or changes its text, where the answer of a model says so."""

    Options = ClassifierOptions

    def __init__(self, options: ClassifierOptions, context: StageContext) -> None:
        """Begin without text."""
        super().__init__(options, context)
        self._moderation = Moderation(options, context.name)
        self._held: Text | Reasoning = Text("")
        self._questions = 0

    def process(self, item: Item) -> Items:
        """Check one item; text is held back until a buffer is full."""
        match item:
            case Text() | Reasoning():
                kind, cutter = type(item), TextCutter(None, self.options.buffer_chars)
                goes_on = kind is type(self._held)
                before = [] if goes_on else self.held()
                pieces = cutter.feed((self._held.text if goes_on else "") + item.text)
                return self._checked([*before, *(kind(one) for one in pieces)], kind(cutter.held))
        return self._checked([*self.held(), item], Text(""))

    def finish(self, end: End) -> Items:
        """Check the text that is still held back."""
        return self._checked(self.held(), Text(""))

    def held(self) -> Iterable[Item]:
        """Return the text that is held back."""
        return [self._held] if self._held.text else []

    async def _checked(self, items: Iterable[Item], held: Text | Reasoning) -> AsyncIterator[Item]:
        """Check items, yield those that replace them, and then hold back `held`.

        If the model gives no answer, the stage still holds the text that it held before.
        """
        for item in items:
            for each in await self._after_check(item):
                yield each
                if isinstance(each, End):
                    return
        self._held = held

    async def _after_check(self, item: Item) -> list[Item]:
        """Return the items that replace `item`, after asking the model about its text."""
        if not isinstance(item, Prompt | Text | Reasoning | Revision):
            return [item]
        texts = item.texts if isinstance(item, Prompt) else (item.text,)
        if not await self._is_blocked("\n".join(texts)):
            return [item]
        if self._moderation.ends:
            is_interim = isinstance(item, Revision) and not item.final
            return [] if is_interim else [self._moderation.end()]
        changed = [self._moderation.changed(text) for text in texts]
        if isinstance(item, Prompt):
            return [*self._moderation.notice(), item.with_texts(changed)]
        if not (changed[0] or isinstance(item, Revision)):
            return []
        return [*self._moderation.notice(), replace(item, text=changed[0])]

    async def _is_blocked(self, text: str) -> bool:
        """Ask the model about a text, and return True if its answer blocks the text."""
        self._questions += 1
        options, answer = self.options, ""
        question = Prompt(filled(options.prompt, text))
        greedy, key = Sampling(temperature=0), str(self._questions)
        outputs = self.ask(options.model, question, greedy, key, max_tokens=options.max_tokens)
        async for output in outputs:
            match output:
                case Text(text=piece) | Revision(text=piece, final=True) | Label(name=piece):
                    answer += piece
                case End(reason=reason) if reason not in COMPLETE:
                    why = output.message or f"its stream ended as {reason.word}"
                    raise Unavailable(f"the model {options.model} gave no answer: {why}")
        return matches(options.block_if, answer)
