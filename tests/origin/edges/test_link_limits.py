"""Limits on what one edge can do to an origin, and to its neighbours on the link."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Call,
    Cancel,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Opened,
    Pass,
    Resume,
    Splitter,
    Status,
    Steer,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    encode,
)
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.origin.config import LedgerConfig
from tailrace.origin.edges.link import BULK_HIGH_BYTES, SEND_HIGH_BYTES
from tailrace.origin.workers.worker_frame import CancelRun
from tests.origin.edges.test_link import REQUEST, House, opened, refused, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path, checkpoint: Path) -> AsyncIterator[House]:
    async with serving(tmp_path, checkpoint) as made:
        yield made


async def test_a_request_beyond_the_corrs_of_a_link_is_refused_on_its_own(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.MAX_CORRS", 2)
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    await opened(client, 2)
    error = await refused(client, Resume(stream), 3)
    assert (error.status, error.code, error.retryable) == (503, "overloaded", True)
    assert error.retry_after_ms is not None
    client.send(Detach(), 2)
    client.send(Resume(stream), 3)
    corr, answer = await client.next()
    assert (corr, type(answer)) == (3, Opened)


async def test_calls_beyond_what_is_held_are_refused_and_credit_behind_them_is_read(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.CALLS_HIGH_BYTES", 1000)
    never = asyncio.Event()

    async def hang(_request: ObjectRequest) -> ObjectResponse:
        await never.wait()
        raise AssertionError

    house.objects.answer = hang
    client = await house.greeted()
    await opened(client, 1, replace(REQUEST, credit=0))
    call = Call("stream", "a", "POST", "http://edge/v1/stream/a", (), bytes(600), 4)
    client.send_call(call, 2)
    client.send_call(call, 3)
    client.send(Credit(5), 1)
    corr, error = await client.next()
    assert isinstance(error, StreamError)
    assert (corr, error.status, error.code) == (3, 503, "overloaded")
    await house.step(house.slot, house.slot.last[0], 0, "a")
    assert await client.next() == (1, Token("a", 0))
    never.set()


async def test_who_says_no_hello_is_sent_away(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.HELLO_S", 0.05)
    client = await house.connected()
    [error] = await client.errors_until_closed()
    assert (error.code, error.status) == ("timeout", 408)


async def test_before_the_hello_no_frame_is_large_and_right_behind_it_any_is(house: House) -> None:
    client = await house.connected()
    client.send_raw(struct.pack("<IBI", 1 << 24 | 5000, Hello.tag, 0))
    [error] = await client.errors_until_closed()
    assert (error.code, error.field) == ("bad_frame", "header.length")
    other = await house.connected()
    request = replace(REQUEST, prompt="The fox " * 1000)
    other.send_raw(encode(Hello(SCHEMA_HASH, "test")) + encode(request, 1))
    assert isinstance((await other.next())[1], Hello)
    corr, answer = await other.next()
    assert isinstance(answer, StreamError)
    assert (corr, answer.code) == (1, "prompt_too_long")


async def test_an_edge_that_was_silent_for_as_long_as_it_has_told_is_gone(house: House) -> None:
    client = await house.greeted()
    client.send(Heartbeat(0, ready=True, patience_ms=15_000))
    await opened(client)
    [there] = house.links
    now = asyncio.get_running_loop().time()
    there.look(now + 6)
    there.look(now + 14)  # at most LONGEST_LOOK_S of it counts
    assert not there.gone
    there.look(now + 20)
    with pytest.raises((EOFError, ConnectionError)):
        await client.next()
    assert not house.links


@pytest.mark.parametrize(("lease_s", "patience_ms"), [(7.0, 7_000), (1.0, 2_000)])
async def test_an_origin_tells_its_lease_as_its_timeout_but_two_seconds_at_least(
    house: House, lease_s: float, patience_ms: int
) -> None:
    told = replace(house.service, retention=LedgerConfig(lease_s=lease_s)).heartbeat()
    assert told.patience_ms == patience_ms


async def test_an_edge_that_has_told_no_timeout_is_kept(house: House) -> None:
    await house.greeted()
    [there] = house.links
    now = asyncio.get_running_loop().time()
    for seconds in range(0, 100, 5):
        there.look(now + seconds)
    assert not there.gone


@pytest.mark.parametrize("is_detached", [True, False])
async def test_a_cancel_counts_until_it_has_been_carried_out_whether_it_is_detached_or_not(
    house: House, monkeypatch: pytest.MonkeyPatch, is_detached: bool
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.MAX_CORRS", 2)
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    client.send(Cancel(stream), 2)  # its end is the worker's to say
    if is_detached:
        client.send(Detach(), 2)
    assert (await refused(client, Cancel(stream), 3)).code == "overloaded"
    assert (await refused(client, Steer(stream, None, "a"), 4)).code == "overloaded"
    await house.cancelled(house.slot, house.slot.sent[0][0], 0)
    assert isinstance((await client.next())[1], StreamEnd)
    if not is_detached:
        assert await client.next() == (2, Status(stream, StreamState.ENDED, 1))
    client.send(Cancel(stream), 5)  # nothing has come for the one that was detached
    assert await client.next() == (5, Status(stream, StreamState.ENDED, 1))


@pytest.mark.parametrize("request_of", [Cancel, lambda stream: Steer(stream, None, "a")])
async def test_a_corr_that_is_in_use_is_refused_for_cancels_and_steers_too(
    house: House, request_of: Callable[[bytes], Cancel | Steer]
) -> None:
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    client.send(request_of(stream), 1)
    [error] = await client.errors_until_closed()
    assert error.code == "corr_in_use"


async def test_all_cancels_of_a_stream_share_one_wait_for_its_end(house: House) -> None:
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    tail = house.ledger.tail(stream)
    assert len(tail.watchers) == 1  # the feed's
    for corr in range(2, 102):
        client.send(Cancel(stream), corr)
    await house.slot.halted.wait()
    assert len(tail.watchers) == 2
    await house.cancelled(house.slot, house.slot.sent[0][0], 0)
    answers = [await client.next() for _ in range(101)]
    assert isinstance(answers[0][1], StreamEnd)
    ended = Status(stream, StreamState.ENDED, 1)
    assert sorted(corr for corr, answer in answers if answer == ended) == list(range(2, 102))
    assert [type(frame) for _, frame in house.slot.sent].count(CancelRun) == 1


async def test_a_backlog_of_requests_is_handled_in_slices_and_heartbeats_pass_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.MAX_TURN_FRAMES", 10)
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    there, written = house.link(), Written()
    there.connection_made(cast(asyncio.Transport, written))
    resumes = [encode(Resume(stream), corr) for corr in range(1, 101)]
    there.data_received(encode(Hello(SCHEMA_HASH, "test")) + b"".join(resumes))
    assert not written.reads.is_set()
    assert there.described()["streams"] == 10
    await asyncio.sleep(0)
    assert there.described()["streams"] == 20
    there.send(encode(Heartbeat(7, ready=True)))  # the supervisor sends one from time to time
    await written.reads.wait()
    assert there.described()["streams"] == 100
    await written.has(202)
    kinds = [type(frame) for frame in written.frames if not isinstance(frame, Pass)]
    assert kinds[:2] == [Hello, Heartbeat]
    assert kinds[2:].index(Heartbeat) <= 20
    there.connection_lost(None)


async def test_an_edge_whose_frames_wait_here_is_not_silent(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.link.MAX_TURN_FRAMES", 1)
    there, written = house.link(), Written()
    there.connection_made(cast(asyncio.Transport, written))
    there.data_received(encode(Hello(SCHEMA_HASH, "test")))
    told = encode(Heartbeat(0, ready=True, patience_ms=15_000))
    there.data_received(told * 3)
    now = asyncio.get_running_loop().time()
    for seconds in (6, 12, 18):
        there.look(now + seconds)
        await asyncio.sleep(0)
    assert not written.aborted.is_set()
    for seconds in (24, 30, 36):
        there.look(now + seconds)
    assert written.aborted.is_set()
    there.connection_lost(None)


async def test_an_edge_that_sends_only_credit_is_not_silent(house: House) -> None:
    there, written = house.link(), Written()
    there.connection_made(cast(asyncio.Transport, written))
    there.data_received(encode(Hello(SCHEMA_HASH, "test")))
    there.data_received(encode(Heartbeat(0, ready=True, patience_ms=15_000)))
    client = await house.greeted()
    stream = (await opened(client, 1)).stream
    there.data_received(encode(Resume(stream), 1))
    assert there.described()["streams"] == 1
    now = asyncio.get_running_loop().time()
    for seconds in range(6, 60, 6):
        there.look(now + seconds)
        there.data_received(encode(Credit(1), 1))
    assert not written.aborted.is_set()
    for seconds in range(60, 78, 6):
        there.look(now + seconds)
    assert written.aborted.is_set()
    there.connection_lost(None)


class Written:
    """A transport that keeps what is written; `stuck` is what it holds back."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.stuck = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.aborted = asyncio.Event()
        self._news = asyncio.Event()

    async def has(self, frames: int) -> None:
        """Wait until so many frames have been written."""
        while len(self.frames) < frames:
            self._news.clear()
            await self._news.wait()

    @property
    def frames(self) -> list[Frame]:
        return [decode(raw)[1] for raw in Splitter().feed(b"".join(self.data))]

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()

    def write(self, data: bytes) -> None:
        self.data.append(data)
        self._news.set()

    def get_write_buffer_size(self) -> int:
        return self.stuck

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, _name: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted.set()


async def test_tokens_leave_before_bulk_of_the_same_turn(house: House) -> None:
    there, written = house.link(), Written()
    there.connection_made(cast(asyncio.Transport, written))
    there.send_bulk(b"bulk")
    there.send(b"token")
    await asyncio.sleep(0)
    assert b"".join(written.data).endswith(b"tokenbulk")
    there.connection_lost(None)


async def test_a_link_is_congested_by_what_one_turn_has_queued(house: House) -> None:
    there, written = house.link(), Written()
    there.connection_made(cast(asyncio.Transport, written))

    def full() -> tuple[bool, bool]:
        return there.bulk_congested, there.congested

    assert full() == (False, False)
    there.send_bulk(bytes(BULK_HIGH_BYTES))
    assert full() == (True, False)
    there.send(bytes(SEND_HIGH_BYTES))
    assert full() == (True, True)
    await asyncio.sleep(0)
    assert full() == (False, False)
    there.pause_writing()
    written.stuck = BULK_HIGH_BYTES
    assert full() == (True, False)
    there.connection_lost(None)
