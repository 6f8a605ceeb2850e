"""Decode attention in Triton, beside its oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.attention_triton import decode_attention
from tailrace.kernels.attention.paged_attention import (
    FAULT_PAGE,
    FAULT_POSITION,
    FAULT_SEQUENCE,
    MAX_SPLITS,
    paged_attention,
)
from tailrace.kernels.attention.paged_kv import KV_DTYPES, PagedKv
from tailrace.kernels.attention.rope import Rope
from tailrace.kernels.attention.rope_triton import rope_write
from tailrace.kernels.attention.splits_triton import DecodeWorkspace
from tailrace.kernels.shapes import PAGE_TOKENS
from tests.kernels.paging import (
    GuardedCache,
    fill,
    guarded_cache,
    int32,
    normal,
    random_rope,
    shuffled_tables,
)
from tests.kernels.refusals import assert_refused

TOLERANCE = {torch.float32: 2e-6}
"""Absolute tolerance; 1e-2 for other caches, where queries and weights are rounded to bf16."""
EDGES = [1, 2, PAGE_TOKENS, PAGE_TOKENS + 1, 8 * PAGE_TOKENS, 8 * PAGE_TOKENS + 1]


@dataclass(frozen=True, slots=True)
class Stage:
    """A filled cache of sequences of given lengths, and the launch over it."""

    guarded: GuardedCache
    tables: Tensor
    workspace: DecodeWorkspace
    max_length: int

    def attend(
        self, x: Tensor, lengths: Sequence[int], sequences: Sequence[int], write: Rope | None = None
    ) -> tuple[Tensor, list[int]]:
        """Launch for rows of these lengths; returns the result and the faults."""
        cache, device = self.guarded.cache, x.device
        out = torch.full((len(x), self.workspace.heads * cache.head_dim), 7.0, device=device)
        faults = torch.zeros(len(x), dtype=torch.int32, device=device)
        decode_attention(
            x,
            int32(list(lengths), device),
            int32(list(sequences), device),
            cache,
            self.tables,
            out,
            faults,
            self.workspace,
            max_length=self.max_length,
            write=write,
        )
        assert not self.workspace.counters.any()
        assert self.guarded.margins_are_untouched()
        return out, faults.tolist()


def stage(
    lengths: list[int],
    device: torch.device,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    rows: int = 24,
) -> Stage:
    max_length = max_length or max(lengths)
    max_pages = -(-max_length // PAGE_TOKENS)
    tables = shuffled_tables(len(lengths), max_pages, device)
    guarded = guarded_cache(tables.numel(), kv_heads, head_dim, dtype, device)
    fill(guarded.cache, tables, lengths)
    workspace = DecodeWorkspace(rows, heads, kv_heads, head_dim, max_length, device)
    return Stage(guarded, tables, workspace, max_length)


def expected(q: Tensor, lengths: list[int], sequences: list[int], made: Stage) -> Tensor:
    device = q.device
    places = int32(lengths, device), int32(sequences, device)
    return paged_attention(q, *places, made.guarded.cache, made.tables)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_equal_the_oracle_at_every_edge(dtype: torch.dtype, device: torch.device) -> None:
    made = stage(EDGES, device, dtype=dtype)
    q = normal(len(EDGES), 2 * 32, device=device)
    out, faults = made.attend(q, EDGES, range(len(EDGES)))
    wanted = expected(q, EDGES, list(range(len(EDGES))), made)
    error = TOLERANCE.get(dtype, 1e-2)
    torch.testing.assert_close(out, wanted, rtol=error, atol=error)
    assert faults == [0] * len(EDGES)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(32, 1, 1), (64, 6, 2), (80, 3, 1), (96, 4, 1), (128, 5, 1), (256, 2, 1), (32, 17, 1)],
)
def test_any_size_and_group_of_heads_equals_the_oracle(
    head_dim: int, heads: int, kv_heads: int, device: torch.device
) -> None:
    lengths = [70, 300]
    made = stage(lengths, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    q = normal(2, heads * head_dim, device=device)
    out, _ = made.attend(q, lengths, [0, 1])
    torch.testing.assert_close(out, expected(q, lengths, [0, 1], made), rtol=2e-6, atol=2e-6)


def test_splits_of_several_pages_equal_the_oracle_and_a_row_alone(device: torch.device) -> None:
    """One position more than a page for each split, beside a row of one."""
    lengths = [MAX_SPLITS * PAGE_TOKENS + 1, 1]
    made = stage(lengths, device, heads=1)
    q = normal(2, 32, device=device)
    out, _ = made.attend(q, lengths, [0, 1])
    torch.testing.assert_close(out, expected(q, lengths, [0, 1], made), rtol=2e-6, atol=2e-6)
    alone, _ = made.attend(q[:1], lengths[:1], [0])
    assert torch.equal(alone, out[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    lengths = [100, 257, 64, 1, 190]
    made = stage(lengths, device, dtype=dtype)
    rows = [row % len(lengths) for row in range(17)]
    q = normal(len(lengths), 2 * 32, device=device)
    batch, _ = made.attend(q[rows].contiguous(), [lengths[row] for row in rows], rows)
    for row, length in enumerate(lengths):
        alone, _ = made.attend(q[row : row + 1], [length], [row])
        assert torch.equal(batch[row : row + 1], alone)
        assert all(torch.equal(batch[i], alone[0]) for i in range(row, 17, len(lengths)))


def test_what_a_launch_has_room_for_changes_nothing(device: torch.device) -> None:
    lengths = [65, 300]
    q = normal(2, 2 * 32, device=device)
    made = stage(lengths, device, max_length=5000, rows=3)
    wide, _ = made.attend(q, lengths, [0, 1])
    narrow = Stage(made.guarded, made.tables, made.workspace, 300)
    assert torch.equal(wide, narrow.attend(q, lengths, [0, 1])[0])


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        (0, torch.float32),
        (PAGE_TOKENS - 1, torch.bfloat16),
        (4 * PAGE_TOKENS - 1, torch.float32),
        (4 * PAGE_TOKENS - 1, torch.int8),
        (MAX_SPLITS * PAGE_TOKENS - 1, torch.bfloat16),
    ],
)
def test_rows_of_one_sequence_have_the_bits_of_as_many_steps(
    length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Regenerating what a lost origin had generated: rows of lengths p+1 .. p+n in one launch."""
    new = 3
    rope = random_rope(32, device, norm=True)
    qkv = normal(new, 4 * 32, device=device)
    lengths = [length + 1 + row for row in range(new)]
    one_by_one = stage([length], device, dtype=dtype, max_length=length + new)
    steps = [
        one_by_one.attend(qkv[row : row + 1], [lengths[row]], [0], write=rope)[0]
        for row in range(new)
    ]
    at_once = stage([length], device, dtype=dtype, max_length=length + new)
    q = torch.empty(new, 2 * 32, device=device)
    none = torch.zeros(new, dtype=torch.int32, device=device)
    positions = int32([n - 1 for n in lengths], device)
    cache = at_once.guarded.cache
    rope_write(qkv, positions, none, rope, cache, at_once.tables, q, none.clone())
    out, _ = at_once.attend(q, lengths, [0] * new)
    assert torch.equal(out, torch.cat(steps))
    for got, wanted in zip(at_once.guarded.buffers, one_by_one.guarded.buffers, strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


def test_a_step_of_many_sequences_writes_and_attends_to_each_own_token(
    device: torch.device,
) -> None:
    before = [0, 63, 64, 255, 256]
    lengths = [length + 1 for length in before]
    rope = random_rope(32, device)
    qkv = normal(5, 4 * 32, device=device)
    made = stage(before, device, max_length=320)
    out, faults = made.attend(qkv, lengths, [0, 1, 2, 3, 4], write=rope)
    cpu = Rope(rope.cos.cpu(), rope.sin.cpu())
    parts = qkv.cpu().view(5, 4, 32)
    q = cpu.turn(parts[:, :2], torch.tensor(before), None).flatten(1)
    keys = cpu.turn(parts[:, 2:3], torch.tensor(before), None)
    for row, length in enumerate(before):
        got_keys, got_values = made.guarded.cache.gather(made.tables[row], length + 1)
        assert torch.equal(got_keys[-1].cpu(), keys[row])
        assert torch.equal(got_values[-1].cpu(), parts[row, 3:])
    wanted = expected(q.to(device), lengths, [0, 1, 2, 3, 4], made)
    torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)
    assert faults == [0] * 5


