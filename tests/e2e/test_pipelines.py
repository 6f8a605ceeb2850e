"""A pipeline whose workers are killed: the reader gets the same text, and nothing forbidden."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.client import Client
from tailrace.ledger.frame import Token
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.pipelines.text_cutter import TextCutter
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.e2e.sse import SSE, Reading, events, resume, start

pytestmark = pytest.mark.anyio

BLOCK_IF, BUFFER_CHARS, ANSWER_TOKENS = "there", 100, 8
SETTINGS = f"""
[origin]
policy = "greedy-dual"  # a model that had a request stays loaded

[models.demo]
folder = "{DEMO_MODEL.resolve()}"
device = "cpu"
kv_mib = 16

[pipelines.safe]
[[pipelines.safe.stages]]
stage = "blocklist"
name = "prompts"
words = ["bomb"]
message = "the prompt was refused"
[[pipelines.safe.stages]]
stage = "model"
model = "demo"
[[pipelines.safe.stages]]
stage = "blocklist"
words = ["the", "a"]
action = "mask"

[pipelines.strict]
[[pipelines.strict.stages]]
stage = "model"
model = "safe"
[[pipelines.strict.stages]]
stage = "blocklist"
patterns = ['\\bwas\\b']
hold_chars = 8

[[pipelines.loud.stages]]
stage = "model"
model = "safe"
[[pipelines.loud.stages]]
stage = "tests.origin.pipelines.staged:ShoutOutside"
name = "shout"
optional = true

[[pipelines.weighed.stages]]
stage = "model"
model = "safe"
[[pipelines.weighed.stages]]
stage = "tests.origin.pipelines.staged:Scale"
name = "scale"
notes = "NOTES"

[pipelines.twice]
[[pipelines.twice.stages]]
stage = "model"
model = "demo"
max_tokens = 20
[[pipelines.twice.stages]]
stage = "model"
name = "second"
model = "demo"
prompt = "Once upon a time {{text}}"

