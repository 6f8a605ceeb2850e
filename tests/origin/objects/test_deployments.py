"""Objects of the operator's own, as edges deploy them: namespaces, migrations, crons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import (
    CallerError,
    ConfigError,
    Conflict,
    Damaged,
    LedgerAway,
    NotFound,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.interface import ObjectKey, ObjectWrite
from tailrace.ledger.objects.deployment import DEPLOYMENT, Deployment
from tailrace.ledger.objects.object import DurableObject, ObjectRequest
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import StreamsConfig
from tailrace.origin.objects.deployments import KEPT
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.objects.operator_classes import load_classes
from tests.origin.own_objects import MINUTE_MS, START_MS, Clerk, Counter

pytestmark = pytest.mark.anyio

ASKED = ObjectRequest("GET", "http://edge/v1/objects/COUNTER/a")


class Clock:
    """A clock that is moved by hand, in ms."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        return self.now


class House:
    """An origin's objects; each `open` is a process of it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self._folder = folder

    @property
    def path(self) -> Path:
        return self._folder / "ledger.db"

    @asynccontextmanager
    async def open(
        self, *classes: type[DurableObject], loads: bool = True
    ) -> AsyncIterator[OriginObjects]:
        ledger = await SqliteLedger.open(self.path, self.clock)
        own = {each.__name__: each for each in classes}
        objects = OriginObjects(ledger, StreamsConfig(), self.clock, own=own)
        if loads:
            await objects.load()
        try:
            yield objects
        finally:
            await objects.close()
            await ledger.close()

    async def ring(self, objects: OriginObjects) -> None:
        """Whatever is due."""
        await objects.runtime.wake_due()
        await objects.runtime.alarms_ended()


async def deploy(objects: OriginObjects, *steps: dict[str, Any], **more: Any) -> None:
    wanted = Deployment.model_validate(
        {"script": "relay", "bindings": {}, "migrations": steps} | more
    )
    request = ObjectRequest("PUT", "http://deployment/", (), wanted.encoded())
    await objects.deploy(wanted.script, request)


async def count(objects: OriginObjects, called: str, name: str = "a") -> int:
    key = ObjectKey(objects.kind_of(called), name)
    response = await objects.fetch(key, ASKED)
    assert isinstance(response.body, bytes)
    return int(response.body)


NEW = {"tag": "v1", "new_sqlite_classes": ["Counter"]}


async def test_objects_stay_when_their_class_is_called_otherwise_and_go_when_it_is_deleted(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    tally = type("Tally", (Counter,), {})
    renamed = {"tag": "v2", "renamed_classes": [{"from": "Counter", "to": "Tally"}]}
    deleted = {"tag": "v3", "deleted_classes": ["Tally"]}
    again = {"tag": "v4", "new_sqlite_classes": ["Tally"]}
    async with house.open(Counter, tally) as objects:
        await deploy(objects, NEW)
        assert [await count(objects, "relay/Counter") for _ in range(2)] == [1, 2]
        await deploy(objects, NEW, renamed)
        assert await count(objects, "relay/Tally") == 3
        with pytest.raises(NotFound, match="no class Counter is deployed"):
            objects.kind_of("relay/Counter")
    async with house.open(tally) as objects:  # it knows the deployment, but has no class Counter
        assert await count(objects, "relay/Tally") == 4
        kind = objects.kind_of("relay/Tally")
        await deploy(objects, NEW, renamed, deleted)
        await house.ring(objects)
        assert await objects.runtime.ledger.objects.names(kind) == []
        await deploy(objects, NEW, renamed, deleted, again)
        assert await count(objects, "relay/Tally") == 1


async def test_each_script_has_objects_of_its_own(tmp_path: Path) -> None:
    async with House(tmp_path).open(Counter) as objects:
        await deploy(objects, NEW)
        await deploy(objects, NEW, script="relay-staging")
        assert await count(objects, "relay/Counter") == 1
        assert await count(objects, "relay-staging/Counter") == 1
        with pytest.raises(Unavailable, match="other is not deployed"):
            objects.kind_of("other/Counter")


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ([NEW, {"tag": "v2", "new_sqlite_classes": ["Counte"]}], {}, "no class Counte"),
        ([NEW | {"tag": "v0"}], {}, "v1 of relay was carried out"),
        ([NEW, {"tag": "v2", "deleted_classes": ["Clerk"]}], {}, "no class Clerk to delete"),
        (
            [NEW, {"tag": "v2", "renamed_classes": [{"from": "Clerk", "to": "Counter"}]}],
            {},
            "Clerk cannot be renamed to Counter",
        ),
        ([NEW], {"bindings": {"CLERK": "Clerk"}}, "no migration makes the class Clerk"),
        ([NEW], {"bindings": {"C": "Counter"}, "crons": ["* * * * *"]}, "has a method scheduled()"),
    ],
)
async def test_what_cannot_be_deployed_is_refused_and_changes_nothing(
    tmp_path: Path, steps: list[dict[str, Any]], more: dict[str, Any], said: str
) -> None:
    async with House(tmp_path).open(Counter) as objects:
        await deploy(objects, NEW)
        assert await count(objects, "relay/Counter") == 1
        with pytest.raises(Conflict) as raised:
            await deploy(objects, *steps, **more)
        assert said in str(raised.value)
        assert await count(objects, "relay/Counter") == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b'{"script": "a", "bindings": {"A": ""}}', "bindings.A"),
        (b'{"script": "a", "bindings": {}, "more": 1}', "more"),
        (b'{"script": "a", "bindings": {}, "crons": ["x"]}', "triggers.crons"),
    ],
)
async def test_what_is_no_deployment_is_refused(tmp_path: Path, body: bytes, field: str) -> None:
    async with House(tmp_path).open(Clerk) as objects:
        with pytest.raises(CallerError) as raised:
            await objects.deploy("a", ObjectRequest("PUT", "http://deployment/", (), body))
        assert (raised.value.field or "") == field


async def test_crons_run_at_their_times_over_restarts_and_one_that_fails_stops_no_other(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    clerks = {"tag": "v1", "new_sqlite_classes": ["Clerk"]}
    more = {"bindings": {"CLERK": "Clerk"}, "crons": ["*/2 * * * *", "*/3 * * * *"]}

    async def told(objects: OriginObjects) -> list[int]:
        key = ObjectKey(objects.kind_of("relay/Clerk"), "*/2 * * * *")
        response = await objects.fetch(key, ASKED)
        assert isinstance(response.body, bytes)
        return [int(minute) for minute in response.body.split()]

    async with house.open(Clerk) as objects:
        await deploy(objects, clerks, **more)
        for _ in range(7):
            house.clock.now += MINUTE_MS
            await house.ring(objects)
        assert await told(objects) == [2, 4, 6]
    house.clock.now += 10 * MINUTE_MS  # the origin was down at 8, 10, ... 16
    async with house.open(Clerk) as objects:
        await house.ring(objects)
        assert await told(objects) == [2, 4, 6, 8]
        house.clock.now += MINUTE_MS
        await house.ring(objects)
        assert await told(objects) == [2, 4, 6, 8, 18]
        await deploy(objects, clerks, **more | {"crons": []})
        house.clock.now += 10 * MINUTE_MS
        await house.ring(objects)
        assert await told(objects) == [2, 4, 6, 8, 18]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("Counter", "'Counter' is not MODULE:NAME"),
        ("tests.nowhere:Counter", "cannot import tests.nowhere"),
        (
            "tests.origin.own_objects:START_MS",
            "has no subclass of DurableObject with the name START_MS",
        ),
    ],
)
def test_a_class_that_cannot_be_had_is_an_error(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"origin\.objects") as raised:
        load_classes((spec,))
    assert said in str(raised.value)
    assert load_classes(("tests.origin.own_objects:Clerk",)) == {"Clerk": Clerk}


@asynccontextmanager
async def running(objects: OriginObjects, called: str) -> AsyncIterator[None]:
    """Run the objects; the block begins when the class `called` is deployed."""
    task = asyncio.create_task(objects.run())
    try:
        while True:
            if task.done():
                task.result()
            with suppress(Unavailable):
                objects.kind_of(called)
                break
            await asyncio.sleep(0)
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE object_value SET value = CAST('{}' AS BLOB) WHERE oid = 1",
        "UPDATE object SET epoch = epoch + 1 WHERE name = 'relay'",
    ],
    ids=["value", "row"],
)
async def test_a_damaged_deployment_is_named_and_costs_no_other(
    tmp_path: Path, damage: str
) -> None:
    house = House(tmp_path)
    async with house.open(Counter) as objects:
        await deploy(objects, NEW)
        await deploy(objects, NEW, script="relay-staging")
    connection = apsw.Connection(str(house.path))
    connection.execute(damage)
    assert connection.changes() == 1
    connection.close()
    with capture_logs() as said:
        async with house.open(Counter, loads=False) as objects:
            async with running(objects, "relay-staging/Counter"):
                assert await count(objects, "relay-staging/Counter") == 1
            with pytest.raises(Unavailable, match="relay is not deployed"):
                objects.kind_of("relay/Counter")
    [line] = [line for line in said if line["event"] == "deployment.damaged"]
    assert line["script"] == "relay"
    assert "does not match its checksum" in line["error"]


async def test_a_deployment_that_cannot_be_decoded_is_named_and_costs_no_other(
    tmp_path: Path,
) -> None:
    house, key = House(tmp_path), ObjectKey(DEPLOYMENT, "relay")
    async with house.open(Counter) as objects:
        await deploy(objects, NEW, script="relay-staging")
        store = objects.runtime.ledger.objects
        epoch = (await store.claim(key)).epoch
        await store.write(ObjectWrite(key, epoch, puts={KEPT: b"{"}))
    with capture_logs() as said:
        async with (
            house.open(Counter, loads=False) as objects,
            running(objects, "relay-staging/Counter"),
        ):
            assert await count(objects, "relay-staging/Counter") == 1
    assert [line["script"] for line in said if line["event"] == "deployment.damaged"] == ["relay"]


def fail_once(
    objects: OriginObjects, read: str, error: TailraceError, patch: pytest.MonkeyPatch
) -> None:
    """Let the next call of the store's method `read` fail."""
    store = objects.runtime.ledger.objects
    real = getattr(store, read)

    async def fail(*_args: object, **_named: object) -> object:
        patch.setattr(store, read, real)
        raise error

    patch.setattr(store, read, fail)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        ("get", LedgerAway("the disk is away")),
        ("names", LedgerAway("the disk is away")),
        ("names", Damaged("a page is malformed")),
    ],
)
async def test_deployments_that_cannot_be_read_at_the_start_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, error: TailraceError
) -> None:
    monkeypatch.setattr("tailrace.origin.objects.object_host.LOAD_AGAIN_S", 0)
    house = House(tmp_path)
    async with house.open(Counter) as objects:
        await deploy(objects, NEW)
    with capture_logs() as said:
        async with house.open(Counter, loads=False) as objects:
            fail_once(objects, read, error, monkeypatch)
            async with running(objects, "relay/Counter"):
                assert await count(objects, "relay/Counter") == 1
    assert [line["event"] for line in said].count("deployments.unread") == 1