FAULTY = [
    pytest.param(70, 0, 2, FAULT_PAGE, id="page beyond the cache"),
    pytest.param(300, 1, 2, FAULT_PAGE, id="page below 0 in one of two splits"),
    pytest.param(385, 0, 2, FAULT_POSITION, id="length beyond the table"),
    pytest.param(-1, 0, 2, FAULT_POSITION, id="length below 0"),
    pytest.param(10, 3, 2, FAULT_SEQUENCE, id="sequence beyond the tables"),
    pytest.param(10, -1, 2, FAULT_SEQUENCE, id="sequence below 0"),
]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(("length", "sequence", "neighbour", "fault"), FAULTY)
def test_a_row_with_a_fault_is_nan_and_harms_no_other(
    length: int, sequence: int, neighbour: int, fault: int, write: bool, device: torch.device
) -> None:
    made = stage([384, 384, 384], device)
    made.tables[0, 1] = made.guarded.cache.pages
    made.tables[1, 4] = -1
    rope = random_rope(32, device) if write else None
    x = normal(2, (4 if write else 2) * 32, device=device)
    alone, _ = made.attend(x[1:], [300], [neighbour], write=rope)
    stored = [buffer.cpu().view(torch.uint8).clone() for buffer in made.guarded.buffers]
    out, faults = made.attend(x, [length, 300], [sequence, neighbour], write=rope)
    assert faults == [fault, 0]
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1:], alone)
    for buffer, before in zip(made.guarded.buffers, stored, strict=True):
        assert torch.equal(buffer.cpu().view(torch.uint8), before)


