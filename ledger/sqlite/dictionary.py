"""What a ledger has learnt of its own streams: a vocabulary, and a dictionary for zstd.

The vocabulary is the most frequent pairs of token ids and the text that they completed, as
they were seen in token frames: no tokenizer is asked, and a text without ids is a pair too.
A frame whose pair is known is one code of one or two bytes, because all else in a canonical
token frame follows from its index. The zstd dictionary is trained on what is left then.

    row of the table   crc u32 · zstd form of: frames · pairs · pair[…] · zstd dictionary
    pair               number of ids · id[…] · bytes of text · text    (numbers are varints)
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import zstandard

from ledger.codec import HEADER_BYTES, PREFIX_BYTES, VERSION_BITS
from ledger.errors import Damaged
from ledger.interface import Record

ONE_BYTE_CODES = 192
"""First bytes of a code below it stand alone; 0 is no pair."""
MAX_PAIRS = ONE_BYTE_CODES - 1 + (256 - ONE_BYTE_CODES) * 256
MAX_TEXT_BYTES = 127
"""Longer texts are no pairs: their length would not fit one byte of the frame."""
MAX_PAIR_IDS = 64
MAX_DICTIONARY_BYTES = 8 * 1024 * 1024
"""A row of the table, uncompressed."""
ZSTD_DICTIONARY_BYTES = 64 * 1024
SAMPLES_PER_DICTIONARY = 8
"""zstd wants at least so many times the dictionary's size to train it from."""
MIN_SAMPLES = 8
LEVEL = 19
"""Of zstd, in the background: more than it, and reading needs more memory."""

Pair = tuple[tuple[int, ...], bytes]
"""Token ids, and the text that they completed."""

_HEAD = struct.Struct("<IBIB")  # header, tag, corr, length of the text
_U32 = struct.Struct("<I")
_TOKEN = 0
_PLAIN_FRAME = b"\0"
"""What our zstd frames begin with: no size, no dictionary's id, no checksum (RFC 8878, 3.1.1.1)."""
_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


