"""A producer killed by SIGKILL a hundred times: what it was acknowledged is never lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.ledger.kill_checker import Checker, Nursery
from tests.ledger.producer import FAILED

pytestmark = pytest.mark.anyio

KILLS = 100
SEED = 20_26
MAX_ACKNOWLEDGEMENTS = 400
"""Before a kill; the least is 1."""
CHECK_EVERY = 5
"""Kills between two looks into the ledger; in between its successor recovers it."""


@contextmanager
def nursery(path: Path, file_bytes: int | None = None) -> Iterator[Nursery]:
    made = Nursery(path, file_bytes)
    try:
        yield made
    finally:
        made.close()


async def test_nothing_acknowledged_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    random, checker = Random(SEED), Checker(tmp_path / "ledger.db")
    with nursery(checker.path) as lives:
        for kill in range(1, KILLS + 1):
            after = random.randint(1, MAX_ACKNOWLEDGEMENTS)
            assert lives.life(checker, after) == -signal.SIGKILL
            if kill % CHECK_EVERY == 0:
                await checker.check()
                assert checker.findings.broken == {}
    assert checker.findings.acknowledged > KILLS


@pytest.mark.parametrize("file_bytes", [150_000, 400_000, 1_000_000])
async def test_a_file_that_may_not_grow_stops_the_ledger_and_costs_nothing(
    tmp_path: Path, file_bytes: int
) -> None:
    checker = Checker(tmp_path / "ledger.db")
    with nursery(checker.path, file_bytes) as lives:
        assert lives.life(checker, None) == FAILED
    await checker.check()
    assert checker.findings.broken == {}
    assert checker.findings.acknowledged > 0
    with nursery(checker.path) as lives:  # there is room again
        assert lives.life(checker, 500) == -signal.SIGKILL
    await checker.check()
    assert checker.findings.broken == {}
