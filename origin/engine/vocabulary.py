"""The bytes that token ids stand for, which need not be whole characters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from ledger.errors import ModelError

_BYTE_LEVEL = {"type": "ByteLevel"}
# SentencePiece's vocabularies: U+2581 is a space, <0xE7> a byte.
_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_FALLBACK = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


class Vocabulary:
    """A tokenizer's ids as bytes. One per model, shared by its runs: building takes some
    microseconds an id.

    Knows byte-level vocabularies (GPT-2's, so Llama 3's, Qwen's and BitNet's) and SentencePiece's
    with bytes to fall back on (Llama 2's); raises ModelError for a tokenizer of another kind.
    """

    strips_space: bool
    """The tokenizer put a space before every text, so that the first one is none of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = json.loads(tokenizer.to_str())["decoder"]
        parts = [_known(part) for part in _flat(decoder)]
        if parts not in ([_BYTE_LEVEL], _FALLBACK, [*_FALLBACK, _STRIP]):
            raise ModelError(
                f"the tokenizer's decoder is {json.dumps(decoder)[:300]}",
                field="decoder",
                hint="one of a byte-level or a byte-fallback vocabulary",
            )
        self.strips_space = _STRIP in parts
        added = tokenizer.get_added_tokens_decoder()
        words = tokenizer.get_vocab(with_added_tokens=True)
        to_bytes = _from_byte_level if parts == [_BYTE_LEVEL] else _from_fallback
        self._bytes = [b""] * (max(words.values(), default=-1) + 1)
        self._special = {token for token, about in added.items() if about.special}
        for word, token in words.items():
            self._bytes[token] = word.encode() if token in self._special else to_bytes(word)

    def bytes_of(self, token: int) -> bytes:
        """What `token` stands for in a text; a special one's name; empty for an unknown id."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def text_of(self, token: int) -> bytes:
        """What `token` adds to a text, to which special ones add nothing."""
        return b"" if token in self._special else self.bytes_of(token)


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder or {}


def _known(part: dict[str, Any]) -> dict[str, Any]:
    """ByteLevel's settings are those of its encoding side."""
    return _BYTE_LEVEL if part.get("type") == "ByteLevel" else part


def _from_byte_level(word: str) -> bytes:
    """A word with a character that stands for no byte is taken as it is, like decoding does."""
    table = _byte_of()
    if all(char in table for char in word):
        return bytes(table[char] for char in word)
    return word.encode()


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 for itself, the others from U+0100 on.

    `bytes_to_unicode` of the code of Radford et al., Language Models are Unsupervised Multitask
    Learners, 2019 (https://github.com/openai/gpt-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _from_fallback(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        try:
            return bytes((int(word[3:5], 16),))
        except ValueError:
            pass  # a word that only looks like a byte
    return word.replace("\u2581", " ").encode()
