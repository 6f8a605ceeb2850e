"""Special tokens that somebody writes inside a message stay the letters that they are.

A chat template writes the special tokens of a conversation itself, as text, and the tokenizer
finds them in that text. One that stands in a message would be found as well, and end the
message or begin another in the system's name. So every one in a message is marked before the
template runs, and what the tokenizer then finds behind a mark is replaced by the ids of its
letters. The marks pass through the template with the text around them, whatever it trims or
splits; the tokenizer never sees them. What is not seen is a special token that a template
itself puts together, by cutting a piece out of the middle of a message.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

MARK = "\ufdd0"
"""A noncharacter: for use inside a process, never in text that is exchanged (Unicode 23.7)."""


class QuotedTokens:
    """The special tokens of one tokenizer, as letters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._texts = {at: token.content for at, token in added.items() if token.special}
        self._letters = {at: self._as_letters(text) for at, text in self._texts.items()}
        longest_first = sorted(self._texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, content: str) -> str:
        """A message's content with MARK before each special token in it, and no other MARK."""
        return self._pattern.sub(lambda found: MARK + found[0], content.replace(MARK, ""))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt; special tokens behind a MARK as their letters."""
        if MARK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        marked, plain = _without_marks(text)
        encoding = self._tokenizer.encode(plain, add_special_tokens=False)
        ids: list[int] = []
        for at, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A token may take the spaces around it with it.
            begins = start + max(plain[start:end].find(self._texts.get(at, "")), 0)
            quoted = at in self._texts and begins in marked
            ids.extend(self._letters[at] if quoted else [at])
        return ids

    def _as_letters(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        finally:
            self._tokenizer.encode_special_tokens = False


def _without_marks(text: str) -> tuple[set[int], str]:
    """(where in the text without marks each of them stood, that text)."""
    pieces = text.split(MARK)
    at, places = 0, set()
    for piece in pieces[:-1]:
        at += len(piece)
        places.add(at)
    return places, "".join(pieces)
