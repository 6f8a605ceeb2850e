"""What the list of models decides, and waiting for a server that is not there yet."""

from __future__ import annotations

import asyncio

import pytest

from ledger.errors import ConfigError
from origin.config import OriginConfig
from origin.producers.upstream import Retry, choose_model, open_upstream
from tests.origin.producers.raw_server import Asked, RawServer, answer, serving

pytestmark = pytest.mark.anyio

ONE = answer(200, {"object": "list", "data": [{"id": "only"}]})


class Progress:
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.told.append((stage, done, total))


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


async def opened(server: RawServer, progress: Progress | None = None, **more: str) -> str:
    """The name of the model that is served."""
    config = OriginConfig(upstream=server.url, **more)  # type: ignore[arg-type]
    retry = Retry(sleep=no_wait)
    made = await open_upstream(config, progress or Progress(), retry)
    await made.close()
    return made.about.name


async def test_the_only_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "secret")
    async with serving(ONE) as server:
        assert await opened(server, upstream_key_env="SERVERS_KEY") == "only"
    assert server.asked[0].path == "/v1/models"
    assert server.asked[0].headers["authorization"] == "Bearer secret"


async def test_a_server_that_is_not_ready_yet_is_waited_for() -> None:
    progress = Progress()
    async with serving(answer(503, {}), b"", b"HTTP/1.1 no\r\n\r\n", ONE) as server:
        assert await opened(server, progress) == "only"
    assert progress.told == [
        ("after 1 tries the upstream server answered 503", 0, 0),
        ("after 2 tries the connection to the upstream server broke", 0, 0),
        ("after 3 tries the upstream server sent what is no HTTP", 0, 0),
    ]
    assert len(server.asked) == 4


async def test_a_server_that_keeps_no_list_needs_a_name() -> None:
    async with serving(answer(404, {})) as server:
        assert await opened(server, upstream_model="named") == "named"
        with pytest.raises(ConfigError, match=r"lists no models.*--upstream-model"):
            await opened(server)


async def test_a_key_that_is_not_taken_is_no_reason_to_wait() -> None:
    async with serving(answer(401, {"error": {"message": "bad key"}})) as server:
        with pytest.raises(ConfigError, match=r"origin\.upstream: .*this origin's key"):
            await opened(server)


@pytest.mark.parametrize("listed", [{"data": 1}, {"data": [{}]}, [], "models", None])
async def test_a_list_that_is_none_is_no_list(listed: object) -> None:
    async with serving(answer(200, listed)) as server:
        assert await opened(server, upstream_model="named") == "named"


def test_of_several_models_one_has_to_be_named() -> None:
    assert choose_model(["a", "b"], "b") == "b"
    assert choose_model(["a", "b"], "alias") == "alias"
    with pytest.raises(ConfigError, match="lists 2 models: a, b"):
        choose_model(["a", "b"], None)


async def test_waiting_can_be_cancelled() -> None:
    asked = asyncio.Event()

    async def never(one: Asked, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with serving(never) as server:
        opening = asyncio.create_task(opened(server))
        await asked.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
