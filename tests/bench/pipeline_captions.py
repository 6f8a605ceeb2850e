"""Live captions of many streams at once, through edge, origin and a pipeline of speech.

Each client has a WebSocket of its own, and sends 100 ms of sound every 100 ms. The stages run in
this process, too, before the measurement: so it is known which piece of the sound each revision
follows, and what the text is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from websockets.asyncio.client import ClientConnection, connect

from tailrace.ledger.frame import (
    FRAMES,
    SCHEMA_HASH,
    Credit,
    Hello,
    Input,
    Open,
    Opened,
    Revision,
    StreamEnd,
    StreamError,
    decode,
    encode,
    split,
    to_error,
)
from tailrace.origin import producer
from tailrace.origin.pipelines.stage import AnyStage, Item
from tailrace.origin.producer import Data, End
from tests.bench.bench_speech import BYTES_PER_MS, PIECE_MS, WORDS, local_stages, spoken
from tests.e2e.processes import Edge, Origin
from tests.spoken import captions

SETTINGS = f"""
[origin]
text_streams = 1024
{captions(processes=2)}
"""
PIECE_BYTES = PIECE_MS * BYTES_PER_MS
SPEAKERS = 6
"""Number of different sounds, of which each stream has one."""
SPREAD_S = 5.0
"""Time in seconds over which the streams begin: people do not end their sentences together."""
CREDIT_FRAMES = 1024
CHANNELS = 200
"""Number of channels on which Inputs wait for their answer."""


@dataclass(frozen=True)
class Spoken:
    """The sound of a stream, and for each revision its text and the piece that it follows."""

    pcm: bytes
    revisions: tuple[tuple[str, bool, int], ...]


@dataclass
class Captions:
    """The revisions that each stream got, and their delays in ms."""

    interim_ms: list[float] = field(default_factory=list)
    final_ms: list[float] = field(default_factory=list)
    lost: int = 0
    changed: int = 0


def prepared(seconds: float) -> list[Spoken]:
    """Return the sounds of SPEAKERS, and what the stages make of them."""
    return [_heard(spoken(seed, seconds)[1]) for seed in range(SPEAKERS)]


def _heard(pcm: bytes) -> Spoken:
    stages, revisions = local_stages(WORDS), list[tuple[str, bool, int]]()
    last = (len(pcm) - 1) // PIECE_BYTES
    for nth in range(last + 1):
        piece = Data(pcm[nth * PIECE_BYTES : (nth + 1) * PIECE_BYTES])
        for made in _through(stages, [piece], ends=nth == last):
            assert isinstance(made, producer.Revision)
            revisions.append((made.text, made.final, nth))
    return Spoken(pcm, tuple(revisions))


def _through(stages: Sequence[AnyStage], items: Iterable[Item], *, ends: bool) -> list[Item]:
    """Give items to the first stage, and return what comes out of the last one."""
    for stage in stages:
        made: list[Item] = []
        for item in items:
            made += stage.process(item)  # type: ignore[arg-type]
        if ends:
            made += stage.finish(End())  # type: ignore[arg-type]
        items = made
    return list(items)


async def caption_all(edge: Edge, streams: int, sounds: list[Spoken]) -> Captions:
    """Caption streams that begin one after the other, within SPREAD_S seconds."""
    found = Captions()
    begin_s = time.perf_counter() + 1 + streams / 50
    works = [
        _Speaker(edge.url, sounds[nth % len(sounds)], begin_s + nth / streams * SPREAD_S)
        for nth in range(streams)
    ]
    await asyncio.gather(*(work.run(found) for work in works))
    return found


class _Speaker:
    """One client, which speaks and reads."""

    def __init__(self, url: str, sound: Spoken, begin_s: float) -> None:
        self._url = f"{url.replace('http', 'ws', 1)}/v1/ws"
        self._sound = sound
        self._begin_s = begin_s
        self._sent_s: list[float] = []

    async def run(self, found: Captions) -> None:
        async with connect(self._url) as socket:
            await socket.send(encode(Hello(SCHEMA_HASH, "bench")))
            await socket.send(encode(Open("captions", prompt="", credit=CREDIT_FRAMES), 1))
            speaking: asyncio.Task[None] | None = None
            revisions: list[tuple[str, bool]] = []
            while True:
                message = await socket.recv()
                assert isinstance(message, bytes)
                for raw in split(message, frozenset(FRAMES), 1 << 20):
                    _, frame = decode(raw)
                    match frame:
                        case Opened():
                            speaking = asyncio.create_task(self._speak(socket, frame))
                        case Revision():
                            self._note(frame, len(revisions), found)
                            revisions.append((frame.text, frame.final))
                            if frame.index % (CREDIT_FRAMES // 2) == 0:
                                await socket.send(encode(Credit(frame.index + CREDIT_FRAMES), 1))
                        case StreamEnd():
                            assert speaking is not None
                            await speaking
                            return self._compare(revisions, found)
                        case StreamError():
                            raise to_error(frame)

    async def _speak(self, socket: ClientConnection, opened: Opened) -> None:
        pcm = self._sound.pcm
        for nth, at in enumerate(range(0, len(pcm), PIECE_BYTES)):
            await asyncio.sleep(self._begin_s + nth * PIECE_MS / 1e3 - time.perf_counter())
            data, is_last = pcm[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(pcm)
            self._sent_s.append(time.perf_counter())
            frame = Input(opened.stream, opened.token or None, at, data, is_last)
            await socket.send(encode(frame, 2 + nth % CHANNELS))

    def _note(self, frame: Revision, number: int, found: Captions) -> None:
        if number < len(self._sound.revisions):
            _, _, piece = self._sound.revisions[number]
            delay_ms = (time.perf_counter() - self._sent_s[piece]) * 1e3
            (found.final_ms if frame.final else found.interim_ms).append(delay_ms)

    def _compare(self, revisions: list[tuple[str, bool]], found: Captions) -> None:
        right = [(text, final) for text, final, _ in self._sound.revisions]
        found.lost += max(0, len(right) - len(revisions))
        found.changed += max(0, len(revisions) - len(right))
        found.changed += sum(one != other for one, other in zip(revisions, right, strict=False))


async def kill_in_turn(origin: Origin, kills: int, seconds: float) -> None:
    """Kill the worker of the captions and the process of a stage in turn, spread over a time."""
    in_turn = cycle((origin.replace_worker, origin.kill_stage))
    for _, kill in zip(range(kills), in_turn, strict=False):
        await asyncio.sleep(seconds / (kills + 1))  # the kills are spread over the streams' time
        await kill("captions")