[pipelines.judged]
[[pipelines.judged.stages]]
stage = "route"
model = "demo"
rules = [{{ model = "safe", pattern = '\\bdog\\b' }}]
[[pipelines.judged.stages]]
stage = "classifier"
model = "demo"
prompt = "{{text}} One day"
max_tokens = {ANSWER_TOKENS}
block_if = '{BLOCK_IF}'
buffer_chars = {BUFFER_CHARS}
action = "replace"
"""
REQUEST: dict[str, Any] = {
    "model": "safe",
    "prompt": "Once upon a time",
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
MODELS = ("demo", "safe", "strict", "loud", "weighed", "twice", "judged")
KILLS = ((10, "demo"), (40, "safe"), (70, "safe"))
"""The events at which the worker of a model is killed."""
HELD_EVENTS = 30
"""Number of events behind the one of a kill at which the model is held: no stream has ended."""


class House:
    """An origin with a model and pipelines around it, and two edges."""

    def __init__(self, folder: Path) -> None:
        settings = folder / "tailrace.toml"
        self.loads = folder / "loads"
        settings.write_text(SETTINGS.replace("NOTES", str(self.loads)))
        self.origin = HeldOrigin(folder / "data", config=settings)
        self.edges = [Edge(self.origin), Edge(self.origin)]


@pytest.fixture(scope="module")
async def pipelines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    made = House(tmp_path_factory.mktemp("pipelines"))
    async with running(made.origin, *made.edges):
        async with httpx.AsyncClient(timeout=60.0) as client:
            for model in MODELS:
                await start(client, made.edges[0].url, REQUEST | {"model": model, "max_tokens": 2})
        yield made


def words(text: str) -> set[str]:
    return set(text.lower().replace(".", " ").replace(",", " ").split())


async def test_a_reader_gets_the_same_masked_text_whoever_is_killed(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in pipelines.edges)
    plain = await start(client, one, REQUEST | {"model": "demo"})
    whole = await start(client, one, REQUEST)
    assert {"the", "a"} <= words(plain.text)
    assert not {"the", "a"} & words(whole.text)
    assert whole.text.count("*") > 3
    assert len(whole.text) == len(plain.text)
    reading, left = Reading(), list(KILLS)
    pipelines.origin.hold_behind(plain, left[0][0] + HELD_EVENTS)
    async with client.stream("POST", f"{one}/v1/generate", json=REQUEST, headers=SSE) as response:
        reading.stream = response.headers["Tailrace-Stream"]
        reading.token = response.headers["Tailrace-Token"]
        async for event in events(response):
            reading.events.append(event)
            if left and len(reading.events) == left[0][0]:
                await pipelines.origin.replace_worker(left.pop(0)[1])
                if left:
                    pipelines.origin.hold_behind(plain, left[0][0] + HELD_EVENTS)
                else:
                    pipelines.origin.go_on()
    assert not left
    assert reading.events == whole.events
    assert reading.end["total_tokens"] == plain.end["total_tokens"]
    for cut in (0, 25, len(reading.events) - 1):
        again = Reading(reading.stream, reading.token, reading.events[:cut])
        assert (await resume(client, two, again)).events == reading.events


@pytest.mark.parametrize("model", ["loud", "weighed"])
async def test_a_reader_gets_the_same_text_if_the_process_of_a_stage_is_killed(
    pipelines: House, client: httpx.AsyncClient, model: str
) -> None:
    url = pipelines.edges[0].url
    plain = await start(client, url, REQUEST | {"model": "demo"})
    body = REQUEST | {"model": model}
    whole = await start(client, url, body)
    assert whole.text.isupper() == (model == "loud")
    loads = pipelines.loads.read_text().splitlines()
    reading, left = Reading(), [10, 40]
    pipelines.origin.hold_behind(plain, left[0] + HELD_EVENTS)
    async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if left and len(reading.events) == left[0]:
                left.pop(0)
                await pipelines.origin.kill_stage(model)
                if left:
                    pipelines.origin.hold_behind(plain, left[0] + HELD_EVENTS)
                else:
                    pipelines.origin.go_on()
    assert reading.events == whole.events
    # A stage of kind `gpu` loads before its worker takes streams, and after each kill.
    more = pipelines.loads.read_text().splitlines()[len(loads) :]
    assert loads
    assert len(more) == (2 if model == "weighed" else 0)


async def test_a_prompt_is_refused_before_any_model_has_it(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    refused = await start(client, url, REQUEST | {"prompt": "How do I build a Bomb?"})
    assert refused.text == ""
    assert refused.end["finish_reason"] == "filtered"
    assert refused.end["message"] == "the prompt was refused"
    assert refused.end["total_tokens"] == 0


async def test_a_stage_that_ends_the_stream_cancels_the_model(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    plain = await start(client, url, REQUEST)
    assert " was " in plain.text
    pipelines.origin.hold(len(plain.text) // 2)  # the model never ends by itself
    ended = await start(client, url, REQUEST | {"model": "strict"})
    assert ended.end["finish_reason"] == "filtered"
    assert plain.text.startswith(ended.text)
    assert plain.text[len(ended.text) :].startswith("was")
    while True:
        shown = (await client.get(f"{url}/v1/admin/streams")).json()["streams"]
        if not shown:
            break
    assert pipelines.origin.count("stream.paused") == 0
    pipelines.origin.go_on()


async def test_the_text_of_one_model_is_the_prompt_of_the_next(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    asked = REQUEST | {"max_tokens": 30}
    first = await start(client, url, asked | {"model": "demo", "max_tokens": 20})
    second = {"model": "demo", "prompt": f"Once upon a time {first.text}"}
    expected = await start(client, url, asked | second)
    twice = await start(client, url, asked | {"model": "twice"})
    assert twice.text == expected.text
    assert twice.end["total_tokens"] == 50


async def judged(client: httpx.AsyncClient, url: str, text: str) -> list[str]:
    """Return the buffers of a text as the classifier passes them on, by asking its model."""
    buffers = []
    for buffer in TextCutter(None, BUFFER_CHARS).feed(text, last=True):
        question = {"model": "demo", "prompt": f"{buffer} One day", "temperature": 0}
        answer = await start(client, url, question | {"max_tokens": ANSWER_TOKENS})
        buffers.append("[removed]" if BLOCK_IF in answer.text.lower() else buffer)
    return buffers


async def test_a_model_that_a_rule_chooses_is_judged_by_another_whoever_is_killed(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    plain = await start(client, url, REQUEST | {"model": "demo"})
    buffers = await judged(client, url, plain.text)
    assert 0 < buffers.count("[removed]") < len(buffers)
    whole = await start(client, url, REQUEST | {"model": "judged"})
    assert whole.text == "".join(buffers)
    assert whole.end["total_tokens"] > plain.end["total_tokens"]  # with those of the answers
    pipelines.origin.hold(len(plain.text) // 2)
    killed = await start(client, url, REQUEST | {"model": "judged"}, stop_after=1)
    await pipelines.origin.replace_worker("judged")
    pipelines.origin.go_on()
    assert (await resume(client, url, killed)).events == whole.events


async def test_a_rule_chooses_another_model(pipelines: House, client: httpx.AsyncClient) -> None:
    url = pipelines.edges[0].url
    asked = REQUEST | {"prompt": "Once upon a time a Dog", "max_tokens": 20}
    safe = await start(client, url, asked)
    assert "*" in safe.text
    made = await start(client, url, asked | {"model": "judged"})
    assert made.text == "".join(await judged(client, url, safe.text))


async def test_no_client_can_read_the_stream_of_the_model_inside(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    pipelines.origin.hold(100)
    own = await start(client, url, REQUEST, stop_after=5)
    shown = (await client.get(f"{url}/v1/admin/streams")).json()["streams"]
    [inner] = [one for one in shown if one["id"] != own.stream]
    assert inner["tenant"] == "pipelines:"
    for path in ("", "?snapshot=1"):
        answer = await client.get(f"{url}/v1/generate/{inner['id']}{path}", headers=SSE)
        assert answer.status_code == 404
    branch = {"index": 3}
    answer = await client.post(f"{url}/v1/generate/{inner['id']}/branch", json=branch)
    assert answer.status_code == 404
    pipelines.origin.go_on()


SKIPS = REQUEST | {"model": "loud", "stages": {"shout": False}}


async def test_a_stage_that_a_request_skips_is_skipped_whoever_is_killed(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    safe = await start(client, url, REQUEST)
    whole = await start(client, url, SKIPS)
    assert whole.events == safe.events  # without a notice
    pipelines.origin.hold(len(safe.text) // 2)
    killed = await start(client, url, SKIPS, stop_after=3)
    await pipelines.origin.replace_worker("loud")
    pipelines.origin.go_on()
    assert (await resume(client, url, killed)).events == whole.events
    loud = await start(client, url, SKIPS | {"stages": {"shout": True}})
    assert loud.text == safe.text.upper()


async def test_a_stage_is_skipped_in_other_dialects_and_clients(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    asked = SKIPS | {"max_tokens": 12}
    text = (await start(client, url, asked)).text
    assert not text.isupper()
    answer = await client.post(f"{url}/v1/completions", json=asked)
    assert answer.json()["choices"][0]["text"] == text
    async with Client([url]) as own:
        frames = [one async for one in own.generate(**asked)]
    assert "".join(one.text for one in frames if isinstance(one, Token)) == text


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ({"shouts": False}, "stages.shouts"),
        ({"shout": False, "model": True}, "stages.model"),
        ({"shout": "off"}, "stages.shout"),
    ],
)
async def test_a_switch_that_cannot_be_is_refused_by_name(
    pipelines: House, client: httpx.AsyncClient, stages: dict[str, Any], field: str
) -> None:
    url = pipelines.edges[0].url
    for path in ("generate", "completions"):
        answer = await client.post(f"{url}/v1/{path}", json=SKIPS | {"stages": stages})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param" if path == "completions" else "field"] == field
    of_a_model = {"model": "demo", "prompt": "x", "stages": {"shout": False}}
    answer = await client.post(f"{url}/v1/generate", json=of_a_model)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "stages.shout")


async def test_operators_see_where_the_time_of_a_stream_goes_while_it_runs(
    pipelines: House, client: httpx.AsyncClient
) -> None:
    url = pipelines.edges[0].url
    plain = await start(client, url, REQUEST | {"model": "demo"})
    pipelines.origin.hold(len(plain.text) // 2)
    own = await start(client, url, REQUEST, stop_after=5)
    stages: dict[str, float] = {}
    while not stages:
        shown = (await client.get(f"{url}/v1/admin/streams")).json()["streams"]
        [row] = [one for one in shown if one["id"] == own.stream]
        stages = row["time"].get("stages", {})
    assert [*stages] == ["prompts", "model", "blocklist"]
    assert 0 < stages["blocklist"] < stages["model"]
    assert row["time"]["decode"] > 0
    pipelines.origin.go_on()
    whole = await resume(client, url, own)
    assert whole.end["finish_reason"] == "length"
    lately = None
    while lately is None:
        lately = (await client.get(f"{url}/v1/admin/streams/{own.stream}")).json()["lately"]
    assert lately["time"]["stages"]["model"] >= stages["model"]
