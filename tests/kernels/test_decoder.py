"""A whole decoder step, beside the oracles of its kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.paged_attention import FAULT_SEQUENCE, paged_attention
from tailrace.kernels.attention.paged_kv import FP8
from tailrace.kernels.decoder import Chunks, Decoder, Rows
from tailrace.kernels.layers import DenseHead, DenseLayer
from tailrace.kernels.linear.dense import dense_linear as dense_oracle
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight
from tailrace.kernels.linear.weight_only import weight_only_linear as weight_only_oracle
from tailrace.kernels.shapes import DecoderShape, Family
from tests.kernels.random_decoder import Recipe, random_decoder

FAMILIES = list(Family)
LENGTH = 320
START = 254
"""The first of the rows that are pushed: with two more they cross the end of a split."""
IDS = [5, 17, 80]


def shape_of(family: Family) -> DecoderShape:
    return DecoderShape("tiny", family, 32, 48, 1, 2, 1, 32, 96, LENGTH)


def recipe_of(family: Family, device: torch.device, rows: int, sequences: int = 2) -> Recipe:
    return Recipe(shape_of(family), device, rows, sequences, LENGTH, dtype=torch.float32, seed=3)


def one_by_one(recipe: Recipe) -> Tensor:
    """Return the logits of IDS, decoded step by step in sequence 1."""
    decoder = random_decoder(recipe)
    found = []
    for place, token in enumerate(IDS):
        rows = Rows.of([token], [START + place], [1], recipe.device)
        found.append(decoder.logits(decoder.decode(rows, recipe.tables(), LENGTH)).clone())
    assert not decoder.faults.any()
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_sequence_have_the_bits_of_steps(family: Family, device: torch.device) -> None:
    recipe = recipe_of(family, device, rows=len(IDS))
    decoder = random_decoder(recipe)
    rows = Rows.of(IDS, range(START, START + len(IDS)), [1] * len(IDS), device)
    logits = decoder.logits(decoder.replay(rows, recipe.tables(), LENGTH))
    assert logits.equal(one_by_one(recipe))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("others", "dtype"), [(1, torch.float32), (9, torch.float32), (9, torch.bfloat16)]
)
def test_a_row_has_the_same_bits_beside_others(
    family: Family, others: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Ten rows take the norms as launches of their own, one row has them in its linears."""
    recipe = replace(recipe_of(family, device, others + 1, others + 1), dtype=dtype)
    alone, together = random_decoder(recipe), random_decoder(recipe)
    tables, last = recipe.tables(), others
    row = Rows.of([7], [70], [last], device)
    expected = alone.logits(alone.decode(row, tables, LENGTH)).clone()
    ids = [*(sequence * 5 % 96 for sequence in range(others)), 7]
    positions = [*(11 * sequence for sequence in range(others)), 70]
    rows = Rows.of(ids, positions, range(others + 1), device)
    logits = together.logits(together.decode(rows, tables, LENGTH))
    assert logits[last:].equal(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_dependent_launches_give_the_same_bits(family: Family, device: torch.device) -> None:
    """On a GPU they overlap; elsewhere this shows that every launch takes the flag."""
    recipe = recipe_of(family, device, rows=len(IDS))
    ordinary, dependent = random_decoder(recipe), random_decoder(replace(recipe, dependent=True))
    assert (ordinary.dependent, dependent.dependent) == (False, True)
    assert one_by_one(replace(recipe, dependent=True)).equal(one_by_one(recipe))
    rows = Rows.of(IDS, range(START, START + len(IDS)), [1] * len(IDS), device)
    replayed = dependent.logits(dependent.replay(rows, recipe.tables(), LENGTH))
    assert replayed.equal(ordinary.logits(ordinary.replay(rows, recipe.tables(), LENGTH)))


@pytest.mark.parametrize("layers", [1, 2])
def test_fused_linears_give_the_same_bits(layers: int, device: torch.device) -> None:
    recipe = recipe_of(Family.BITNET, device, rows=len(IDS))
    recipe = replace(recipe, shape=replace(recipe.shape, layers=layers))
    fused = replace(recipe, fused=True)
    assert random_decoder(recipe).fused is None
    assert random_decoder(fused).fused is not None
    assert one_by_one(fused).equal(one_by_one(recipe))
    rows = Rows.of(IDS, range(START, START + len(IDS)), [1] * len(IDS), device)
    replayed = random_decoder(fused).replay(rows, recipe.tables(), LENGTH)
    assert replayed.equal(random_decoder(recipe).replay(rows, recipe.tables(), LENGTH))


def test_layers_without_ternary_linears_are_not_fused(device: torch.device) -> None:
    recipe = replace(recipe_of(Family.LLAMA, device, rows=1), fused=True)
    assert random_decoder(recipe).fused is None


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
def test_a_step_is_that_of_the_oracles(family: Family, device: torch.device) -> None:
    recipe = recipe_of(family, device, rows=2)
    decoder = random_decoder(recipe)
    rows = Rows.of([4, 90], [10, 63], [0, 1], device)
    expected = oracle_logits(random_decoder(recipe), rows, recipe.tables())
    logits = decoder.logits(decoder.decode(rows, recipe.tables(), LENGTH))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "kv_dtype"), [(8, FP8), (4, torch.int8)])
