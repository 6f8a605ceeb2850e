import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from origin.detokenise import Detokeniser
from tests.origin.tiny_checkpoint import END_ID, SENTENCES, train_tokenizer

TOKENIZER = train_tokenizer(300)
TEXT = "Füchse – 🦊狐 and 🐻, é"


def pieces(ids: list[int]) -> list[str]:
    detokeniser = Detokeniser(TOKENIZER)
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
        resumed = Detokeniser(TOKENIZER)
        replayed = [resumed.step(token) for token in ids[:cut]]
        assert replayed + [resumed.step(token) for token in ids[cut:]] == uninterrupted


def test_special_tokens_are_no_text() -> None:
    fox = TOKENIZER.encode("fox").ids
    assert "".join(pieces([END_ID, *fox, END_ID])) == "fox"


def test_flush_gives_a_truncated_last_character_as_a_replacement() -> None:
    detokeniser = Detokeniser(TOKENIZER)
    ids = TOKENIZER.encode("a狐").ids[:-1]
    assert "".join(detokeniser.step(token) for token in ids) == "a"
    assert detokeniser.flush() == "\ufffd"
    assert detokeniser.flush() == ""


def test_flush_gives_nothing_after_a_whole_character() -> None:
    detokeniser = Detokeniser(TOKENIZER)
    for token in TOKENIZER.encode("a🦊").ids:
        detokeniser.step(token)
    assert detokeniser.flush() == ""


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_any_ids_give_the_text_that_decoding_them_at_once_gives(ids: list[int]) -> None:
    detokeniser = Detokeniser(TOKENIZER)
    text = "".join(detokeniser.step(token) for token in ids) + detokeniser.flush()
    assert text == TOKENIZER.decode(ids)


def test_the_fixture_has_characters_of_several_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("狐").ids) > 1
