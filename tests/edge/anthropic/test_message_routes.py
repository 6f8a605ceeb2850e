"""`/v1/messages` over a real link: what the origin is asked, and what clients are answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tailrace.edge.anthropic.routes import VERSIONS
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.telemetry.request_metrics import TelemetryMiddleware
from tailrace.ledger.errors import LedgerFull, Unavailable
from tailrace.ledger.frame import (
    LINK_CODEC,
    Answer,
    Body,
    BodyEnd,
    Call,
    Cancel,
    FinishReason,
    Message,
    Open,
    Resume,
    StreamEnd,
    Token,
)
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS
from tailrace.ledger.links.token_count import TOKEN_COUNT
from tests.edge.scripted_origin import PROMPT_TOKENS, STREAM, ScriptedOrigin

pytestmark = pytest.mark.anyio

ID = f"msg_{STREAM.hex()}"
PATH = "/v1/messages"
WORDS = 3
HELLO: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Hello"}],
}


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(WORDS)


@pytest.fixture(params=VERSIONS)
async def client(
    request: pytest.FixtureRequest, origin: ScriptedOrigin
) -> AsyncIterator[httpx.AsyncClient]:
    async with origin.serving() as link:
        app = TelemetryMiddleware(create_app(link, EdgeConfig(http=("127.0.0.1:0",))), None)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://127.0.0.1",
            headers={"anthropic-version": request.param},
        ) as made:
            yield made


def cut(whole: str) -> list[str]:
    """Return the events of a body, each with its end."""
    return [f"{event}\n\n" for event in whole.split("\n\n")[:-1]]


async def test_a_message_is_the_same_however_it_is_read(client: httpx.AsyncClient) -> None:
    made = await client.post(PATH, json=HELLO)
    assert made.json() == {
        "id": ID,
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": " w0 w1 w2"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": PROMPT_TOKENS,
            "output_tokens": WORDS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert (await client.get(f"{PATH}/{ID}")).json() == made.json()
    streamed = await client.post(PATH, json=HELLO | {"stream": True})
    for headers, query in (
        ({}, "?stream=true"),
        ({"Accept": "text/event-stream"}, ""),
        ({"Accept": "text/event-stream"}, "?token=v1.x"),
    ):
        read = await client.get(f"{PATH}/{ID}{query}", headers=headers)
        assert read.text == streamed.text
    again = await client.get(f"{PATH}/{ID}?stream=false", headers={"Last-Event-ID": "1"})
    assert again.json() == made.json()


async def test_cached_tokens_are_asked_for_when_a_message_ends(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.cached_tokens = 2
    usage = {"input_tokens": PROMPT_TOKENS - 2, "cache_read_input_tokens": 2}
    whole = (await client.post(PATH, json=HELLO)).json()["usage"]
    read = (await client.get(f"{PATH}/{ID}")).json()["usage"]
    assert whole == read == whole | usage
    streamed = (await client.post(PATH, json=HELLO | {"stream": True})).text
    last = json.loads(cut(streamed)[-2].partition("data: ")[2])
    assert last["usage"] == whole
    for after in range(len(cut(streamed))):
        resumed = await client.get(f"{PATH}/{ID}?starting_after={after}")
        assert resumed.text == "".join(cut(streamed)[after + 1 :])
    calls = [frame for frame in origin.received if isinstance(frame, Call)]
    assert {(call.object, call.name) for call in calls} == {(CACHED_TOKENS, STREAM.hex())}
    _, resume = LINK_CODEC.decode(calls[0].body)
    assert resume == Resume(STREAM, token="v1.token")


async def test_a_message_ends_although_no_origin_knows_its_cached_tokens(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.cached_tokens = None
    for stream in (False, True):
        answer = await client.post(PATH, json=HELLO | {"stream": stream})
        assert answer.status_code == 200
        assert '"cache_read_input_tokens":0' in answer.text


async def test_every_suffix_completes_its_prefix(client: httpx.AsyncClient) -> None:
    whole = (await client.post(PATH, json=HELLO | {"stream": True})).text
    events = cut(whole)
    assert len(events) == WORDS + 5
    for after in range(len(events)):
        prefix = "".join(events[: after + 1])
        by_query = await client.get(f"{PATH}/{ID}?starting_after={after}")
        by_header = await client.get(f"{PATH}/{ID}", headers={"Last-Event-ID": str(after)})
        assert prefix + by_query.text == prefix + by_header.text == whole
        assert by_query.status_code == 200
        assert by_header.status_code == (204 if after == len(events) - 1 else 200)
    for after in (len(events), 10**19):
        beyond = await client.get(f"{PATH}/{ID}?starting_after={after}")
        assert (beyond.status_code, beyond.json()["error"]) == (
            400,
            {
                "type": "invalid_request_error",
                "message": f"starting_after: The answer has no event {after} yet: its last one is"
                f" {len(events) - 1}.",
            },
        )


async def test_a_head_has_the_headers_alone(client: httpx.AsyncClient) -> None:
    for query in ("", "?stream=true", "?starting_after=2", "?starting_after=7"):
        head = await client.head(f"{PATH}/{ID}{query}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["tailrace-stream"] == STREAM.hex()


async def test_a_position_that_is_no_number_is_refused(client: httpx.AsyncClient) -> None:
    hint = "(send the `id` of the last event that you have, in decimal digits)"
    for headers, query, field in (
        ({}, "?starting_after=x", "starting_after"),
        ({"Last-Event-ID": "x"}, "", "Last-Event-ID"),
        ({"Last-Event-ID": "1"}, "?starting_after=2", "starting_after"),
    ):
        answer = await client.get(f"{PATH}/{ID}{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            f"{field}: not the number of one event {hint}",
        )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", PATH, 200),
        ("GET", f"{PATH}/{ID}", 200),
        ("GET", f"{PATH}/{ID}?stream=true", 200),
        ("GET", f"{PATH}/{ID}?starting_after=2", 200),
        ("GET", f"{PATH}/{ID}?starting_after=x", 400),
        ("POST", f"{PATH}/{ID}/cancel", 200),
        ("GET", f"{PATH}/nothing", 404),
        ("GET", f"{PATH}/{ID}/nothing", 404),
        ("PUT", PATH, 405),
    ],
)
async def test_every_answer_names_its_request(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    for stream in (False, True):
        body = HELLO | {"stream": stream}
        answer = await client.request(method, path, json=body, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
        if status == 200:
            assert answer.headers["tailrace-stream"] == STREAM.hex()
            assert answer.headers["tailrace-token"] == "v1.token"
        else:
            assert answer.json()["request_id"] == "mine"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "anthropic-version: header is required (one of 2023-06-01, 2026-10-21)"),
        (
            {"anthropic-version": "2023-01-01"},
            "anthropic-version: '2023-01-01' is not supported (one of 2023-06-01, 2026-10-21)",
        ),
    ],
)
async def test_a_post_has_to_name_the_version(
    client: httpx.AsyncClient, headers: dict[str, str], said: str
) -> None:
    del client.headers["anthropic-version"]
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = await client.post(path, json=HELLO, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (
            400,
            {"type": "invalid_request_error", "message": said},
        )
    # The routes that the API does not have do not need it: an EventSource cannot send it.
    assert (await client.get(f"{PATH}/{ID}?stream=true")).status_code == 200
    assert (await client.post(f"{PATH}/{ID}/cancel")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_origin_have_the_types_of_the_api(
    client: httpx.AsyncClient, origin: ScriptedOrigin, stream: bool
) -> None:
    unknown = await client.post(PATH, json=HELLO | {"model": "x", "stream": stream})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert unknown.headers["x-should-retry"] == "false"
    assert unknown.headers.get_list("request-id") == unknown.headers.get_list("x-request-id")
    origin.refusal = LedgerFull("the ledger is full")
    full = await client.post(PATH, json=HELLO | {"stream": stream})
    assert (full.status_code, full.json()["error"]) == (
        529,
        {"type": "overloaded_error", "message": "the ledger is full"},
    )
    assert full.headers["x-should-retry"] == "true" and int(full.headers["retry-after-ms"]) > 0
    origin.refusal = Unavailable("no worker can start")
    gone = await client.post(PATH, json=HELLO | {"stream": stream})
    assert (gone.status_code, gone.json()["error"]["type"]) == (503, "api_error")


async def test_a_message_that_was_cancelled_can_be_read_as_far_as_it_got(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.frames = [Token("Once", 0), StreamEnd(1, FinishReason.CANCELLED, 1, PROMPT_TOKENS)]
    origin.released = 2
    headers = {"Tailrace-Token": "v1.x"}
    cancelled = await client.post(f"{PATH}/{ID}/cancel", headers=headers)
    assert Cancel(STREAM, "v1.x") in origin.received
    read = await client.get(f"{PATH}/{ID}")
    for document in (cancelled.json(), read.json()):
        assert document["content"] == [{"type": "text", "text": "Once"}]
        assert document["stop_reason"] == "cancelled"
    waited = await client.post(PATH, json=HELLO)
    assert (waited.status_code, waited.json()["error"]) == (
        409,
        {"type": "invalid_request_error", "message": "the stream was cancelled"},
    )
    assert waited.headers["tailrace-stream"] == STREAM.hex()


async def test_a_message_that_failed_is_an_error_that_names_its_stream(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    end = StreamEnd(1, FinishReason.ORIGIN_LOST, 1, PROMPT_TOKENS, "lost", retryable=True)
    origin.frames, origin.released = [Token("Once", 0), end], 2
    for answer in (await client.post(PATH, json=HELLO), await client.get(f"{PATH}/{ID}")):
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "api_error")
        assert answer.headers["tailrace-stream"] == STREAM.hex()


async def test_a_running_message_is_read_without_waiting(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.released = 2
    document = (await client.get(f"{PATH}/{ID}")).json()
    assert document["content"] == [{"type": "text", "text": " w0 w1"}]
    assert (document["stop_reason"], document["usage"]["output_tokens"]) == (None, 0)
    [read] = [frame for frame in origin.received if isinstance(frame, Resume)]
    assert not read.follow


async def test_the_key_of_a_request_goes_to_the_origin(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    await client.post(PATH, json=HELLO, headers={"Idempotency-Key": "mine"})
    [asked] = [frame for frame in origin.received if isinstance(frame, Open)]
    assert asked.idempotency_key == "mine"


async def test_tokens_are_counted_by_an_origin_that_has_the_model(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.answers = (Answer(200), Body(b"12"), BodyEnd())
    asked = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 4000}}
    counted = await client.post(f"{PATH}/count_tokens", json=asked | thinking)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 12})
    [call] = [frame for frame in origin.received if isinstance(frame, Call)]
    assert (call.object, call.name, call.method) == (TOKEN_COUNT, "demo", "GET")
    _, wanted = LINK_CODEC.decode(call.body)
    assert isinstance(wanted, Open) and wanted.messages == (Message("user", "Hello"),)
    refused = await client.post(f"{PATH}/count_tokens", json={"model": "demo"})
    assert refused.json()["error"]["message"] == (
        "messages: this field is required (a list of messages)"
    )
