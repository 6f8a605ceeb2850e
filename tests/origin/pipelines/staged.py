"""Stages for tests, and the outputs of pipelines that have them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from itertools import chain, pairwise, repeat
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar

from tailrace.origin.pipelines.origin_client import OriginClient
from tailrace.origin.pipelines.runner import RunningStage, outputs
from tailrace.origin.pipelines.stage import (
    AnyStage,
    Item,
    Items,
    Prompt,
    Stage,
    StageContext,
    StageKind,
    StageOptions,
)
from tailrace.origin.pipelines.switches import Switches
from tailrace.origin.producer import Data, End, Output, RunFate, Text
from tests.origin.producers.asked import recipe

STREAM = bytes(range(16))
chance = Random()
"""The source of the places at which `Scattered` cuts. A simulation gives it a seed."""
END = End()


class Words(Stage[StageOptions]):
    """Replaces a prompt by its words, as a model would."""

    answers_prompts = True

    def process(self, item: Item) -> Iterable[Item]:
        """Yield the words of a prompt."""
        if isinstance(item, Prompt):
            for word in item.texts[0].split():
                yield Text(f"{word} ")
        else:
            yield item


class Shout(Stage[StageOptions]):
    """Puts text in upper case, and holds back the last one."""

    def __init__(self, options: StageOptions, context: StageContext) -> None:
        """Begin without text."""
        super().__init__(options, context)
        self._last: list[Item] = []

    def process(self, item: Item) -> Iterable[Item]:
        """Return the item before this one."""
        if not isinstance(item, Text):
            return (item,)
        if item.text == "fail ":
            raise ValueError("a word that fails")
        ready, self._last = self._last, [item]
        return map(_loud, ready)

    def finish(self, end: End) -> Iterable[Item]:
        """Return the last item."""
        return map(_loud, self._last)

    def held(self) -> Iterable[Item]:
        """Return the last item, as it was."""
        return self._last


class Unsteady(Shout):
    """A Shout that fails by chance."""

    odds = 0.002

    def process(self, item: Item) -> Iterable[Item]:
        """Return the item before this one, or raise LookupError."""
        if chance.random() < self.odds:
            raise LookupError("by chance")
        return super().process(item)


class ShoutOutside(Shout):
    """A Shout in a process of its own."""

    kind = StageKind.CPU


class Leaves(Stage[StageOptions]):
    """Passes on text in a process of its own; when it is closed, it writes to the file so named."""

    kind = StageKind.CPU

    def __init__(self, options: StageOptions, context: StageContext) -> None:
        """Begin without a file."""
        super().__init__(options, context)
        self._file = Path()

    def process(self, item: Item) -> Iterable[Item]:
        """Note the file."""
        if isinstance(item, Text):
            self._file = Path(item.text.strip())
        return (item,)

    def close(self, has_ended: bool) -> None:
        """Write whether the stream has ended."""
        self._file.write_text(str(has_ended))


class Sleeps(Stage[StageOptions]):
    """Passes on items in a process of its own, and never returns at the word `hang`."""

    kind = StageKind.CPU

    def process(self, item: Item) -> Iterable[Item]:
        """Return the item, but never `hang`."""
        while item == Text("hang "):
            time.sleep(60)
        print("a stage may print")
        return (item,)


class Hex(Stage[StageOptions]):
    """Writes each four bytes of the input in hex, in however many pieces they come."""

    answers_prompts = True
    takes_input = True

    def __init__(self, options: StageOptions, context: StageContext) -> None:
        """Begin without bytes."""
        super().__init__(options, context)
        self._bytes = b""

    def process(self, item: Item) -> Iterable[Item]:
        """Yield the groups of four bytes that are complete."""
        if isinstance(item, Data):
            self._bytes += item.data
        while len(self._bytes) >= 4:
            yield Text(self._bytes[:4].hex() + " ")
            self._bytes = self._bytes[4:]

    def finish(self, end: End) -> Iterable[Item]:
        """Yield the bytes that are left."""
        if self._bytes:
            yield Text(self._bytes.hex())


class Scattered(Stage[StageOptions]):
    """Cuts each text at random places, so its pieces are never the same twice."""

    is_deterministic = False

    def __init__(self, options: StageOptions, context: StageContext) -> None:
        """Begin without texts."""
        super().__init__(options, context)
        self._count = 0

    def process(self, item: Item) -> Iterable[Item]:
        """Return the pieces of a text, the first of which has the number of texts before it."""
        if not isinstance(item, Text) or self.is_repeated:
            self._count += isinstance(item, Text)
            return (item,)
        text = f"{self._count}:{item.text}"
        self._count += 1
        places = chance.sample(range(len(text)), chance.randrange(4))
        return [Text(piece) for piece in cut_at(text, places) if piece]


class PassOn(Stage[StageOptions]):
    """Passes on everything."""

    def process(self, item: Item) -> Items:
        """Return the item."""
        return (item,)


def _loud(item: Item) -> Item:
    assert isinstance(item, Text)
    return Text(item.text.upper())


class Hangs(Stage[StageOptions]):
    """Passes on items, and waits for ever at the word `hang`."""

    def process(self, item: Item) -> Items:
        """Return the item, but never `hang`."""
        return self._later(item)

    async def _later(self, item: Item) -> AsyncIterator[Item]:
        if isinstance(item, Text):
            yield Text("-")
        if item == Text("hang "):
            await asyncio.Event().wait()
        yield item


Makes = Callable[[Any, StageContext], AnyStage]


def stage_of(kind: Makes, name: str = "", begin: int = 0, **more: Any) -> AnyStage:
    """Return a stage object; `more` are `options` and `origin`."""
    options = more.pop("options", StageOptions())
    origin = more.pop("origin", None) or OriginClient(Path("none"))
    context = StageContext(name or _name_of(kind), STREAM, recipe(), origin, begin)
    return kind(options, context)


def _name_of(kind: Makes) -> str:
    return getattr(kind, "__name__", "stage").lower()


def running(kind: Makes, name: str = "", **more: Any) -> RunningStage:
    """Return a stage of a stream; `more` are `options`, `origin`, `optional` and `limit_s`."""
    of_object = {key: more.pop(key) for key in ("options", "origin") if key in more}

    def make(begin: int) -> AnyStage:
        return stage_of(kind, name, begin, **of_object)

    return RunningStage(name or _name_of(kind), make, **more)


def unswitched(stages: Sequence[RunningStage]) -> Switches:
    """Return the switches of a stream that gets no request to switch stages."""
    return switches([one.name for one in stages])[0]


def switches(
    names: Sequence[str], off: Iterable[str] = (), is_new: Iterable[bool] = ()
) -> tuple[Switches, list[bytes]]:
    """Return the switches of a stream with these stages, and the list of the changes they store.

    `is_new` has the answers to whether the next output is new; after them it is always new.
    """
    runs = _Runs(chain(is_new, repeat(True)))
    return Switches(names, off, runs), runs.stored


class _Runs:
    """The runs of a stream's stages, with their changes in memory."""

    def __init__(self, is_new: Iterator[bool]) -> None:
        self.stored: list[bytes] = []
        self._is_new = is_new

    async def append(self, line: bytes) -> None:
        self.stored.append(line)

    async def load_logs(self, stages: Sequence[str]) -> None:
        """Do nothing: there are no logs."""

    def is_new(self, stages: Sequence[str]) -> bool:
        return next(self._is_new)


