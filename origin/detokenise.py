"""Token ids to text, one id at a time, in whole characters only."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokeniser:
    """Gives text as soon as the ids so far end on a whole character; special tokens are skipped.

    To go on after a break, step a new one through all ids from the first: a DecodeStream that
    is primed with ids ending inside a character gives their whole text again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._last: list[int] = []  # the ids of the last text given
        self._held: list[int] = []  # the ids since then

    def step(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._held.append(token)
        text: str | None = self._stream.step(self._tokenizer, token)
        if text is None:
            return ""
        self._last, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The held ids as text, an unfinished character as U+FFFD; nothing is held any more.

        DecodeStream has no such call. The last ids are decoded along and cut off again,
        because a decoder may treat the first token of a text apart.
        """
        before = self._decode(self._last)
        text = self._decode(self._last + self._held)[len(before) :]
        self._last, self._held = [], []
        self._stream = DecodeStream(skip_special_tokens=True)
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
