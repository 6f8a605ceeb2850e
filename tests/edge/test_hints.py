"""Hints that edges send to origins of several models."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.hints import EVERY_S, Hints
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.ledger.frame import Answer, BodyEnd, Call
from tailrace.ledger.links.hints import Hint
from tests.edge.scripted_origin import ScriptedOrigin, until

pytestmark = pytest.mark.anyio

OPEN = EdgeConfig(http=("127.0.0.1:0",))


@pytest.fixture
async def origin() -> AsyncIterator[tuple[ScriptedOrigin, OriginPool]]:
    scripted = ScriptedOrigin(1)
    scripted.models = ("small", "large")
    scripted.answers = (Answer(204, ()), BodyEnd())
    async with scripted.serving() as link:
        yield scripted, link


def heard(origin: ScriptedOrigin) -> list[tuple[str, str]]:
    calls = [one for one in origin.received if isinstance(one, Call)]
    assert all(one.object == "hint" and one.caller is None for one in calls)
    return sorted((one.name, one.body.decode()) for one in calls)


async def test_a_list_of_models_and_a_page_are_signs_once_in_a_while(
    origin: tuple[ScriptedOrigin, OriginPool],
) -> None:
    scripted, link = origin
    app = create_app(link, OPEN)
    app.state.hints = Hints(link, clock_s=lambda: now)
    transport = httpx.ASGITransport(app)
    now = 0.0
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for path in ("/v1/models", "/v1/models", "/v1/models/large", "/v1/models/none", "/"):
            await client.get(path)
        await scripted.has_received(3)
        now = EVERY_S
        await client.get("/v1/models")
        await scripted.has_received(4)
    assert heard(scripted) == [("models", ""), ("models", ""), ("models", "large"), ("page", "")]


async def test_an_origin_of_one_model_is_told_nothing(
    origin: tuple[ScriptedOrigin, OriginPool],
) -> None:
    scripted, link = origin
    hints = Hints(link)
    hints.send(Hint.MODELS, "small")
    await scripted.has_received(1)
    scripted.models = ("small",)
    scripted.say()
    await until(lambda: link.heartbeat.models == ("small",))
    hints.send(Hint.PAGE)
    scripted.models = ("small", "large")
    scripted.say()
    await until(lambda: link.heartbeat.models == ("small", "large"))
    hints.send(Hint.RECONNECT)
    await scripted.has_received(2)
    assert heard(scripted) == [("models", "small"), ("reconnect", "")]
