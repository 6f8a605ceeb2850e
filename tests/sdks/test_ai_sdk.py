"""The AI SDK, unmodified, against real edges: its chat and providers, an EventSource."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.sdks.conftest import MAJORS, Script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=MAJORS)
async def told(request: pytest.FixtureRequest, house: House, node: Script) -> dict[str, Any]:
    """Run the script with each major version of the AI SDK; return what it saw."""
    urls = (edge.url for edge in house.edges)
    seen: dict[str, Any] = await node("ai_sdk.mjs", request.param, *urls)
    return seen


async def test_a_chat_is_answered_and_asked_again(told: dict[str, Any]) -> None:
    chat = told["conversation"]
    assert (chat["status"], chat.get("error")) == ("ready", None)
    assert chat["roles"] == ["user", "assistant"] * 2
    assert all(chat["texts"])
    assert chat["reasons"] == ["length"] * 3
    assert chat["unknown"] == 204


@pytest.mark.parametrize("kept", ["none", "part", "whole"])
async def test_an_answer_that_ended_while_the_page_was_away_is_had_whole(
    told: dict[str, Any], kept: str
) -> None:
    chat = told["conversation"]
    assert chat["again"][kept] == {"status": "ready", "texts": chat["texts"]}


async def test_what_is_refused_is_told_to_who_asked(told: dict[str, Any]) -> None:
    refused = told["refused"]
    assert refused["status"] == "error"
    unsupported = "message parts of type 'file' are not supported: models take text only"
    assert refused["error"] == unsupported


@pytest.mark.parametrize("provider", ["responses", "compatible"])
async def test_a_provider_streams_what_it_gets_at_once(told: dict[str, Any], provider: str) -> None:
    answer = told["provided"][provider]
    assert answer["streamed"] == answer["whole"] and answer["pieces"] > 10
    assert answer["reason"] in ("stop", "length") and answer["usage"] > 10


@pytest.mark.parametrize("provider", ["openai.responses", "openai.chat"])
async def test_a_tool_is_called_and_its_result_answered(
    told: dict[str, Any], provider: str
) -> None:
    answer = told["tools"][provider]
    assert set(answer["called"]) == {"double"} and answer["steps"] == 2
    assert answer["text"]


async def test_an_eventsource_reads_the_stream_that_a_response_is(told: dict[str, Any]) -> None:
    assert told["eventSource"]["events"] == told["eventSource"]["text"] != ""
