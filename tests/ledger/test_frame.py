"""Values, limits and errors of frames; properties and vectors are tested elsewhere."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from tailrace.ledger import errors
from tailrace.ledger.errors import (
    BeyondEnd,
    CallerError,
    FrameError,
    NotFound,
    Overloaded,
    StaleEpoch,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import (
    CLIENT,
    CLOSING,
    EDGE,
    FRAMES,
    LOGGED,
    MAX_FRAME_BYTES,
    MAX_MESSAGES,
    SCHEMA_HASH,
    Branch,
    Cache,
    Call,
    Caller,
    Cancel,
    Challenge,
    Chunk,
    Codec,
    Compression,
    Detach,
    Durability,
    Embedding,
    FinishReason,
    FormatKind,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Message,
    ModelTier,
    Open,
    OutputFormat,
    Overflow,
    Priority,
    Proof,
    Renew,
    Resume,
    Sampling,
    Score,
    Sibling,
    Snapshot,
    Splitter,
    StageSwitch,
    StreamError,
    StreamState,
    Token,
    TokenScores,
    ToolChoice,
    Tools,
    Unread,
    corr_of,
    decode,
    encode,
    error_frame,
    index_of,
    patch_corrs,
    split,
    tag_of,
    to_error,
    with_corr,
)
from tailrace.ledger.wire.bare import field_types
from tailrace.ledger.wire.schema import Word
from tests.schema_text import CLIENT_SCHEMA, canonical, read_schema, schema_hash

SCHEMA = read_schema(CLIENT_SCHEMA)
PARTS = (
    *(Branch, Caller, Header, Message, ModelTier, OutputFormat),
    *(Sampling, Score, Sibling, StageSwitch, TokenScores, Tools),
)
"""Structs that are no frames of their own."""
ENUMS: list[type[Word]] = [
    Compression,
    Cache,
    Durability,
    Priority,
    FinishReason,
    StreamState,
    Overflow,
    FormatKind,
    ToolChoice,
    Unread,
]


def refusal(raw: bytes, frames: Codec[Frame] | None = None) -> FrameError:
    with pytest.raises(FrameError) as caught:
        frames.decode(raw) if frames else decode(raw)
    return caught.value


# ---- the schema ----


def test_the_schema_hash_is_that_of_the_schema_file() -> None:
    assert schema_hash(CLIENT_SCHEMA.read_text(encoding="utf-8")) == SCHEMA_HASH


def test_the_schema_hash_ignores_comments_and_layout() -> None:
    assert canonical("# x\n\ntype  A\tstruct {\n  b: str # why\n}\n") == "type A struct { b: str }"


@pytest.mark.parametrize("cls", [*FRAMES.values(), *PARTS])
def test_a_class_has_the_fields_of_its_struct_in_order(cls: type) -> None:
    types = {name: of.name for name, of in field_types(cls).items()}
    assert list(types.items()) == list(SCHEMA.structs[cls.__name__].items())


def test_the_table_of_tags_is_the_union_of_the_schema() -> None:
    assert {cls.__name__: tag for tag, cls in FRAMES.items()} == SCHEMA.unions["Frame"]
    assert all(cls.tag == tag for tag, cls in FRAMES.items())
    assert {*SCHEMA.structs} == {cls.__name__ for cls in (*FRAMES.values(), *PARTS)}


def test_the_enums_are_those_of_the_schema() -> None:
    assert {e.__name__: {m.name: m.value for m in e} for e in ENUMS} == SCHEMA.enums


def test_logged_frames_and_snapshots_of_them_have_an_index_and_come_from_a_server() -> None:
    indexed = {tag for tag, cls in FRAMES.items() if "index" in SCHEMA.structs[cls.__name__]}
    assert indexed == LOGGED | {Snapshot.tag}
    assert not (LOGGED | CLOSING) & EDGE
    # A client cannot call an object past its edge, nor pass for an edge.
    of_links: set[type[Frame]] = {Call, Challenge, Proof, Renew, Heartbeat}
    assert {cls.tag for cls in of_links} == EDGE - CLIENT


# ---- values ----


def test_a_token_frame_is_small() -> None:
    assert len(encode(Token(" the", 42), corr=2**32 - 1)) <= 20


def test_frames_of_two_classes_are_never_equal() -> None:
    message: object = Message("a", "b")

    assert message != ("a", "b")
    assert Cancel(bytes(16)) == Cancel(bytes(16))
    assert len({Token("x", 1), Token("x", 1), Token("x", 2)}) == 2


def test_a_decoded_token_is_as_immutable_as_any() -> None:
    _, token = decode(encode(Token("x", 1)))
    with pytest.raises(FrozenInstanceError):
        token.index = 2  # type: ignore[attr-defined]
    assert repr(token) == "Token(text='x', index=1)"
    assert hash(token) == hash(Token("x", 1))


def test_optional_fields_and_lists_may_be_left_out() -> None:
    frame = Open(model="demo", prompt="x", credit=256)
    assert (frame.messages, frame.stop, frame.sampling.seed) == ((), (), None)
    assert decode(encode(frame)) == (0, frame)


@pytest.mark.parametrize("enum", ENUMS)
def test_words_and_members_of_an_enum_are_one_to_one(enum: type[Word]) -> None:
    for member in enum:
        assert member.word == member.word.lower()
        assert enum.from_word(member.word) is member


def test_words_use_hyphens() -> None:
    assert FinishReason.ORIGIN_LOST.word == "origin-lost"


@pytest.mark.parametrize("word", ["", "Power", "origin_lost", "0"])
def test_an_unknown_word_is_refused_with_the_known_ones(word: str) -> None:
    with pytest.raises(CallerError) as caught:
        FinishReason.from_word(word)
    assert caught.value.field == "finish_reason"
    assert caught.value.hint is not None
    assert "origin-lost" in caught.value.hint


# ---- encoding what does not fit ----


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (Token(7, 0), "Token.text"),  # type: ignore[arg-type]
        (Token("x", "0"), "Token.index"),  # type: ignore[arg-type]
        (Token(None, None), "Token.text"),  # type: ignore[arg-type]
        (Chunk("x", True, 0), "Chunk.data"),  # type: ignore[arg-type]
        (Chunk(b"", 1, 0), "Chunk.last"),  # type: ignore[arg-type]
        (Embedding((1.0, 1e39), 0), "Embedding.values[1]"),
        (Embedding([1.0], 0), "Embedding.values"),  # type: ignore[arg-type]
        (StreamError("c", "m", False, 70000), "StreamError.status"),
        (Resume(bytes(15)), "Resume.stream"),
        (Open("m", messages=(Message("user", "\ud800"),)), "Open.messages[0].content"),
        (Open("m", messages=("hi",)), "Open.messages[0]"),  # type: ignore[arg-type]
        (Open("m", durability=1), "Open.durability"),  # type: ignore[arg-type]
        (Message("user", "hi"), "Message"),
    ],
)
def test_a_value_outside_its_type_is_refused_by_name(frame: Frame, field: str) -> None:
    with pytest.raises(FrameError) as caught:
        encode(frame)
    assert caught.value.field == field


@pytest.mark.parametrize("corr", [-1, 2**32, "1", None])
def test_a_corr_is_a_u32(corr: int) -> None:
    raw = bytearray(encode(Token("x", 1)))
    for act in (
        lambda: encode(Token("x", 1), corr),
        lambda: encode(Detach(), corr),
        lambda: with_corr(raw, corr),
        lambda: patch_corrs(raw, [(0, corr)]),
    ):
        with pytest.raises(FrameError) as caught:
            act()
        assert (caught.value.field, caught.value.offset) == ("corr", 5)


def test_a_frame_over_the_limit_is_neither_written_nor_read() -> None:
    largest = Token("a" * (MAX_FRAME_BYTES - 9), 0)  # tag 1, corr 4, length 3, index 1
    raw = encode(largest)
    assert len(raw) == 4 + MAX_FRAME_BYTES
    assert decode(raw) == (0, largest)
    with pytest.raises(FrameError, match="exceeds the limit"):
        encode(Token(largest.text + "a", 0))
    small: Codec[Frame] = Codec(FRAMES, max_frame_bytes=MAX_FRAME_BYTES - 1)
    assert refusal(raw, small).field == "header.length"


# ---- raw frames ----


@pytest.mark.parametrize("size", range(9))
def test_a_stump_has_neither_tag_nor_corr(size: int) -> None:
    stump = bytearray(encode(Token("x", 1))[:size])
    for act in (
        lambda: tag_of(stump),
        lambda: corr_of(stump),
        lambda: index_of(stump),
        lambda: patch_corrs(stump, [(0, 1)]),
    ):
        with pytest.raises(FrameError):
            act()


def test_a_list_of_a_client_is_refused_by_its_length_before_an_item_is_made() -> None:
    for most in (
        Open(model="", messages=(Message("", ""),) * MAX_MESSAGES),
        Open(model="", stop=("",) * MAX_MESSAGES),
    ):
        assert decode(encode(most)) == (0, most)
    with pytest.raises(FrameError, match="1025 items, of 1024 at most") as caught:
        decode(encode(Open(model="", messages=(Message("", ""),) * (MAX_MESSAGES + 1))))
    assert caught.value.field == "Open.messages"


def test_a_frame_that_is_not_logged_has_no_index() -> None:
    with pytest.raises(FrameError, match="Detach has no index"):
        index_of(encode(Detach()))


# ---- cutting ----


def test_a_splitter_lets_only_its_side_through() -> None:
    splitter = Splitter(tags=CLIENT)
    assert len(splitter.feed(encode(Hello(SCHEMA_HASH, "x")) + encode(Detach(), 1))) == 2
    with pytest.raises(FrameError) as caught:
        splitter.feed(encode(Token("x", 1), 1))
    assert caught.value.field == "tag"


def test_a_splitter_stays_failed() -> None:
    splitter = Splitter(max_frame_bytes=100)
    with pytest.raises(FrameError) as first:
        splitter.feed(encode(Token("a" * 200, 1)))
    with pytest.raises(FrameError) as second:
        splitter.feed(encode(Token("a", 1)))
    assert second.value is first.value
    assert splitter.pending == 0


def test_a_message_holds_whole_frames() -> None:
    raw = encode(Token("x", 1), 1)
    assert split(raw * 2) == [raw, raw]
    assert split(b"") == []
    with pytest.raises(FrameError, match="ends inside a frame"):
        split(raw + raw[:5])


# ---- errors as frames ----


@pytest.mark.parametrize(
    "error",
    [
        BeyondEnd("index 9 is beyond the end", hint="at most 4"),
        NotFound("no model 'x'", code="unknown_model", field="model"),
        Overloaded("queue is full", retry_after_ms=1500),
        StaleEpoch("epoch 1 has been replaced"),
        CallerError("no such view", code="not_acceptable", status=406, field="Accept"),
        TailraceError("a fault of ours"),
    ],
    ids=lambda e: e.code,
)
def test_an_error_crosses_the_wire_unchanged(error: TailraceError) -> None:
    frame = error_frame(error)
    again = to_error(frame)
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert decode(encode(frame)) == (0, frame)


def test_each_receiver_of_one_error_is_told_a_wait_of_its_own() -> None:
    error = Overloaded("the queue is full", min_retry_ms=200)
    waits = {error_frame(error).retry_after_ms for _ in range(100)}
    assert all(wait is not None and 200 <= wait <= 1000 for wait in waits)
    assert len(waits) > 1, "all would come back at once"


def test_a_wait_that_a_peer_has_told_is_passed_on_as_it_is() -> None:
    told = to_error(error_frame(Overloaded("the queue is full")))
    assert {error_frame(told).retry_after_ms for _ in range(100)} == {told.retry_after_ms}


@pytest.mark.parametrize(
    ("code", "status", "cls"),
    [
        ("a_code_of_tomorrow", 404, NotFound),
        ("a_code_of_tomorrow", 418, CallerError),
        ("a_code_of_tomorrow", 503, Unavailable),
        ("a_code_of_tomorrow", 599, TailraceError),
    ],
)
def test_an_unknown_code_falls_back_on_its_status(
    code: str, status: int, cls: type[TailraceError]
) -> None:
    error = to_error(StreamError(code, "m", False, status))
    assert (type(error), error.code, error.status) == (cls, code, status)


def test_every_class_of_the_error_tree_crosses_but_the_one_with_an_offset() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    for cls in classes:
        if cls is not FrameError:
            assert type(to_error(error_frame(cls("m")))) is cls
    told = to_error(error_frame(FrameError("bad byte", field="Token.text", offset=9)))
    assert (type(told), told.code, told.field) == (CallerError, "bad_frame", "Token.text")


def test_any_error_text_can_be_sent() -> None:
    frame = error_frame(NotFound("\ud800" + "x" * 2_000_000, field="\udfff", hint="\ud800"))
    assert len(encode(frame)) < 10_000
    assert frame.message.startswith("?x")