async def run(
    stages: Sequence[RunningStage], prompt: str, switched: Switches | None = None
) -> list[Output]:
    """Return all outputs of a pipeline."""
    switched = switched or unswitched(stages)
    return [one async for one in outputs(stages, Prompt(prompt), switched, RunFate())]


def synchronous(stage: AnyStage, items: Iterable[Item], end: End | None = END) -> list[Item]:
    """Return what a stage that never waits makes of items, up to an End of its own.

    With `end` None the input does not end.
    """
    made: list[Item] = []
    for item in items:
        made += _given(stage.process(item))
        if made and isinstance(made[-1], End):
            return made
    return made if end is None else [*made, *_given(stage.finish(end))]


async def asynchronous(stage: AnyStage, items: Iterable[Item]) -> list[Item]:
    """Return what a stage that may wait makes of items, up to an End of its own."""
    made: list[Item] = []
    for item in (*items, END):
        given = stage.finish(item) if isinstance(item, End) else stage.process(item)
        made += [each async for each in given] if isinstance(given, AsyncIterable) else given
        if made and isinstance(made[-1], End):
            return made
    return made


def _given(items: Items) -> Iterable[Item]:
    assert isinstance(items, Iterable)
    return items


def cut_at(text: str, cuts: Iterable[int]) -> list[str]:
    """Return the pieces of a text that is cut at some places."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


class ScaleOptions(StageOptions):
    """Options of the stage below."""

    notes: Path
    """File with a line for each time that the model was loaded."""
    fails: bool = False


class Scale(Stage[ScaleOptions]):
    """Appends to each text the sum of its characters' weights, which are loaded once."""

    kind = StageKind.GPU
    Options: ClassVar[type[ScaleOptions]] = ScaleOptions

    @classmethod
    def load(cls, options: ScaleOptions, device: str) -> Any:
        """Return the weights of characters, and note that they were loaded."""
        with options.notes.open("a") as notes:
            notes.write(f"{os.getpid()} {device}\n")
        if options.fails:
            raise RuntimeError("the weights are missing")
        return {letter: nth for nth, letter in enumerate(ascii_lowercase, 1)}

    def process(self, item: Item) -> Iterable[Item]:
        """Return text with its sum."""
        if isinstance(item, Text):
            weights = self.context.loaded
            item = Text(f"{item.text}{sum(weights.get(one, 0) for one in item.text.lower())} ")
        yield item
