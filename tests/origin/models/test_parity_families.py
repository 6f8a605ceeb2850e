"""Random checkpoints of every family in transformers and in our CPU model: the same numbers."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tailrace.kernels.shapes import Family
from tailrace.origin.checkpoint.layout import INDEX_FILE
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.cpu_model import load
from tailrace.origin.models.tensors import read_tensors
from tests.origin.models.reference_model import (
    first_difference,
    load_reference,
    our_greedy,
    our_rounded,
    reference_greedy,
    reference_logits,
    reference_rounded,
)
from tests.origin.models.sequences import prompt_logits
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

LOGIT_ERROR = 1e-4
PROMPT_TOKENS = 70  # a whole chunk and a part of one
GREEDY_TOKENS = 8
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def llama(**sizes: Any) -> Shape:
    return Shape(family=Family.LLAMA, **sizes)


def qwen3(**sizes: Any) -> Shape:
    return Shape(family=Family.QWEN3, **sizes)


DENSE = {
    "llama-gqa-1": llama(heads=4, kv_heads=4),
    "llama-gqa-2-untied": llama(heads=4, kv_heads=2, tied_head=False, ffn=72),
    "llama-gqa-3-d48": llama(hidden=144, heads=3, kv_heads=1, rope={"rope_scaling": LLAMA3}),
    "llama-gqa-4-d24": llama(heads=4, kv_heads=1, head_dim=24, rope={"rope_scaling": YARN}),
    "llama-linear": llama(rope={"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama-dynamic": llama(rope={"rope_scaling": {"type": "dynamic", "factor": 3.0}}),
    "llama-shards": llama(shards=3, layers=3, rope={"rope_theta": 1e4}),
    "qwen3-gqa-1-d32": qwen3(heads=2, kv_heads=2, head_dim=32),
    "qwen3-gqa-2-d48-untied": qwen3(heads=4, head_dim=48, tied_head=False),
    "qwen3-gqa-3-d16": qwen3(hidden=40, heads=6, head_dim=16, rope={"rope_scaling": LLAMA3}),
    "qwen3-gqa-4-d32": qwen3(heads=4, kv_heads=1, head_dim=32, rope={"rope_parameters": YARN}),
}
TERNARY = {
    "packed": Shape(),
    "packed-gqa-3-d48-untied": Shape(hidden=144, heads=3, kv_heads=1, tied_head=False),
    "packed-gqa-4-llama3": Shape(heads=4, kv_heads=1, rope={"rope_scaling": LLAMA3}),
    "packed-odd-sizes": Shape(hidden=36, heads=6, kv_heads=2, ffn=52),
    "packed-shards": Shape(shards=2, kv_heads=4),
    "unpacked": Shape(packed=False),
    "unpacked-d32-yarn": Shape(packed=False, heads=2, rope={"rope_scaling": YARN}),
}


def prompt(shape: Shape, length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(shape.vocab) for _ in range(length)]


@pytest.mark.parametrize("shape", DENSE.values(), ids=DENSE.keys())
def test_dense_logits_and_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, shape: Shape
) -> None:
    write_checkpoint(tmp_path, shape)
    reference, model = load_reference(tmp_path), load(tmp_path)
    ids = prompt(shape, PROMPT_TOKENS, seed=1)
    theirs = reference_logits(reference, ids)
    assert float(theirs.std()) > 0.5  # a difference of LOGIT_ERROR is one of little
    difference = (prompt_logits(model, ids) - theirs).abs().max()
    assert float(difference) < LOGIT_ERROR
    chosen = our_greedy(model, ids, GREEDY_TOKENS)
    assert chosen == reference_greedy(reference, ids, GREEDY_TOKENS)


@pytest.mark.parametrize("shape", TERNARY.values(), ids=TERNARY.keys())
def test_ternary_logits_are_those_of_transformers_where_the_same_was_rounded(
    tmp_path: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an activation lies on the edge between two integers, the last bit of a sum decides."""
    write_checkpoint(tmp_path, shape)
    reference, model = load_reference(tmp_path), load(tmp_path)
    alike = 0
    for seed in range(10):
        ids = prompt(shape, 8, seed)
        theirs, their_rounded = reference_rounded(reference, ids)
        ours, our_int8 = our_rounded(model, ids, monkeypatch)
        parted = first_difference(our_int8, their_rounded)
        assert parted in (None, 1)
        if parted is None:
            assert float((ours - theirs).abs().max()) < LOGIT_ERROR
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
            alike += 1
    assert alike >= 7


@pytest.mark.parametrize("shape", TERNARY.values(), ids=TERNARY.keys())
def test_ternary_greedy_tokens_are_ones_that_transformers_would_choose(
    tmp_path: Path, shape: Shape
) -> None:
    write_checkpoint(tmp_path, shape)
    reference, model = load_reference(tmp_path), load(tmp_path)
    ids = prompt(shape, 8, seed=0)
    chosen = our_greedy(model, ids, GREEDY_TOKENS)
    before = reference_logits(reference, [*ids, *chosen])[len(ids) - 1 : -1]
    missed = before.amax(1) - before.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    # Where one rounding flips, two tokens that are nearly as likely may change places.
    assert float(missed.max()) < 0.05 * float(before.std())


@pytest.mark.parametrize("name", ["llama-gqa-3-d48", "llama-gqa-2-untied", "qwen3-gqa-4-d32"])
def test_what_transformers_saves_in_shards_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    shape = DENSE[name]
    written = write_checkpoint(tmp_path / "written", shape)
    saved = tmp_path / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_reference(written).save_pretrained(saved, max_shard_size="100KB")
    shutil.copy(written / "tokenizer.json", saved)
    assert (saved / INDEX_FILE).exists()
    config, before = read_config(saved), read_config(written)
    assert config == before
    tensors = read_tensors(saved, config)
    expected = read_tensors(written, before)
    assert tensors.keys() == expected.keys()
    for tensor_name, tensor in tensors.items():
        assert torch.equal(tensor, expected[tensor_name].float())
