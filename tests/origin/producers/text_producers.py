"""Producers that tests serve in real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

from tailrace.ledger.errors import Unavailable
from tailrace.origin.producer import About, Data, End, Output, Request, Resumption, Revision, Text

CHILD_S = 120
"""Time after which a forked child that was not ended is gone, in seconds."""


class Echo:
    """Says the prompt's words; `raise` makes it fail."""

    about = About("echo", "echo 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        words = (request.recipe.prompt or "").split()
        for word in words:
            if word == "raise":
                raise KeyError("secret")
            yield Text(f"{word} ")
        yield End(total_tokens=len(words))

    async def close(self) -> None:
        """Hold nothing."""


class Flaky(Echo):
    """Says the prompt's words, and fails once at `fail`, whichever process it runs in.

    The folder in NOTED has a file for each prompt that has failed. At `always` it fails each time.
    """

    about = About("flaky", "flaky 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        prompt = request.recipe.prompt or ""
        for word in prompt.split():
            if word == "always":
                raise Unavailable("the device is busy")
            if word == "fail":
                noted = Path(os.environ["NOTED"]) / prompt.replace(" ", "-")
                if not await asyncio.to_thread(noted.exists):
                    await asyncio.to_thread(noted.touch)
                    raise Unavailable("the device is busy")
            yield Text(f"{word} ")


class Seeing(Echo):
    """Says which GPUs its process sees."""

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        yield Text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


class Endless(Echo):
    """Says the prompt again and again; notes in a file when it was closed."""

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        try:
            while True:
                yield Text(request.recipe.prompt or "")
                await asyncio.sleep(0)
        finally:
            if "NOTED" in os.environ:
                await asyncio.to_thread(Path(os.environ["NOTED"]).write_text, "closed")


class Speech(Echo):
    """Hears the prompt word by word, as recognisers of speech do: first roughly, then surely.

    Every sentence is revised while it is heard, and final at its full stop; then comes its sound.
    """

    about = About("speech", "speech 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        for sentence in (request.recipe.prompt or "").split(". "):
            words = sentence.rstrip(".").split()
            for count in range(1, len(words) + 1):
                yield Revision(" ".join(words[:count]).lower())
            yield Revision(" ".join(words).capitalize() + ". ", final=True)
        yield Data(bytes(range(256)))


class Forking(Echo):
    """Has a child process that holds whatever was open; its number goes to a file."""

    about = About("forking", "forking 1", Resumption.REPEATS)

    def __init__(self) -> None:
        child = os.fork()
        if not child:
            signal.alarm(CHILD_S)
            signal.pause()
        Path(os.environ["NOTED"]).write_text(str(child))


class Waiting(Echo):
    """Says nothing for a very long time, as a slow server does."""

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        await asyncio.Event().wait()
        yield Text("at last")


class Blocking(Echo):
    """Holds the event loop for ever."""

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        signal.pause()
        yield Text("at last")


def stuck() -> Echo:
    """Return a start that never ends."""
    signal.pause()
    return Echo()


echo, endless, speech, flaky = Echo, Endless, Speech, Flaky
forking, waiting, blocking = Forking, Waiting, Blocking
seeing = Seeing
