"""Token ids to text, one id at a time, in whole characters only."""

from __future__ import annotations

import codecs

from origin.engine.vocabulary import Vocabulary


class Detokeniser:
    """Gives text as soon as the bytes so far end on a whole character; special tokens are none.

    Bytes that are no UTF-8 become U+FFFD, as soon as they are certain to be none and as many as
    the Unicode standard recommends (section 3.9, substitution of maximal subparts).
    A step takes time by the bytes of its token alone. Stepping a new one through all ids gives
    the same pieces again.
    """

    def __init__(self, vocabulary: Vocabulary, goes_on: bool = False) -> None:
        """goes_on: there is text before the first token, of which its space parts it."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = vocabulary.strips_space and not goes_on

    def step(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        raw = self._vocabulary.text_of(token)
        if raw and self._strips_space:
            self._strips_space = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """An unfinished character as U+FFFD; nothing is held any more. More ids may follow."""
        return self._decoder.decode(b"", final=True)
