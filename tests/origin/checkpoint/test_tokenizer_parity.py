"""The ids are those of transformers, or the files are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from tailrace.ledger.errors import ModelError
from tailrace.ledger.frame import Message
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.checkpoint.prompt import PromptReader
from tests.origin.engine.runs import fallback_tokenizer
from tests.origin.tiny_checkpoint import END, Shape, change_json, write_checkpoint

TEXTS = (
    "What is 12 + 30? The fox said <think> and then, ever so slowly, nothing more.",
    f"a{END} fox the fox",
    "The ox",
)
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def plain_token(content: str, **flags: object) -> dict[str, object]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False, "special": True} | flags  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, Shape(layers=1))
    return write(tmp_path, {})


def write(directory: Path, config: dict[str, Any]) -> Path:
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(known | config))
    return directory


def change_tokenizer(directory: Path, **keys: object) -> None:
    change_json(directory / "tokenizer.json", lambda raw: raw.update(keys))


def assert_ids_are_those_of_transformers(directory: Path) -> None:
    read_config(directory)
    reader, theirs = PromptReader(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert list(reader.ids(text, ())) == theirs(text)["input_ids"]
    turns = [{"role": "user", "content": "The fox and the bear. " * 3}]
    chat = theirs.apply_chat_template(turns, return_dict=False)
    assert list(reader.ids(None, [Message(**turn) for turn in turns])) == chat


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {"direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0,
           "pad_token": END, "strategy": "BatchLongest"}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"truncation": TRUNCATION},
        {"padding": PADDING},
        {"padding": PADDING | {"strategy": {"Fixed": 64}}, "truncation": TRUNCATION},
    ],
)
def test_what_a_training_cut_and_filled_up_is_read_whole(
    copy: Path, keys: dict[str, object]
) -> None:
    change_tokenizer(copy, **keys)
    assert_ids_are_those_of_transformers(copy)
    assert len(PromptReader(copy).ids(TEXTS[0], ())) > 8


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"0": plain_token(END)}, "eos_token": END},
        {"add_prefix_space": False, "add_bos_token": False, "bos_token": None},
        {
            "add_prefix_space": None,
            "eos_token": plain_token(END, __type="AddedToken"),
            "pad_token": END,
        },
        {"additional_special_tokens": [END], "split_special_tokens": False},
    ],
)
def test_files_that_say_the_same_are_taken(copy: Path, config: dict[str, object]) -> None:
    assert_ids_are_those_of_transformers(write(copy, config))


def test_what_a_template_of_the_tokenizer_adds_may_be_said_twice(copy: Path) -> None:
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 0)]),
        ]
    )
    tokenizer.save(str(copy / "tokenizer.json"))
    assert_ids_are_those_of_transformers(write(copy, {"bos_token": END, "add_bos_token": True}))
    with pytest.raises(ModelError, match="add_bos_token: false"):
        read_config(write(copy, {"bos_token": END, "add_bos_token": False}))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"added_tokens_decoder": {"301": plain_token("<think>")}}, "added_tokens_decoder.301"),
        ({"added_tokens_decoder": {"0": plain_token(END, rstrip=True)}}, "added_tokens_decoder.0"),
        ({"added_tokens_decoder": {"0": plain_token(END, special=False)}}, "tokens_decoder.0"),
        ({"added_tokens_decoder": {"0": END}}, "added_tokens_decoder.0"),
        ({"added_tokens_decoder": {"x": plain_token(END)}}, "added_tokens_decoder.x"),
        ({"bos_token": "Ġthe"}, "bos_token"),
        ({"pad_token": "Ġthe"}, "pad_token"),
        ({"additional_special_tokens": ["Ġthe"]}, "additional_special_tokens"),
        ({"add_bos_token": True, "bos_token": END}, "add_bos_token"),
        ({"add_eos_token": True, "eos_token": END}, "add_eos_token"),
        ({"add_prefix_space": True}, "add_prefix_space"),
        ({"add_prefix_space": "yes"}, "add_prefix_space"),
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"pad_token": ["x"]}, "pad_token"),
    ],
)
def test_files_that_contradict_one_another_are_refused_by_key(
    copy: Path, config: dict[str, object], key: str
) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        read_config(write(copy, config))
    assert caught.value.field == str(copy / "tokenizer_config.json")
    assert caught.value.hint


def test_an_added_token_of_the_old_file_that_the_tokenizer_lacks_is_refused(copy: Path) -> None:
    (copy / "added_tokens.json").write_text(json.dumps({END: 0}))
    assert_ids_are_those_of_transformers(copy)
    (copy / "added_tokens.json").write_text(json.dumps({END: 0, "<think>": 300}))
    with pytest.raises(ModelError, match="<think>: 300") as caught:
        read_config(copy)
    assert caught.value.field == str(copy / "added_tokens.json")


def drop_the_prefix(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"]["normalizers"].pop(0)


@pytest.mark.parametrize(
    ("change", "said", "served"),
    [
        (lambda tokenizer: None, True, True),
        (lambda tokenizer: None, False, False),
        (drop_the_prefix, False, True),
        (drop_the_prefix, True, False),
    ],
)
def test_the_space_before_the_first_word_is_that_of_the_tokenizer(
    copy: Path, change: Callable[[dict[str, Any]], None], said: bool, served: bool
) -> None:
    fallback_tokenizer().save(str(copy / "tokenizer.json"))
    change_json(copy / "tokenizer.json", change)
    write(copy, {"add_prefix_space": said})
    if served:
        read_config(copy)
        return
    with pytest.raises(ModelError, match="add_prefix_space"):
        read_config(copy)
