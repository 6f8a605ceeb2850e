"""English text in pieces of the size of tokens, to measure what streams take."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PIECE = re.compile(r" ?[A-Za-z]{1,6}| ?[^A-Za-z ]{1,3}| ")


def english_tokens(count: int) -> list[str]:
    """Return the first `count` pieces of the documentation's prose, of 3.6 characters on average.

    Tokens of usual vocabularies are longer, so that fewer of them make the same text.
    """
    paths = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    prose = [line for line in text.splitlines() if re.match(r"(- \W*)?[A-Za-z]", line)]
    pieces = _PIECE.findall("\n".join(prose))[:count]
    assert len(pieces) == count, "the documentation has too few words"
    return pieces
