"""Probing an upstream server: its list of models, and waiting for one that is not up yet."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import OriginConfig
from tailrace.origin.producers.upstream import Retry, choose_model, open_upstream
from tailrace.up import development_certificate
from tests.origin.producers.raw_server import Asked, RawServer, answer, serving

pytestmark = pytest.mark.anyio

ONE = answer(200, {"object": "list", "data": [{"id": "only"}]})


class Progress:
    """A progress callback that records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.told.append((stage, done, total))


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


async def opened(server: RawServer, progress: Progress | None = None, **more: str) -> str:
    """Return the name of the model that is served."""
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
        ("after 3 tries the upstream server sent malformed HTTP", 0, 0),
    ]
    assert len(server.asked) == 4


async def test_a_server_that_is_away_is_logged_for_each_reason_and_once_a_minute() -> None:
    now, waits = 0.0, 0
    answers = [answer(503, {})] * 40 + [answer(502, {}), answer(502, {}), ONE]

    async def wait(seconds: float) -> None:
        nonlocal now, waits
        now, waits = now + 2.0, waits + 1

    async with serving(*answers) as server:
        config = OriginConfig(upstream=server.url)
        with capture_logs() as logged:
            made = await open_upstream(config, Progress(), Retry(sleep=wait, clock=lambda: now))
            await made.close()
    assert waits == 42
    told = [(event["event"], event["tries"], event.get("reason")) for event in logged]
    assert told == [
        ("upstream.away", 1, "the upstream server answered 503"),
        ("upstream.away", 31, "the upstream server answered 503"),
        ("upstream.away", 41, "the upstream server answered 502"),
        ("upstream.back", 42, None),
    ]


async def why_away(url: str) -> str:
    """Return the reason that is logged for a server at this address, which is not there."""

    async def leave(seconds: float) -> None:
        raise LookupError

    with capture_logs() as logged, pytest.raises(LookupError):
        await open_upstream(OriginConfig(upstream=url), Progress(), Retry(sleep=leave))
    (away,) = logged
    assert (away["event"], away["url"]) == ("upstream.away", url)
    return str(away["reason"])


async def test_a_server_that_is_away_is_logged_with_the_cause(tmp_path: Path) -> None:
    files = development_certificate(tmp_path, datetime.now(UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with closing(
        await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    ) as server:
        port = server.sockets[0].getsockname()[1]
        assert "certificate is refused: self" in await why_away(f"https://localhost:{port}/v1")

    def say_no_tls(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.close()

    with closing(await asyncio.start_server(say_no_tls, "127.0.0.1", 0)) as server:
        port = server.sockets[0].getsockname()[1]
        assert "TLS failed" in await why_away(f"https://127.0.0.1:{port}/v1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = await why_away(f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
    assert refused == "connection refused: nothing listens at that address"
    assert "name cannot be resolved" in await why_away("http://tailrace.invalid/v1")


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
