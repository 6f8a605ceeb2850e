"""The objects of an origin, wired as they are when it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ledger.errors import ConfigError
from ledger.interface import ObjectKey
from ledger.objects.object import ObjectRequest
from ledger.sqlite.ledger import SqliteLedger
from ledger.subscriptions.route import INDEX_KEY, SUBSCRIPTION
from origin.config import StreamsConfig
from origin.objects import OriginObjects
from origin.supervisor import now_ms

pytestmark = pytest.mark.anyio

ROOT = "http://edge/v1/stream"
JSON = (("content-type", "application/json"),)


async def test_a_stream_wakes_the_worker_of_its_subscription(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
    objects = OriginObjects(ledger, StreamsConfig(), now_ms)
    running = asyncio.create_task(objects.run())

    async def put(key: ObjectKey, path: str, fields: object) -> int:
        body = json.dumps(fields).encode()
        request = ObjectRequest("PUT", f"{ROOT}/{path}", JSON, body)
        return (await objects.fetch(key, request)).status

    wanted = {"type": "pull-wake", "pattern": "**", "wake_stream": "wake"}
    pool = ObjectKey(SUBSCRIPTION, "pool")
    assert await put(ObjectKey("stream", "wake"), "wake", []) == 201
    assert await put(pool, "__ds/subscriptions/pool", wanted) == 201
    assert await put(ObjectKey("stream", "work"), "work", [1]) == 201
    poll = ObjectRequest("GET", f"{ROOT}/wake?offset=-1&live=long-poll")
    wake = await objects.fetch(ObjectKey("stream", "wake"), poll)
    assert isinstance(wake.body, bytes)
    assert json.loads(wake.body)[0]["stream"] == "work"
    running.cancel()
    await asyncio.wait([running])
    await objects.close()
    await ledger.close()


async def test_the_key_that_signs_webhooks_survives_a_restart(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
        objects = OriginObjects(ledger, StreamsConfig(), now_ms)
        response = await objects.fetch(INDEX_KEY, ObjectRequest("GET", ROOT))
        keys.append(response.body)
        await objects.close()
        await ledger.close()
    assert keys[0] == keys[1]


def test_hosts_of_webhooks_are_split_at_commas_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert StreamsConfig.load().webhook_hosts == ()
    monkeypatch.setenv("TAILRACE_STREAMS_WEBHOOK_HOSTS", "127.0.0.1, hooks.internal")
    assert StreamsConfig.load().webhook_hosts == ("127.0.0.1", "hooks.internal")


def test_the_settings_of_streams_are_a_table_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[streams]\nlong_poll_s = 5\ndurability = "power"\n')
    config = StreamsConfig.load(file)
    assert (config.long_poll_s, config.durability) == (5, "power")
    file.write_text('[streams]\ndurability = "relaxed"\n')
    with pytest.raises(ConfigError, match=r"streams\.durability"):
        StreamsConfig.load(file)
