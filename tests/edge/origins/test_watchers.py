"""Heartbeats to clients that only watch, on a clock that is a number."""

import pytest

from tailrace.edge.origins.watchers import HEARTBEAT_EVERY_S, Watchers
from tailrace.ledger.frame import Frame, Heartbeat
from tests.edge.origins.test_relay import Client


class Watched:
    """Eight watching clients on a clock that is moved by hand."""

    def __init__(self) -> None:
        self.watchers = Watchers()
        self.now = 1000.0
        self.clients = [Client() for _ in range(8)]
        for client in self.clients:
            self.watchers.watch(client)

    def hears(self, heartbeat: Heartbeat | None) -> None:
        for sink, raw in self.watchers.heard(heartbeat):
            sink.deliver(raw)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        for sink, raw in self.watchers.beat(self.now):
            sink.deliver(raw)

    def told(self) -> list[list[Frame]]:
        return [[frame for _, frame in client.frames] for client in self.clients]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_who_begins_to_watch_gets_the_last_heartbeat(watched: Watched) -> None:
    watched.hears(Heartbeat(1, ready=True))
    late = Client()
    for sink, raw in watched.watchers.watch(late):
        sink.deliver(raw)
    assert late.frames == [(0, Heartbeat(1, ready=True))]


def test_heartbeats_without_news_come_one_after_another(watched: Watched) -> None:
    watched.hears(Heartbeat(1, ready=True))
    watched.passes(0)
    watched.hears(Heartbeat(2, ready=True))
    assert watched.told() == [[Heartbeat(1, ready=True)]] * 8
    for turn in range(1, 9):
        watched.passes(HEARTBEAT_EVERY_S / 8)
        assert [len(frames) for frames in watched.told()] == [2] * turn + [1] * (8 - turn)
    assert watched.told()[0][1] == Heartbeat(2, ready=True)


def test_all_learn_at_once_that_readiness_has_changed(watched: Watched) -> None:
    loading = Heartbeat(1, ready=False, reasons=("loading",))
    for heartbeat in (loading, Heartbeat(2, ready=True), Heartbeat(3, ready=True, models=("m",))):
        watched.hears(heartbeat)
    assert watched.told() == [[loading, Heartbeat(2, ready=True)]] * 8


def test_time_in_which_nothing_is_known_owes_nobody_anything(watched: Watched) -> None:
    watched.hears(Heartbeat(1, ready=True))
    watched.passes(0)
    watched.hears(None)
    watched.passes(10 * HEARTBEAT_EVERY_S)
    watched.hears(Heartbeat(2, ready=True))
    watched.passes(0)
    assert watched.told() == [[Heartbeat(1, ready=True), Heartbeat(2, ready=True)]] * 8


def test_who_is_forgotten_hears_no_more(watched: Watched) -> None:
    watched.watchers.forget(watched.clients[0])
    watched.hears(Heartbeat(1, ready=True))
    assert [len(frames) for frames in watched.told()] == [0] + [1] * 7
