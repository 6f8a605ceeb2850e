"""The stage `model`: another model of the same origin, whose output is a stream in the ledger.

The first model of a pipeline gets the prompt of the request. A later model waits for the whole text
of the stage before it. Its prompt is then its option `prompt`, with this text in place of {text}.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Sampling
from tailrace.origin import producer
from tailrace.origin.pipelines.inner_stream import COMPLETE, AskingStage
from tailrace.origin.pipelines.prompt_template import TEXT_MARK, PromptTemplate, filled
from tailrace.origin.pipelines.stage import Item, Items, Prompt, StageContext, StageOptions
from tailrace.origin.producer import End, Reasoning, Text

MAX_CHAINED_CHARS = 1 << 20
"""Maximum number of characters of the text that a model gets from the stage before it."""


class ModelOptions(StageOptions):
    """The options of the stage `model`."""

    model: str = Field(min_length=1, description="Name of the model to ask.")
    prompt: PromptTemplate = Field(
        TEXT_MARK,
        description="Prompt for the model if the stage before it sends text, as another model"
        " does. {text} stands for this text.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Maximum number of tokens. Default: that of the request."
    )

    @property
    def asked_models(self) -> tuple[str, ...]:
        """The names of the models that the stage may ask."""
        return (self.model,)

    def model_for(self, prompt: Prompt) -> str:
        """Return the name of the model that gets a prompt."""
        return self.model


class ModelStage(AskingStage[ModelOptions]):
    """Replaces a prompt by the output of a model."""

    Options: ClassVar[type[ModelOptions]] = ModelOptions
    answers_prompts: ClassVar[bool] = True

    def __init__(self, options: ModelOptions, context: StageContext) -> None:
        """Begin without a prompt."""
        super().__init__(options, context)
        self._had_prompt = False
        self._text: list[str] = []
        self._chars = 0

    def process(self, item: Item) -> Items:
        """Send a prompt to the model, or add the text of another item to the prompt to come."""
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
        """Send the gathered text to the model, if no prompt came and the text is complete."""
        if self._had_prompt or end.reason not in COMPLETE:
            return ()
        return self._outputs(Prompt(filled(self.options.prompt, "".join(self._text))))

    def _gather(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > MAX_CHAINED_CHARS:
            raise CallerError(f"the text has more than {MAX_CHAINED_CHARS} characters")
        self._text.append(text)

    def _outputs(self, prompt: Prompt) -> Items:
        recipe = self.context.recipe
        given = {name: getattr(recipe.sampling, name) for name in recipe.given or ()}
        return self.ask(
            self.options.model_for(prompt),
            prompt,
            Sampling(**given),
            max_tokens=self.options.max_tokens or recipe.max_tokens,
            stop=recipe.stop,
            ignore_eos=recipe.ignore_eos,
        )
