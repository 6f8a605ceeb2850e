"""`/v1/responses` over a real link: what the origin is asked, and what is too much to ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.openai.request import ALL_THERE_IS
from tailrace.edge.openai.responses.request import read_note
from tailrace.ledger.frame import (
    Cancel,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Resume,
    ToolChoice,
    Tools,
)
from tests.edge.scripted_origin import STREAM, ScriptedOrigin

pytestmark = pytest.mark.anyio

ID = f"resp_{STREAM.hex()}"
WORDS = 3


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(WORDS)


@pytest.fixture
async def client(origin: ScriptedOrigin) -> AsyncIterator[httpx.AsyncClient]:
    async with origin.serving() as link:
        app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as made:
            yield made


async def opened(client: httpx.AsyncClient, origin: ScriptedOrigin, **body: Any) -> Open:
    """Return what the origin is asked for by such a request."""
    answer = await client.post("/v1/responses", json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return next(frame for frame in origin.received if isinstance(frame, Open))


async def test_a_request_is_asked_for_in_our_words(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    schema = {"type": "object"}
    wanted = await opened(
        client,
        origin,
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "1 + 1?"},
            {"type": "reasoning", "id": "rs_x", "summary": []},
            {"type": "message", "role": "assistant", "content": "I see."},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "add", "arguments": "[]"},
            {"type": "function_call_output", "call_id": "a", "output": "2"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        ],
        instructions="Answer.",
        tools=[{"type": "function", "name": "add", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        include=["message.output_text.logprobs"],
        truncation="auto",
        top_p=0.5,
        min_p=0.1,
        priority="batch",
        stop="END",
    )
    first, second = (
        '[{"id":"a","name":"add","arguments":"{}"},{"id":"b","name":"add","arguments":"[]"}]',
        '[{"id":"c","name":"add","arguments":"{}"}]',
    )
    assert wanted.messages == (
        Message("system", "Answer."),
        Message("system", "Be brief."),
        Message("user", "1 + 1?"),
        Message("assistant", "I see.", tool_calls=first),
        Message("tool", "2", tool_call_id="a"),
        Message("assistant", "", tool_calls=second),
    )
    functions = '[{"name":"add","parameters":{"type":"object"}}]'
    assert wanted.tools == Tools(functions, ToolChoice.REQUIRED, "add", parallel=False)
    assert wanted.format == OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}')
    assert (wanted.logprobs, wanted.max_tokens) == (0, ALL_THERE_IS)
    assert (wanted.overflow, wanted.priority.word) == (Overflow.DROP_OLDEST, "batch")
    assert (wanted.sampling.top_p, wanted.sampling.min_p, wanted.stop) == (0.5, 0.1, ("END",))
    note = read_note(wanted.note)
    assert note.asked["tool_choice"] == {"type": "function", "name": "add"}
    assert note.input is not None and len(note.input) == 8
    assert "min_p" not in note.asked


async def test_a_delete_is_a_cancel_that_forgets(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    headers = {"Tailrace-Token": "v1.x"}
    await client.post(f"/v1/responses/{ID}/cancel", headers=headers)
    await client.delete(f"/v1/responses/{ID}", headers=headers)
    cancels = [frame for frame in origin.received if isinstance(frame, Cancel)]
    assert cancels == [Cancel(STREAM, "v1.x"), Cancel(STREAM, "v1.x", forget=True)]


async def test_what_is_gone_on_from_has_a_limit_all_together(
    client: httpx.AsyncClient, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = {"type": "item_reference", "id": f"msg_{STREAM.hex()}0000"}
    asked = {"model": "demo", "input": [item, {"role": "user", "content": "?"}]}
    answer = await client.post("/v1/responses", json=asked)
    assert answer.status_code == 200
    reads = [frame for frame in origin.received if isinstance(frame, Resume)]
    assert [read.follow for read in reads] == [False]
    monkeypatch.setattr("tailrace.edge.openai.responses.routes.MAX_EARLIER_BYTES", 40)
    for body in (asked, {"model": "demo", "input": "?", "previous_response_id": ID}):
        refused = await client.post("/v1/responses", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")


async def test_a_number_is_looked_for_no_further_than_it_is(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    whole = (await client.get(f"/v1/responses/{ID}?stream=true")).text.split("\n\n")
    for after in range(len(whole) - 1):
        rest = await client.get(f"/v1/responses/{ID}?stream=true&starting_after={after}")
        assert rest.text.split("\n\n") == whole[after + 1 :]
    last = json.loads(whole[-2].split("data: ")[1])
    assert last["response"]["usage"]["output_tokens"] == WORDS
    beyond = await client.get(f"/v1/responses/{ID}?stream=true&starting_after={len(whole) - 1}")
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "starting_after")
    assert (await client.head(f"/v1/responses/{ID}?stream=true")).status_code == 200
