"""The objects of an origin, wired as they are when it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError, NotFound
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.objects.runtime import MAX_ALARMS_AT_ONCE
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import StreamsConfig
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.steady_clock import now_ms
from tailrace.origin.subscriptions.index import SCAN
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from tailrace.origin.subscriptions.webhook import MAX_DELIVERIES_PER_HOST
from tests.ledger.next_alarm import next_alarm_ms
from tests.origin.subscriptions.subscription_world import Receiver

pytestmark = pytest.mark.anyio

ROOT = "http://edge/v1/stream"
JSON = (("content-type", "application/json"),)


async def test_a_stream_wakes_the_worker_of_its_subscription(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
    objects = OriginObjects(ledger, StreamsConfig(subscriptions=True), now_ms)
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


async def test_streams_of_tenants_are_apart_forks_too_and_subscriptions_hear_of_none(
    tmp_path: Path,
) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
    objects = OriginObjects(ledger, StreamsConfig(subscriptions=True), now_ms)
    running = asyncio.create_task(objects.run())

    async def ask(method: str, key: str, *headers: tuple[str, str], body: bytes = b"") -> int:
        request = ObjectRequest(method, f"{ROOT}/{key.rpartition('/')[2]}", headers, body)
        return (await objects.fetch(ObjectKey("stream", key), request)).status

    text = ("content-type", "text/plain")
    assert await ask("PUT", "/acme/a", text, body=b"acme's") == 201
    assert await ask("GET", "/other/a") == await ask("GET", "a") == 404
    fork = ("stream-forked-from", "/v1/stream/a")
    assert await ask("PUT", "/other/fork", fork) == 404
    assert await ask("PUT", "/acme/fork", fork) == 201
    for key, status in (("/acme/fork", 200), ("/acme//a", 404), ("/acme/", 404), ("/acme/..", 404)):
        assert await ask("GET", key) == status

    wanted = {"type": "pull-wake", "pattern": "**", "wake_stream": "wake"}
    made = ObjectRequest("PUT", f"{ROOT}/__ds/subscriptions/all", JSON, json.dumps(wanted).encode())
    assert (await objects.fetch(ObjectKey(SUBSCRIPTION, "all"), made)).status == 201
    assert await ask("PUT", "/acme/later", text) == 201
    assert await ask("PUT", "later", text) == 201
    seen = await objects.fetch(
        ObjectKey(SUBSCRIPTION, "all"), ObjectRequest("GET", f"{ROOT}/__ds/subscriptions/all")
    )
    assert isinstance(seen.body, bytes)
    assert [stream["path"] for stream in json.loads(seen.body)["streams"]] == ["later"]
    running.cancel()
    await asyncio.wait([running])
    await objects.close()
    await ledger.close()


async def test_a_wake_does_not_wait_for_webhooks_that_hang(tmp_path: Path) -> None:
    """More of them than there are places for the alarms of all objects."""
    hanging, receiver = asyncio.Queue[asyncio.StreamWriter](), Receiver()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hanging.put_nowait(writer)

    ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
    hosts = ("127.0.0.1", "127.0.0.2")
    objects = OriginObjects(ledger, StreamsConfig(subscriptions=True, webhook_hosts=hosts), now_ms)
    running = asyncio.create_task(objects.run())

    async def put(key: ObjectKey, path: str, fields: object) -> None:
        body = json.dumps(fields).encode()
        assert (
            await objects.fetch(key, ObjectRequest("PUT", f"{ROOT}/{path}", JSON, body))
        ).status == 201

    async def subscribe(name: str, pattern: str, url: str) -> None:
        wanted = {"type": "webhook", "pattern": pattern, "webhook": {"url": url}}
        await put(ObjectKey(SUBSCRIPTION, name), f"__ds/subscriptions/{name}", wanted)

    server = await asyncio.start_server(hang, "127.0.0.2", 0)
    async with server, receiver.listening():
        port = server.sockets[0].getsockname()[1]
        for number in range(MAX_ALARMS_AT_ONCE + 6):
            await subscribe(f"slow{number}", "slow", f"http://127.0.0.2:{port}/")
        await subscribe("quick", "quick", receiver.url)
        await put(ObjectKey("stream", "slow"), "slow", [1])
        async with asyncio.timeout(20):
            writers = [await hanging.get() for _ in range(MAX_DELIVERIES_PER_HOST)]
        await put(ObjectKey("stream", "quick"), "quick", [1])
        await receiver.post()
        assert hanging.empty(), "those that there is a place for still hang, and the others wait"
        running.cancel()
        await asyncio.wait([running])
        await objects.close()
        for writer in writers:
            writer.close()
    await ledger.close()


async def test_the_key_that_signs_webhooks_survives_a_restart(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
        objects = OriginObjects(ledger, StreamsConfig(subscriptions=True), now_ms)
        response = await objects.fetch(INDEX_KEY, ObjectRequest("GET", ROOT))
        keys.append(response.body)
        await objects.close()
        await ledger.close()
    assert keys[0] == keys[1]


async def test_subscriptions_are_off_unless_the_operator_wants_them(tmp_path: Path) -> None:
    """The leftovers of subscriptions are kept while these are off, and go on when on again."""
    now, pool, lease_ms = 1_000_000, ObjectKey(SUBSCRIPTION, "pool"), 30_000
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: now)

    async def ask(config: StreamsConfig, *requests: tuple[ObjectKey, str, str, object]) -> None:
        objects = OriginObjects(ledger, config, lambda: now)
        for key, method, path, fields in requests:
            body = json.dumps(fields).encode()
            request = ObjectRequest(method, f"{ROOT}/{path}", JSON, body)
            if method == SCAN:
                request = ObjectRequest.internal(SCAN)
            try:
                assert (await objects.fetch(key, request)).status < 300
            finally:
                await objects.runtime.wake_due()
                await objects.runtime.alarms_ended()
        await objects.close()

    wanted = {"type": "pull-wake", "pattern": "*", "wake_stream": "wake", "lease_ttl_ms": lease_ms}
    put = (pool, "PUT", "__ds/subscriptions/pool", wanted)
    work = (ObjectKey("stream", "work"), "PUT", "work", [1])
    claim = (pool, "POST", "__ds/subscriptions/pool/claim", {"worker": "w"})
    await ask(StreamsConfig(subscriptions=True), put, work, claim)
    assert await next_alarm_ms(ledger.objects) == now + lease_ms
    now += lease_ms
    assert not StreamsConfig().subscriptions
    with pytest.raises(NotFound) as refused:
        await ask(StreamsConfig(), claim)
    assert (refused.value.code, "streams.subscriptions" in str(refused.value)) == (
        "subscriptions_off",
        True,
    )
    assert await next_alarm_ms(ledger.objects) is None
    look = (pool, SCAN, "__ds/subscriptions/pool", None)
    await ask(StreamsConfig(subscriptions=True), look, claim)
    await ledger.close()


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
