"""A campaign against real processes, after which the usage is compared with the log.

Streams are cut, resumed, left and cancelled, and workers and origins are killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from tailrace.ledger.frame import StreamEnd, decode
from tailrace.ledger.inspection.commands import reading
from tailrace.ledger.usage import Usage, UsageCounts, UsageQuery
from tests.e2e.processes import Edge, Origin

MAX_TOKENS = 16
TRIES_S = 0.2
"""Seconds before a client that was refused tries again."""
SETTLE_S = 120.0
"""Maximum seconds until all streams have ended."""
MODEL = "demo"


@dataclass
class Campaign:
    """Opens `streams` streams, `width` at a time, and kills something every `kill_every` of them.

    Every fifth kill is the origin's, the others are its worker's.
    """

    origin: Origin
    edge: Edge
    streams: int
    seed: int
    width: int = 16
    kill_every: int = 20
    opened: list[str] = field(default_factory=list)
    kills: int = 0
    _done: int = 0

    async def run(self) -> None:
        """Play all streams, and return when each has ended."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60.0, limits=limits) as client:
            numbers = iter(range(self.streams))
            async with asyncio.TaskGroup() as group:
                for _ in range(self.width):
                    group.create_task(self._clients(client, numbers))
                group.create_task(self._kill())
            await self._settle()

    async def _clients(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._client(client, Random(self.seed * 1_000_003 + number))
            self._done += 1

    async def _client(self, client: httpx.AsyncClient, random: Random) -> None:
        """Open a stream, and read it over several connections, which are cut anywhere."""
        body = {
            "model": MODEL,
            "prompt": "Once upon a time"[: random.randint(1, 16)],
            "max_tokens": random.randint(1, MAX_TOKENS),
            "seed": random.getrandbits(32),
            "ignore_eos": True,
        }
        url, after = f"{self.edge.url}/v1/generate", -1
        stream = await self._open(client, url, body, random)
        self.opened.append(stream)
        while random.random() < 0.6:
            if random.random() < 0.15:
                with suppress(httpx.HTTPError):
                    await client.post(f"{url}/{stream}/cancel")
            after = await self._read(client, f"{url}/{stream}", after, random.randint(1, 12))

    async def _open(
        self, client: httpx.AsyncClient, url: str, body: dict[str, object], random: Random
    ) -> str:
        headers = {"Accept": "text/event-stream", "Idempotency-Key": str(random.getrandbits(64))}
        while True:
            with suppress(httpx.HTTPError):
                async with client.stream("POST", url, json=body, headers=headers) as answer:
                    if answer.status_code == 200:
                        return str(answer.headers["Tailrace-Stream"])
            await asyncio.sleep(TRIES_S)

    async def _read(self, client: httpx.AsyncClient, url: str, after: int, events: int) -> int:
        """Read some events, then cut the connection; return the last index."""
        headers = {"Accept": "text/event-stream"}
        params = {} if after < 0 else {"after": after}
        with suppress(httpx.HTTPError):
            async with client.stream("GET", url, params=params, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        after, events = int(line[4:]), events - 1
                    if events == 0:
                        break
        return after

    async def _kill(self) -> None:
        while self._done < self.streams:
            await asyncio.sleep(0.05)
            if self._done // self.kill_every <= self.kills:
                continue
            self.kills += 1
            if self.kills % 5 == 0:
                await self.origin.kill()
                await self.origin.ready()
            else:
                with suppress(ProcessLookupError):
                    await self.origin.kill_worker()

    async def _settle(self) -> None:
        """Wait until all streams have ended; the origin tells nobody outside when."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                async with reading(self.origin.data / "ledger.db") as reader:
                    if not (await reader.status()).unfinished:
                        return
                await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Bill:
    """The usage that the ledger has counted, and by how many tokens it differs from the log.

    `errors` sums the differences of each stream, so that they cannot cancel each other out.
    """

    total: UsageCounts
    errors: int


async def bill(place: Path) -> Bill:
    """Compare the usage of every stream with the stream's log."""
    async with reading(place) as reader:
        total = (await reader.usage(UsageQuery())).total
        streams = errors = prompts = outputs = 0
        async for row in reader.streams():
            records = [record async for _, record in reader.records(row)]
            _, end = decode(records[-1].frame)
            assert isinstance(end, StreamEnd)
            made = sum(len(record.ids) for record in records)
            counted = await reader.usage_row(row.id)
            assert counted is None or row.ended
            errors += _difference(counted, end.prompt_tokens, made)
            streams, prompts, outputs = streams + 1, prompts + end.prompt_tokens, outputs + made
    # The sums, which may include streams whose rows are still in the log alone.
    errors += abs(total.streams - streams)
    errors += abs(total.prompt_tokens - prompts) + abs(total.output_tokens - outputs)
    errors += abs(total.delivered_tokens + total.unread_tokens - total.output_tokens)
    return Bill(total, errors)


def _difference(counted: Usage | None, prompt: int, made: int) -> int:
    if counted is None:
        return prompt + made
    return abs(counted.prompt_tokens - prompt) + abs(counted.output_tokens - made)
