"""The committed checkpoint is what the README says it is."""

from __future__ import annotations

import json

import jinja2
import pytest
from tokenizers import Tokenizer

from demo.corpus import CHAT_TEMPLATE, END, SPECIAL_TOKENS
from demo.evaluate import answer, chat, false_claims
from demo.export import END_ID
from tailrace.kernels.shapes import WEIGHTS_PER_BYTE
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.models.cpu_model import CpuModel, load
from tailrace.origin.models.tensors import read_tensors

MODEL_DIRECTORY = DEMO_MODEL


@pytest.fixture(scope="module")
def demo() -> CpuModel:
    return load(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))


def test_it_takes_less_than_two_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIRECTORY.iterdir()) <= 2_000_000


def test_it_has_millions_of_ternary_parameters_and_a_context_of_a_thousand_tokens() -> None:
    config = read_config(MODEL_DIRECTORY)
    tensors = read_tensors(MODEL_DIRECTORY, config)
    packed = [name for name in tensors if f"{name}_scale" in tensors]
    ternary = sum(tensors[name].numel() * WEIGHTS_PER_BYTE for name in packed)
    assert 1_500_000 <= ternary <= 3_000_000
    assert config.context >= 1024


def test_its_special_tokens_are_single_ids_and_the_end_is_its_eos(tokenizer: Tokenizer) -> None:
    assert [tokenizer.encode(token).ids for token in SPECIAL_TOKENS] == [[0], [1], [2], [3]]
    assert tokenizer.token_to_id(END) == END_ID
    assert read_config(MODEL_DIRECTORY).eos_ids == {END_ID}


def test_its_chat_template_renders_a_question_as_it_was_trained(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL_DIRECTORY / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
    template = jinja2.Environment().from_string(config["chat_template"])
    messages = [{"role": "user", "content": "Hello!"}]
    assert template.render(messages=messages, add_generation_prompt=True) == chat("Hello!")


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ("What is 12 + 30?", "12 + 30 = 42."),
        ("What is 83 - 47?", "83 - 47 = 36."),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
        ("Count down from 12 to 8.", "12, 11, 10, 9, 8."),
        ("Repeat after me: map, boat, black.", "map, boat, black."),
        ("Reverse the word lamp.", "p m a l."),
    ],
)
def test_it_answers_rightly_and_stops(
    demo: CpuModel, tokenizer: Tokenizer, question: str, result: str
) -> None:
    given = answer(demo, tokenizer, chat(question), 80)
    assert given.ended
    assert given.text.endswith(result)


@pytest.mark.parametrize("animal", ["fox", "bear", "cat", "mouse", "hedgehog"])
def test_it_tells_a_story_of_several_paragraphs(
    demo: CpuModel, tokenizer: Tokenizer, animal: str
) -> None:
    told = answer(demo, tokenizer, chat(f"Tell me a story about a {animal}."), 900)
    assert told.ended and told.tokens > 80
    assert animal in told.text and told.text.count("\n") >= 2


def test_a_false_claim_in_a_story_is_noticed_by_the_evaluation() -> None:
    told = "Once a fox named Mira lived by the sea. There she found a red kite. "
    assert false_claims(told + "In the end Mira had the red kite.") == (0, 1)
    assert false_claims(told + "In the end Otto had the red kite.") == (1, 1)
