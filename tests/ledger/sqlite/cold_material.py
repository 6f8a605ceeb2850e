"""Streams to keep, pack and remove: sentences of a few words, a token a word."""

from __future__ import annotations

from random import Random

from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from ledger.interface import Append, NewStream, Record
from ledger.sqlite.cold import payload_of
from ledger.sqlite.dictionary import Dictionary, Vocabulary, train
from ledger.sqlite.ledger import SqliteLedger

WORDS = "the cat sat on a mat and then it went to sleep by an old door of wood".split()
TTL_S = 1_000.0


class Clock:
    """Unix time in ms that moves only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += int(seconds * 1000)


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def token(index: int, word: int) -> Record:
    return Record(encode(Token(f" {WORDS[word]}", index)), (1_000 + word,))


def sentence(count: int, seed: int = 0, *, ends: bool = True) -> list[Record]:
    """The records of a stream of `count` tokens."""
    random = Random(seed)
    records = [token(index, random.randrange(len(WORDS))) for index in range(count)]
    if ends:
        records.append(Record(encode(StreamEnd(count, FinishReason.STOP, count, 0)), ()))
    return records


def learnt(streams: int = 40, tokens: int = 100) -> Dictionary:
    """A dictionary of such sentences."""
    material = [sentence(tokens, seed) for seed in range(streams)]
    vocabulary = Vocabulary()
    for records in material:
        vocabulary.count(records)
    pairs = vocabulary.pairs()
    untrained = Dictionary(pairs, b"", vocabulary.frames)
    payloads = [payload_of(0, records, untrained).data for records in material]
    return Dictionary(pairs, train(payloads), vocabulary.frames)


async def store(
    ledger: SqliteLedger, number: int, records: list[Record], ttl_s: float = TTL_S
) -> bytes:
    """A new stream of these records, a few with each commit; returns its id."""
    stream = stream_id(number)
    await ledger.create(NewStream(stream, "{}", Durability.PROCESS, ttl_s))
    await extend(ledger, stream, records)
    return stream


async def extend(
    ledger: SqliteLedger, stream: bytes, records: list[Record], first: int = 0
) -> None:
    for at in range(0, len(records), 100):
        batch = [
            Append(stream, 1, first + at + n, record)
            for n, record in enumerate(records[at : at + 100])
        ]
        assert await ledger.append(batch) == []
