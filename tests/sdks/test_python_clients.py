"""Python's other clients, unmodified: litellm, langchain-openai, instructor and guidellm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import House
from tests.sdks.conftest import Script, done
from tests.sdks.test_chat_completions import ADD, CHAT

pytestmark = pytest.mark.anyio

REQUESTS = 8
ANIMALS = {(animal, legs) for animal in ("fox", "owl") for legs in (2, 4)}
TOKENS = 20


async def text_of(client: httpx.AsyncClient, edge: str, asked: dict[str, Any]) -> str:
    """Return what the native route says."""
    answer = await client.post(f"{edge}/v1/generate", json=asked)
    text: str = answer.json()["text"]
    return text


async def test_litellm(house: House, client: httpx.AsyncClient, python: Script) -> None:
    edge, other = (each.url for each in house.edges)
    said = await python("litellm_client.py", edge, other, json.dumps(CHAT), json.dumps(ADD))
    text = await text_of(client, edge, CHAT)
    assert said["text"] == said["streamed"] == text
    whole, streamed = said["usage"]
    assert whole["completion_tokens"] == streamed["completion_tokens"] == 40
    assert whole["prompt_tokens"] == streamed["prompt_tokens"] > 0
    seen, rest = said["left"]
    assert rest == text and text.startswith(seen) and 0 < len(seen) < len(text)
    assert "cancelled" in said["cancelled"]
    call, pieces = said["calls"]
    assert call == pieces and call[0] == "tool_calls" and call[2] == "add"
    assert json.loads(call[3]).keys() == {"a", "b"}
    assert said["refusals"] == [["NotFoundError", 404], ["BadRequestError", 400]]


async def test_langchain(house: House, client: httpx.AsyncClient, python: Script) -> None:
    edge = house.edges[0].url
    said = await python("langchain_client.py", edge, json.dumps(CHAT))
    text = await text_of(client, edge, CHAT)
    assert said["text"] == said["streamed"] == text and said["chunks"] > 40
    assert said["responses"] == [text, text]
    assert said["usage"][0] == said["usage"][1] and said["usage"][0]["output_tokens"] == 40
    assert said["structured"].keys() == {"animal", "legs"}
    [call], pieces = said["calls"]
    assert pieces == [call] and call["name"] == "add"
    assert call["args"].keys() == {"a", "b"} and {*call["args"].values()} <= {1, 2, 3}
    assert said["refusal"] == ["OpenAIModelNotFoundError", 404]


async def test_instructor(house: House, python: Script) -> None:
    told = await python("instructor_client.py", house.edges[0].url)
    assert set(told) == {"tool_call", "tools_strict", "json_schema_mode", "responses_tools"}
    for mode, animal in told.items():
        assert (animal["animal"], animal["legs"]) in ANIMALS, mode


async def test_guidellm_drives_it(
    house: House, client: httpx.AsyncClient, other_packages: Path, tmp_path: Path
) -> None:
    edge, other = (each.url for each in house.edges)
    asked = [f"Tell me a story about fox number {nth}." for nth in range(REQUESTS)]
    lines = [json.dumps({"prompt": each, "output_tokens_count": TOKENS}) for each in asked]
    prompts, told = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("\n".join(lines))
    await done(
        *(other_packages / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={edge},model=demo"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={told}"),
    )
    [benchmark] = json.loads(told.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    for request in benchmark["requests"]["successful"]:
        kept = await client.get(f"{other}/v1/chat/completions/{request['response_id']}")
        document = kept.json()
        assert request["output"] == document["choices"][0]["message"]["content"]
        assert request["input_metrics"]["text_tokens"] == document["usage"]["prompt_tokens"]
        assert request["output_metrics"]["text_tokens"] == TOKENS
        assert request["time_to_first_token_ms"] > 0 and request["inter_token_latency_ms"] > 0
