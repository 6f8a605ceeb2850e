"""The link over real loopback sockets, and the subscriber that reads through it."""

import pytest

from edge.link import Link
from edge.subscriber import WINDOW_FRAMES, Subscriber
from ledger.errors import NotFound
from ledger.frame import Credit, Open, Opened, Resume, Token, decode
from tests.edge.scripted_origin import STREAM, TOKEN, ScriptedOrigin

pytestmark = pytest.mark.anyio

OPEN = Open("demo", prompt="hold", idempotency_key="key", credit=WINDOW_FRAMES)


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
    heartbeat = Link("127.0.0.1", 9).heartbeat
    assert not heartbeat.ready
    assert heartbeat.reasons == ("no link to the origin at 127.0.0.1:9",)