def test_a_length_beyond_the_launch_or_the_rotary_table_is_a_fault(device: torch.device) -> None:
    made = stage([400], device)
    narrow = Stage(made.guarded, made.tables, made.workspace, 256)
    _, faults = narrow.attend(normal(2, 2 * 32, device=device), [257, 256], [0, 0])
    assert faults == [FAULT_POSITION, 0]
    rope = random_rope(32, device)
    short = Rope(rope.cos[:20].contiguous(), rope.sin[:20].contiguous())
    _, faults = made.attend(normal(1, 4 * 32, device=device), [21], [0], write=short)
    assert faults == [FAULT_POSITION]


def test_a_row_of_length_0_is_padding(device: torch.device) -> None:
    made = stage([10], device)
    q = normal(2, 2 * 32, device=device)
    out, faults = made.attend(q, [0, 10], [0, 0])
    assert faults == [0, 0]
    assert not out[0].any()
    assert out[1].any()


def test_a_page_after_a_rows_last_may_be_foreign(device: torch.device) -> None:
    made = stage([400], device)
    q = normal(1, 2 * 32, device=device)
    before, _ = made.attend(q, [128], [0])
    made.tables[0, 2:] = 10**9
    after, faults = made.attend(q, [128], [0])
    assert torch.equal(after, before)
    assert faults == [0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_makes_its_own_heads_nan(bad: float, device: torch.device) -> None:
    made = stage([300, 300], device, heads=4, kv_heads=2)
    cache: PagedKv = made.guarded.cache
    cache.keys[made.tables[0, 1].long(), 1, 3] = bad
    q = normal(2, 4 * 32, device=device)
    q[0, 2 * 32] = q[0, 3 * 32] = 0.0
    with np.errstate(invalid="ignore"):
        out, faults = made.attend(q, [300, 300], [0, 1])
    assert bool(out[0].view(2, -1)[1].isnan().all())
    assert bool(out[0].view(2, -1)[0].isfinite().all())
    assert bool(out[1].isfinite().all())
    assert faults == [0, 0]


def test_no_rows_are_no_launch(device: torch.device) -> None:
    made = stage([10], device)
    out, faults = made.attend(torch.empty(0, 2 * 32, device=device), [], [])
    assert out.shape == (0, 2 * 32)
    assert faults == []


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    made = stage([10], device, heads=4, kv_heads=2, rows=1)
    q, row = normal(1, 128, device=device), int32([1], device)
    narrow = DecodeWorkspace(1, 2, 2, 32, 10, device)
    assert_refused(
        partial(decode_attention, cache=made.guarded.cache, tables=made.tables),
        {
            "x": q,
            "lengths": row,
            "sequences": row.clone(),
            "out": q.clone(),
            "faults": row.clone(),
            "workspace": made.workspace,
            "max_length": 10,
        },
        (ValueError, "x: shape (1, 100)", {"x": normal(1, 100, device=device)}),
        (ValueError, "max_length", {"max_length": PAGE_TOKENS}),
        (ValueError, "max_length", {"max_length": 0}),
        (ValueError, "workspace", {"workspace": narrow}),
    )
