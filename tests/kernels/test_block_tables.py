"""Block tables on a device hold what the host's lists hold, and only differences are sent."""

from collections.abc import Sequence
from random import Random

import pytest
import torch

from tailrace.kernels import block_tables
from tailrace.kernels.block_tables import MAX_CELLS_PER_TABLE, NO_PAGE, BlockTables
from tailrace.kernels.one_copy import move_into

PAGES = 20
ROOM = 16


def put(
    kept: BlockTables, tables: Sequence[Sequence[int]], room: int = ROOM
) -> tuple[list[int], int]:
    """Bring the device up to date; return the slots, and how many cells travelled with a step."""
    slots, cells = kept.place(tables, room)
    device = kept.tables.device
    indices = torch.tensor([index for index, _ in cells], dtype=torch.int64, device=device)
    pages = torch.tensor([page for _, page in cells], dtype=torch.int32, device=device)
    kept.put(indices, pages)
    return slots, len(cells)


def seen(kept: BlockTables, slot: int) -> list[int]:
    """Return the pages of a slot, up to the first that is none; all others must be none."""
    row: list[int] = kept.tables[slot].tolist()
    count = row.index(NO_PAGE) if NO_PAGE in row else len(row)
    assert row[count:] == [NO_PAGE] * (len(row) - count)
    return row[:count]


def test_the_tables_are_those_of_the_host_after_any_history(device: torch.device) -> None:
    """Sequences start, grow by one page or many, and end; more of them than slots, over time."""
    random, kept = Random(3), BlockTables(5, PAGES, device)
    running = [[random.randrange(99)] for _ in range(7)]
    for _ in range(300):
        table = random.choice(running)
        if random.random() < 0.2:
            table[:] = []
            running[running.index(table)] = [random.randrange(99)]
        elif len(table) < PAGES:
            table += [random.randrange(99) for _ in range(random.choice((1, 1, 1, 12)))][
                : PAGES - len(table)
            ]
        chosen = random.sample(running, 5)
        slots, _ = put(kept, chosen)
        assert len(set(slots)) == 5
        for slot, pages in zip(slots, chosen, strict=True):
            assert seen(kept, slot) == pages


def test_only_what_has_changed_is_sent(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def count(there: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        copied.append(len(here))
        return move_into(there, here)

    monkeypatch.setattr(block_tables, "move_into", count)
    kept = BlockTables(4, PAGES, device)
    long, short = [*range(MAX_CELLS_PER_TABLE + 1)], [7, 8]
    slots, sent = put(kept, [long, short])
    assert (sent, copied) == (2, [len(long)])
    for _ in range(3):
        assert put(kept, [short, long]) == (slots[::-1], 0)
    long.append(50)
    assert put(kept, [long]) == (slots[:1], 1)
    assert copied == [MAX_CELLS_PER_TABLE + 1]


def test_cells_that_do_not_fit_the_step_are_copied(device: torch.device) -> None:
    kept, tables = BlockTables(4, PAGES, device), [[1, 2], [3, 4], [5, 6]]
    slots, sent = put(kept, tables, room=3)
    assert sent == 2
    assert [seen(kept, slot) for slot in slots] == tables


def test_a_list_that_has_the_slot_of_another_shows_nothing_of_it(device: torch.device) -> None:
    kept = BlockTables(1, PAGES, device)
    for pages in ([*range(15)], [], [3], [*range(9)]):
        (slot,), _ = put(kept, [pages])
        assert seen(kept, slot) == pages


def test_pages_beyond_the_width_are_dropped(device: torch.device) -> None:
    kept, pages = BlockTables(1, 2, device), [4, 5, 6]
    (slot,), _ = put(kept, [pages])
    pages.append(7)
    put(kept, [pages])
    assert kept.tables[slot].tolist() == [4, 5]


def test_more_tables_than_slots_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="tables: 3, expected at most 2"):
        BlockTables(2, PAGES, device).place([[1], [2], [3]], ROOM)


def test_a_cell_of_padding_belongs_to_no_table(device: torch.device) -> None:
    kept = BlockTables(2, 3, device)
    where = torch.tensor([kept.padding], device=device)
    kept.put(where, torch.tensor([9], dtype=torch.int32, device=device))
    assert (kept.tables == NO_PAGE).all()