class Dictionary:
    """One row of the table `dictionary`, ready for use. Immutable."""

    def __init__(self, pairs: Sequence[Pair], trained: bytes, frames: int) -> None:
        self.frames = frames
        """How many it was made from."""
        self._pairs = pairs
        self._trained = trained
        self._heads: dict[int, dict[bytes, bytes]] = {}
        self._codes: dict[int, dict[tuple[bytes, tuple[int, ...]], bytes]] = {}
        self._by_code = {code_of(at): pair for at, pair in enumerate(pairs)}
        self.ids = {code: ids for code, (ids, _) in self._by_code.items()} | {b"\0": ()}
        zstd = zstandard.ZstdCompressionDict(trained) if trained else None
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, format=_MAGICLESS, write_content_size=False, write_dict_id=False
        )
        self._compressor = zstandard.ZstdCompressor(dict_data=zstd, compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor(dict_data=zstd, format=_MAGICLESS)

    # ---- the vocabulary ----

    def heads(self, width: int) -> dict[bytes, bytes]:
        """By code: a token frame up to its index, which takes `width` bytes."""
        heads = self._heads.get(width)
        if heads is None:
            heads = {code: token_head(text, width) for code, (_, text) in self._by_code.items()}
            heads[b"\0"] = b""
            self._heads[width] = heads
        return heads

    def codes(self, width: int) -> dict[tuple[bytes, tuple[int, ...]], bytes]:
        """The reverse: (frame up to its index, ids) to code."""
        codes = self._codes.get(width)
        if codes is None:
            codes = {
                (token_head(text, width), ids): code for code, (ids, text) in self._by_code.items()
            }
            self._codes[width] = codes
        return codes

    # ---- zstd ----

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    def decompress(self, data: bytes, size: int) -> bytes:
        """Exactly `size` bytes, or `ValueError`."""
        if data[:1] != _PLAIN_FRAME:
            raise ValueError("a size of its own")  # for which memory would be taken
        try:
            found = self._decompressor.decompress(
                data, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if len(found) != size:
            raise ValueError(f"{len(found)} bytes, not {size}")
        return found

    # ---- as a row ----

    def pack(self) -> bytes:
        out = bytearray()
        put_uint(out, self.frames)
        put_uint(out, len(self._pairs))
        for ids, text in self._pairs:
            put_uint(out, len(ids))
            for token_id in ids:
                put_uint(out, token_id)
            put_uint(out, len(text))
            out += text
        out += self._trained
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(bytes(out))
        return _U32.pack(zlib.crc32(packed)) + packed

    @classmethod
    def unpack(cls, row: bytes, *, where: str) -> Dictionary:
        """The dictionary of a row; `Damaged`, naming `where`, if it is not whole."""
        if not row or _U32.pack(zlib.crc32(row[4:])) != row[:4]:
            raise Damaged(
                f"{where}: its dictionary {'does not match its checksum' if row else 'is gone'}",
                hint="the file is damaged; restore it from a copy",
            )
        return _parse(row)


@lru_cache(maxsize=8)
def _parse(row: bytes) -> Dictionary:
    data = zstandard.ZstdDecompressor().decompress(row[4:], max_output_size=MAX_DICTIONARY_BYTES)
    frames, at = take_uint(data, 0)
    count, at = take_uint(data, at)
    pairs: list[Pair] = []
    for _ in range(count):
        length, at = take_uint(data, at)
        ids = []
        for _ in range(length):
            token_id, at = take_uint(data, at)
            ids.append(token_id)
        size, at = take_uint(data, at)
        pairs.append((tuple(ids), data[at : at + size]))
        at += size
    return Dictionary(pairs, data[at:], frames)


# ---- learning ----


class Vocabulary:
    """Counts pairs, a slice of records at a time."""

    def __init__(self) -> None:
        self._seen: Counter[Pair] = Counter()
        self.frames = 0

    def count(self, records: Iterable[Record]) -> None:
        for frame, ids in records:
            self.frames += 1
            text = text_of(frame)
            if text is not None and len(ids) <= MAX_PAIR_IDS:
                self._seen[ids, text] += 1

    def pairs(self) -> list[Pair]:
        """The most frequent first; what was seen once teaches nothing."""
        return [pair for pair, times in self._seen.most_common(MAX_PAIRS) if times > 1]


def train(payloads: Sequence[bytes]) -> bytes:
    """A zstd dictionary for data like these; empty where they are too few. Takes seconds."""
    size = min(ZSTD_DICTIONARY_BYTES, sum(map(len, payloads)) // SAMPLES_PER_DICTIONARY)
    if len(payloads) < MIN_SAMPLES:
        return b""
    try:
        return zstandard.train_dictionary(size, list(payloads), level=LEVEL).as_bytes()
    except zstandard.ZstdError:
        return b""  # it says so where the data are too few or too alike


# ---- the parts of a token frame ----


def code_of(at: int) -> bytes:
    """The code of the pair at place `at`."""
    if at < ONE_BYTE_CODES - 1:
        return bytes((at + 1,))
    return ((ONE_BYTE_CODES << 8) + at - (ONE_BYTE_CODES - 1)).to_bytes(2, "big")


def token_head(text: bytes, width: int) -> bytes:
    """A canonical token frame under corr 0 up to its index, which takes `width` bytes."""
    size = PREFIX_BYTES - HEADER_BYTES + 1 + len(text) + width
    return _HEAD.pack(VERSION_BITS + size, _TOKEN, 0, len(text)) + text


def text_of(frame: bytes) -> bytes | None:
    """The text of what may be a token frame; None for what certainly is none."""
    if len(frame) <= _HEAD.size or frame[HEADER_BYTES] != _TOKEN:
        return None
    size = frame[PREFIX_BYTES]
    end = _HEAD.size + size
    return frame[_HEAD.size : end] if size <= MAX_TEXT_BYTES and end < len(frame) else None


def put_uint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def take_uint(data: bytes, at: int) -> tuple[int, int]:
    """(value, the offset after it); `IndexError` where the data end."""
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
