"""The bytes of each token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models

from tailrace.ledger.errors import ModelError
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.engine.transcript import Vocabulary
from tests.origin.engine.runs import fallback_tokenizer, id_of_byte
from tests.origin.tiny_checkpoint import END, END_ID, train_tokenizer

TINY = train_tokenizer(300)
DEMO = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
FALLBACK = fallback_tokenizer()


@pytest.mark.parametrize("tokenizer", [TINY, DEMO, FALLBACK], ids=["tiny", "demo", "fallback"])
def test_every_id_has_the_bytes_that_llguidance_reads_in_it(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    oracle = LLTokenizer(tokenizer.to_str(), eos_token=[END_ID])
    for token in range(tokenizer.get_vocab_size()):
        # To llguidance, 0xFF marks special tokens; no text has this byte.
        assert vocabulary.bytes_of(token) in (oracle.decode_bytes([token]), b"\xff")


def test_part_of_a_character_is_its_exact_bytes() -> None:
    ids = TINY.encode("狐").ids
    assert len(ids) > 1
    assert b"".join(map(Vocabulary(TINY).bytes_of, ids)) == "狐".encode()
    ids = [id_of_byte(byte) for byte in "狐".encode()]
    assert b"".join(map(Vocabulary(FALLBACK).bytes_of, ids)) == "狐".encode()


def test_a_special_token_has_its_name_and_adds_no_text() -> None:
    vocabulary = Vocabulary(TINY)
    assert vocabulary.bytes_of(END_ID) == END.encode()
    assert vocabulary.text_of(END_ID) == b""


def test_ids_beyond_the_tokenizer_are_empty() -> None:
    vocabulary = Vocabulary(TINY)
    assert vocabulary.bytes_of(300) == vocabulary.text_of(300) == b""


@settings(max_examples=200)
@given(st.lists(st.integers(0, 301), max_size=12))
def test_the_bytes_of_any_ids_are_the_text_that_decoding_gives(ids: list[int]) -> None:
    tokenizer = train_with_added_tokens()
    vocabulary = Vocabulary(tokenizer)
    text = b"".join(map(vocabulary.text_of, ids)).decode(errors="replace")
    assert text == tokenizer.decode(ids)


def train_with_added_tokens() -> Tokenizer:
    """With words whose characters stand for no byte, and for other bytes than their own."""
    tokenizer = Tokenizer.from_str(TINY.to_str())
    tokenizer.add_tokens(["two words", "<é>"])
    return tokenizer


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_a_tokenizer_of_another_kind_is_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="the tokenizer's decoder is") as caught:
        Vocabulary(tokenizer)
    assert caught.value.field == "decoder"
