"""The stage `group`: joins small pieces of text into words, sentences or paragraphs.

The output of a model comes token by token. A stage, or a client, that works on whole sentences
(a voice, for instance) needs larger pieces. No timer is used: the pieces depend on the text alone.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tailrace.ledger.text_units import Unit
from tailrace.origin.pipelines.holding_stage import HoldingStage
from tailrace.origin.pipelines.stage import StageOptions
from tailrace.origin.pipelines.text_cutter import Cutter, TextCutter

DEFAULT_GROUP_CHARS = 2000
MAX_GROUP_CHARS = 16_384


class GroupOptions(StageOptions):
    """The options of the stage `group`."""

    by: Unit | None = Field(
        None,
        description="What a piece of text is. word, phrase (it ends at punctuation), sentence or"
        " paragraph (it ends at a blank line). Default: `chars` alone decides.",
    )
    chars: int = Field(
        DEFAULT_GROUP_CHARS,
        ge=1,
        le=MAX_GROUP_CHARS,
        description="Maximum length of a piece, in characters. A longer one is cut between words.",
    )

    @model_validator(mode="after")
    def _groups_by_something(self) -> Self:
        if not self.model_fields_set & {"by", "chars"}:
            raise ValueError("give by or chars")
        return self


class Group(HoldingStage[GroupOptions]):
    """Joins text, and reasoning, into larger pieces."""

    Options = GroupOptions

    def cutter(self) -> Cutter:
        """Return a cutter that cuts text as the options say."""
        return TextCutter(self.options.by, self.options.chars)
