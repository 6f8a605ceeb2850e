"""Compression on a WebSocket session: who gets it, what it saves, and that credit ignores it."""

from __future__ import annotations

import pytest

from tailrace.edge.session import HELLO, CloseCode, Session
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    FLAG_ZSTD,
    SCHEMA_HASH,
    Compression,
    Credit,
    FinishReason,
    Frame,
    Hello,
    Logged,
    Opened,
    Resume,
    Snapshot,
    StreamEnd,
    StreamError,
    Token,
    TokenRun,
    decode,
    encode,
    split,
    tag_of,
)
from tailrace.ledger.wire.compression import unpacked
from tests.edge.test_session_snapshots import CORR, STREAM
from tests.english import english_tokens

TOKENS = 3_000
ROOM_BYTES = 8 << 10
"""Room that a connection offers for a message."""


def stream(count: int = TOKENS) -> list[Logged]:
    tokens = [Token(text, index) for index, text in enumerate(english_tokens(count))]
    return [*tokens, StreamEnd(count, FinishReason.STOP, count, 3)]


class Reader:
    """A client that replays a stream, behind a session and an origin that obeys credit."""

    def __init__(self, frames: list[Logged], hello: Hello) -> None:
        self.frames, self.session, self.window = frames, Session(), Window(0, 0)
        self.session.receive(encode(hello))
        self.raw: list[bytes] = []
        self.shown: list[Frame] = []
        self.size = 0
        self.limit = 0

    def client(self, *frames: Frame) -> None:
        """Send frames of the client, and let everything happen that follows."""
        for _, frame in self.session.receive(b"".join(encode(one, CORR) for one in frames)):
            self._take(frame)
        while self._step():
            pass

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Resume):
            self.window = Window.starting(
                frame.start, frame.credit, credit_bytes=frame.credit_bytes
            )
            opened = Opened(STREAM, len(self.frames), "", "demo", 1, first=frame.start)
            self.session.deliver(encode(opened, CORR))
        elif isinstance(frame, Credit):
            self.window.grant(frame.limit, frame.bytes)

    def _step(self) -> bool:
        some = self.frames[self.window.next :][: self.window.wanted(len(self.frames))]
        for raw in self.window.passing([encode(one, CORR) for one in some]) if some else ():
            self.session.deliver(raw)
        message = self.session.next_message(ROOM_BYTES)
        for raw in () if message is None else split(message):
            self.raw.append(raw)
            self.size += len(raw)
            self.shown += [decode(each)[1] for each in unpacked(raw)]
        credits = self.session.credits()
        for _, frame in credits:
            self._take(frame)
        return bool(message or credits or some)

    @property
    def logged(self) -> list[Frame]:
        return [frame for frame in self.shown if isinstance(frame, Logged)]


PLAIN = Hello(SCHEMA_HASH, "test")
ZSTD = Hello(SCHEMA_HASH, "test", Compression.ZSTD)


def replayed(hello: Hello, after: int | None = None) -> Reader:
    """Read a stream with credit that is renewed as a client does."""
    reader = Reader(stream(), hello)
    reader.client(Resume(STREAM, after=after, credit=256))
    while not isinstance(reader.shown[-1], StreamEnd):
        done = reader.logged[-1]
        assert isinstance(done, Logged)
        reader.client(Credit(done.index + 1 + 256))
    return reader


def test_both_hellos_say_that_they_take_compression() -> None:
    hello = decode(HELLO)[1]
    assert isinstance(hello, Hello)
    assert hello.compression is Compression.ZSTD


def test_a_client_that_does_not_ask_gets_frames_as_they_are() -> None:
    reader = replayed(PLAIN)
    assert reader.logged == stream()
    assert not any(tag_of(raw) == TokenRun.tag or raw[3] >> 4 & FLAG_ZSTD for raw in reader.raw)


@pytest.mark.parametrize("after", [None, 0, 1, 1_000, TOKENS - 2, TOKENS - 1])
def test_a_replay_is_the_same_and_much_smaller(after: int | None) -> None:
    plain, zstd = replayed(PLAIN, after), replayed(ZSTD, after)
    first = 0 if after is None else after + 1
    assert zstd.logged == plain.logged == stream()[first:]
    if after in (None, 0, 1):
        assert any(tag_of(raw) == TokenRun.tag for raw in zstd.raw)
        assert zstd.size / TOKENS < 4 < 15 < plain.size / TOKENS


