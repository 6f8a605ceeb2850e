"""The transport of `tailrace/ai-sdk` under the AI SDK's own chat, against real edges."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.sdks.adder import WORDS
from tests.sdks.conftest import MAJORS, Script
from tests.sdks.test_producer import ADDER

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
async def edges(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Edge]]:
    origin = Origin(tmp_path_factory.mktemp("transport"), producer=ADDER)
    made = [Edge(origin), Edge(origin)]
    async with running(origin, *made):
        yield made


@pytest.fixture(scope="module", params=MAJORS)
async def seen(request: pytest.FixtureRequest, edges: list[Edge], node: Script) -> dict[str, Any]:
    """Run the script with each major version of the AI SDK; return what it saw."""
    urls = (edge.url for edge in edges)
    found: dict[str, Any] = await node("transport.mjs", request.param, *urls)
    return found


async def test_a_message_that_is_cut_before_any_frame_comes_whole(seen: dict[str, Any]) -> None:
    cut = seen["cut"]
    assert cut["frames"] > 10
    assert len(cut["parts"]) == 3 * cut["frames"] + 2
    for parts in cut["parts"]:
        assert parts == cut["plain"]
    kinds = [part["type"] for part in cut["plain"]]
    assert kinds == ["step-start", "reasoning", "text", "tool-add", "tool-now"]
    assert cut["ends"] == ["tool-calls"]
    assert min(cut["connections"]) >= 2


async def test_a_reload_shows_the_message_once_and_a_stop_ends_it_for_all(
    seen: dict[str, Any],
) -> None:
    resumed = seen["resumed"]
    assert resumed["texts"] == [[TEXT]] * 3
    assert resumed["ids"] == [True] * 3
    assert resumed["statuses"] == ["ready"] * 3
    assert (resumed["before"], resumed["reason"]) == ("running", "cancelled")
    assert resumed["cancels"] == [1, 0, 0]
    assert resumed["connections"] == 5  # the connection was cut four times


async def test_a_stop_may_leave_only(seen: dict[str, Any]) -> None:
    assert seen["left"] == {
        "state": "detached",
        "cancels": 0,
        "running": "running",
        "status": "ready",
        "reason": "cancelled",
    }


async def test_a_chat_that_is_resumed_twice_cancels_nothing(seen: dict[str, Any]) -> None:
    twice = seen["twice"]
    assert (twice["running"], twice["before"]) == ("running", 0)
    assert twice["texts"] == ["Count, and wait.", TEXT]
    assert (twice["after"], twice["reason"]) == (1, "cancelled")


async def test_a_stop_before_the_answer_cancels_and_a_lost_answer_is_no_second_stream(
    seen: dict[str, Any],
) -> None:
    early = seen["early"]
    assert (early["status"], early["messages"]) == ("ready", 1)
    assert early["reason"] == "cancelled"
    assert early["lost"] == {"asked": 2, "streams": 1, "parts": 5}


async def test_requests_have_the_options_and_refusals_reach_the_chat(seen: dict[str, Any]) -> None:
    told = seen["told"]
    assert told["headers"] == ["Bearer key", "1", "2"]
    assert told["body"] == [True, "nobody", "submit-message"]
    assert told["refused"] == ["error", "unknown_model", 404]
    unsupported = "message parts of type 'file' are not supported: models take text only"
    assert told["file"] == ["error", unsupported]
    assert told["keyless"] == [401, "no API key"]
    assert told["nothing"] == ["ready", 1]
    assert told["faults"] == [["forbidden", True]]


async def test_devices_that_follow_a_chat_show_and_stop_each_others_answers(
    seen: dict[str, Any],
) -> None:
    followed = seen["followed"]
    one, two = followed["streams"]
    assert followed["turns"] == {"one": [two], "two": [one]}
    assert followed["stopped"] == [one, two] and followed["none"] == []
    assert followed["texts"] == [[TEXT, TEXT]] * 2
    assert followed["reasons"] == ["cancelled"] * 2


async def test_the_turns_of_a_chat_come_once_wherever_the_connection_breaks(
    seen: dict[str, Any],
) -> None:
    turns = seen["turns"]
    assert len(set(turns["streams"])) == 4
    for read in turns["read"]:
        assert read == {"found": turns["streams"], "connections": 2}
    assert turns["first"] == {"type": "presence", "readers": 1}
    assert turns["refused"] in (400, 404)


@pytest.mark.parametrize("fault", ["silence", "cut"])
async def test_a_followed_chat_notices_that_the_network_was_lost_and_is_back(
    seen: dict[str, Any], fault: str
) -> None:
    woken = seen["woken"]
    assert woken["read"][fault] == {
        "found": woken["streams"],
        "connections": 2,
        "waits": 1,
        "listens": 0,
    }
