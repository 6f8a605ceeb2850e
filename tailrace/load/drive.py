"""Sends requests at scheduled times, even if earlier ones have not finished (an open loop).

A Tailrace edge gets them on its native route, where this module can cut connections and resume the
streams. Any server, also an edge, can get them on OpenAI's routes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import httpx

from tailrace.client import Client, http_error
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import StreamEnd
from tailrace.load.samples import Sample

Api = Literal["native", "chat", "completions"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_IN_FLIGHT = 10_000
"""Maximum number of unfinished requests of a run. A request that is due while this many are
unfinished is not sent and counts as failed."""
WORDS = "a the of and to in that it was he for on with his as had you at be her".split()


@dataclass(frozen=True, slots=True)
class Demand:
    """Describes the requests of a run and their server; the same `seed` gives the same requests.

    A prompt consists of `prompt_words` random words, so that no server has it in a cache. In each
    answer the connection is cut `cuts` times, after random tokens.
    """

    url: str
    api: Api
    model: str
    prompt_words: int
    max_tokens: int
    cuts: int
    seed: int
    timeout_s: float


def poisson(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Return the times of a Poisson process, in seconds from the start of the run."""
    random, times, at = Random(seed), list[float](), 0.0
    while (at := at + random.expovariate(rate_per_s)) < seconds:
        times.append(at)
    return times


async def drive(
    load: Demand,
    due_s: Sequence[float],
    progress: Callable[[int], None],
    api_key: str | None = None,
) -> list[Sample]:
    """Send a request at each time in `due_s`, and return one sample for each.

    `due_s` are seconds from the start. `progress` is called with the number of finished requests.
    """
    loop = asyncio.get_running_loop()
    samples = [Sample(due) for due in due_s]
    done, under_way = 0, 0

    async def one(number: int, sample: Sample) -> None:
        nonlocal done, under_way
        under_way += 1
        try:
            async with asyncio.timeout(load.timeout_s):
                await ask(load, number, sample, begun_s + sample.due_s)
        except TimeoutError:
            sample.error = "timeout"
        except TailraceError as error:
            sample.error = error.code
        except httpx.TransportError as error:
            sample.error = type(error).__name__
        finally:
            sample.whole_s = loop.time() - begun_s - sample.due_s
            done, under_way = done + 1, under_way - 1
            progress(done)

    ask = (_Native if load.api == "native" else _OpenAI)(load, api_key)
    async with aclosing(ask):
        begun_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number, sample in enumerate(samples):
                await asyncio.sleep(max(0.0, begun_s + sample.due_s - loop.time()))
                if under_way >= MAX_IN_FLIGHT:
                    sample.error = "too_many_in_flight"
                    done += 1
                    continue
                tasks.create_task(one(number, sample))
    return samples


def prompt_of(load: Demand, number: int) -> str:
    random = Random(f"{load.seed} {number}")
    return " ".join(random.choices(WORDS, k=load.prompt_words))


# ---- servers ----


class _Native:
    """Sends requests to a Tailrace edge with `tailrace.Client`, which resumes after cuts."""

    def __init__(self, load: Demand, api_key: str | None) -> None:
        self._client = Client([load.url], api_key=api_key, random=Random(load.seed))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __call__(self, load: Demand, number: int, sample: Sample, due: float) -> None:
        loop, cut_s = asyncio.get_running_loop(), None
        random = Random(f"{load.seed} cuts {number}")
        places = sorted(random.choices(range(1, max(2, load.max_tokens)), k=load.cuts))
        stream = self._client.generate(
            prompt=prompt_of(load, number),
            model=load.model,
            max_tokens=load.max_tokens,
            ignore_eos=True,
        )
        async with aclosing(stream):
            async for frame in stream:
                now = loop.time()
                if isinstance(frame, StreamEnd):
                    sample.tokens = frame.total_tokens
                    if frame.finish_reason.word not in ("length", "stop"):
                        sample.error = frame.finish_reason.word
                    break
                if cut_s is not None:
                    sample.cuts[len(sample.pieces_s)] = now - cut_s
                    cut_s = None
                _came(sample, now - due)
                if places and len(sample.pieces_s) >= places[0]:
                    places = [place for place in places if place > len(sample.pieces_s)]
                    cut_s = now
                    stream.cut()


class _OpenAI:
    """Sends requests to any OpenAI-compatible server."""

    def __init__(self, load: Demand, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._http = httpx.AsyncClient(
            base_url=load.url.rstrip("/"), headers=headers, timeout=load.timeout_s, limits=limits
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __call__(self, load: Demand, number: int, sample: Sample, due: float) -> None:
        loop, prompt = asyncio.get_running_loop(), prompt_of(load, number)
        body: dict[str, Any] = {
            "model": load.model,
            "max_tokens": load.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        body |= (
            {"messages": [{"role": "user", "content": prompt}]}
            if load.api == "chat"
            else {"prompt": prompt}
        )
        async with self._http.stream("POST", PATHS[load.api], json=body) as answer:
            if answer.status_code != 200:
                raise http_error(answer.status_code, answer.headers, await answer.aread())
            async with aclosing(_chunks(answer)) as chunks:
                async for chunk in chunks:
                    if "error" in chunk:
                        sample.error = str(chunk["error"].get("code") or "error")
                        return
                    if any(map(_says, chunk.get("choices", ()))):
                        _came(sample, loop.time() - due)
                    usage = chunk.get("usage") or {}
                    sample.tokens = usage.get("completion_tokens", sample.tokens)
        sample.tokens = sample.tokens or len(sample.pieces_s)


def _came(sample: Sample, at_s: float) -> None:
    if sample.first_s is None:
        sample.first_s = at_s
    sample.pieces_s.append(at_s)


async def _chunks(answer: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(key) for key in ("content", "text", "reasoning_content", "tool_calls"))
