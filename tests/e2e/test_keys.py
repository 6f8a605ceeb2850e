"""An edge that asks for API keys, over real sockets: two tenants, pages, tokens, and the logs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from typer.testing import CliRunner
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from tailrace.cli import app
from tailrace.client import Client
from tailrace.ledger.errors import Unauthorized
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Frame,
    Hello,
    Open,
    Opened,
    Resume,
    StreamError,
    decode,
    encode,
    split,
)
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import after_retry

pytestmark = pytest.mark.anyio

PROMPT = "The secret of the old lighthouse"
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "seed": 7}
SSE = {"Accept": "text/event-stream"}


class House(NamedTuple):
    """An origin and an edge with a file of API keys."""

    origin: Origin
    edge: Edge
    keys: Path

    def add(self, tenant: str, *options: object) -> str:
        words = ["key", "add", tenant, "--tenant", tenant, "--keys", self.keys, *options, "--json"]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        key: str = json.loads(result.stdout)["key"]
        return key


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("keys")
    origin = Origin(folder)
    house = House(origin, Edge(origin), folder / "api-keys.json")
    house.add("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILRACE_EDGE_API_KEYS", str(house.keys))
        patch.setenv("TAILRACE_EDGE_LOG_LEVEL", "debug")
        async with running(origin, house.edge):
            yield house


async def added(house: House, tenant: str, *options: object) -> dict[str, str]:
    """Return the header with a new key, which the running edge has read."""
    before = sum(e.get("message") == "reloaded" for e in house.edge.events)
    key = house.add(tenant, *options)
    await house.edge.saw("reloaded", before + 1)
    return {"Authorization": f"Bearer {key}"}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_tenant_has_its_streams_to_itself(house: House, client: httpx.AsyncClient) -> None:
    url = house.edge.url
    acme, other = await added(house, "acme"), await added(house, "other")
    refused = await client.post(f"{url}/v1/generate", json=BODY)
    assert code_of(refused) == (401, "no_key")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/version", "/web/tailrace/wire.js"):
        assert (await client.get(url + path)).status_code == 200
    assert (await client.get(f"{url}/readyz")).json() == {"ready": True, "reasons": []}
    told = (await client.get(f"{url}/readyz", headers=acme)).json()
    assert [one["origin"] for one in told["origins"]] == [house.origin.link]
    made = await client.post(f"{url}/v1/generate", json=BODY, headers=acme)
    assert made.status_code == 200 and made.json()["total_tokens"] == 24
    stream = f"{url}/v1/generate/{made.json()['id']}"
    assert (await client.get(stream, headers=acme)).json()["text"] == made.json()["text"]
    assert code_of(await client.get(stream, headers=other)) == (404, "unknown_stream")
    assert code_of(await client.get(stream)) == (401, "no_key")
    notes = f"{url}/v1/stream/notes"
    for each, text in ((acme, "acme's"), (other, "other's")):
        plain = each | {"Content-Type": "text/plain"}
        assert (await client.put(notes, headers=plain, content=text)).status_code == 201
    assert (await client.get(f"{notes}?offset=-1", headers=acme)).text == "acme's"
    assert (await client.get(f"{notes}?offset=-1", headers=other)).text == "other's"
    key = acme["Authorization"].removeprefix("Bearer ")
    async with Client([url], api_key=key) as ours:
        frames = [frame async for frame in ours.resume(made.json()["id"])]
    assert frames
    async with Client([url]) as nobody:
        with pytest.raises(Unauthorized):
            await anext(aiter(nobody.generate(prompt="x")))


async def test_a_key_of_class_batch_gets_no_urgent_streams(
    house: House, client: httpx.AsyncClient
) -> None:
    url = house.edge.url
    key = await added(house, "night", "--class", "batch")
    admin = await added(house, "default", "--rights", "admin")
    made = await client.post(f"{url}/v1/generate", json=BODY, headers=key)
    assert made.status_code == 200
    for path, body, field in (
        ("/v1/generate", BODY, "field"),
        ("/v1/completions", BODY, "param"),
    ):
        refused = await client.post(
            url + path, json=body | {"priority": "interactive"}, headers=key
        )
        assert code_of(refused) == (403, "class_not_allowed")
        assert refused.json()["error"][field] == "priority"
    chat = {"messages": [{"id": "1", "role": "user", "parts": [{"type": "text", "text": "x"}]}]}
    refused = await client.post(
        f"{url}/api/chat", json=chat | {"model": "demo", "priority": "standard"}, headers=key
    )
    assert refused.status_code == 403
    assert "bound to the class 'batch'" in refused.text
    told = await client.get(f"{url}/v1/admin/streams/{made.json()['id']}", headers=admin)
    assert told.json()["recipe"]["priority"] == "batch"


async def test_every_error_of_the_ai_sdks_routes_is_plain_text(
    house: House, client: httpx.AsyncClient
) -> None:
    url, key = house.edge.url, await added(house, "pages-of-ai-sdk")
    for path in ("/api/chat", "/api/chat/chat-1/stream"):
        for headers in ({}, {"Authorization": "Bearer tr_wrong"}):
            refused = await client.request(
                "POST" if path == "/api/chat" else "GET", url + path, headers=headers
            )
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert refused.headers["Content-Type"].startswith("text/plain")
            assert "API key" in refused.text and "{" not in refused.text
    for method, path, body in (
        ("POST", "/api/chat", "{"),
        ("DELETE", "/api/chat", ""),
        ("GET", "/api/chat/chat-1", ""),
        ("GET", f"/api/chat/{'x' * 129}/stream", ""),
    ):
        refused = await client.request(method, url + path, headers=key, content=body)
        assert refused.status_code in (400, 404, 405)
        assert refused.headers["Content-Type"].startswith("text/plain")


async def test_ollamas_client_is_told_which_api_is_served(
    house: House, client: httpx.AsyncClient
) -> None:
    url, key = house.edge.url, await added(house, "ollama")
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    chat = await client.post(f"{url}/api/chat", json=body, headers=key)
    assert chat.status_code == 400
    assert "AI SDK" in chat.text and "/v1/chat/completions" in chat.text
    tags = await client.get(f"{url}/api/tags", headers=key)
    assert tags.status_code == 404 and "Ollama's API is not supported" in tags.text


async def test_a_page_reads_with_a_token_that_its_server_gave_it_and_can_do_no_more(
    house: House, client: httpx.AsyncClient
) -> None:
    reader = await added(house, "pages", "--rights", "generate,read")
    url = house.edge.url
    made = await client.post(f"{url}/v1/generate", json=BODY, headers=reader | SSE)
    stream = f"{url}/v1/generate/{made.headers['Tailrace-Stream']}"
    token = made.headers["Tailrace-Token"]
    # An EventSource cannot send headers.
    seen = await client.get(f"{stream}?token={token}", headers=SSE)
    assert after_retry(seen.text) == after_retry(made.text)
    assert seen.headers["Referrer-Policy"] == "no-referrer"
    by_header = {"Tailrace-Token": token}
    assert (await client.get(stream, headers=by_header)).status_code == 200
    for headers in (by_header, reader):
        refused = await client.post(f"{stream}/cancel", headers=headers)
        assert code_of(refused) == (403, "missing_right")
    assert code_of(await client.get(f"{stream}?token={token}x")) == (401, "bad_token")


async def test_a_page_opens_a_websocket_with_a_key_or_reads_with_tokens_alone(
    house: House, client: httpx.AsyncClient
) -> None:
    key = (await added(house, "sockets"))["Authorization"].removeprefix("Bearer ")
    url = house.edge.url.replace("http", "ws") + "/v1/ws"
    offered = [Subprotocol("tailrace"), Subprotocol(f"tailrace-key.{key}")]
    wanted = Open("demo", prompt=PROMPT, max_tokens=4, credit=100)

    async def first_answer(socket: Any, frame: Frame) -> Frame:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")) + encode(frame, 1))
        while True:
            for raw in split(await socket.recv()):
                corr, answer = decode(raw)
                if corr == 1:
                    return answer

    async with connect(url, subprotocols=offered, compression=None, proxy=None) as socket:
        assert socket.subprotocol == "tailrace"
        opened = await first_answer(socket, wanted)
    assert isinstance(opened, Opened)
    async with connect(url, compression=None, proxy=None) as socket:
        refused = await first_answer(socket, wanted)
        assert isinstance(refused, StreamError) and refused.code == "no_key"
        await socket.send(encode(Resume(opened.stream, token=opened.token, credit=9), 2))
        answers: list[Frame] = []
        while not answers:
            message = await socket.recv(decode=False)
            answers = [frame for corr, frame in map(decode, split(message)) if corr == 2]
        assert isinstance(answers[0], Opened)


async def test_metrics_are_for_administrators(house: House, client: httpx.AsyncClient) -> None:
    url = f"{house.edge.url}/metrics"
    assert code_of(await client.get(url)) == (401, "no_key")
    assert code_of(await client.get(url, headers=await added(house, "curious"))) == (
        403,
        "missing_right",
    )
    shown = await client.get(url, headers=await added(house, "default", "--rights", "admin"))
    assert "tailrace_edge_origin_up{" in shown.text


async def test_a_revoked_key_is_refused_while_the_edge_runs(
    house: House, client: httpx.AsyncClient
) -> None:
    brief = await added(house, "brief", "--requests-per-s", "0.001")
    names = f"{house.edge.url}/v1/stream/none"
    assert (await client.get(names, headers=brief)).status_code == 404
    limited = await client.get(names, headers=brief)
    assert code_of(limited) == (429, "too_many_requests")
    assert int(limited.headers["Retry-After"]) > 100
    before = sum(e.get("message") == "reloaded" for e in house.edge.events)
    key = brief["Authorization"].removeprefix("Bearer ")
    revoked = CliRunner().invoke(app, ["key", "revoke", key, "--keys", str(house.keys)])
    assert revoked.exit_code == 0
    await house.edge.saw("reloaded", before + 1)
    assert code_of(await client.get(names, headers=brief)) == (401, "bad_key")


async def test_no_key_token_or_prompt_is_in_a_log(house: House, client: httpx.AsyncClient) -> None:
    """After all that is above, and some that goes wrong; a test of what the logs can hold."""
    headers = await added(house, "logged")
    url, before = house.edge.url, house.edge.count("request")
    made = await client.post(f"{url}/v1/generate", json=BODY, headers=headers)
    token = made.headers["Tailrace-Token"]
    stream = f"{url}/v1/generate/{made.json()['id']}"
    await client.get(f"{stream}?token={token}", headers=SSE)
    await client.get(f"{stream}?token={token}&after=x")
    await client.post(f"{url}/v1/generate", json=BODY | {"prompt": [PROMPT]}, headers=headers)
    await client.post(f"{url}/v1/generate", json=BODY | {"max_tokens": -1}, headers=headers)
    await client.post(f"{stream}/steer", json={"text": PROMPT}, headers=headers)
    await client.get(stream, headers={"Tailrace-Token": token + "x"})
    secrets = [headers["Authorization"].split("_", 2)[2], token, token.rpartition(".")[2], PROMPT]
    await house.edge.saw("request", before + 7)  # an answer comes before its line is read
    logs = json.dumps([*house.edge.events, *house.origin.events])
    requests = [event for event in house.edge.events if event.get("message") == "request"]
    assert all(event["request_id"] and event["route"] for event in requests)
    assert "origin link up" in logs and f'"stream": "{made.json()["id"]}"' in logs
    assert [secret for secret in secrets if secret in logs] == []


async def test_a_response_is_its_tenants(house: House, client: httpx.AsyncClient) -> None:
    url = f"{house.edge.url}/v1/responses"
    ours, theirs = await added(house, "responses"), await added(house, "strangers")
    writer = await added(house, "writers", "--rights", "generate")
    asked = {"model": "demo", "input": PROMPT, "max_output_tokens": 8}
    made = await client.post(url, json=asked, headers=ours)
    response, token = f"{url}/{made.json()['id']}", made.headers["Tailrace-Token"]
    paths = ("", "?stream=true", "?stream=true&starting_after=1", "/input_items")
    for path in paths:
        assert (await client.get(response + path, headers=ours)).status_code == 200
        assert (await client.get(response + path, headers={"Tailrace-Token": token})).is_success
        refused = await client.get(response + path, headers=theirs)
        assert code_of(refused) == (404, "unknown_stream")
        assert code_of(await client.get(response + path)) == (401, "invalid_api_key")
    assert code_of(await client.post(f"{response}/cancel", headers=theirs))[0] == 404
    assert code_of(await client.delete(response, headers=theirs))[0] == 404
    going_on = asked | {"previous_response_id": made.json()["id"]}
    refused = await client.post(url, json=going_on, headers=theirs)
    assert code_of(refused) == (400, "previous_response_not_found")
    # A key that may only begin streams may not read them, not even its own.
    own = await client.post(url, json=asked, headers=writer)
    refused = await client.get(f"{url}/{own.json()['id']}", headers=writer)
    assert code_of(refused) == (403, "missing_right")
    deleted = await client.delete(response, headers=ours)
    assert deleted.json() == {"id": made.json()["id"], "object": "response", "deleted": True}
    assert code_of(await client.get(response, headers=ours))[0] == 404


def x_api_key(bearer: dict[str, str]) -> dict[str, str]:
    """Return the headers with which clients of Anthropic's API send the same key."""
    key = bearer["Authorization"].removeprefix("Bearer ")
    return {"X-Api-Key": key, "Anthropic-Version": "2023-06-01"}


