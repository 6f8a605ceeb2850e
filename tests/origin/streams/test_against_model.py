"""Streams and forks against what they are meant to be: lists of messages in a dictionary."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.origin.streams.stream_world import ROOT, StreamWorld, streams_at

NAMES = "abcd"
END = -1


@dataclass
class Model:
    """One stream: `offsets` are the ends of its messages, from the offset 0 on."""

    data: bytes = b""
    sizes: list[int] = field(default_factory=lambda: [0])
    offsets: list[str] = field(default_factory=lambda: [f"{0:016d}_{0:016d}"])
    closed: bool = False
    deleted: bool = False
    source: str | None = None

    def append(self, body: bytes, offset: str) -> None:
        self.data += body
        self.sizes.append(len(self.data))
        self.offsets.append(offset)


@dataclass(frozen=True)
class Put:
    """A PUT that creates a stream."""

    name: str
    body: bytes


@dataclass(frozen=True)
class Post:
    """A POST that appends to a stream."""

    name: str
    body: bytes
    closes: bool


@dataclass(frozen=True)
class Fork:
    """At the end of the message `at`, counted from the first or from the last one."""

    name: str
    source: str
    at: int
    sub_offset: int
    body: bytes


@dataclass(frozen=True)
class Delete:
    """A DELETE of a stream."""

    name: str


@dataclass(frozen=True)
class Restart:
    """A restart of the process."""


names = st.sampled_from(NAMES)
bodies = st.binary(max_size=6)
operations = st.lists(
    st.builds(Put, names, bodies)
    | st.builds(Post, names, st.binary(min_size=1, max_size=6), st.booleans())
    | st.builds(Fork, names, names, st.integers(0, 5), st.integers(0, 4), bodies)
    | st.builds(Delete, names)
    | st.just(Restart()),
    max_size=40,
)


class Streams:
    """The model of all streams: what each request is answered, and what is there after it."""

    def __init__(self) -> None:
        self.streams: dict[str, Model] = {}

    def needed(self, name: str) -> bool:
        return any(stream.source == name for stream in self.streams.values())

    def delete(self, name: str) -> int:
        stream = self.streams.get(name)
        if stream is None or stream.deleted:
            return 404 if stream is None else 410
        stream.deleted = True
        self._collect(name)
        return 204

    def _collect(self, name: str | None) -> None:
        while name is not None and self.streams[name].deleted and not self.needed(name):
            name = self.streams.pop(name).source

    def status(self, name: str) -> int:
        stream = self.streams.get(name)
        if stream is None:
            return 404
        return 410 if stream.deleted else 200


async def put(world: StreamWorld, model: Streams, step: Put) -> None:
    there = model.streams.get(step.name)
    answer = await world.put(step.name, step.body)
    if there is not None:
        same = not there.deleted and there.source is None and not there.closed
        assert answer.status == (200 if same else 409)
        return
    assert answer.status == 201
    model.streams[step.name] = stream = Model()
    if step.body:
        stream.append(step.body, answer.header("stream-next-offset") or "")


async def post(world: StreamWorld, model: Streams, step: Post) -> None:
    stream = model.streams.get(step.name)
    answer = await world.post(step.name, step.body, stream_closed=str(step.closes))
    if stream is None or stream.deleted:
        assert answer.status == model.status(step.name)
    elif stream.closed:
        assert answer.status == 409
        assert answer.header("stream-next-offset") == stream.offsets[END]
    else:
        assert answer.status == 204
        stream.append(step.body, answer.header("stream-next-offset") or "")
        stream.closed = step.closes


async def fork(world: StreamWorld, model: Streams, step: Fork) -> None:
    source = model.streams.get(step.source)
    at = 0 if source is None else min(step.at, len(source.offsets) - 1)
    answer = await world.ask(
        "PUT",
        step.name,
        step.body,
        stream_forked_from=f"{ROOT}{step.source}",
        stream_fork_offset=f"{0:016d}_{0:016d}" if source is None else source.offsets[at],
        stream_fork_sub_offset=str(step.sub_offset),
    )
    if step.name in model.streams:
        assert answer.status in (200, 409)  # which of them depends on how it was made
    elif source is None or source.deleted:
        assert answer.status == (404 if source is None else 409)
    elif step.sub_offset > (source.sizes + source.sizes[END:])[at + 1] - source.sizes[at]:
        assert answer.status == 400
    else:
        assert answer.status == 201
        model.streams[step.name] = inherited(source, at, step)
        if step.body:
            model.streams[step.name].append(step.body, "")
        model.streams[step.name].offsets[END] = answer.header("stream-next-offset") or ""


def inherited(source: Model, at: int, step: Fork) -> Model:
    made = Model(
        source.data[: source.sizes[at]],
        source.sizes[: at + 1],
        source.offsets[: at + 1],
        source=step.source,
    )
    if step.sub_offset:
        begin = source.sizes[at]
        # Where this message ends is said only if it is the last one; else it is the next frame.
        made.append(source.data[begin : begin + step.sub_offset], f"{at + 1:016d}_{0:016d}")
    return made


async def delete(world: StreamWorld, model: Streams, step: Delete) -> None:
    answer = await world.ask("DELETE", step.name)
    assert answer.status == model.delete(step.name)


async def agree(world: StreamWorld, model: Streams) -> None:
    """Every stream reads, from every offset, as its model says."""
    for name in NAMES:
        await world.becomes(name, model.status(name))
        stream = model.streams.get(name)
        if stream is None or stream.deleted:
            continue
        for size, offset in zip(stream.sizes, stream.offsets, strict=True):
            assert await world.text(name, f"?offset={offset}") == stream.data[size:]
        head = await world.ask("HEAD", name)
        assert head.header("stream-closed") == ("true" if stream.closed else None)
        assert head.header("stream-next-offset") == stream.offsets[END]


async def play(folder: Path, steps: list[object]) -> None:
    model, left = Streams(), list(steps)
    while True:
        async with streams_at(folder) as world:
            while left and not isinstance(step := left.pop(0), Restart):
                match step:
                    case Put():
                        await put(world, model, step)
                    case Post():
                        await post(world, model, step)
                    case Fork():
                        await fork(world, model, step)
                    case Delete():
                        await delete(world, model, step)
                await agree(world, model)
            await agree(world, model)
        if not left:
            return


@settings(max_examples=40)
@given(operations)
def test_streams_are_what_they_are_meant_to_be(steps: list[object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), steps))
