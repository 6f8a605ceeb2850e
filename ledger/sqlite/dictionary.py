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
from functools import cached_property, lru_cache

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
MAX_COUNTED = 8 * MAX_PAIRS
"""Pairs that are counted at a time; where there are more, those seen least are forgotten."""
MAX_DICTIONARY_BYTES = 8 * 1024 * 1024
"""A row of the table, uncompressed."""
ZSTD_DICTIONARY_BYTES = 64 * 1024
SAMPLES_PER_DICTIONARY = 8
"""zstd wants at least so many times the dictionary's size to train it from."""
MAX_TRAIN_BYTES = 128 * ZSTD_DICTIONARY_BYTES
"""and learns no more from more than about a hundred times."""
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
        self._zstd = zstandard.ZstdCompressionDict(trained) if trained else None
        self._heads: dict[int, Heads] = {}
        self._codes: dict[int, dict[tuple[bytes, tuple[int, ...]], bytes]] = {}
        self.ids = Ids(pairs)
        self._decompressor = zstandard.ZstdDecompressor(dict_data=self._zstd, format=_MAGICLESS)

    # ---- the vocabulary ----

    def heads(self, width: int) -> dict[bytes, bytes]:
        """By code: a token frame up to its index, which takes `width` bytes."""
        heads = self._heads.get(width)
        if heads is None:
            heads = self._heads[width] = Heads(self._pairs, width)
        return heads

    def codes(self, width: int) -> dict[tuple[bytes, tuple[int, ...]], bytes]:
        """The reverse: (frame up to its index, ids) to code."""
        codes = self._codes.get(width)
        if codes is None:
            codes = self._codes[width] = {
                (token_head(text, width), ids): code_of(at)
                for at, (ids, text) in enumerate(self._pairs)
            }
        return codes

    # ---- zstd ----

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    @cached_property
    def _compressor(self) -> zstandard.ZstdCompressor:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, format=_MAGICLESS, write_content_size=False, write_dict_id=False
        )
        return zstandard.ZstdCompressor(dict_data=self._zstd, compression_params=parameters)

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
        _check(row, where)
        return _unpack(row)


class Heads(dict[bytes, bytes]):
    """`Dictionary.heads`, filled as codes are met: all of them at once take several ms."""

    def __init__(self, pairs: Sequence[Pair], width: int) -> None:
        super().__init__({b"\0": b""})
        self._pairs = pairs
        self._width = width

    def __missing__(self, code: bytes) -> bytes:
        head = self[code] = token_head(self._pairs[place_of(code)][1], self._width)
        return head


class Ids(dict[bytes, tuple[int, ...]]):
    """By code: the token ids of its pair; filled in the same way."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        super().__init__({b"\0": ()})
        self._pairs = pairs

    def __missing__(self, code: bytes) -> tuple[int, ...]:
        ids = self[code] = self._pairs[place_of(code)][0]
        return ids


class Parsing:
    """A row on its way to a dictionary, some pairs at a time: 16,000 of them take 40 ms.

    Raises `Damaged`, naming `where`, if the row is not whole.
    """

    def __init__(self, row: bytes, *, where: str) -> None:
        _check(row, where)
        zstd = zstandard.ZstdDecompressor()
        self._data = zstd.decompress(row[4:], max_output_size=MAX_DICTIONARY_BYTES)
        self._frames, at = take_uint(self._data, 0)
        self._count, self._at = take_uint(self._data, at)
        self._pairs: list[Pair] = []

    def advance(self, pairs: int) -> Dictionary | None:
        """Take so many pairs more; the dictionary once there are no more."""
        data, at = self._data, self._at
        for _ in range(min(pairs, self._count - len(self._pairs))):
            length, at = take_uint(data, at)
            ids = []
            for _ in range(length):
                token_id, at = take_uint(data, at)
                ids.append(token_id)
            size, at = take_uint(data, at)
            self._pairs.append((tuple(ids), data[at : at + size]))
            at += size
        self._at = at
        if len(self._pairs) < self._count:
            return None
        return Dictionary(self._pairs, data[at:], self._frames)


def _check(row: bytes, where: str) -> None:
    if not row or _U32.pack(zlib.crc32(memoryview(row)[4:])) != row[:4]:
        raise Damaged(
            f"{where}: its dictionary {'does not match its checksum' if row else 'is gone'}",
            hint="the file is damaged; restore it from a copy",
        )


@lru_cache(maxsize=8)
def _unpack(row: bytes) -> Dictionary:
    found = Parsing(row, where="").advance(MAX_PAIRS)
    if found is None:
        raise ValueError(f"more than {MAX_PAIRS} pairs")
    return found


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
        if len(self._seen) > MAX_COUNTED:
            self._seen = Counter(dict(self._seen.most_common(MAX_COUNTED // 2)))

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


def place_of(code: bytes) -> int:
    """The place of the pair with this code."""
    if len(code) == 1:
        return code[0] - 1
    return int.from_bytes(code, "big") - (ONE_BYTE_CODES << 8) + ONE_BYTE_CODES - 1


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