def type_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


async def test_a_message_is_its_tenants(house: House, client: httpx.AsyncClient) -> None:
    url = f"{house.edge.url}/v1/messages"
    ours, theirs = x_api_key(await added(house, "ours")), x_api_key(await added(house, "theirs"))
    reader = x_api_key(await added(house, "readers", "--rights", "read"))
    asked = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": PROMPT}]}
    made = await client.post(url, json=asked, headers=ours)
    message, token = f"{url}/{made.json()['id']}", made.headers["Tailrace-Token"]
    for query in ("", "?stream=true", "?starting_after=1"):
        assert (await client.get(message + query, headers=ours)).status_code == 200
        assert (await client.get(message + query, headers={"Tailrace-Token": token})).is_success
        refused = await client.get(message + query, headers=theirs)
        assert type_of(refused) == (404, "not_found_error")
        assert type_of(await client.get(message + query)) == (401, "authentication_error")
    assert (await client.get(f"{message}?stream=true&token={token}")).status_code == 200
    refused = await client.post(f"{message}/cancel", headers=theirs)
    assert type_of(refused) == (404, "not_found_error")
    for path in ("", "/count_tokens"):
        refused = await client.post(url + path, json=asked, headers=reader)
        assert type_of(refused) == (403, "permission_error")
        wrong = {**ours, "X-Api-Key": "tr_wrong"}
        refused = await client.post(url + path, json=asked, headers=wrong)
        assert type_of(refused) == (401, "authentication_error")
    counted = await client.post(f"{url}/count_tokens", json=asked, headers=ours)
    assert counted.json() == {"input_tokens": made.json()["usage"]["input_tokens"]}


