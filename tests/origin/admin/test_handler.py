"""An origin's answers to operators, over a real ledger; the tests play the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import Forbidden
from tailrace.ledger.frame import Call, Caller
from tailrace.ledger.interface import StreamInfo
from tailrace.ledger.links.rights import Right
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.admin.handler import AdminHandler
from tailrace.origin.admin.streams import LivePages
from tailrace.origin.config import OriginConfig
from tailrace.origin.workers.load_spans import FORKED, LoadStage, WorkerStart
from tailrace.origin.workers.worker_frame import LoadProgress, RunWaits, StageTime, StageTimes
from tests.origin.edges.test_link import House as LinkHouse
from tests.origin.stage import READY, RECIPE, A, B, C, Stage

pytestmark = pytest.mark.anyio


class House(Stage):
    """A stage with an admin handler before it."""

    def __init__(self, ledger: SqliteLedger, **settings: Any) -> None:
        super().__init__(ledger)
        self.admin = AdminHandler(
            ledger=ledger,
            runs=self.runs,
            metrics=self.metrics,
            config=OriginConfig(max_streams=4, **settings),
            pages=LivePages(self.runs, lambda at_s: round(at_s * 1000)),
            slots=self.slots,
            links=list,
            end=self.end,
            unix_ms=lambda at_s: round(at_s * 1000),
        )

    async def end(self, info: StreamInfo) -> StreamInfo:
        await self.runs.cancel(info.stream)
        return await self.ledger.info(info.stream)

    async def ask(self, asked: str, *, method: str = "GET", body: bytes = b"") -> Any:
        """Return the document, or the error."""
        name, _, query = asked.partition("?")
        request = ObjectRequest(method, f"http://operator/{name}?{query}", body=body)
        answer = await self.admin.answer(name, request)
        assert isinstance(answer.body, bytes)
        document = json.loads(answer.body)
        assert (answer.status >= 400) == ("error" in document)
        return document.get("error", document)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    yield ledger
    await ledger.close()


@pytest.fixture
async def house(ledger: SqliteLedger) -> House:
    return House(ledger)


def ids(page: Any) -> list[str]:
    return [row["id"] for row in page["streams"]]


async def test_a_page_is_a_window_of_the_sorted_streams(house: House) -> None:
    for stream, tenant in ((A, "acme"), (B, "beta"), (C, "acme")):
        house.clock_s += 1
        await house.start(stream, RECIPE.model_copy(update={"tenant": tenant}))
    page = await house.ask("streams?sort=began_ms&order=asc&offset=1&limit=1")
    assert ids(page) == [B.hex()] and (page["live"], page["found"]) == (3, 3)
    assert ids(await house.ask("streams?order=desc")) == [C.hex(), B.hex(), A.hex()]
    found = await house.ask("streams?tenant=acme&limit=1")
    assert (ids(found), found["found"], found["live"]) == ([C.hex()], 2, 3)
    assert ids(await house.ask(f"streams?id={B.hex()[:6].upper()}")) == [B.hex()]
    assert page["states"] == {"waiting": 3}


async def test_with_a_cursor_only_what_has_changed_is_told(house: House) -> None:
    slot, run = await house.running(A)
    await house.start(B)
    first = await house.ask("streams?sort=tokens")
    house.clock_s += 2
    await house.step(slot, run, 0, " the")
    house.runs.readers.begin(A)
    house.runs.resumed(A)
    # Cursors of other origins stand beside ours.
    then = await house.ask(f"streams?sort=tokens&since=ffff0000.7,{first['cursor']}")
    row, unchanged = then["streams"]
    assert unchanged == {"id": B.hex(), "tokens": 0}
    told = {key: row[key] for key in ("state", "tokens", "frames", "readers", "resumes", "last_ms")}
    assert told == {
        "state": "running",
        "tokens": 1,
        "frames": 1,
        "readers": 1,
        "resumes": 1,
        "last_ms": 2000,
    }
    await house.step(slot, run, 1, None)
    last = await house.ask(f"streams?sort=tokens&since={then['cursor']}")
    assert [(one["id"], one["finish_reason"]) for one in last["ended"]] == [(A.hex(), "length")]
    # B has A's place on the worker now? It had one of its own: nothing of it has changed.
    assert last["streams"] == [{"id": B.hex(), "tokens": 0}]
    assert (await house.ask(f"streams?since={last['cursor']}"))["ended"] == []
    # To a cursor of an earlier life of this origin all is new.
    assert len((await house.ask("streams?since=00000000.99"))["streams"][0]) > 2


async def test_a_page_says_where_the_time_of_each_stream_went(house: House) -> None:
    await house.start(A)
    house.clock_s += 1.5
    [waiting] = (await house.ask("streams"))["streams"]
    no_waits = {"batch": 0, "ledger": 0, "relay": 0, "away": 0}
    assert waiting["time"] == {"queue": 1.5, "prefill": 0, "decode": 0} | no_waits
    slot = house.slots[0]
    await house.ready(slot)
    run = slot.last[0]
    house.clock_s += 0.5
    house.runs.worker_waits(slot, RunWaits.of({run: 0.25, run + 1: 9.0}))
    await house.step(slot, run, 0, " the")
    readers = house.runs.readers

    def reach(released: int) -> int:
        return released

    readers.join(A, reach)
    house.clock_s += 0.75  # it has no credit
    readers.begin(A)
    house.clock_s += 0.25
    readers.end(A)
    readers.leave(A, reach, 1)
    house.clock_s += 1
    readers.begin(A)
    times = (StageTime("model", 3, 250_000), StageTime("group", 5, 2_000))
    house.runs.worker_stages(slot, StageTimes(A, times, is_final=False))
    [row] = (await house.ask("streams"))["streams"]
    expected = {"queue": 1.5, "prefill": 0.5, "decode": 2, "batch": 0.25, "ledger": 0}
    expected |= {"relay": 0.75, "away": 1}
    assert row["time"] == expected | {"stages": {"model": 0.25, "group": 0.002}}
    await house.step(slot, run, 1, None)
    house.clock_s += 9
    page = await house.ask("streams")
    assert page["ended"][0]["time"] == row["time"]
    assert (await house.ask(f"streams/{A.hex()}"))["lately"]["time"] == row["time"]


async def test_time_for_commits_is_that_of_the_streams_worker(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, run = await house.running(A)
    append = house.ledger.append

    async def slow(batch: Any) -> Any:
        house.clock_s += 0.25
        return await append(batch)

    monkeypatch.setattr(house.ledger, "append", slow)
    await house.step(slot, run, 0, " the")
    await house.step(slot, run, 1, " end")
    [row] = (await house.ask("streams"))["streams"]
    parts = {"queue": 0, "prefill": 0.25, "decode": 0.25, "batch": 0, "ledger": 0.5}
    assert row["time"] == parts | {"relay": 0, "away": 0}


async def test_frames_are_told_with_the_times_at_which_they_were_released(house: House) -> None:
    slot, run = await house.running(A)
    for index in range(3):
        house.clock_s += 0.25
        await house.step(slot, run, index, f" w{index}")
    told = await house.ask(f"streams/{A.hex()}/frames?start=1&text=1")
    assert [(one["index"], one["at_ms"], one["text"]) for one in told["frames"]] == [
        (1, 500, " w1"),
        (2, 750, " w2"),
    ]
    assert told["next_index"] == 3 and not told["ended"]
    assert "text" not in (await house.ask(f"streams/{A.hex()}/frames"))["frames"][0]
    await house.step(slot, run, 3, None)
    ended = await house.ask(f"streams/{A.hex()}/frames?start=3&text=1")
    assert ended["ended"] and ended["frames"][0]["finish_reason"] == "length"
    assert ended["frames"][0]["at_ms"] == 750  # kept after the end of the stream


async def test_times_of_a_stream_that_came_from_elsewhere_begin_where_it_was_taken_over(
    house: House, ledger: SqliteLedger
) -> None:
    slot, run = await house.running(A)
    await house.step(slot, run, 0, " w0")
    other = House(ledger)
    await other.ready(other.slots[0])
    other.clock_s = 7
    await other.runs.restore([A])
    taken, number = other.slots[0], other.slots[0].last[0]
    await other.step(taken, number, 1, " w1")
    told = await other.ask(f"streams/{A.hex()}/frames")
    assert [one["at_ms"] for one in told["frames"]] == [None, 7000]
    [row] = (await other.ask("streams"))["streams"]
    assert (row["takeovers"], row["tokens"], row["frames"]) == (1, 2, 2)


async def test_a_stream_is_told_without_its_prompt_unless_that_is_asked_for_and_allowed(
    house: House, ledger: SqliteLedger
) -> None:
    recipe = RECIPE.model_copy(
        update={"prompt": "secret words", "stop": ("secret stop",), "note": "secret"}
    )
    await house.start(A, recipe)
    plain = await house.ask(f"streams/{A.hex()}")
    assert "secret" not in json.dumps(plain)
    assert plain["recipe"]["prompt_tokens"] == 2 and plain["live"]["state"] == "waiting"
    assert (await house.ask(f"streams/{A.hex()}?text=1"))["prompt"] == "secret words"
    strict = House(ledger, operator_text=False)
    for asked in ("?text=1", "/frames?text=1"):
        refused = await strict.ask(f"streams/{A.hex()}{asked}")
        assert (refused["code"], refused["hint"]) == (
            "missing_right",
            "the setting origin.operator_text = true allows operators to read text",
        )
    assert (await strict.ask(f"streams/{A.hex()}"))["id"] == A.hex()


async def test_a_cancelled_stream_has_ended_and_says_why(house: House) -> None:
    await house.start(A)  # no worker has it
    told = await house.ask(f"streams/{A.hex()}/cancel", method="POST")
    assert told["ended"] and told["end"]["finish_reason"] == "cancelled"
    assert told["live"] is None and told["lately"]["finish_reason"] == "cancelled"


async def test_the_pool_tells_of_each_worker_and_of_the_stages_of_its_start(house: House) -> None:
    slot, other = house.slots
    house.clock_s = 10
    house.runs.worker_loading(slot, LoadProgress("read", 0, 1))
    house.clock_s = 11
    house.runs.worker_loading(slot, LoadProgress("unpack", 1, 2))
    assert (await house.ask("pool"))["workers"][0]["stage"] == "unpack"
    house.clock_s = 12
    house.runs.worker_loading(slot, LoadProgress("unpack", 2, 2))
    house.clock_s = 13
    stages = LoadStage("start", 9, 10), LoadStage("read", 10, 11), LoadStage("unpack", 11, 13)
    slot.start = WorkerStart(FORKED, 9, 13, stages)
    await house.ready(slot, READY)
    house.runs.worker_loading(other, LoadProgress("read", 0, 1))
    await house.lost(other)
    told = await house.ask("pool")
    good, bad = told["starts"]
    assert [(one["stage"], one["begin_ms"], one["end_ms"]) for one in good["spans"]] == [
        ("start", 9000, 10_000),
        ("read", 10_000, 11_000),
        ("unpack", 11_000, 13_000),
    ]
    assert (good["begin_ms"], good["ready_ms"], good["exit_reason"]) == (9000, 13_000, None)
    assert (bad["ready_ms"], bad["exit_reason"]) == (None, "ended by SIGKILL")
    first, second = told["workers"]
    assert (first["state"], first["model"], first["deaths"]) == ("ready", "demo", 0)
    assert (second["state"], second["deaths"], second["exit_reason"]) == (
        "down",
        1,
        "ended by SIGKILL",
    )


async def test_histograms_are_what_fell_into_each_bucket(house: House) -> None:
    slot, run = await house.running(A)
    house.clock_s += 0.02
    await house.step(slot, run, 0, " a")
    for index in (1, 2):
        house.clock_s += 0.004
        await house.step(slot, run, index, " b")
    told = {one["name"]: one for one in (await house.ask("histograms"))["histograms"]}
    between = told["tailrace_inter_token_latency_seconds"]
    [series] = [one for one in between["series"] if one["labels"] == {"priority": "standard"}]
    counted = dict(zip([*between["bounds"], "more"], series["counts"], strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {0.005: 2}
    assert series["sum"] == pytest.approx(0.008)


async def test_the_ledger_tells_what_it_takes(house: House) -> None:
    await house.start(A)
    told = await house.ask("ledger")
    assert told["used_bytes"] > 0 and told["wal_bytes"] > 0 and told["disk_free_bytes"] > 0


async def test_a_simulation_says_what_policies_would_have_cost(house: House) -> None:
    rows = "".join(f"a,{100 * n},1\n" for n in range(20))
    request = {
        "csv": f"model,arrival_s,duration_s\n{rows}",
        "policies": ["ttl-10", "ttl-1000", "break-even"],
        "cold_cost_gpu_s": 60,
    }
    body = json.dumps(request).encode()
    told = await house.ask("simulate", method="POST", body=body)
    cost = {one["policy"]: one["cost_gpu_s"] for one in told["policies"]}
    # 19 gaps of 99 s: idled through, or left after 10 or 60 s at 60 a cold start.
    assert cost == {"ttl-10": 19 * 70, "ttl-1000": 19 * 99, "break-even": 19 * 120}
    assert told["optimum_gpu_s"] == 19 * 60 and len(told["ttls"]) == 41
    bad = json.dumps(request | {"csv": "model,arrival_s,duration_s\na,1,x\n"}).encode()
    refused = await house.ask("simulate", method="POST", body=bad)
    assert refused["field"] == "csv: row 2: column duration_s"
    both = await asyncio.gather(
        *(house.ask("simulate", method="POST", body=body) for _ in range(2))
    )
    assert [one.get("gaps", one.get("code")) for one in both] == [19, "overloaded"]


@pytest.mark.parametrize(
    ("asked", "method", "code", "field"),
    [
        ("nothing", "GET", "not_found", None),
        ("streams?sort=prompt", "GET", "invalid_request", "sort"),
        ("streams?limit=1001", "GET", "invalid_request", "limit"),
        ("streams?offset=-1", "GET", "invalid_request", "offset"),
        ("streams?limit=1&limit=2", "GET", "invalid_request", "query"),
        ("pool?x=1", "GET", "unknown_field", "x"),
        ("pool", "POST", "method_not_allowed", None),
        (f"streams/{A.hex()}", "GET", "unknown_stream", None),
        (f"streams/{A.hex()}/cancel", "GET", "method_not_allowed", None),
    ],
)
async def test_what_cannot_be_asked_is_refused_with_the_reason(
    house: House, asked: str, method: str, code: str, field: str | None
) -> None:
    refused = await house.ask(asked, method=method)
    assert (refused["code"], refused.get("field")) == (code, field)


async def test_only_operators_have_their_calls_answered(
    ledger: SqliteLedger, checkpoint: Path
) -> None:
    """The edge has looked already; an origin whose edges ask for tenants looks again."""
    service = LinkHouse(ledger, checkpoint).service
    rights = Right.GENERATE | Right.READ | Right.CANCEL
    call = Call(
        object="operator",
        name="pool",
        method="GET",
        url="http://operator/pool",
        headers=(),
        body=b"",
        credit=16,
        caller=Caller("acme", rights),
    )
    with pytest.raises(Forbidden):
        await service.call(call)
