"""Time what readers wait for: the text of 50,000 tokens, a branch, and a known answer.

    python tests/bench/bench_readers.py [--tokens 50000] [--rounds 5] [--streams 10000]
                                        [--readers 2000] [--before FOLDER] [--only PART]

Origin and edge are real processes on loopback, and the ledger is a file. The stream has ended. It
is read whole by HTTP/1.1 as frames, once as it was made and once as a snapshot, each time until the
last byte. Each figure is the median of the rounds.

`wire` in a figure's name means compressed by zstd: the body of HTTP, or the frames of a WebSocket
(`socket`). Its text is the documentation's prose in pieces of 3.6 characters; the sizes are in
bytes a token.

A second origin serves the demo model. `begin_ttft_ms` is the time from a request until the first
frame of its stream, `branch_ttft_ms` that until the first own frame of a branch in the middle of a
stream of 600 tokens, whose shared text comes as a snapshot, and `cached_ttft_ms` that until the
first frame of an answer of 600 tokens from the ledger.

Then 10,000 short streams of the demo model are cut, resumed, left and cancelled while their workers
and their origin are killed, and the usage of each is compared with its log.

Then 2,000 readers follow one stream (`tests/bench/edge/crowd.py`): `readers_2000_cpu_us_per_frame`
is the processor time of edge and origin together for each frame of each reader, in us, and
`readers_2000_link_frames` the number of times that a frame crosses the link between them. With
`--before`, another checkout with tests/bench/edge copied into it is measured in turn, and
`readers_2000_cpu_ratio` is its time divided by ours.

Then 2,000 clients follow one chat (`crowd.measure_chat`). `chat_2000_cpu_us_per_frame` and
`chat_2000_link_frames` are as above, for each frame of a turn and follower, and
`chat_2000_link_bytes` is what a frame takes on the link for all followers together.
`chat_2000_turn_cpu_us` and `chat_2000_turn_link_bytes` are what a turn of one word takes per
follower, `chat_2000_turn_ms` is the time until the last follower has its end, and
`chat_2000_join_cpu_us` is the processor time of a follower that comes while the others do.
`chat_2000_edge_kib` and `chat_2000_origin_kib` are the memory of a follower that waits, in KiB.

`--only` measures one part: `replay`, `usage`, `crowd` or `chat`.

It ends with one line of JSON; times in ms, sizes in bytes of the body, `usage_error_tokens` in
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import (  # noqa: E402
    FRAMES_TYPE,
    SCHEMA_HASH,
    Compression,
    Credit,
    Hello,
    Logged,
    Resume,
    Snapshot,
    Splitter,
    Token,
    corr_of,
    decode,
    encode,
    split,
)
from tailrace.ledger.wire.compression import unpacked  # noqa: E402
from tailrace.origin.producer import About, End, Output, Request, Resumption, Text  # noqa: E402
from tests.bench.edge import crowd  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402
from tests.e2e.usage_campaign import Campaign, bill  # noqa: E402
from tests.english import english_tokens  # noqa: E402

SETTINGS = """
[origin]
producer = "tests.bench.bench_readers:Words"
"""
SOCKET_CREDIT = 1_024
"""Credit of a WebSocket's reader, in frames."""
ENGLISH = "english"
"""The prompt whose answer is prose, for figures of compression."""
WORDS = ("the", " river", " ran", " down", " to", " a", " mill", ",", " and", " turned", " it")


