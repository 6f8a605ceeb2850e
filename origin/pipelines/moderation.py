"""How stages treat blocked content: the options, and the items that follow from them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tailrace.ledger.frame import FinishReason
from tailrace.origin.pipelines.stage import StageOptions
from tailrace.origin.producer import End, Remark

BLOCKED = "blocked"
"""Code of the Notice about blocked text."""


class Action(StrEnum):
    """How blocked text is treated."""

    END = "end"
    REPLACE = "replace"
    MASK = "mask"
    NOTICE = "notice"


class ModerationOptions(StageOptions):
    """The options of every stage that blocks text."""

    action: Action = Field(
        Action.END,
        description="What to do with blocked text. end: end the stream as filtered. replace: put"
        " `replacement` in its place. mask: put an asterisk in the place of each character."
        " notice: let it pass, and add a Notice to the stream.",
    )
    replacement: str = Field("[removed]", description="Text that replaces blocked text.")
    message: str = Field(
        "the text was blocked", description="Message of a stream that ends because of this stage."
    )


class Moderation:
    """The treatment of blocked text in one stream, by the stage `name`."""

    def __init__(self, options: ModerationOptions, name: str) -> None:
        """Begin without any blocked text."""
        self._options = options
        self._name = name
        self._has_noticed = False
        self.ends = options.action is Action.END
        """True if blocked text ends the stream."""

    def end(self) -> End:
        """Return the End of a stream that has blocked text."""
        return End(FinishReason.FILTERED, message=self._options.message)

    def changed(self, text: str) -> str:
        """Return the text that takes the place of blocked text."""
        match self._options.action:
            case Action.REPLACE:
                return self._options.replacement
            case Action.MASK:
                return "*" * len(text)
        return text

    def notice(self) -> list[Remark]:
        """Return the notice about blocked text; the list is empty if none is to be sent.

        A stream gets at most one notice, and only if the option `action` is `notice`.
        """
        if self._options.action is not Action.NOTICE or self._has_noticed:
            return []
        self._has_noticed = True
        return [Remark(BLOCKED, f"{self._name}: {self._options.message}")]