def test_credit_counts_frames_as_they_are_without_compression() -> None:
    readers = [Reader(stream(), hello) for hello in (PLAIN, ZSTD)]
    for reader in readers:
        reader.client(Resume(STREAM, credit=200, credit_bytes=1_000))
    assert len(readers[0].logged) == len(readers[1].logged) < 100
    for reader in readers:
        reader.client(Credit(150, 100_000))
    assert [len(reader.logged) for reader in readers] == [200, 200]
    for reader in readers:
        reader.client(Credit(1_000, 100_000))
    assert [len(reader.logged) for reader in readers] == [1_000, 1_000]
    assert readers[0].logged == readers[1].logged


def test_a_live_token_is_sent_as_it_is() -> None:
    session = Session()
    session.receive(encode(ZSTD))
    session.receive(encode(Resume(STREAM, credit=100), CORR))
    session.deliver(encode(Opened(STREAM, 0, "", "demo", 1), CORR))
    while session.next_message() is not None:
        pass
    token = encode(Token(" the", 0), CORR)
    assert session.pass_on(token, ROOM_BYTES) == token


def test_a_snapshot_is_one_compressed_frame() -> None:
    reader = Reader(stream(), ZSTD)
    reader.client(Resume(STREAM, credit=1, snapshot=True))
    reader.client(Credit(TOKENS + 1))
    assert isinstance(reader.shown[-1], StreamEnd)
    [snapshot] = [raw for raw in reader.raw if tag_of(raw) == Snapshot.tag]
    assert snapshot[3] >> 4 & FLAG_ZSTD
    [plain] = unpacked(snapshot)
    frame = decode(plain)[1]
    assert isinstance(frame, Snapshot)
    assert frame.text == "".join(english_tokens(TOKENS))
    assert len(snapshot) < len(plain) / 2


def test_streams_that_share_a_message_keep_their_order() -> None:
    session = Session()
    session.receive(encode(ZSTD))
    frames = stream(200)
    for corr in (1, 2, 3):
        session.receive(encode(Resume(STREAM, credit=1_000), corr))
        session.deliver(encode(Opened(STREAM, 201, "", "demo", 1), corr))
        for frame in frames:
            session.deliver(encode(frame, corr))
    got: dict[int, list[Frame]] = {}
    while (message := session.next_message()) is not None:
        for raw in split(message):
            for corr, shown in map(decode, unpacked(raw)):
                got.setdefault(corr, []).append(shown)
    for corr in (1, 2, 3):
        assert got[corr][1:] == frames


# ---- Hellos that are refused ----


def refusal(hello: bytes) -> tuple[StreamError, CloseCode]:
    session = Session()
    session.receive(hello)
    assert session.close is not None
    message = session.next_message()
    assert message is not None
    error = [decode(raw)[1] for raw in split(message)][-1]
    assert isinstance(error, StreamError)
    return error, session.close.code


def test_an_unknown_compression_is_refused_by_name() -> None:
    raw = bytearray(encode(ZSTD))
    assert raw[-2:] == b"\x01\x00"
    raw[-1] = 7
    error, code = refusal(bytes(raw))
    assert (error.code, error.field) == ("bad_frame", "Hello.compression")
    assert code is CloseCode.PROTOCOL_ERROR


@pytest.mark.parametrize("more", [b"", b"\x00\x00\x00"])
def test_a_hello_of_another_release_is_refused_for_its_schema(more: bytes) -> None:
    payload = b"otherone" + b"\x04test" + more
    head = (len(payload) + 5 | 1 << 24).to_bytes(4, "little")
    error, _ = refusal(head + bytes((Hello.tag, 0, 0, 0, 0)) + payload)
    assert (error.code, error.status) == ("schema_mismatch", 426)
    assert b"otherone".hex() in error.message


def test_json_messages_are_never_compressed() -> None:
    session = Session(speaks_json=True)
    hello = f'{{"type":"Hello","schema":"{SCHEMA_HASH.hex()}","software":"t","compression":"zstd"}}'
    assert session.receive(hello) == []
    assert session.close is None
    session.receive(f'{{"type":"Resume","corr":99,"stream":"{STREAM.hex()}","credit":1000}}')
    session.deliver(encode(Opened(STREAM, 500, "", "demo", 1), 99))
    for frame in stream(300)[:300]:
        session.deliver(encode(frame, 99))
    message = session.next_message()
    assert message is not None
    assert TokenRun.tag not in {tag_of(raw) for raw in split(message)}
