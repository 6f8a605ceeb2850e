"""Byte logs: each byte is stored once, even if several clients send it, and can be read again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from random import Random

import pytest

from tailrace.ledger.errors import Conflict, NotFound, TailraceError, TooLarge
from tailrace.ledger.interface import Append, ObjectKey
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import StreamsConfig
from tailrace.origin.objects import byte_logs
from tailrace.origin.objects.byte_logs import BYTE_LOG, CHECK_MS, LAST, LIMIT, OFFSET
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.steady_clock import now_ms
from tests.ledger.backends import A, end, new

pytestmark = pytest.mark.anyio

INPUT = ObjectKey(BYTE_LOG, A.hex())
OUTPUTS = ObjectKey(BYTE_LOG, f"{A.hex()}:stage")
BYTES = Random(1).randbytes(1000)


class House:
    """The objects of one origin, whose clock may be ahead by `late_ms`, and the stream A."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.late_ms = 0
        self.ledger = ledger
        self.objects = OriginObjects(ledger, StreamsConfig(), lambda: now_ms() + self.late_ms)

    async def send(
        self, data: bytes, offset: int, *, last: bool = False, key: ObjectKey = INPUT
    ) -> tuple[int, bool]:
        """Append, and return what is stored."""
        head = ((OFFSET, str(offset)), (LAST, str(int(last))), (LIMIT, "900"))
        answer = await self.objects.fetch(key, ObjectRequest("POST", "", head, data))
        assert isinstance(answer.body, bytes)
        stored = json.loads(answer.body)
        return stored["bytes"], stored["complete"]

    async def read(self, query: str = "", key: ObjectKey = INPUT) -> bytes:
        """Return the bytes that a reader gets before its answer ends."""
        body = (await self.objects.fetch(key, ObjectRequest("GET", f"?{query}"))).body
        assert isinstance(body, AsyncGenerator)
        return b"".join([piece async for piece in body])

    async def ring(self) -> None:
        """Let the time pass after which each log looks if its stream has ended."""
        self.late_ms += CHECK_MS + 1000
        await self.objects.runtime.wake_due()
        await self.objects.runtime.alarms_ended()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(await SqliteLedger.open(tmp_path / "ledger.db", now_ms))
    await made.ledger.create(new(A))
    yield made
    await made.objects.close()
    await made.ledger.close()


async def test_bytes_in_any_pieces_are_stored_once(house: House) -> None:
    draw, stored = Random(2), 0
    while stored < 900:
        at = draw.randrange(stored + 1)
        data = BYTES[at : min(900, at + draw.randrange(200))]
        stored = max(stored, at + len(data))
        assert await house.send(data, at) == (stored, False)
    following = asyncio.create_task(house.read("follow=1"))
    assert await house.send(b"", 900, last=True) == (900, True)
    assert await following == await house.read() == BYTES[:900]
    assert await house.send(BYTES[:900], 0, last=True) == (900, True)  # a repeated request


@pytest.mark.parametrize(
    ("data", "offset", "code"),
    [(b"x", 11, "input_gap"), (bytes(891), 10, "input_too_large"), (b"x", 10, None)],
)
async def test_bytes_that_do_not_fit_change_nothing(
    house: House, data: bytes, offset: int, code: str | None
) -> None:
    await house.send(BYTES[:10], 0)
    if code is None:
        await house.send(b"", 10, last=True)
        code = "input_complete"
    with pytest.raises(TailraceError) as refused:
        await house.send(data, offset)
    assert refused.value.code == code
    assert await house.read() == BYTES[:10]


async def test_a_log_has_at_most_so_many_pieces(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_logs, "MAX_PIECES", 5)
    for at in range(5):
        await house.send(BYTES[at : at + 1], at)
    with pytest.raises(TooLarge, match="more than 5 pieces"):
        await house.send(BYTES[5:6], 5)
    assert await house.send(b"", 5, last=True) == (5, True)


async def test_outputs_of_a_stage_are_refused_to_a_second_worker(house: House) -> None:
    await house.send(b"one\n", 0, key=OUTPUTS)
    with pytest.raises(Conflict, match="another worker runs the stages"):
        await house.send(b"two\n", 0, key=OUTPUTS)
    assert await house.read(key=OUTPUTS) == b"one\n"


async def test_too_many_outputs_of_a_stage_are_refused_with_its_name(house: House) -> None:
    with pytest.raises(
        TooLarge, match="the outputs of the stage stage would have more than 900 bytes"
    ):
        await house.send(bytes(901), 0, key=OUTPUTS)


async def test_a_log_is_deleted_when_its_stream_has_ended(house: House) -> None:
    await house.send(BYTES[:10], 0)
    await house.send(b"one\n", 0, key=OUTPUTS)
    await house.ring()
    assert await house.read() == BYTES[:10]
    assert await house.ledger.append([Append(A, 1, 0, end(0))]) == []
    await house.ring()
    for key in (INPUT, OUTPUTS):
        with pytest.raises(NotFound):
            await house.read(key=key)
    assert await house.ledger.objects.names(BYTE_LOG) == []
