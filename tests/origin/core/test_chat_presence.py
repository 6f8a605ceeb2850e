"""The presence of chats: what an origin publishes and reads, and when, on a clock moved by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tailrace.ledger.interface import PublishedReaders
from tailrace.origin.core import chat_presence
from tailrace.origin.core.chat_presence import (
    RECHECK_INTERVAL_S,
    ROUND_INTERVAL_S,
    ChatPresence,
    Round,
)

CHAT, OTHER = b"a" * 16, b"b" * 16


class Board:
    """The published counts of all origins; a lease that has ended takes its counts along."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[bytes, int]] = {}
        self.writes = 0

    def publish(self, origin: str, readers: Mapping[bytes, int]) -> None:
        self.writes += 1
        own = self.counts.setdefault(origin, {})
        own |= readers
        for chat in [chat for chat, count in own.items() if not count]:
            del own[chat]

    def read(self, origin: str, chats: tuple[bytes, ...]) -> dict[bytes, PublishedReaders]:
        own = self.counts.get(origin, {})
        return {
            chat: PublishedReaders(
                own.get(chat, 0),
                sum(of.get(chat, 0) for name, of in self.counts.items() if name != origin),
            )
            for chat in chats
        }


class Origin:
    """An origin that carries out its rounds at once."""

    def __init__(self, board: Board, name: str) -> None:
        self.core = ChatPresence(shared=True)
        self.board = board
        self.name = name

    def step(self, now: float) -> Round | None:
        """Carry out the round that is due, if any."""
        begun = self.core.begin(now)
        if begun is not None:
            if begun.publish:
                self.board.publish(self.name, begun.publish)
            self.core.done(begun, self.board.read(self.name, begun.read))
        return begun


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def one(board: Board) -> Origin:
    return Origin(board, "one")


@pytest.fixture
def two(board: Board) -> Origin:
    return Origin(board, "two")


def test_a_ledger_of_one_origin_needs_no_rounds() -> None:
    core = ChatPresence(shared=False)
    core.join(CHAT)
    core.join(CHAT)
    assert (core.count(CHAT), core.total) == (2, 2)
    core.leave(CHAT)
    assert (core.count(CHAT), core.wake_at(), core.begin(1e9)) == (1, None, None)


def test_the_followers_of_all_origins_are_summed(one: Origin, two: Origin) -> None:
    one.core.join(CHAT)
    assert one.core.count(CHAT) is None  # nobody knows yet if others follow it
    one.step(0.0)
    assert one.core.count(CHAT) == 1
    two.core.join(CHAT)
    two.core.join(CHAT)
    two.step(0.0)
    assert two.core.count(CHAT) == 3
    one.core.noticed([CHAT, OTHER])
    assert one.step(ROUND_INTERVAL_S) == Round({}, (CHAT,))
    assert one.core.count(CHAT) == 3
    two.core.leave(CHAT)
    assert two.core.count(CHAT) == 2
    two.step(ROUND_INTERVAL_S)
    one.core.noticed(None)
    one.step(2 * ROUND_INTERVAL_S)
    assert one.core.count(CHAT) == 2


def test_many_followers_make_one_write_and_no_change_makes_none(board: Board, one: Origin) -> None:
    one.core.join(CHAT)
    one.step(0.0)
    for _ in range(1000):
        one.core.join(CHAT)
        one.core.join(OTHER)
    assert one.step(ROUND_INTERVAL_S / 2) is None
    assert one.core.wake_at() == ROUND_INTERVAL_S
    one.step(ROUND_INTERVAL_S)
    assert (board.writes, board.counts["one"]) == (2, {CHAT: 1001, OTHER: 1000})
    one.core.join(CHAT)
    one.core.leave(CHAT)
    assert one.step(2 * ROUND_INTERVAL_S) is None
    now = 2 * ROUND_INTERVAL_S
    for _ in range(100):
        due = one.core.wake_at()
        assert due is not None and due <= now + RECHECK_INTERVAL_S
        now = due
        one.step(now)
    assert now >= 90 * RECHECK_INTERVAL_S
    assert board.writes == 2


def test_nothing_is_due_while_nobody_follows(board: Board, one: Origin) -> None:
    assert one.core.wake_at() is None
    one.core.join(CHAT)
    one.step(0.0)
    one.core.leave(CHAT)
    one.step(ROUND_INTERVAL_S)
    assert board.counts["one"] == {}
    one.core.noticed(None)
    assert (one.core.wake_at(), one.core.begin(1e9)) == (None, None)


def test_a_dead_origins_followers_leave_without_a_notification(
    board: Board, one: Origin, two: Origin
) -> None:
    one.core.join(CHAT)
    two.core.join(CHAT)
    two.step(0.0)
    one.step(0.0)
    assert one.core.count(CHAT) == 2
    del board.counts["two"]  # its lease has ended
    assert one.core.wake_at() == RECHECK_INTERVAL_S
    assert one.step(RECHECK_INTERVAL_S) == Round({}, (CHAT,))
    assert one.core.count(CHAT) == 1


def test_counts_that_the_ledger_has_lost_are_published_again(board: Board, one: Origin) -> None:
    one.core.join(CHAT)
    one.step(0.0)
    board.counts.clear()
    one.step(RECHECK_INTERVAL_S)
    assert one.step(RECHECK_INTERVAL_S + ROUND_INTERVAL_S) == Round({CHAT: 1}, ())
    assert board.counts["one"] == {CHAT: 1}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_failed_round_is_repeated_whatever_it_has_stored(
    board: Board, one: Origin, stored: bool, leaves: bool
) -> None:
    one.core.join(CHAT)
    begun = one.core.begin(0.0)
    assert begun == Round({CHAT: 1}, (CHAT,))
    if stored:
        board.publish("one", begun.publish)
    if leaves:
        one.core.leave(CHAT)
    one.core.failed(begun, 0.0)
    assert one.core.wake_at() == RECHECK_INTERVAL_S
    one.step(RECHECK_INTERVAL_S)
    assert board.counts["one"] == ({} if leaves else {CHAT: 1})
    assert one.core.count(CHAT) == (None if leaves else 1)


def test_a_follower_that_comes_during_a_round_is_published_by_the_next(
    board: Board, one: Origin
) -> None:
    one.core.join(CHAT)
    begun = one.core.begin(0.0)
    assert begun is not None
    one.core.join(CHAT)
    board.publish("one", begun.publish)
    assert one.core.done(begun, board.read("one", begun.read)) == [CHAT]
    assert one.core.count(CHAT) == 2
    assert one.step(ROUND_INTERVAL_S) == Round({CHAT: 2}, ())


def test_only_chats_whose_number_has_changed_are_reported(board: Board, one: Origin) -> None:
    one.core.join(CHAT)
    one.core.join(OTHER)
    one.step(0.0)
    board.publish("two", {OTHER: 3})
    begun = one.core.begin(RECHECK_INTERVAL_S)
    assert begun == Round({}, (CHAT, OTHER))
    assert one.core.done(begun, board.read("one", begun.read)) == [OTHER]


def test_a_round_has_a_limit_and_the_next_goes_on(
    one: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_presence, "MAX_ROUND_CHATS", 2)
    chats = [bytes([number]) * 16 for number in range(3)]
    for chat in chats:
        one.core.join(chat)
    assert one.step(0.0) == Round(dict.fromkeys(chats[:2], 1), tuple(chats[:2]))
    assert one.core.wake_at() == ROUND_INTERVAL_S
    assert one.step(ROUND_INTERVAL_S) == Round({chats[2]: 1}, (chats[2],))
    assert [one.core.count(chat) for chat in chats] == [1, 1, 1]