async def test_keys_and_tokens_are_asked_for_in_the_words_of_the_api(
    house: House, client: httpx.AsyncClient
) -> None:
    url = house.edge.url
    key = (await added(house, "sdk"))["Authorization"].removeprefix("Bearer ")
    body: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "seed": 1}

    def sdk_of(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)

    async with sdk_of(key) as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(**body, max_tokens=8)
        id_ = raw.parse().id
    for wrong in ("none", f"{key}x"):
        async with sdk_of(wrong) as sdk:
            with pytest.raises(openai.AuthenticationError) as caught:
                await sdk.chat.completions.create(**body)
            assert caught.value.code == "invalid_api_key"
    read = f"{url}/v1/chat/completions/{id_}"
    assert code_of(await client.get(read)) == (401, "invalid_api_key")
    token = {"Tailrace-Token": raw.headers["tailrace-token"]}
    assert (await client.get(read, headers=token)).json()["id"] == id_
    other = await added(house, "foreign")
    assert code_of(await client.get(read, headers=other)) == (404, "unknown_stream")
    models = await client.get(f"{url}/v1/models")
    assert code_of(models) == (401, "invalid_api_key")
    assert (await client.get(f"{url}/health")).status_code == 200


async def test_tenants_share_no_answers_and_branch_only_their_own(house: House) -> None:
    own, other = await added(house, "branching"), await added(house, "elsewhere")
    body = BODY | {"prompt": "An answer of one tenant", "cache": "exact"}
    url = f"{house.edge.url}/v1/generate"
    async with httpx.AsyncClient() as client:
        first, second = [(await client.post(url, json=body, headers=own)) for _ in range(2)]
        foreign = await client.post(url, json=body, headers=other)
        assert "notices" not in first.json()
        assert [notice["code"] for notice in second.json()["notices"]] == ["cached"]
        assert "notices" not in foreign.json()
        assert foreign.json()["text"] == first.json()["text"]
        target = f"{url}/{first.json()['id']}/branch"
        token = {"Tailrace-Token": first.headers["Tailrace-Token"]}
        cut = {"index": 2}
        refused = await client.post(target, json=cut, headers=other)
        assert code_of(refused) == (404, "unknown_stream")
        refused = await client.post(target, json=cut, headers=other | token)
        assert code_of(refused) == (403, "missing_right")
        refused = await client.post(target, json=cut, headers=token)
        assert code_of(refused) == (401, "no_key")
        made = await client.post(target, json=cut, headers=own)
        assert made.status_code == 200
        assert (await client.get(f"{url}/{made.json()['id']}", headers=other)).status_code == 404
