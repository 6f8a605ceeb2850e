"""Origins of several models hear what may soon be asked for; nobody waits until they do."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpx
import pytest

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.hints import EVERY_S, Hints
from tailrace.edge.origins.link import Link
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import Answer, BodyEnd, Call
from tailrace.ledger.links.hints import Hint
from tests.edge.scripted_origin import ScriptedOrigin, until

pytestmark = pytest.mark.anyio

OPEN = EdgeConfig(http=("127.0.0.1:0",), host_models=("Small.example.org=small",))


@pytest.fixture
async def origin() -> AsyncIterator[tuple[ScriptedOrigin, Link]]:
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
    origin: tuple[ScriptedOrigin, Link],
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


async def test_a_handshake_for_a_host_is_a_sign_of_the_model_behind_it(
    origin: tuple[ScriptedOrigin, Link],
) -> None:
    scripted, link = origin
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Hints(link, OPEN.models_of_hosts).listen(server)
    for name in ("elsewhere.example.org", "small.example.org"):
        shake_hands(server, name)
    await scripted.has_received(1)
    assert heard(scripted) == [("handshake", "small")]


def shake_hands(server: ssl.SSLContext, name: str) -> None:
    """As far as the name; for the rest the server would need a certificate."""
    sent, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(answered, sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLError):
        server.wrap_bio(sent, answered, server_side=True).do_handshake()


async def test_an_origin_of_one_model_is_told_nothing(
    origin: tuple[ScriptedOrigin, Link],
) -> None:
    scripted, link = origin
    hints = Hints(link)
    hints.say(Hint.MODELS, "small")
    await scripted.has_received(1)
    scripted.models = ("small",)
    scripted.say()
    await until(lambda: link.heartbeat.models == ("small",))
    hints.say(Hint.PAGE)
    scripted.models = ("small", "large")
    scripted.say()
    await until(lambda: link.heartbeat.models == ("small", "large"))
    hints.say(Hint.RECONNECT)
    await scripted.has_received(2)
    assert heard(scripted) == [("models", "small"), ("reconnect", "")]


@pytest.mark.parametrize("text", ["small.example.org", "=small", "small.example.org="])
def test_a_host_without_its_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST=MODEL"):
        EdgeConfig.load(host_models=[text])
