"""The load of the soak: requests over time, and what each reader saw of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import WINDOW_FRAMES, Reader
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Open, Priority, Sampling, StreamEnd, Token, decode, tag_of

SYSTEM = "You are a friendly fox who answers in short words. " * 6
"""Shared by half of the prompts, so that prefixes are found again."""
QUESTIONS = (
    "Once upon a time there was a fox who lived by the river.",
    "Count from 3 to 12.",
    "Reverse the word river.",
    "Who has the ball?",
)
SHARES = {Priority.INTERACTIVE: 0.4, Priority.STANDARD: 0.4, Priority.BATCH: 0.2}
"""Share of each class in the tokens that are requested."""
MAX_TOKENS = {Priority.INTERACTIVE: 120, Priority.STANDARD: 250, Priority.BATCH: 500}


@dataclass(slots=True)
class Seen:
    """A stream as its reader saw it; times are seconds since the soak began."""

    priority: Priority
    asked_s: float
    frames_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    failure: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.frames_s[0] - self.asked_s if self.frames_s else None

    def gaps(self) -> Iterator[tuple[float, float]]:
        """(when, how long) of the waits between two frames, in seconds."""
        for before, after in zip(self.frames_s, self.frames_s[1:], strict=False):
            yield after, after - before


class Readers:
    """Asks for streams over one link, and reads all of them."""

    def __init__(self, link: OriginPool, seed: int) -> None:
        self.seen: list[Seen] = []
        self.began = time.monotonic()
        self._link = link
        self._random = Random(seed)
        self._reading: set[asyncio.Task[None]] = set()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def reading(self) -> int:
        return len(self._reading)

    def ask(self, priority: Priority, max_tokens: int | None = None) -> asyncio.Task[None]:
        """Add a stream."""
        random = self._random
        most = max_tokens or random.randint(MAX_TOKENS[priority] // 4, MAX_TOKENS[priority])
        question = random.choice(QUESTIONS)
        request = Open(
            model="demo",
            prompt=(SYSTEM if random.random() < 0.5 else "") + question,
            max_tokens=most,
            ignore_eos=True,
            priority=priority,
            credit=WINDOW_FRAMES,
            sampling=Sampling(temperature=0.8, seed=random.getrandbits(64)),
        )
        task = asyncio.create_task(self._read(request))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return task

    async def arrive(self, tokens_per_s: float, until_s: float) -> None:
        """Make requests at random times, for `tokens_per_s` tokens on average."""
        tokens = {p: MAX_TOKENS[p] * 5 / 8 for p in SHARES}  # mean tokens of a request
        rates = {p: share * tokens_per_s / tokens[p] for p, share in SHARES.items()}
        total = sum(rates.values())
        while self.now_s < until_s:
            await asyncio.sleep(self._random.expovariate(total))
            self.ask(self._random.choices(list(rates), list(rates.values()))[0])

    async def drain(self) -> None:
        """Wait for the streams that are under way."""
        while self._reading:
            await asyncio.wait(set(self._reading))

    async def _read(self, request: Open) -> None:
        seen = Seen(request.priority, self.now_s)
        self.seen.append(seen)
        reader = Reader(self._link)
        try:
            await reader.open(request)
            while seen.ended_s is None:
                self._note(seen, await reader.take())
        except TailraceError as error:
            seen.failure = str(error)
        finally:
            reader.close()

    def _note(self, seen: Seen, frames: list[bytes]) -> None:
        now = self.now_s
        for raw in frames:
            if tag_of(raw) == Token.tag:
                seen.frames_s.append(now)
            else:
                _, frame = decode(raw)
                seen.ended_s = now
                if not isinstance(frame, StreamEnd) or frame.finish_reason.word != "length":
                    seen.failure = str(frame)


def class_wait_s(seen: Iterable[Seen]) -> float:
    """Return the longest time in which some of these streams were open and none got a frame."""
    moments = []
    for one in seen:
        moments += [(one.asked_s, 1), *((at, 0) for at in one.frames_s)]
        if one.ended_s is not None:
            moments.append((one.ended_s, -1))
    longest, since, opened = 0.0, 0.0, 0
    for at, change in sorted(moments):
        if opened and change <= 0:
            longest = max(longest, at - since)
        if change <= 0 or not opened:
            since = at
        opened += change
    return longest
