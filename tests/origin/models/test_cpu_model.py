"""The CPU model: the bits of a row are the same in any batch, for all families."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.attention import row_attention
from tailrace.kernels.sampler.sampler import Sampling, sample
from tailrace.kernels.shapes import PAGE_TOKENS, Family
from tailrace.ledger.errors import ModelError, TooLarge
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.cpu_linear import DenseLinear
from tailrace.origin.models.cpu_model import CpuModel, load, pages_within
from tailrace.origin.models.model import Draw, Piece, context_pages, prefill
from tailrace.origin.models.tensors import read_tensors
from tests.origin.models.sequences import decoded_rows, prompt_logits
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

SHAPES = {
    "bitnet": Shape(),
    "llama": Shape(family=Family.LLAMA),
    "qwen3": Shape(family=Family.QWEN3, head_dim=32),
    # No size is a multiple of what a processor computes at a time.
    "odd llama": Shape(family=Family.LLAMA, hidden=60, heads=6, kv_heads=2, ffn=37, vocab=301),
    "odd qwen3": Shape(family=Family.QWEN3, hidden=100, heads=5, kv_heads=5, head_dim=6, ffn=70),
}
PROMPTS = (1, 3, 63, 64, 65, 127, 128, 200)
"""Lengths at and beside the edges of pages."""
ROWS = 17
KV_BYTES = 4_000_000


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    folder = tmp_path_factory.mktemp("family")
    return load(write_checkpoint(folder, SHAPES[request.param]), kv_bytes=KV_BYTES)


def ids_of(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (length,), generator=random).tolist()


def poison(model: CpuModel) -> None:
    """NaN wherever keys and values may lie."""
    slots = torch.arange(model.pages * PAGE_TOKENS)
    for layer in range(model.config.layers):
        model._cache.write(layer, slots, nan_rows(model, len(slots)))


def nan_rows(model: CpuModel, count: int) -> Tensor:
    """Return random keys and values of some tokens."""
    return torch.full((count, 2 * model.config.kv_heads, model.config.head_dim), torch.nan)


class Sequence:
    """A prompt of some length and what is decoded after it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.prompt = ids_of(length, length)
        self.rest = ids_of(ROWS, 1000 + length)
        self.prompt_rows = self.rows = torch.empty(0)
        self.pages: list[int] = []
        self.done = 0

    def alone(self, model: CpuModel) -> None:
        """Compute the rows with nothing beside them, one token at a time."""
        pages = range(context_pages(model.config))
        self.prompt_rows = prefill(model, self.prompt, pages)
        self.rows = decoded_rows(model, self.rest, self.length, pages)

    def start(self, model: CpuModel, pages: list[int]) -> None:
        self.pages, self.done = pages, 0
        assert torch.equal(prefill(model, self.prompt, pages), self.prompt_rows)

    def next(self, count: int) -> tuple[Piece, Tensor]:
        """Return the next rows, and what they must give."""
        rows = slice(self.done, self.done + count)
        self.done += count
        piece = Piece(self.rest[rows], self.length + rows.start, self.pages, prefill=False)
        return piece, self.rows[rows]


