"""What `tailrace up` shows a person: progress, addresses, and a sample that is cut and resumed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.status import Status

from ledger.errors import TailraceError
from ledger.version import tailrace_version
from tailrace.client import Client
from tailrace.viewer import Viewer, printable

READY_POLL_S = 0.1
READY_TIMEOUT_S = 1.0  # for one answer of /readyz
SAMPLE_PROMPT = "Once upon a time"
SAMPLE_TOKENS = 64
SAMPLE_SEED = 7
SAMPLE_CUT_AFTER = 24  # tokens


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where it is served: addresses as HOST:PORT, and the folder of everything kept."""

    http: str
    https: str
    link: str
    data: Path

    @property
    def http_url(self) -> str:
        return f"http://{self.http}"

    @property
    def https_url(self) -> str:
        return f"https://{self.https}"


async def wait_until_ready(place: Addresses, console: Console) -> None:
    """Ask /readyz until it says yes, and show why it does not yet."""
    shown = ""
    # trust_env: a proxy of the environment is no way to loopback.
    async with httpx.AsyncClient(trust_env=False, timeout=READY_TIMEOUT_S) as client:
        with console.status("starting") as status:
            while (reason := await _why_not_ready(client, place)) is not None:
                if reason != shown:
                    _show_progress(reason, status, console)
                    shown = reason
                await asyncio.sleep(READY_POLL_S)


async def _why_not_ready(client: httpx.AsyncClient, place: Addresses) -> str | None:
    try:
        answer = await client.get(f"{place.http_url}/readyz")
    except httpx.TransportError:
        return "starting the edge"
    if answer.status_code == httpx.codes.OK:
        return None
    reasons: list[str] = answer.json()["reasons"]
    return ", ".join(reasons)


def _show_progress(reason: str, status: Status, console: Console) -> None:
    if console.is_terminal:
        status.update(reason)
    else:
        console.print(f"  {reason}", markup=False)


def ready_line(place: Addresses, pids: dict[str, int | None], ready_s: float) -> str:
    return json.dumps(
        {
            "ready": True,
            "http": place.http_url,
            "https": place.https_url,
            "link": place.link,
            "data": str(place.data),
            "pids": pids,
            "ready_ms": round(ready_s * 1000),
        }
    )


def print_addresses(place: Addresses, ready_s: float, console: Console) -> None:
    request = json.dumps({"model": "demo", "prompt": SAMPLE_PROMPT, "max_tokens": 200})
    console.print(
        f"Tailrace {tailrace_version()} serves the demo model, ready after {ready_s:.1f} s\n\n"
        f"  HTTP           {place.http_url}\n"
        f"  HTTPS, HTTP/3  {place.https_url}\n"
        f"  console        {place.http_url}/\n"
        f"  origin link    {place.link}\n"
        f"  data and logs  {place.data}\n\n"
        "Try it:\n\n"
        f"  curl -N {place.http_url}/v1/generate -H 'Accept: text/event-stream' -d '{request}'",
        markup=False,
        soft_wrap=True,  # a wrapped command cannot be copied
    )


async def print_sample(place: Addresses, console: Console) -> None:
    """One short stream through the edge, cut on the way; a failure is told, not fatal."""
    console.print(f"\nA sample, cut after {SAMPLE_CUT_AFTER} tokens and resumed:\n")

    def write(text: str) -> None:
        console.print(printable(text), end="", markup=False, soft_wrap=True)

    def note(text: str) -> None:
        console.print(text, end="", style="bold cyan", markup=False, soft_wrap=True)

    viewer = Viewer(write, note, SAMPLE_CUT_AFTER)
    write(f"  {SAMPLE_PROMPT}")
    try:
        # trust_env: a proxy of the environment is no way to loopback.
        async with Client([place.http_url], on_state=viewer.on_state, trust_env=False) as client:
            sample = client.generate(
                prompt=SAMPLE_PROMPT, max_tokens=SAMPLE_TOKENS, seed=SAMPLE_SEED
            )
            _, summary = await viewer.follow(sample)
    except TailraceError as error:
        console.print(f"\nthe sample failed: {error}", style="red", markup=False)
        return
    console.print(f"\n\n  {summary}", style="dim")
