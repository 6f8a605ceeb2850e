"""Twenty streams at once on one WebSocket connection: cut at every index, and killed."""

import asyncio

import pytest
from websockets.exceptions import ConnectionClosed

from ledger.frame import Open, Sampling
from tests.e2e.conftest import House
from tests.e2e.multiplex import Multiplex, Stream, connected

pytestmark = pytest.mark.anyio

STREAMS = 20
TOKENS = 60
LONG = 200
CREDIT = 1000


def requests(tokens: int, credit: int = CREDIT, first_seed: int = 100) -> list[Open]:
    return [
        Open(
            model="demo",
            prompt="Once upon a time",
            max_tokens=tokens,
            ignore_eos=True,
            credit=credit,
            sampling=Sampling(temperature=0.8, seed=first_seed + n),
        )
        for n in range(STREAMS)
    ]


async def uninterrupted(house: House, tokens: int) -> list[Stream]:
    streams = [Stream() for _ in range(STREAMS)]
    async with connected(house.edges[0].url, streams) as client:
        await client.open(requests(tokens))
        await client.drain()
    return streams


async def finish_on_second_edge(house: House, streams: list[Stream]) -> None:
    async with connected(house.edges[1].url, streams) as client:
        await client.resume(CREDIT)
        await client.drain()


def same(streams: list[Stream], whole: list[Stream]) -> bool:
    return [stream.frames for stream in streams] == [stream.frames for stream in whole]


async def test_every_index_is_a_place_to_be_cut(house: House) -> None:
    """Credit stops each of the 20 streams at an index of its own; then the connection drops."""
    whole = await uninterrupted(house, TOKENS)
    assert len({stream.text for stream in whole}) == STREAMS
    for first in range(0, TOKENS, STREAMS):
        streams = [Stream() for _ in range(STREAMS)]
        cuts = [first + n + 1 for n in range(STREAMS)]
        async with connected(house.edges[0].url, streams) as client:
            await client.open(requests(TOKENS, credit=0))
            for n, cut in enumerate(cuts):
                await client.grant(n, cut)
            async for _ in client.read():
                held = [len(stream.frames) for stream in streams]
                assert all(have <= cut for have, cut in zip(held, cuts, strict=True))
                if held == [min(cut, len(w.frames)) for cut, w in zip(cuts, whole, strict=True)]:
                    break
        await finish_on_second_edge(house, streams)
        assert same(streams, whole)


async def all_have_begun(client: Multiplex) -> None:
    """Read until every stream has a frame; far from the end of any, however late that is read."""
    async for _ in client.read():
        if all(stream.frames for stream in client.streams):
            return


async def test_the_edge_is_killed_under_twenty_streams(house: House) -> None:
    whole = await uninterrupted(house, LONG)
    streams = [Stream() for _ in range(STREAMS)]

    async def read_and_kill() -> None:
        async with connected(house.edges[0].url, streams) as client:
            await client.open(requests(LONG))
            await all_have_begun(client)
            await house.edges[0].kill()
            await client.drain()

    with pytest.raises(ConnectionClosed):
        await read_and_kill()
    assert not any(stream.ended for stream in streams)
    await finish_on_second_edge(house, streams)
    assert same(streams, whole)


async def test_the_worker_is_killed_under_twenty_streams(house: House) -> None:
    whole = await uninterrupted(house, LONG)
    streams = [Stream() for _ in range(STREAMS)]
    async with connected(house.edges[0].url, streams) as client:
        await client.open(requests(LONG))
        await all_have_begun(client)
        await house.origin.kill_worker()
        await client.drain()
    assert same(streams, whole)
    await house.origin.saw("stream.taken_over", STREAMS)
    taken_over = [e for e in house.origin.events if e.get("message") == "stream.taken_over"]
    assert len(taken_over) == STREAMS
    assert all(0 < event["frames"] < LONG for event in taken_over)


async def test_a_stream_on_one_corr_does_not_wait_for_one_without_credit(house: House) -> None:
    streams = [Stream(), Stream()]
    stalled, flowing = requests(TOKENS, credit=0)[0], requests(TOKENS)[1]
    async with connected(house.edges[0].url, streams) as client:
        await client.open([stalled, flowing])
        async for number, _ in client.read():
            assert number == 1
            if streams[1].ended:
                break
        await client.grant(0, CREDIT)
        await client.drain()
    whole = await uninterrupted(house, TOKENS)
    assert same(streams, whole[:2])


async def test_a_detached_stream_runs_on(house: House) -> None:
    streams = [Stream() for _ in range(STREAMS)]
    async with connected(house.edges[0].url, streams) as client:
        await client.open(requests(TOKENS))
        await all_have_begun(client)
    async with asyncio.timeout(60):  # nobody reads them now; they end all the same
        await finish_on_second_edge(house, streams)
    assert all(stream.ended for stream in streams)