def test_a_quantised_step_is_that_of_the_oracles(
    bits: int, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """A value that is rounded to 8 bits may fall to the other side of a tie here and there."""
    shape = DecoderShape("tiny", Family.LLAMA, 128, 128, 1, 4, 2, 32, 96, LENGTH)
    recipe = Recipe(shape, device, 2, 2, LENGTH, bits=bits, kv_dtype=kv_dtype, seed=3)
    decoder = random_decoder(recipe)
    rows = Rows.of([4, 90], [10, 63], [0, 1], device)
    expected = oracle_logits(random_decoder(recipe), rows, recipe.tables())
    logits = decoder.logits(decoder.decode(rows, recipe.tables(), LENGTH))
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert error < 0.01


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
def test_a_prompt_in_chunks_gives_the_hidden_rows_of_steps(
    family: Family, device: torch.device
) -> None:
    """Not bit for bit, since a chunk attends by other tiles; a chunk's neighbours change none."""
    recipe = recipe_of(family, device, rows=2 * len(IDS))
    alone, together = random_decoder(recipe), random_decoder(recipe)
    positions = range(START, START + len(IDS))
    rows = Rows.of(IDS, positions, [1] * len(IDS), device)
    chunk = Chunks.of([len(IDS)], [START], [1], device)
    logits = alone.logits(alone.prefill(rows, chunk, recipe.tables(), 64)).clone()
    torch.testing.assert_close(logits, one_by_one(recipe), rtol=1e-4, atol=1e-4)
    both = Rows.of([9, 8, 7, *IDS], [*range(3), *positions], [0] * 3 + [1] * 3, device)
    chunks = Chunks.of([3, 3], [0, START], [0, 1], device)
    hidden = together.prefill(both, chunks, recipe.tables(), 64)
    assert together.logits(hidden)[3:].equal(logits)


def test_a_row_without_a_sequence_is_faulted_and_spoils_no_other(device: torch.device) -> None:
    recipe = recipe_of(Family.LLAMA, device, rows=2)
    decoder, alone = random_decoder(recipe), random_decoder(recipe)
    rows = Rows.of([5, 6], [3, 3], [2, 1], device)
    hidden = decoder.decode(rows, recipe.tables(), LENGTH)
    assert decoder.faults.tolist() == [FAULT_SEQUENCE, 0]
    one = Rows.of([6], [3], [1], device)
    assert hidden[1:].equal(alone.decode(one, recipe.tables(), LENGTH))


def test_more_rows_than_there_is_room_for_are_refused(device: torch.device) -> None:
    recipe = recipe_of(Family.LLAMA, device, rows=1)
    rows = Rows.of([5, 6], [3, 3], [0, 1], device)
    with pytest.raises(ValueError, match="rows: 2, expected at most 1"):
        random_decoder(recipe).decode(rows, recipe.tables(), LENGTH)


def test_parts_that_do_not_fit_the_shape_are_refused(device: torch.device) -> None:
    recipe = recipe_of(Family.LLAMA, device, rows=1)
    decoder = random_decoder(recipe)
    with pytest.raises(ValueError, match="layers: 0 with 0 ropes and 0 caches, expected 1"):
        Decoder(
            recipe.shape, decoder.table, [], [], decoder.head, [], max_rows=1, max_length=LENGTH
        )


def oracle_logits(decoder: Decoder, rows: Rows, tables: Tensor) -> Tensor:
    """Return a step of float layers by the plain torch operations beside the kernels."""
    shape, count = decoder.shape, len(rows)
    x = decoder.table[rows.ids.long()].float()
    qkv = x.new_empty(count, shape.queries + 2 * shape.keys)
    inner = x.new_empty(count, shape.ffn)
    for layer, rope, cache in decoder.parts:
        assert isinstance(layer, DenseLayer)
        linear_oracle(x, layer.qkv, qkv, norm=layer.input_norm, eps=layer.eps)
        sizes = [shape.queries, shape.keys, shape.keys]
        q, k, v = (part.reshape(count, -1, shape.head_dim) for part in torch.split(qkv, sizes, -1))
        q, k = rope.turn(q, rows.positions, rope.q_norm), rope.turn(k, rows.positions, rope.k_norm)
        for row, sequence in enumerate(rows.sequences.tolist()):
            one = slice(row, row + 1)
            cache.write(tables[sequence], rows.positions[one], k[one], v[one])
        mixed = paged_attention(q.flatten(1), rows.lengths, rows.sequences, cache, tables)
        linear_oracle(mixed, layer.output, x, epilogue=Epilogue.ADD)
        norm, eps = layer.ffn_input_norm, layer.eps
        linear_oracle(x, layer.gate_up, inner, norm=norm, eps=eps, epilogue=Epilogue.SWIGLU)
        linear_oracle(inner, layer.down, x, epilogue=Epilogue.ADD)
    head, logits = decoder.head, x.new_empty(count, shape.vocab)
    assert isinstance(head, DenseHead)
    linear_oracle(x, head.weight, logits, norm=head.norm, eps=head.eps)
    return logits


def linear_oracle(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
) -> None:
    if isinstance(weight, Tensor):
        dense_oracle(x, weight, out, norm=norm, eps=eps, epilogue=epilogue)
    else:
        weight_only_oracle(x, weight, out, norm=norm, eps=eps, epilogue=epilogue)
