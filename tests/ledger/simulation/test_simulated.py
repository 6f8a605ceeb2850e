"""Ten thousand interleavings per run, and proof that they would find what they are for.

A seed that fails is named. `python -m tests.ledger.simulation.simulation SEED` runs that one
again, and so does `SEED=… pytest tests/ledger/simulation/test_simulated.py -k ten_thousand`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.ledger.sqlite.commit_log import Log
from tailrace.ledger.sqlite.group import Group, GroupCommit
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.storage import Commit
from tailrace.ledger.sqlite.tail import Tail
from tests.ledger.simulation.simulated_storage import SimulatedStorage
from tests.ledger.simulation.simulation import failure, run

ROOT = Path(__file__).resolve().parents[3]
SIMULATION = "tests.ledger.simulation.simulation"
INTERLEAVINGS = 10_000
PROCESSES = 2
PLANTED_SEEDS = 300
"""Number of seeds of which at least one must find each planted bug; many find each."""


def simulate(first: int, count: int, hash_seed: str = "0") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            SIMULATION,
            str(first),
            str(count),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ten_thousand_interleavings_lose_double_and_reorder_nothing() -> None:
    if "SEED" in os.environ:
        run(int(os.environ["SEED"]))
        return
    share = INTERLEAVINGS // PROCESSES
    running = [simulate(number * share, share) for number in range(PROCESSES)]
    said = [process.communicate()[0] for process in running]
    assert said == [f"{share} ran\n"] * PROCESSES


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Also where sets of bytes have another order."""
    runs = [simulate(17, 1, hash_seed) for hash_seed in ("0", "1", "2")]
    said = {process.communicate()[0] for process in runs}
    assert said == {f"1 ran, {run(17)}\n"}


# ---- bugs on purpose ----


def release_before_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Tail.accept

    def accept_and_release(
        tail: Tail, epoch: int, index: int, frame: bytes, ids: tuple[int, ...], extra: bytes
    ) -> int:
        size = accept(tail, epoch, index, frame, ids, extra)
        tail.released = tail.accepted
        tail.wake()
        return size

    monkeypatch.setattr(Tail, "accept", accept_and_release)


def acknowledge_before_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(commits: GroupCommit) -> None:
        commits.schedule()
        await asyncio.sleep(0)

    monkeypatch.setattr(GroupCommit, "commit", commit)


def call_process_durable_enough_for_power(monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit_durably(
        storage: SimulatedStorage, commit: Commit, behind: Callable[[], Commit]
    ) -> None:
        storage.commit(commit)
        storage.commit(behind())

    monkeypatch.setattr(SimulatedStorage, "commit_durably", commit_durably)


def accept_an_old_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Tail.accept

    def accept_any(
        tail: Tail, epoch: int, index: int, frame: bytes, ids: tuple[int, ...], extra: bytes
    ) -> int:
        return accept(tail, tail.epoch, index, frame, ids, extra)

    monkeypatch.setattr(Tail, "accept", accept_any)


def forget_an_epoch_in_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Log.prepare

    def prepare_without(log: Log, group: Group) -> None:
        prepare(log, group)
        group.commit.epochs.clear()

    monkeypatch.setattr(Log, "prepare", prepare_without)


def forget_a_segment_at_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Log._store

    def store_all_but_one(log: Log, due: int, group: Group, commit: Commit) -> None:
        store(log, due, group, commit)
        del commit.segments[-1:]

    monkeypatch.setattr(Log, "_store", store_all_but_one)


def forget_usage_at_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Log._store

    def store_without(log: Log, due: int, group: Group, commit: Commit) -> None:
        store(log, due, group, commit)
        del commit.usage[-1:]

    monkeypatch.setattr(Log, "_store", store_without)


def forget_the_usage_of_deleted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residents, "_count", lambda *_: None)


def prune_one_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    tidy = SqliteLedger._tidy

    def tidy_and_prune(ledger: SqliteLedger, group: Group, commit: Commit) -> None:
        tidy(ledger, group, commit)
        if commit.keep_from is not None:
            commit.keep_from += 1

    monkeypatch.setattr(SqliteLedger, "_tidy", tidy_and_prune)


def wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "wake", lambda _: None)


def go_on_after_a_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(commits: GroupCommit, error: Exception, group: Group) -> None:
        waiting, commits.forming = [*group.waiters, *commits.forming.waiters], Group()
        for waiter in waiting:
            waiter.set_exception(error)

    monkeypatch.setattr(GroupCommit, "_fail", fail)


PLANTED = [
    release_before_durable,
    acknowledge_before_durable,
    call_process_durable_enough_for_power,
    accept_an_old_epoch,
    forget_an_epoch_in_a_crash,
    forget_a_segment_at_compaction,
    forget_usage_at_compaction,
    forget_the_usage_of_deleted_streams,
    prune_one_row_too_many,
    wake_nobody,
    go_on_after_a_failed_write,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(failure(seed) is not None for seed in range(PLANTED_SEEDS))
