"""The stage `route`: asks the model that rules choose by the length or the words of the prompt.

The choice depends on the prompt alone, so a worker that runs the stages again asks the same model.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.origin.pipelines.patterns import Pattern, matches
from tailrace.origin.pipelines.stage import Prompt
from tailrace.origin.pipelines.stages.model import ModelOptions, ModelStage

MAX_RULES = 100
"""Maximum number of rules of a route."""


class Rule(BaseModel):
    """A model, and the conditions under which it gets a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Name of the model to ask.")
    max_chars: int | None = Field(
        None, ge=0, description="Maximum length of the prompt, in characters."
    )
    pattern: Pattern | None = Field(
        None,
        description="Regular expression that a part of the prompt must match, in the syntax of"
        " Python's re module. It ignores case.",
    )

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if self.max_chars is None and self.pattern is None:
            raise ValueError("give max_chars or pattern")
        return self

    def fits(self, prompt: Prompt) -> bool:
        """Return True if a prompt meets every condition of the rule."""
        if self.max_chars is not None and sum(map(len, prompt.texts)) > self.max_chars:
            return False
        pattern = self.pattern
        return pattern is None or any(matches(pattern, text) for text in prompt.texts)


class RouteOptions(ModelOptions):
    """The options of the stage `route`: those of `model`, which is the default, and rules."""

    rules: tuple[Rule, ...] = Field(
        min_length=1,
        max_length=MAX_RULES,
        description="Models and the prompts that they get. The first rule that fits the prompt"
        " chooses the model. Default: `model`.",
    )

    @property
    def asked_models(self) -> tuple[str, ...]:
        """The names of the models that the stage may ask."""
        return (self.model, *(rule.model for rule in self.rules))

    def model_for(self, prompt: Prompt) -> str:
        """Return the name of the model that gets a prompt."""
        return next((rule.model for rule in self.rules if rule.fits(prompt)), self.model)


class Route(ModelStage):
    """Replaces a prompt by the output of the model that the rules choose."""

    Options = RouteOptions
