"""Two origins and two edges on one PostgreSQL, and a reader that notes when events come."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from psycopg.conninfo import conninfo_to_dict

from tailrace.edge.origins.load_balancing import PREFIX_CHARS, Candidate, by_key
from tailrace.edge.origins.origin_pool import needs_of
from tailrace.ledger.frame import Open
from tests.e2e.processes import Edge, Origin
from tests.e2e.sse import SSE, Reading, events


def request(seed: int, tokens: int, prompt: str = "Once upon a time") -> dict[str, Any]:
    """Return a body that gives the same text each time."""
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
    }


class Cluster:
    """Two or three origins that share a ledger and their keys, and two edges of all.

    Where they are `apart`, each edge has one origin.
    """

    def __init__(self, folder: Path, dsn: str, *, apart: bool = False, origins: int = 2) -> None:
        self.folder = folder
        self.settings = folder / "tailrace.toml"
        self.settings.write_text(
            f'[ledger]\nurl = "{url_of(dsn)}"\n[origin]\nkeys = "{folder / "keys.json"}"\n'
        )
        one, two, *more = (self.origin(name) for name in ("one", "two", "three")[:origins])
        self.origins = [one, two, *more]
        self.edges = [Edge(one), Edge(two)]
        if not apart:
            self.edges = [Edge(one, two, *more), Edge(*more, two, one)]

    def origin(self, name: str, port: int | None = None) -> Origin:
        return Origin(self.folder / name, port, config=self.settings)

    def prompt_of(self, origin: int) -> str:
        """One that every edge asks this origin for, as long as it is up and not overloaded.

        A short prompt goes to whoever has least to do, which is a matter of heartbeats.
        """
        candidates = [Candidate(each.link) for each in self.origins]
        for number in itertools.count():
            prompt = f"Once upon a time, {number} days ago, there was a little girl. ".ljust(
                PREFIX_CHARS, "."
            )
            key = needs_of(Open("demo", prompt)).key
            assert key is not None
            if by_key(candidates, key)[0] is candidates[origin]:
                return prompt
        raise AssertionError("unreachable: the counter does not end")

    def count(self, origin: int, message: str) -> int:
        """Return how often an origin has logged that."""
        return len(self.logged(origin, message))

    def logged(self, origin: int, message: str) -> list[dict[str, Any]]:
        return [e for e in self.origins[origin].events if e.get("message") == message]


def url_of(dsn: str) -> str:
    """`name=value` pairs as the URL that the settings want."""
    return f"postgresql:///?{urlencode(conninfo_to_dict(dsn))}"


class Reader:
    """A reader of one stream from its start; `under_way` is set once it has enough events."""

    def __init__(self, under_way_at: int) -> None:
        self.reading = Reading()
        self.under_way = asyncio.Event()
        self._under_way_at = under_way_at
        self._times_s: list[float] = []

    async def read(self, client: httpx.AsyncClient, edge: Edge, body: dict[str, Any]) -> None:
        url = f"{edge.url}/v1/generate"
        async with client.stream("POST", url, json=body, headers=SSE) as response:
            async for event in events(response):
                self.reading.events.append(event)
                self._times_s.append(asyncio.get_running_loop().time())
                if len(self._times_s) == self._under_way_at:
                    self.under_way.set()

    @property
    def longest_pause_s(self) -> float:
        """Between two events."""
        return max(b - a for a, b in zip(self._times_s, self._times_s[1:], strict=False))
