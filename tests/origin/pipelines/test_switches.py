"""Stages that are switched while their stream runs: under kills, no output is lost or changed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tailrace.ledger.errors import Conflict, Damaged
from tailrace.ledger.frame import Caller, Frame, Notice, StageSwitch, StreamEnd, Token, decode
from tailrace.origin.pipelines import runner
from tailrace.origin.pipelines.origin_client import OriginClient
from tailrace.origin.pipelines.producer import PipelineProducer
from tailrace.origin.pipelines.queue import MAX_QUEUED_ITEMS, ItemQueue
from tailrace.origin.pipelines.runner import STAGE_SKIPPED, STAGE_SWITCHED
from tailrace.origin.pipelines.switches import CHANGES, REQUESTS, Change, request_line
from tailrace.origin.pipelines.table import PipelineTable
from tailrace.origin.producer import Request
from tailrace.origin.producers.production import Production
from tests.origin.pipelines import staged
from tests.origin.pipelines.staged import STREAM, switches
from tests.origin.producers.asked import recipe

pytestmark = pytest.mark.anyio

OWN = "tests.origin.pipelines.staged"
NAMES = ("b", "a", "c")
SEEDS = 60
WORDS = 40


def test_a_request_counts_from_the_next_item_on() -> None:
    switching, _ = switches(NAMES)
    assert switching.due("a", 0) is None
    switching.add_request(request_line([StageSwitch("a", False), StageSwitch("b", True)]))
    assert switching.due("a", 5) == Change("a", 5, False, 1)
    assert switching.due("b", 5) is None  # it is on
    assert switching.due("c", 5) is None


async def test_a_failure_settles_the_requests_before_it() -> None:
    switching, stored = switches(NAMES)
    switching.add_request(request_line([StageSwitch("a", True)]))
    await switching.carry_out(switching.failed("a", 3, "ValueError: no"))
    assert switching.due("a", 4) is None
    switching.add_request(request_line([StageSwitch("a", True)]))
    change = switching.due("a", 5)
    assert change == Change("a", 5, True, 2)
    await switching.carry_out(change)
    assert switching.due("a", 5) is None
    assert stored == [b'["a", 3, false, 1, "ValueError: no"]\n', b'["a", 5, true, 2, ""]\n']


async def test_changes_of_an_earlier_run_come_at_the_same_items() -> None:
    off, on = Change("a", 3, False, 1), Change("a", 3, True, 2)
    first, stored = switches(NAMES)
    await first.carry_out(off)
    await first.carry_out(on)
    again, stored_again = switches(NAMES)
    again.add_changes(b"".join(stored))
    for _ in range(3):
        again.add_request(request_line([StageSwitch("a", False), StageSwitch("b", False)]))
    for _ in range(2):
        again.begin_run()
        assert [again.due("a", item) for item in range(3)] == [None] * 3
        assert again.due("b", 0) is None  # while changes behind it are repeated
        assert again.due("a", 3) == off
        await again.carry_out(off)
        assert again.due("a", 3) == on
        await again.carry_out(on)
        assert again.due("a", 3) == Change("a", 3, False, 3)
        assert again.due("b", 0) == Change("b", 0, False, 3)
    assert stored_again == []


def test_a_request_waits_while_outputs_are_repeated() -> None:
    switching, _ = switches(NAMES, is_new=[False])
    switching.add_request(request_line([StageSwitch("a", False)]))
    assert switching.due("a", 0) is None
    assert switching.due("a", 1) == Change("a", 1, False, 1)


@pytest.mark.parametrize("log", [b"{}\n", b"[1]\n", b'["a", 1, 2, 3, 4, 5]\n', b"x\n"])
def test_a_damaged_log_is_refused(log: bytes) -> None:
    with pytest.raises(Damaged, match="malformed"):
        switches(NAMES)[0].add_changes(log)


class Logs(OriginClient):
    """An origin that keeps byte logs in memory, and answers after a random number of turns."""

    def __init__(self, random: Random) -> None:
        super().__init__(Path("none"))
        self.logs: dict[str, bytes] = {}
        self._random = random

    async def read_log(self, name: str, caller: Caller) -> bytes:
        await self._wait()
        return self.logs.get(name, b"")

    async def append_log(
        self, name: str, caller: Caller, offset: int, data: bytes, limit: int
    ) -> None:
        await self._wait()
        log = self.logs.get(name, b"")
        if len(log) != offset:
            raise Conflict("another worker")
        self.logs[name] = log + data
        await self._wait()

    async def follow_log(self, name: str, caller: Caller) -> AsyncGenerator[bytes, None]:
        read = 0
        while True:
            await self._wait()
            log = self.logs.get(name, b"")
            if log[read:]:
                yield log[read:]
            read = len(log)

    def request(self, *stages: StageSwitch) -> None:
        """Store a request of a client."""
        name = f"{STREAM.hex()}:{REQUESTS}"
        self.logs[name] = self.logs.get(name, b"") + request_line(stages)

    def forget_requests(self) -> None:
        self.logs.pop(f"{STREAM.hex()}:{REQUESTS}", None)

    @property
    def changes(self) -> bytes:
        return self.logs.get(f"{STREAM.hex()}:{CHANGES}", b"")

    async def _wait(self) -> None:
        for _ in range(self._random.randrange(1, 4)):
            await asyncio.sleep(0)


def table(random: Random) -> PipelineTable:
    shout = {"stage": f"{OWN}:Shout", "name": "shout", "optional": True}
    scattered = {
        "stage": f"{OWN}:Scattered",
        "name": "scattered",
        "optional": random.random() < 0.5,
    }
    kind = random.choice(["Shout", "Unsteady"])
    last = {"stage": f"{OWN}:{kind}", "name": "last", "optional": True}
    between = [shout, scattered] if random.random() < 0.7 else [scattered, shout]
    stages = [{"stage": f"{OWN}:Words"}, *between, last]
    return PipelineTable.model_validate({"stages": stages})


class Stream:
    """A stream of the pipeline: its durable frames, over several runs."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        staged.chance.seed(seed)
        self.logs = Logs(random)
        self.producer = PipelineProducer("served", table(random), self.logs)
        failing = random.randrange(2 * WORDS)
        self.prompt = " ".join(
            "fail" if at == failing else f"w{chr(97 + at % 26)}{chr(97 + at // 26)}"
            for at in range(WORDS)
        )
        off = tuple(name for name in ("shout", "last") if random.random() < 0.2)
        fingerprint = self.producer.about.fingerprint
        self.recipe = recipe(self.prompt, skipped_stages=off, fingerprint=fingerprint)
        self.frames: list[Frame] = []

    @property
    def has_ended(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1], StreamEnd)

    async def run(self, *, is_quiet: bool = False) -> None:
        """Run the stages, until the end or until the worker is killed at a random frame.

        Some of the frames that the worker has sent before its death are not durable.
        """
        random = self.random
        request = Request(self.recipe, "", len(self.frames), stream=STREAM)
        sent: list[Frame] = []
        most = 10 * WORDS if is_quiet else random.randrange(30)
        async with aclosing(Production(self.producer, request, run=1).frames()) as frames:
            async for index, raw in frames:
                frame = decode(raw)[1]
                assert index == len(self.frames) + len(sent)
                sent.append(frame)
                if len(sent) > most:
                    break
                if not is_quiet and random.random() < 0.15:
                    stage = random.choice(["shout", "scattered", "last"])
                    self.logs.request(StageSwitch(stage, random.random() < 0.6))
        lost = 0 if is_quiet else random.choice([0, 1, 3, 20])
        self.frames += sent[: max(0, len(sent) - lost)]


@pytest.mark.parametrize("room", [1, 2, 5, MAX_QUEUED_ITEMS])
async def test_a_killed_run_switches_the_stages_at_the_same_items(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ItemQueue", partial(ItemQueue, room))
    switched = skipped = 0
    for seed in range(SEEDS):
        stream = Stream(seed)
        while not stream.has_ended:
            await stream.run()
        said = "".join(one.text for one in stream.frames if isinstance(one, Token))
        words = re.sub(r"\d+:", "", said)  # `Scattered` numbers the items
        assert words.lower().split() == stream.prompt.split(), seed
        notices = [one.code for one in stream.frames if isinstance(one, Notice)]
        assert len(notices) == len(stream.logs.changes.splitlines()), seed
        switched += notices.count(STAGE_SWITCHED)
        skipped += notices.count(STAGE_SKIPPED)
        frames, stream.frames = stream.frames, []
        stream.logs.forget_requests()  # some may have come after the last item of their stage
        with monkeypatch.context() as quiet:
            quiet.setattr(staged.Unsteady, "odds", 0.0)
            await stream.run(is_quiet=True)
        assert stream.frames == frames, seed
    assert switched > SEEDS // 4
    assert skipped > SEEDS // 40
