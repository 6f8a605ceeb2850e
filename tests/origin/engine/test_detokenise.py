"""Detokenising step by step: whole characters only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tailrace.origin.engine.transcript import Detokeniser, Vocabulary
from tests.origin.engine.runs import fallback_tokenizer, id_of_byte
from tests.origin.tiny_checkpoint import END_ID, SENTENCES, train_tokenizer

TOKENIZER = train_tokenizer(300)
VOCABULARY = Vocabulary(TOKENIZER)
TEXT = "Füchse – 🦊狐 and 🐻, é"


def pieces(ids: list[int]) -> list[str]:
    detokeniser = Detokeniser(VOCABULARY)
    return [detokeniser.step(token) for token in ids]


@pytest.mark.parametrize("text", [TEXT, *SENTENCES])
def test_the_pieces_are_the_text_and_none_holds_part_of_a_character(text: str) -> None:
    given_out = pieces(TOKENIZER.encode(text).ids)
    assert "".join(given_out) == text
    assert not any("\ufffd" in piece for piece in given_out)
    assert "" in pieces(TOKENIZER.encode("狐🐻").ids)


def test_stepping_a_new_one_through_all_ids_gives_the_same_pieces_from_any_cut() -> None:
    ids = TOKENIZER.encode(TEXT).ids
    uninterrupted = pieces(ids)
    for cut in range(len(ids)):
        resumed = Detokeniser(VOCABULARY)
        replayed = [resumed.step(token) for token in ids[:cut]]
        assert replayed + [resumed.step(token) for token in ids[cut:]] == uninterrupted


def test_special_tokens_are_no_text() -> None:
    fox = TOKENIZER.encode("fox").ids
    assert "".join(pieces([END_ID, *fox, END_ID])) == "fox"


def test_flush_gives_a_truncated_last_character_as_a_replacement() -> None:
    detokeniser = Detokeniser(VOCABULARY)
    ids = TOKENIZER.encode("a狐").ids[:-1]
    assert "".join(detokeniser.step(token) for token in ids) == "a"
    assert detokeniser.flush() == "\ufffd"
    assert detokeniser.flush() == ""


def test_flush_gives_nothing_after_a_whole_character() -> None:
    detokeniser = Detokeniser(VOCABULARY)
    for token in TOKENIZER.encode("a🦊").ids:
        detokeniser.step(token)
    assert detokeniser.flush() == ""


def test_bytes_that_begin_no_character_come_out_at_once() -> None:
    last = TOKENIZER.encode("狐").ids[-1]
    assert pieces([last, last, *TOKENIZER.encode("fox").ids])[:2] == ["\ufffd", "\ufffd"]


def test_after_a_flush_it_goes_on_as_before() -> None:
    detokeniser = Detokeniser(VOCABULARY)
    assert [detokeniser.step(token) for token in TOKENIZER.encode("狐").ids[:-1]] == [""] * 2
    assert detokeniser.flush() == "\ufffd"
    assert "".join(map(detokeniser.step, TOKENIZER.encode(" 狐 fox").ids)) == " 狐 fox"


def test_an_id_that_no_token_has_is_no_text() -> None:
    assert pieces([TOKENIZER.get_vocab_size() + 5]) == [""]


FALLBACK = fallback_tokenizer()


@settings(max_examples=200)
@given(st.text("ab 狐é🦊", max_size=12))
def test_bytes_to_fall_back_on_become_characters(text: str) -> None:
    ids = FALLBACK.encode(text).ids
    detokeniser = Detokeniser(Vocabulary(FALLBACK))
    assert "".join(map(detokeniser.step, ids)) == text
    assert FALLBACK.decode(ids) == text


def test_a_lone_byte_does_not_spoil_what_is_fallen_back_on_before_it() -> None:
    detokeniser = Detokeniser(Vocabulary(FALLBACK))
    given_out = [detokeniser.step(id_of_byte(byte)) for byte in b"5\xe8\xd2A"]
    assert given_out == ["5", "", "\ufffd", "\ufffdA"]


@settings(max_examples=200)
@given(st.lists(st.integers(1, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_any_ids_give_the_text_that_decoding_them_at_once_gives(ids: list[int]) -> None:
    detokeniser = Detokeniser(VOCABULARY)
    text = "".join(detokeniser.step(token) for token in ids) + detokeniser.flush()
    assert text == TOKENIZER.decode(ids)


def test_the_fixture_has_characters_of_several_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("狐").ids) > 1
