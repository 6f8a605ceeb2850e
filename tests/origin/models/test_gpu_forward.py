"""Batches of pieces through the kernels: how they are grouped, and that grouping changes no bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrace.kernels.decoder import Decoder
from tailrace.kernels.layers import TernaryLayer
from tailrace.kernels.sampler.sampler_rows import SamplerWorkspace
from tailrace.kernels.shapes import DecoderShape, Family
from tailrace.kernels.step_graph import Capture, Launch
from tailrace.origin.models.gpu_forward import GpuForward, chunk_groups, row_groups, spans_of
from tailrace.origin.models.gpu_graphs import GpuGraphs, captured_rows
from tailrace.origin.models.model import DEFAULT_STEP_ROWS, Piece
from tailrace.origin.scheduler.limits import Limits
from tests.kernels.random_decoder import Recipe, random_decoder

LENGTH = 320
PAGES = 5
"""Number of pages for a sequence of LENGTH positions."""
ROWS = 5
"""Maximum number of rows in one pass of the decoder: few, so that batches are divided."""
VOCAB = 96


def chunk(ids: Sequence[int], pages: Sequence[int], start: int = 0) -> Piece:
    return Piece(ids, start, pages, prefill=True)


def rows(ids: Sequence[int], start: int, pages: Sequence[int]) -> Piece:
    return Piece(ids, start, pages, prefill=False)


def pages_of(sequence: int) -> list[int]:
    """Return pages as a pool may give them: never shared by two sequences, and in no order."""
    return [(7 * (sequence * PAGES + index)) % (4 * PAGES) for index in range(PAGES)]


def decoder_of(family: Family, device: torch.device, most: int = ROWS) -> Decoder:
    shape = DecoderShape("tiny", family, 32, 48, 2, 2, 1, 32, VOCAB, LENGTH)
    recipe = Recipe(shape, device, most, sequences=4, length=LENGTH, dtype=torch.float32, seed=3)
    decoder = random_decoder(recipe)
    if device.type == "cpu":  # where one GEMV takes seconds, and has the same bits
        decoder.parts = [
            (replace(layer, gemv_rows=0) if isinstance(layer, TernaryLayer) else layer, rope, cache)
            for layer, rope, cache in decoder.parts
        ]
    return decoder


def forward_with(decoder: Decoder, capture: Capture | None = None) -> GpuForward:
    workspace = SamplerWorkspace(decoder.step_rows, VOCAB, decoder.device)
    return GpuForward(decoder, GpuGraphs(decoder, workspace, capture))


def forward_of(family: Family, device: torch.device) -> GpuForward:
    return forward_with(decoder_of(family, device))


def alone(forward: GpuForward, pieces: Sequence[Piece]) -> Tensor:
    """Return each piece by itself, and its rows one by one."""
    found = []
    for piece in pieces:
        whole = [(piece.start, piece.ids)]
        steps = [(piece.start + index, [token]) for index, token in enumerate(piece.ids)]
        for start, ids in whole if piece.prefill else steps:
            found.append(forward([Piece(ids, start, piece.pages, piece.prefill)]))
    return torch.cat(found)


def test_a_chunk_is_not_divided_and_a_group_holds_as_many_as_fit() -> None:
    spans = spans_of([chunk(range(size), [0]) for size in (3, 2, 4, 5, 1)])
    assert [[len(span) for span in group] for group in chunk_groups(spans, 5)] == [
        [3, 2],
        [4],
        [5],
        [1],
    ]


def test_a_group_has_as_many_chunks_as_a_captured_prefill_takes() -> None:
    spans = spans_of([chunk([1], [0])] * 5)
    assert [len(group) for group in chunk_groups(spans, 64, most_chunks=2)] == [2, 2, 1]


def test_rows_that_do_not_fit_go_on_in_the_next_group_at_their_places() -> None:
    pieces = [rows(range(size), 10, [0]) for size in (1, 3, 9, 1)]
    groups = list(row_groups(spans_of(pieces), 4))
    assert [sum(map(len, group)) for group in groups] == [4, 4, 4, 2]
    spans = [span for group in groups for span in group]
    assert [place for span in spans for place in range(span.place, span.place + len(span))] == [
        *range(14)
    ]
    assert [token for span in spans for token in span.ids] == [0, *range(3), *range(9), 0]
    last = spans[-2]
    assert (list(last.ids), list(last.positions)) == ([8], [18])


@pytest.mark.parametrize("family", Family)
def test_a_batch_has_the_bits_of_its_pieces_alone(family: Family, device: torch.device) -> None:
    """Chunks among rows; a step of 3 rows, which is filled up; one past a split and one before."""
    pieces = [
        rows([8], 300, pages_of(0)),
        chunk([3, 1, 4], pages_of(1), 64),
        rows([2, 7], 40, pages_of(2)),
        chunk([9, 2], pages_of(3)),
    ]
    expected = alone(forward_of(family, device), pieces)
    assert expected.isfinite().all()
    assert forward_of(family, device)(pieces).equal(expected)


def test_more_rows_than_fit_have_the_bits_of_steps(device: torch.device) -> None:
    """7 rows of one sequence, of 5 at a time, beside one of another."""
    pieces = [rows([*range(7)], 253, pages_of(1)), rows([5], 3, pages_of(0))]
    expected = alone(forward_of(Family.LLAMA, device), pieces)
    assert forward_of(Family.LLAMA, device)(pieces).equal(expected)


def test_as_many_rows_as_run_by_default_are_one_step() -> None:
    """They read the weights once."""
    spans = spans_of([rows([7], 10, [index]) for index in range(Limits().running)])
    assert len(list(row_groups(spans, captured_rows(DEFAULT_STEP_ROWS)))) == 1


def test_more_chunks_than_fit_go_one_group_after_another(device: torch.device) -> None:
    pieces = [chunk([1, 2, 3], pages_of(0)), chunk([4, 5, 6], pages_of(1)), chunk([7], pages_of(2))]
    expected = alone(forward_of(Family.LLAMA, device), pieces)
    assert forward_of(Family.LLAMA, device)(pieces).equal(expected)


@pytest.mark.parametrize("family", Family)
def test_chunks_of_one_prompt_have_the_bits_of_one_after_the_other(
    family: Family, device: torch.device
) -> None:
    """In one group, beside a chunk of another prompt: keys are there before anybody attends."""
    prompt = [(7 * index) % VOCAB for index in range(67)]
    pieces = [
        chunk(prompt[:64], pages_of(1)),
        chunk([9, 2], pages_of(3)),
        chunk(prompt[64:], pages_of(1), 64),
    ]
    expected = alone(forward_with(decoder_of(family, device, 80)), pieces)
    assert expected.isfinite().all()
    assert forward_with(decoder_of(family, device, 80))(pieces).equal(expected)


def padded(launch: Launch) -> Launch:
    """Launch like `launched`; but a capture has a fixed number of rows, so prefills are padded."""

    def run() -> Tensor:
        return launch()

    return run


@pytest.fixture
def huge_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` allocates with a number whose square is infinite."""
    allocate = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        allocated = allocate(*size, **options)
        return allocated.fill_(3e38) if allocated.is_floating_point() else allocated

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.usefixtures("huge_leftovers")
@pytest.mark.parametrize("family", [Family.BITNET, Family.QWEN3])
def test_a_prefill_that_is_padded_has_the_bits_of_one_that_is_not(
    family: Family, device: torch.device
) -> None:
    """Twice, so that padding lies where rows were; the cache has nothing of it.

    No row of padding multiplies infinity by zero, which the interpreter refuses (NumPy warns).
    """
    batches = [
        [chunk([3, 1, 4, 1, 5], pages_of(0)), chunk([9, 2], pages_of(1))],
        [chunk([8], pages_of(2)), chunk([1, 2], pages_of(3))],
    ]
    decoders = [decoder_of(family, device, 12) for _ in range(2)]
    plain, fixed = forward_with(decoders[0]), forward_with(decoders[1], padded)
    for batch in batches:
        assert fixed(batch).equal(plain(batch))
    assert fixed._graphs.captured == 1 and plain._graphs.captured == 0
    for (_, _, ours), (_, _, theirs) in zip(decoders[0].parts, decoders[1].parts, strict=True):
        assert ours.keys.equal(theirs.keys) and ours.values.equal(theirs.values)


