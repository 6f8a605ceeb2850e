"""The link over real loopback sockets, and the subscriber that reads through it."""

import asyncio

import pytest

from edge.link import Link
from edge.subscriber import WINDOW_FRAMES, Subscriber
from ledger.backoff import Backoff
from ledger.errors import NotFound
from ledger.frame import Credit, Open, Opened, Resume, Token, decode
from tests.edge.scripted_origin import STREAM, TOKEN, ScriptedOrigin, linked

pytestmark = pytest.mark.anyio

OPEN = Open("demo", prompt="hold", idempotency_key="key", credit=WINDOW_FRAMES)
NO_WAIT = Backoff(3600, 3600)
"""Whoever waits for this one waits for longer than any test may last."""


async def taken(subscriber: Subscriber, count: int) -> list[object]:
    """The next `count` frames at least."""
    frames: list[object] = []
    while len(frames) < count:
        frames += [decode(raw)[1] for raw in await subscriber.take()]
    return frames


async def test_a_dropped_link_is_only_a_pause() -> None:
    origin = ScriptedOrigin(3)
    async with origin.serving() as link:
        subscriber = Subscriber(link)
        opened = await subscriber.open(OPEN)
        assert opened == Opened(STREAM, 1, TOKEN, "demo", 3)
        assert await taken(subscriber, 1) == [Token(" w0", 0)]
        origin.released = len(origin.frames)
        origin.drop_links()
        assert await taken(subscriber, 3) == origin.frames[1:]
    resume = Resume(STREAM, after=0, token=TOKEN, credit=WINDOW_FRAMES - 1)
    assert origin.received == [OPEN, resume]


async def test_credit_is_renewed_when_half_of_the_window_has_drained() -> None:
    origin = ScriptedOrigin(WINDOW_FRAMES * 2)
    async with origin.serving() as link:
        subscriber = Subscriber(link)
        await subscriber.open(Open("demo", prompt="all", credit=WINDOW_FRAMES))
        frames = await taken(subscriber, WINDOW_FRAMES)
        assert len(frames) == WINDOW_FRAMES  # and no more: this batch has not drained yet
        frames += await taken(subscriber, 1)
        frames += await taken(subscriber, len(origin.frames) - len(frames))
    assert frames == origin.frames
    limits = [frame.limit for frame in origin.received if isinstance(frame, Credit)]
    assert limits[0] == 2 * WINDOW_FRAMES
    assert limits == sorted(limits)


async def test_a_refusal_is_raised_where_the_request_was_made() -> None:
    async with ScriptedOrigin(1).serving() as link:
        with pytest.raises(NotFound):
            await Subscriber(link).open(Resume(bytes(16), credit=WINDOW_FRAMES))


async def test_silence_gives_no_frames() -> None:
    async with ScriptedOrigin(1).serving() as link:
        subscriber = Subscriber(link)
        await subscriber.open(OPEN)
        await taken(subscriber, 1)
        assert await subscriber.take(timeout_s=0) == []


def test_a_link_that_was_never_up_is_not_ready() -> None:
    heartbeat = Link(("127.0.0.1", 9)).heartbeat
    assert not heartbeat.ready
    assert heartbeat.reasons == ("no link to the origin at 127.0.0.1:9",)


# ---- several origins ----


async def test_when_an_origin_is_lost_the_next_one_is_asked_for_the_rest_at_once() -> None:
    first, second = ScriptedOrigin(3), ScriptedOrigin(3)
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        assert link.address == f"127.0.0.1:{first.port}"
        subscriber = Subscriber(link)
        await subscriber.open(OPEN)
        assert await taken(subscriber, 1) == [Token(" w0", 0)]
        first.stop()
        assert await taken(subscriber, 3) == first.frames[1:]
        assert link.address == f"127.0.0.1:{second.port}"
    assert first.received == [OPEN]
    assert second.received == [Resume(STREAM, after=0, token=TOKEN, credit=WINDOW_FRAMES - 1)]


async def test_an_open_that_was_not_answered_is_sent_to_the_next_origin() -> None:
    first, second = ScriptedOrigin(3), ScriptedOrigin(3)
    first.silent = True
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        subscriber = Subscriber(link)
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(subscriber.open(OPEN))
            await first.has_received(1)
            first.stop()
        assert opening.result() == Opened(STREAM, 1, TOKEN, "demo", 3)
    assert first.received == second.received == [OPEN]


async def test_the_first_origin_that_answers_is_used() -> None:
    dead, alive = ScriptedOrigin(1), ScriptedOrigin(1)
    async with dead.listening(), alive.listening():
        dead.stop()
        async with linked(dead, alive, backoff=NO_WAIT) as link:
            assert link.address == f"127.0.0.1:{alive.port}"


async def test_only_when_all_origins_have_failed_the_edge_waits() -> None:
    class Waiting(Backoff):
        begun = asyncio.Event()

        def next_delay_s(self) -> float:
            self.begun.set()
            return 3600.0

    backoff = Waiting(0, 0)
    one, two = ScriptedOrigin(1), ScriptedOrigin(1)
    async with one.listening(), two.listening(), linked(one, two, backoff=backoff) as link:
        assert not backoff.begun.is_set()
        one.stop()
        two.stop()
        await backoff.begun.wait()
        places = f"127.0.0.1:{one.port}, 127.0.0.1:{two.port}"
        assert link.heartbeat.reasons == (f"no link to the origin at {places}",)
