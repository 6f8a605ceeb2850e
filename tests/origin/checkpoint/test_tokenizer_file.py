"""Checks of a checkpoint's tokenizer."""

import json
from pathlib import Path

import pytest

from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.model_config import read_config
from tests.origin.tiny_checkpoint import Shape, set_keys, write_checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, Shape(layers=1))


def test_a_tokenizer_with_more_ids_than_the_vocabulary_is_refused(copy: Path) -> None:
    with pytest.raises(ModelError, match=r"has id 299 \(expected ids below vocab_size 290\)") as it:
        read_config(set_keys(copy, vocab_size=290))
    assert it.value.field == str(copy / "tokenizer.json")


def test_a_tokenizer_without_the_end_of_text_is_refused(copy: Path) -> None:
    set_keys(copy, vocab_size=400)
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 310]}')
    with pytest.raises(ModelError, match="no token has the eos_token_id 310"):
        read_config(copy)


@pytest.mark.parametrize("eos_token", ["</s>", {"content": "</s>"}, ["</s>"]])
def test_an_end_of_text_that_is_no_token_is_refused(copy: Path, eos_token: object) -> None:
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    with pytest.raises(ModelError, match="eos_token") as caught:
        read_config(copy)
    assert caught.value.field == str(copy / "tokenizer_config.json")


@pytest.mark.parametrize("content", [None, "{}", '{"model": {"vocab": 3}}', '{"added_tokens": 1}'])
def test_a_missing_or_empty_tokenizer_is_refused(copy: Path, content: str | None) -> None:
    path = copy / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError) as caught:
        read_config(copy)
    assert caught.value.field == str(path)


def test_a_unigram_tokenizer_is_read_as_well(copy: Path) -> None:
    pieces = [["<s>", 0.0], *([f"p{at}", -1.0] for at in range(299))]
    (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    assert read_config(copy).vocab == 300
