"""The stage `markdown-safe`: no piece of text ends inside an element of Markdown.

A client that shows each piece as it comes then never shows half of a link, or the marks of a code
block as text. Pieces are otherwise as small as those of the model.
"""

from __future__ import annotations

from pydantic import Field

from tailrace.origin.pipelines.holding_stage import HoldingStage
from tailrace.origin.pipelines.markdown_cutter import MarkdownCutter
from tailrace.origin.pipelines.stage import StageOptions
from tailrace.origin.pipelines.text_cutter import Cutter

DEFAULT_ELEMENT_CHARS = 500
MAX_ELEMENT_CHARS = 4096


class MarkdownSafeOptions(StageOptions):
    """The options of the stage `markdown-safe`."""

    hold_chars: int = Field(
        DEFAULT_ELEMENT_CHARS,
        ge=2,
        le=MAX_ELEMENT_CHARS,
        description="Maximum number of characters that are held back. A longer link, code span or"
        " first line of a code block is passed on in pieces.",
    )


class MarkdownSafe(HoldingStage[MarkdownSafeOptions]):
    """Holds back text and reasoning that ends inside an element of Markdown."""

    Options = MarkdownSafeOptions

    def cutter(self) -> Cutter:
        """Return a cutter that knows the elements of Markdown."""
        return MarkdownCutter(self.options.hold_chars)