def test_the_ids_of_pages_change_no_bit(device: torch.device) -> None:
    def generated(pages: list[int]) -> Tensor:
        forward = forward_of(Family.QWEN3, device)
        prompt = forward([chunk([3, 1, 4], pages)])
        return torch.cat([prompt, forward([rows([1, 5], 3, pages)])])

    assert generated([4]).equal(generated([11, 2]))


def test_what_lies_after_the_last_page_of_a_sequence_is_not_read(device: torch.device) -> None:
    """A table that ends with its sequence, beside a longer one."""
    pieces = [rows([8], 63, pages_of(0)[:1]), rows([8], 300, pages_of(1))]
    expected = alone(forward_of(Family.LLAMA, device), pieces)
    assert expected.isfinite().all()
    assert forward_of(Family.LLAMA, device)(pieces).equal(expected)


SPOILED: dict[str, Callable[[], Piece]] = {
    "a page that is not there": lambda: rows([5], 70, [0, 99]),
    "a position without a page": lambda: rows([5], 64, [0]),
    "an id that is not there": lambda: rows([VOCAB], 3, [0]),
}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_a_row_with_a_fault_is_nan_and_spoils_no_other(
    spoiled: Callable[[], Piece], device: torch.device
) -> None:
    others = [rows([5], 9, pages_of(1)), rows([6, 7], 9, pages_of(2))]
    expected = forward_of(Family.LLAMA, device)(others)
    hidden = forward_of(Family.LLAMA, device)([others[0], spoiled(), others[1]])
    assert hidden[1].isnan().all()
    assert hidden[[0, 2, 3]].equal(expected)


def test_a_row_that_only_fills_a_step_up_writes_nowhere(device: torch.device) -> None:
    """Three rows take a step of four; nothing but their three cells of the cache changes."""
    decoder = decoder_of(Family.LLAMA, device)
    before = [layer.keys.clone() for _, _, layer in decoder.parts]
    for replayed in ([rows([5], 9, [3]), rows([6, 7], 9, [5])], [rows([5, 6, 7], 9, [0])]):
        forward_with(decoder)(replayed)
    for (_, _, cache), keys in zip(decoder.parts, before, strict=True):
        changed = (cache.keys != keys).any(-1).any(1).nonzero().tolist()
        assert changed == [[0, 9], [0, 10], [0, 11], [3, 9], [5, 9], [5, 10]]
