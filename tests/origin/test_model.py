import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels.norm
from kernels.ternary import pack_ternary, ternary_linear
from ledger.errors import ModelError, TooLarge
from origin.cpu_model import CpuModel, TernaryLinear, load
from origin.model import PREFILL_CHUNK_TOKENS
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles parts of BitNet otherwise


def random_ids(count: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (count,), generator=random).tolist()


def load_reference(directory: Path) -> torch.nn.Module:
    """The same checkpoint in transformers, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # Its own .float() refuses quantised models, whose scales stay bf16 otherwise.
    return torch.nn.Module.float(loaded)


def greedy(model: CpuModel, prompt: list[int], count: int) -> list[int]:
    cache = model.new_cache()
    hidden = model.advance(prompt, cache)
    ids: list[int] = []
    for _ in range(count):
        ids.append(int(model.logits(hidden[-1:]).argmax()))
        hidden = model.advance(ids[-1:], cache)
    return ids


@pytest.mark.parametrize("tied_head", [True, False])
def test_it_equals_transformers(tmp_path: Path, tied_head: bool) -> None:
    write_checkpoint(tmp_path, Shape(tied_head=tied_head))
    model, reference = load(tmp_path), load_reference(tmp_path)
    differences = []
    for seed in range(8):
        ids = random_ids(10, seed)
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        logits = model.forward(ids)
        differences.append(float((logits - expected).abs().max()))
        assert logits.argmax(-1).equal(expected.argmax(-1))
    # Where an activation lies on the edge between two int8 values, the last bit of a sum,
    # which differs between CPUs, picks the side: one prompt in eight may do so.
    assert sorted(differences)[-2] < 1e-5


def test_it_generates_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(tied_head=False))
    prompt = random_ids(7, 3)
    generated = load_reference(tmp_path).generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert greedy(load(tmp_path), prompt, 30) == generated[0, len(prompt) :].tolist()


def test_fused_ternary_layers_equal_the_oracle_of_each_bit_for_bit() -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=random) * 3
    parts = []
    for rows in (16, 8, 4):
        ternary = torch.randint(-1, 2, (rows, 48), generator=random, dtype=torch.int8)
        parts.append((pack_ternary(ternary), torch.rand(1, generator=random).bfloat16()))
    expected = torch.cat([ternary_linear(x, packed, scale) for packed, scale in parts], -1)
    assert torch.equal(TernaryLinear(parts)(x), expected)


def test_a_ternary_layer_is_exact_in_any_batch() -> None:
    random = torch.Generator().manual_seed(2)
    ternary = torch.randint(-1, 2, (64, 512), generator=random, dtype=torch.int8)
    layer = TernaryLinear([(pack_ternary(ternary), torch.ones(1))])
    x = torch.randn(33, 512, generator=random)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_decoding_one_by_one_agrees_with_prefill(model: CpuModel) -> None:
    ids = random_ids(12, 5)
    cache = model.new_cache()
    one_by_one = torch.cat([model.logits(model.advance([token], cache)) for token in ids])
    torch.testing.assert_close(one_by_one, model.forward(ids), rtol=1e-4, atol=1e-4)


def test_prefill_in_chunks_agrees_with_one_piece(model: CpuModel) -> None:
    ids = random_ids(PREFILL_CHUNK_TOKENS + 9, 6)
    whole = model.logits(model.advance(ids, model.new_cache()))
    torch.testing.assert_close(model.forward(ids)[:8], whole[:8], rtol=1e-4, atol=1e-4)
    assert cosine(model.forward(ids)[-1], whole[-1]) > 0.99


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def test_tokens_beyond_the_context_are_refused(model: CpuModel) -> None:
    cache = model.new_cache()
    model.advance([1] * 250, cache)
    with pytest.raises(TooLarge):
        model.advance([1] * 7, cache)
    assert cache.length == 250


def test_loading_tells_its_progress(checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load(checkpoint, lambda *stage: told.append(stage))
    assert told == [("read", 0, 1), ("read", 1, 1), ("unpack", 1, 2), ("unpack", 2, 2)]


def test_packed_bits_that_stand_for_no_weight_are_refused_by_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
        load(tmp_path)


def test_the_fingerprint_names_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    same = write_checkpoint(tmp_path / "same")
    other = write_checkpoint(tmp_path / "other", seed=2)
    fingerprint = load(checkpoint).fingerprint
    assert load(same).fingerprint == fingerprint
    assert load(other).fingerprint != fingerprint


def test_the_fingerprint_names_the_kernels(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(checkpoint).fingerprint
    source = Path(kernels.norm.__file__).read_text()
    (tmp_path / "norm.py").write_text(source.replace("1e-5", "1e-6") + "\n")
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
    assert load(checkpoint).fingerprint != before


def test_a_row_that_holds_nan_or_infinity_gives_nan_and_its_neighbours_do_not() -> None:
    ternary = torch.ones(8, 16, dtype=torch.int8)
    x = torch.ones(3, 16)
    x[0, 5], x[2, 5] = torch.nan, torch.inf
    out = TernaryLinear([(pack_ternary(ternary), torch.ones(1))])(x)
    assert out.isnan().all(-1).tolist() == [True, False, True]