def random_batches(random: Random, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    while left := [sequence for sequence in sequences if sequence.done < ROWS]:
        yield random.sample(left, random.randint(1, len(left)))


def random_company(random: Random, pages: list[int]) -> Piece:
    """Return a chunk of another prompt."""
    return Piece(ids_of(random.randint(1, 64), random.randrange(99)), 0, pages, prefill=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_row_has_its_bits_whatever_is_in_the_batch_and_wherever_its_pages_lie(
    served: CpuModel, seed: int
) -> None:
    random, sequences = Random(seed), [Sequence(length) for length in PROMPTS]
    for sequence in sequences:
        sequence.alone(served)
    poison(served)
    free = random.sample(range(served.pages), served.pages)
    for sequence in sequences:
        count = -(-(sequence.length + ROWS) // PAGE_TOKENS)
        sequence.start(served, [free.pop() for _ in range(count)])
    others = [free.pop()]
    for batch in random_batches(random, sequences):
        parts = [sequence.next(random.randint(1, ROWS - sequence.done)) for sequence in batch]
        if random.random() < 0.5:
            company = random_company(random, others)
            parts.insert(random.randint(0, len(parts)), (company, torch.empty(0)))
        hidden = served.forward([piece for piece, _ in parts])
        sizes = [len(piece.ids) for piece, _ in parts]
        for (_, expected), rows in zip(parts, torch.split(hidden, sizes), strict=True):
            assert not len(expected) or torch.equal(rows, expected)


def test_chunks_of_one_prompt_in_a_batch_give_the_rows_of_one_after_the_other(
    served: CpuModel,
) -> None:
    prompt, other, pages = ids_of(200, 4), ids_of(30, 5), [3, 1, 0, 6]
    expected = prefill(served, prompt, pages), prefill(served, other, [5])
    poison(served)
    chunks = [
        Piece(prompt[start : start + 64], start, pages, prefill=True)
        for start in range(0, len(prompt), 64)
    ]
    hidden = served.forward([*chunks, Piece(other, 0, [5], prefill=True)])
    assert torch.equal(hidden, torch.cat(expected))


def test_batches_of_every_size_give_the_rows_of_one(served: CpuModel) -> None:
    tables = [[2 * number, 2 * number + 1] for number in range(17)]
    alone = []
    for number, pages in enumerate(tables):
        prefill(served, ids_of(40 + number, number), pages)
        alone.append(served.forward([Piece([7], 40 + number, pages, prefill=False)]).clone())
    for size in range(1, 18):
        pieces = [
            Piece([7], 40 + number, pages, prefill=False)
            for number, pages in enumerate(tables[:size])
        ]
        assert torch.equal(served.forward(pieces), torch.cat(alone[:size]))


@pytest.mark.parametrize("start", [1, 60, 63, 64, 65, 120, 128])
def test_replayed_rows_equal_single_steps(served: CpuModel, start: int) -> None:
    prompt, rest, pages = ids_of(start, 5), ids_of(40, 6), [5, 3, 9, 4]
    prefill(served, prompt, pages)
    one_by_one = decoded_rows(served, rest, start, pages)
    poison(served)
    prefill(served, prompt, pages)
    assert torch.equal(decoded_rows(served, rest, start, pages, at_once=40), one_by_one)


def test_rejected_draft_rows_leave_no_trace(served: CpuModel) -> None:
    prompt, rest, pages = ids_of(62, 5), ids_of(6, 6), [1, 0]
    prefill(served, prompt, pages)
    expected = decoded_rows(served, rest, 62, pages)
    prefill(served, prompt, pages)
    decoded_rows(served, [rest[0], 9, 9, 9], 62, pages, at_once=4)
    assert torch.equal(decoded_rows(served, rest[1:], 63, pages), expected[1:])


def test_a_row_of_nan_disturbs_no_other(served: CpuModel) -> None:
    well, ill = [0, 1], [2, 3]
    for pages in (well, ill):
        prefill(served, ids_of(70, 3), pages)
    expected = served.forward([Piece([7], 70, well, prefill=False)]).clone()
    slots = torch.tensor(served._cache.slots(ill, range(10)))
    served._cache.write(0, slots, nan_rows(served, 10))
    pieces = [Piece([7], 70, pages, prefill=False) for pages in (ill, well, ill)]
    hidden = served.forward(pieces)
    assert torch.equal(hidden[1:2], expected)
    assert hidden[[0, 2]].isnan().all()
    drawn = served.draw(hidden, [Draw(Sampling(), 0, logprobs=2)] * 3)
    assert [one.token for one in drawn] == [
        -1,
        served.draw(expected, [Draw(Sampling(), 0)])[0].token,
        -1,
    ]
    assert drawn[0].scores is None and drawn[1].scores is not None


def test_decoding_agrees_with_prefill(served: CpuModel) -> None:
    ids = ids_of(12, 5)
    one_by_one = served.logits(decoded_rows(served, ids, 0, [0]))
    torch.testing.assert_close(one_by_one, prompt_logits(served, ids), rtol=1e-4, atol=1e-4)


def test_the_rows_of_one_batch_draw_what_they_draw_alone(served: CpuModel) -> None:
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(17, served.config.hidden, generator=random)
    draws = [
        Draw(Sampling(temperature=0.5 * (row % 3), top_k=40, top_p=0.95, seed=row), row, logprobs=4)
        for row in range(17)
    ]
    alone = [served.draw(hidden[row : row + 1], draws[row : row + 1])[0] for row in range(17)]
    for size in (1, 2, 3, 9, 16, 17):
        assert served.draw(hidden[:size], draws[:size]) == alone[:size]
    assert len({drawn.token for drawn in alone}) > 5


def test_a_draw_is_that_of_the_sampler(served: CpuModel) -> None:
    hidden = torch.randn(1, served.config.hidden, generator=torch.Generator().manual_seed(1))
    vocab = served.config.vocab
    mask = torch.full((-(-vocab // 32),), 0x5555, dtype=torch.int32)
    counts = torch.arange(vocab, dtype=torch.int32) % 3
    sampling = Sampling(temperature=1.5, presence=0.4, min_p=0.01, seed=9)
    for position in range(20):
        expected = sample(served.logits(hidden)[0], sampling, position, mask, counts)
        assert served.draw(hidden, [Draw(sampling, position, mask, counts)])[0].token == expected


def test_scores_are_of_the_raw_logits_best_first_and_ties_to_the_lowest_id(
    served: CpuModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    monkeypatch.setattr(served, "logits", lambda _: raw)
    mask, logprobs = torch.tensor([0b000101], dtype=torch.int32), raw[0].log_softmax(-1).tolist()
    for asked in (0, 1, 2, 3, 4, 6, 9):
        (drawn,) = served.draw(raw, [Draw(Sampling(), 0, mask, logprobs=asked)])
        assert drawn.token == 2 and drawn.scores is not None
        assert drawn.scores.chosen == logprobs[2]
        best = [1, 3, 2, 4, 5, 0][:asked]
        assert drawn.scores.best == tuple((id, logprobs[id]) for id in best)


def test_a_draw_that_asks_for_no_scores_has_none(served: CpuModel) -> None:
    hidden = torch.zeros(1, served.config.hidden)
    assert served.draw(hidden, [Draw(Sampling(), 0)])[0].scores is None


@pytest.mark.parametrize(
    ("piece", "error"),
    [
        (Piece([1] * 7, 250, [0, 1, 2, 3, 4], prefill=False), TooLarge),
        (Piece([1] * 2, 63, [0], prefill=False), TooLarge),
        (Piece([1] * 65, 0, [0, 1], prefill=True), ValueError),
        (Piece([1], 3, [0], prefill=True), ValueError),
        (Piece([], 0, [0], prefill=False), ValueError),
        (Piece([1], -1, [0], prefill=False), ValueError),
        (Piece([999], 0, [0], prefill=False), ValueError),
        (Piece([-1], 0, [0], prefill=False), ValueError),
        (Piece([1], 0, [-1], prefill=False), ValueError),
        (Piece([1], 0, [10**6], prefill=False), ValueError),
    ],
    ids=[
        "context",
        "table",
        "long chunk",
        "cut chunk",
        "empty",
        "before",
        "id",
        "-id",
        "-page",
        "page",
    ],
)
def test_a_piece_that_cannot_be_computed_is_refused(
    served: CpuModel, piece: Piece, error: type[Exception]
) -> None:
    with pytest.raises(error):
        served.forward([Piece([1], 0, [7], prefill=False), piece])


def test_the_pages_fit_the_bytes_and_hold_at_least_one_context(served: CpuModel) -> None:
    config = served.config
    page = 4 * 2 * config.layers * config.kv_heads * config.head_dim * PAGE_TOKENS
    assert pages_within(config, 10 * page + 1) == 10
    assert pages_within(config, 0) == config.context // PAGE_TOKENS == 4


def test_a_context_that_the_memory_does_not_hold_is_refused(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    with pytest.raises(ModelError, match="pages of keys and values"):
        CpuModel(replace(config, context=2**44), read_tensors(checkpoint, config), "")


def test_the_fingerprint_names_the_number_of_threads(checkpoint: Path) -> None:
    threads, before = torch.get_num_threads(), load(checkpoint).fingerprint
    torch.set_num_threads(threads + 1)
    try:
        assert load(checkpoint).fingerprint != before
    finally:
        torch.set_num_threads(threads)


def test_pages_are_copied_where_the_bits_depend_on_what_lies_around_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uneven(q: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return row_attention(q, keys, values, scale) + keys.stride(0) * 1e-9

    expected = prompt_logits(load(checkpoint), [5, 6, 7])
    monkeypatch.setattr("tailrace.origin.models.cpu_model.row_attention", uneven)
    model = load(checkpoint)
    assert not model._cache.in_place
    assert torch.equal(prompt_logits(model, [5, 6, 7]), expected)


def test_no_weight_is_held_twice(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    tensors = read_tensors(checkpoint, config)
    model = CpuModel(config, tensors, "")
    assert not tensors
    assert isinstance(model._head, DenseLinear)
    assert model._head.weight is model._embedding