class Words:
    """A producer of as many words as the request asks for, as fast as they are taken."""

    about = About("words", "words 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the words."""
        recipe = request.recipe
        words = english_tokens(recipe.max_tokens) if recipe.prompt == ENGLISH else WORDS
        for number in range(recipe.max_tokens):
            yield Text(words[number % len(words)])
        yield End(total_tokens=request.recipe.max_tokens)

    async def close(self) -> None:
        """Hold nothing."""


async def read(client: httpx.AsyncClient, url: str, **params: Any) -> tuple[float, bytes]:
    """Return the ms until the last byte, and the body."""
    began = time.perf_counter()
    headers = {"Accept": FRAMES_TYPE, "Accept-Encoding": "identity"}
    answer = await client.get(url, headers=headers, params=params)
    assert answer.status_code == 200, answer.text
    return (time.perf_counter() - began) * 1e3, answer.content


async def first_ms(
    client: httpx.AsyncClient, url: str, body: dict[str, object], index: int = 0
) -> float:
    """Return the ms from a POST until the frame with this index, or one after it, has come."""
    began = time.perf_counter()
    headers, splitter = {"Accept": FRAMES_TYPE}, Splitter()
    async with client.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for data in answer.aiter_bytes():
            frames = (decode(raw)[1] for raw in splitter.feed(data))
            if any(isinstance(frame, Logged) and frame.index >= index for frame in frames):
                return (time.perf_counter() - began) * 1e3
    raise AssertionError(f"the stream has no frame {index}")


async def measure_beginnings(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Begin streams, branches and known answers of the demo model; return the figures."""
    origin = Origin(folder / "demo")
    edge = Edge(origin)
    found: dict[str, list[float]] = {"begin": [], "branch": [], "cached": []}
    async with running(origin, edge), httpx.AsyncClient(timeout=httpx.Timeout(300.0)) as client:
        url = f"{edge.url}/v1/generate"
        plain = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 600, "seed": 1}
        body: dict[str, object] = plain | {"ignore_eos": True}
        made = await client.post(url, json=body)
        middle = 300
        target = f"{url}/{made.json()['id']}/branch?snapshot=1"
        for nth in range(options.rounds):
            found["begin"].append(await first_ms(client, url, body | {"seed": nth + 2}))
            wanted: dict[str, object] = {"index": middle, "max_tokens": 400}
            found["branch"].append(await first_ms(client, target, wanted, middle))
            found["cached"].append(await first_ms(client, url, body | {"cache": "exact"}))
    return {f"{name}_ttft_ms": round(statistics.median(each), 1) for name, each in found.items()}


def text_of(body: bytes) -> str:
    """Return the text of the frames in a body."""
    frames = [decode(raw)[1] for raw in Splitter().feed(body)]
    return "".join(one.text for one in frames if isinstance(one, Token | Snapshot))


async def body_bytes(client: httpx.AsyncClient, url: str, accept: str, **params: Any) -> int:
    """Return the size of a compressed body as it travels."""
    headers = {"Accept": accept, "Accept-Encoding": "zstd"}
    async with client.stream("GET", url, headers=headers, params=params) as answer:
        assert answer.headers["Content-Encoding"] == "zstd"
        return sum([len(piece) async for piece in answer.aiter_raw()])


async def socket_bytes(url: str, stream: str, tokens: int, *, snapshot: bool = False) -> int:
    """Return the size of the compressed frames of a replay over a WebSocket, and check its text."""
    hello = Hello(SCHEMA_HASH, "bench", Compression.ZSTD)
    resume = Resume(bytes.fromhex(stream), credit=SOCKET_CREDIT, snapshot=snapshot)
    size, text, index = 0, list[str](), -1
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/ws") as socket:
        await socket.send(encode(hello) + encode(resume, 1))
        while index < tokens:
            message = await socket.recv()
            assert isinstance(message, bytes)
            for raw in (raw for raw in split(message) if corr_of(raw) == 1):
                size += len(raw)
                for _, frame in map(decode, unpacked(raw)):
                    text += [frame.text] if isinstance(frame, Token | Snapshot) else []
                    index = frame.index if isinstance(frame, Logged | Snapshot) else index
            await socket.send(encode(Credit(index + 1 + SOCKET_CREDIT), 1))
    assert "".join(text) == "".join(english_tokens(tokens))
    return size


async def measure_wire(
    client: httpx.AsyncClient, edge: Edge, tokens: int, thousands: str
) -> dict[str, object]:
    """Replay a stream of prose with compression; return the bytes a token of each way."""
    body = {"model": "words", "prompt": ENGLISH, "max_tokens": tokens}
    stream = (await client.post(f"{edge.url}/v1/generate", json=body)).json()["id"]
    url = f"{edge.url}/v1/generate/{stream}"
    sizes = {
        "frames": await body_bytes(client, url, FRAMES_TYPE),
        "events": await body_bytes(client, url, "text/event-stream"),
        "frames_snapshot": await body_bytes(client, url, FRAMES_TYPE, snapshot=1),
        "events_snapshot": await body_bytes(client, url, "text/event-stream", snapshot=1),
        "socket": await socket_bytes(edge.url, stream, tokens),
        "socket_snapshot": await socket_bytes(edge.url, stream, tokens, snapshot=True),
    }
    return {
        f"wire_{name}_{thousands}_bytes_per_token": round(size / tokens, 2)
        for name, size in sizes.items()
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Make the stream, read it in both ways, and return the figures."""
    settings = folder / "tailrace.toml"
    settings.write_text(SETTINGS)
    origin = Origin(folder / "data", config=settings)
    edge = Edge(origin)
    found: dict[str, list[tuple[float, bytes]]] = {"replay": [], "snapshot": []}
    async with running(origin, edge), httpx.AsyncClient(timeout=httpx.Timeout(300.0)) as client:
        body = {"model": "words", "prompt": "-", "max_tokens": options.tokens}
        made = await client.post(f"{edge.url}/v1/generate", json=body)
        url = f"{edge.url}/v1/generate/{made.json()['id']}"
        for _ in range(options.rounds):
            found["replay"].append(await read(client, url))
            found["snapshot"].append(await read(client, url, snapshot=1))
        thousands = f"{options.tokens // 1000}k"
        wire = await measure_wire(client, edge, options.tokens, thousands)
    bodies = {name: rounds[0][1] for name, rounds in found.items()}
    assert text_of(bodies["replay"]) == text_of(bodies["snapshot"]) == made.json()["text"]
    figures: dict[str, object] = {"tokens": options.tokens}
    for name, rounds in found.items():
        figures[f"{name}_{thousands}_ms"] = round(statistics.median(ms for ms, _ in rounds), 1)
        figures[f"{name}_{thousands}_bytes"] = len(bodies[name])
    frames = [decode(raw)[1] for raw in Splitter().feed(bodies["snapshot"])]
    figures[f"snapshot_{thousands}_frames"] = len(frames)
    return figures | wire | await measure_beginnings(options, folder)


async def count(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Play the campaign, and return by how many tokens the usage differs from the log."""
    origin = Origin(folder / "counted")
    edge = Edge(origin)
    async with running(origin, edge):
        campaign = Campaign(origin, edge, options.streams, seed=1, width=32, kill_every=100)
        began = time.perf_counter()
        await campaign.run()
        seconds = time.perf_counter() - began
        found = await bill(origin.data / "ledger.db")
    return {
        "usage_streams": found.total.streams,
        "usage_output_tokens": found.total.output_tokens,
        "usage_unread_tokens": found.total.unread_tokens,
        "usage_kills": campaign.kills,
        "usage_s": round(seconds, 1),
        "usage_error_tokens": found.errors,
    }


async def follow(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Let many readers follow one stream, and return what a frame of a reader costs."""
    trees = [ROOT] if options.before is None else [ROOT, options.before.resolve()]
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for nth in range(options.crowd_rounds):
        for place, tree in enumerate(trees):
            data = folder / f"crowd-{nth}-{place}"
            data.mkdir()
            measured = await crowd.measure(data, options.readers, options.seconds, tree)
            found[tree].append(measured)
    name = f"readers_{options.readers}"
    medians = {
        tree: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for tree, rounds in found.items()
    }
    ours = medians[ROOT]
    figures: dict[str, object] = {
        f"{name}_cpu_us_per_frame": round(ours["cpu_us"], 2),
        f"{name}_origin_cpu_us_per_frame": round(ours["origin_cpu_us"], 2),
        f"{name}_link_frames": round(ours["link_frames"], 2),
    }
    for before in trees[1:]:
        figures[f"{name}_cpu_us_per_frame_before"] = round(medians[before]["cpu_us"], 2)
        figures[f"{name}_origin_cpu_us_per_frame_before"] = round(
            medians[before]["origin_cpu_us"], 2
        )
        figures[f"{name}_link_frames_before"] = round(medians[before]["link_frames"], 2)
        figures[f"{name}_cpu_ratio"] = round(medians[before]["cpu_us"] / ours["cpu_us"], 2)
    return figures


async def follow_chat(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Let many clients follow one chat, and return what a frame, a turn and a follower cost."""
    rounds = []
    for nth in range(options.crowd_rounds):
        data = folder / f"chat-{nth}"
        data.mkdir()
        rounds.append(await crowd.measure_chat(data, options.readers, options.seconds))
    found = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    name = f"chat_{options.readers}"
    return {
        f"{name}_cpu_us_per_frame": round(found["cpu_us"], 2),
        f"{name}_origin_cpu_us_per_frame": round(found["origin_cpu_us"], 2),
        f"{name}_link_frames": round(found["link_frames"], 2),
        f"{name}_link_bytes": round(found["link_bytes"], 1),
        f"{name}_join_cpu_us": round(found["join_cpu_us"], 1),
        f"{name}_turn_cpu_us": round(found["turn_cpu_us"], 1),
        f"{name}_turn_origin_cpu_us": round(found["turn_origin_cpu_us"], 1),
        f"{name}_turn_link_bytes": round(found["turn_link_bytes"], 1),
        f"{name}_turn_ms": round(found["turn_ms"], 1),
        f"{name}_edge_kib": round(found["edge_kib"], 1),
        f"{name}_origin_kib": round(found["origin_kib"], 1),
    }


PARTS = {"replay": measure, "usage": count, "crowd": follow, "chat": follow_chat}


def main() -> None:
    """Measure, and print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=50_000, help="length of the stream")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is read")
    parser.add_argument("--streams", type=int, default=10_000, help="streams that are counted")
    parser.add_argument("--readers", type=int, default=2_000, help="readers of one stream or chat")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long they are measured")
    parser.add_argument("--crowd-rounds", type=int, default=1, help="how often they are measured")
    parser.add_argument("--before", type=Path, help="another checkout that they also read from")
    parser.add_argument("--only", choices=PARTS, help="the only part to measure")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in PARTS.items():
            if options.only in (None, name):
                figures |= asyncio.run(part(options, Path(folder)))
        print_line(figures)


if __name__ == "__main__":
    main()
