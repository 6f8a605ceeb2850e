"""The origin's end of a link, over a real socket and a real ledger; workers are the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import apsw
import pytest

from tailrace.ledger.errors import Conflict, LedgerFailed, NotFound, TooLarge
from tailrace.ledger.frame import (
    LINK_CODEC,
    MAX_MESSAGES,
    SCHEMA_HASH,
    Call,
    Cancel,
    Credit,
    Detach,
    Durability,
    FormatKind,
    Frame,
    Heartbeat,
    Hello,
    Message,
    Open,
    Opened,
    OutputFormat,
    Pass,
    Priority,
    Renew,
    Resume,
    Sampling,
    Splitter,
    Status,
    Steer,
    StreamError,
    StreamState,
    Token,
    ToolChoice,
    Tools,
    decode,
    encode,
)
from tailrace.ledger.interface import NewStream, ObjectKey, StreamKind
from tailrace.ledger.links.rights import Right
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.record_extra import IdSpan
from tailrace.ledger.sqlite.disk.disk_sync import SyncOf, sync_of
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.checkpoint.prompt import PromptReader
from tailrace.origin.config import LedgerConfig, OriginConfig
from tailrace.origin.edges.link import EdgeLink
from tailrace.origin.generations.branch import MAX_STEER_CHARS
from tailrace.origin.generations.resume_tokens import TokenKeys
from tailrace.origin.generations.service import LEDGER_SILENCE_S, Service
from tailrace.origin.workers import worker_frame
from tailrace.origin.workers.worker_frame import Emission, StartRun, Step
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs
from tests.ledger.sqlite.test_capacity import DISK_BYTES, SharedDisk
from tests.origin.stage import Slot, Stage, fresh
from tests.origin.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.anyio

REQUEST = Open(model="demo", prompt="The fox", max_tokens=9, credit=100, sampling=Sampling(seed=1))


class Client:
    """An edge of frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = Splitter()
        self._frames: list[tuple[int, Frame]] = []
        self.passes: dict[int, bytes] = {}  # by corr

    def send(self, frame: Frame, corr: int = 0) -> None:
        self._writer.write(encode(frame, corr))

    def send_call(self, call: Call, corr: int) -> None:
        self._writer.write(LINK_CODEC.encode(call, corr))

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def next(self) -> tuple[int, Frame]:
        """Return the next frame except for Heartbeat and Pass; EOFError when the link is closed."""
        while True:
            while self._frames:
                corr, frame = self._frames.pop(0)
                if isinstance(frame, Pass):
                    self.passes[corr] = frame.mac
                elif not isinstance(frame, Heartbeat):
                    return corr, frame
            async with asyncio.timeout(30):
                data = await self._reader.read(65_536)
            if not data:
                raise EOFError
            self._frames += map(decode, self._splitter.feed(data))

    async def errors_until_closed(self) -> list[StreamError]:
        """Return the errors on corr 0 that come before the origin closes."""
        errors = []
        with suppress(EOFError):
            while True:
                corr, frame = await self.next()
                if corr == 0 and isinstance(frame, StreamError):
                    errors.append(frame)
        return errors

    async def leave(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class ScriptedObjects:
    """Objects that record requests and answer as the test wants."""

    def __init__(self) -> None:
        self.requests: list[tuple[ObjectKey, ObjectRequest]] = []
        self.answer: Callable[[ObjectRequest], Awaitable[ObjectResponse]] = self.no_objects

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        self.requests.append((key, request))
        return await self.answer(request)

    fetch_here = fetch

    async def deploy(self, script: str, request: ObjectRequest) -> ObjectResponse:
        return await self.answer(request)

    kind_of = staticmethod(str)

    async def no_objects(self, request: ObjectRequest) -> ObjectResponse:
        raise NotFound("no objects here")


class House(Stage):
    """A link server with one worker slot, and the errors that would end the origin."""

    def __init__(self, ledger: SqliteLedger, model: Path, *, require_token: bool = False) -> None:
        super().__init__(ledger)
        self.objects = ScriptedObjects()
        self.fatal: list[LedgerFailed] = []
        self.links: set[EdgeLink] = set()
        self.now = 1000
        self.models.readers[""] = PromptReader(model)
        self.service = Service(
            ledger=ledger,
            objects=self.objects,
            runs=self.runs,
            keys=TokenKeys({"k": bytes(32)}),
            config=OriginConfig(require_token=require_token),
            retention=LedgerConfig(retention_s=60),
            now_ms=lambda: self.now,
        )
        self.port = 0
        self.clients: list[Client] = []

    @property
    def slot(self) -> Slot:
        return self.slots[0]

    def link(self) -> EdgeLink:
        return EdgeLink(self.service, self.links, self.fatal.append)

    async def connected(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def greeted(self) -> Client:
        client = await self.connected()
        client.send(Hello(SCHEMA_HASH, "test"))
        _, hello = await client.next()
        assert hello == Hello(SCHEMA_HASH, "tailrace-origin")
        return client


@asynccontextmanager
async def serving(
    folder: Path,
    model: Path,
    *,
    require_token: bool = False,
    vfs: str | None = None,
    wal_sync: SyncOf = sync_of,
) -> AsyncIterator[House]:
    """Yield a house whose link listens and whose model is loaded."""
    path = folder / "ledger.db"
    ledger = await SqliteLedger.open(path, lambda: 1000, vfs=vfs, wal_sync=wal_sync)
    house = House(ledger, model, require_token=require_token)
    server = await asyncio.get_running_loop().create_server(house.link, "127.0.0.1", 0)
    house.port = server.sockets[0].getsockname()[1]
    await house.ready(house.slot)
    try:
        yield house
    finally:
        for client in house.clients:
            await client.leave()
        server.close()
        await ledger.close()


@pytest.fixture
async def house(tmp_path: Path, checkpoint: Path) -> AsyncIterator[House]:
    async with serving(tmp_path, checkpoint) as made:
        yield made


async def opened(client: Client, corr: int = 1, request: Open = REQUEST) -> Opened:
    client.send(request, corr)
    answer_corr, answer = await client.next()
    assert answer_corr == corr
    assert isinstance(answer, Opened), answer
    return answer


async def refused(client: Client, request: Frame, corr: int = 2) -> StreamError:
    client.send(request, corr)
    answer_corr, answer = await client.next()
    assert answer_corr == corr
    assert isinstance(answer, StreamError), answer
    return answer


async def test_a_stream_is_opened_and_its_tokens_come_on_its_corr(house: House) -> None:
    client = await house.greeted()
    await opened(client, corr=5)
    await house.step(house.slot, house.slot.last[0], 0, "a")
    assert await client.next() == (5, Token("a", 0))


async def test_a_stream_whose_opener_left_at_once_runs_all_the_same(house: House) -> None:
    client = await house.greeted()
    client.send(Open(model="demo", prompt="The fox", idempotency_key="key"), 1)
    await client.leave()
    again = await house.greeted()
    answer = await opened(
        again, request=Open(model="demo", prompt="The fox", idempotency_key="key")
    )
    assert [type(frame) for _, frame in house.slot.sent].count(StartRun) == 1
    await house.step(house.slot, house.slot.last[0], 0, "a")
    assert (await house.ledger.info(answer.stream)).next_index == 1


async def test_a_request_that_is_sent_again_is_answered_although_there_is_no_room(
    house: House,
) -> None:
    client = await house.greeted()
    request = replace(REQUEST, idempotency_key="key")
    first = await opened(client, 1, request)
    with house.runs.room(fresh(3), Priority.INTERACTIVE):
        again = await opened(client, 2, request)
        assert (await refused(client, REQUEST, 3)).code == "overloaded"
    assert again.stream == first.stream


async def test_a_conversation_of_too_many_messages_is_refused(house: House) -> None:
    client = await house.greeted()
    messages = (Message("user", ""),) * (MAX_MESSAGES + 1)
    error = await refused(client, replace(REQUEST, prompt=None, messages=messages))
    assert (error.status, error.field) == (400, "Open.messages")
    assert "1025 items, of 1024 at most" in error.message


class Noting(PromptReader):
    """Notes in which thread each text was tokenised."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.threads: list[threading.Thread] = []

    def steer_ids(self, text: str) -> tuple[int, ...]:
        self.threads.append(threading.current_thread())
        return super().steer_ids(text)


async def test_a_long_text_to_steer_with_is_tokenised_off_the_event_loop_or_not_at_all(
    house: House, checkpoint: Path
) -> None:
    client = await house.greeted()
    stream = (await opened(client)).stream
    reader = Noting(checkpoint)
    service, house.models.readers[""] = house.service, reader
    for size in (MAX_STEER_CHARS, MAX_STEER_CHARS + 1):
        with pytest.raises(TooLarge):
            await service.steer(Steer(stream, None, "a" * size))
    assert len(reader.threads) == 1
    assert reader.threads[0] is not threading.current_thread()


async def test_a_chat_template_runs_off_the_event_loop(house: House, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    threads: list[threading.Thread] = []

    def now() -> datetime:
        threads.append(threading.current_thread())
        return datetime(2026, 3, 1, tzinfo=UTC)

    service, house.models.readers[""] = house.service, PromptReader(model, now)
    await service.open(replace(REQUEST, prompt=None, messages=(Message("user", "Hi"),)))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_credit_that_overtakes_the_answer_counts(house: House) -> None:
    client = await house.greeted()
    client.send(Open(model="demo", prompt="The fox"), 1)
    client.send(Credit(1), 1)
    _, answer = await client.next()
    assert isinstance(answer, Opened)
    for index in range(2):
        await house.step(house.slot, house.slot.last[0], index, "a")
    assert await client.next() == (1, Token("a", 0))
    client.send(Cancel(bytes(16)), 2)  # its answer shows that no second token came before it
    corr, _ = await client.next()
    assert corr == 2


async def test_a_detached_corr_is_free_and_silent(house: House) -> None:
    client = await house.greeted()
    stream = (await opened(client)).stream
    client.send(Detach(), 1)
    client.send(Resume(stream, credit=10), 1)
    _, answer = await client.next()
    assert isinstance(answer, Opened)
    await house.step(house.slot, house.slot.last[0], 0, "a")
    assert await client.next() == (1, Token("a", 0))


async def test_a_cancel_is_answered_when_the_end_is_durable(house: House) -> None:
    client = await house.greeted()
    stream = (await opened(client)).stream
    house.slot.ordered.clear()
    client.send(Cancel(stream), 2)
    await asyncio.wait_for(house.slot.ordered.wait(), 30)
    await house.step(house.slot, house.slot.last[0], 0, None)
    answers = [await client.next(), await client.next()]
    assert (2, Status(stream, StreamState.ENDED, 1)) in answers


async def test_a_token_is_needed_where_the_origin_asks_for_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint, require_token=True) as house:
        client = await house.greeted()
        answer = await opened(client)
        client.send(Resume(answer.stream), 2)
        client.send(Resume(answer.stream, token=answer.token), 3)
        answers = dict([await client.next(), await client.next()])
        assert isinstance(answers[2], StreamError)
        assert answers[2].status == 401
        assert isinstance(answers[3], Opened)
        house.now += 61_000
        client.send(Resume(answer.stream, token=answer.token), 4)
        _, expired = await client.next()
        assert isinstance(expired, StreamError)
        assert expired.status == 401


async def test_an_edge_renews_with_its_pass_when_the_token_has_expired(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint, require_token=True) as house:
        client = await house.greeted()
        answer = await opened(client)
        mac = client.passes[1]
        house.now += 61_000
        again = await house.greeted()
        again.send(Renew(answer.stream, None, True, 10, None, mac), 1)
        _, renewed = await again.next()
        assert renewed == Opened(answer.stream, 0, "", "", 0)  # the client has had all else
        assert again.passes == {}
        keys = TokenKeys({"new": bytes([1] * 32), "k": bytes(32)})
        house.service = replace(house.service, keys=keys)
        later = await house.greeted()
        later.send(Renew(answer.stream, None, True, 10, None, mac), 1)
        assert (await later.next())[1] == renewed
        assert later.passes == {1: keys.pass_for(answer.stream)}, "the old key may go now"
        await house.step(house.slot, house.slot.last[0], 0, "a")
        assert await again.next() == (1, Token("a", 0))
        for stream, forged in ((answer.stream, bytes(32)), (bytes(16), mac)):
            error = await refused(again, Renew(stream, None, True, 10, None, forged))
            assert (error.status, error.code) == (401, "bad_token")


@pytest.mark.parametrize("request_of", [Resume, Cancel])
async def test_the_stream_of_an_object_is_as_if_absent(
    house: House, request_of: type[Resume] | type[Cancel]
) -> None:
    stream = bytes([7]) * 16
    await house.ledger.create(NewStream(stream, "", Durability.PROCESS, 60, kind=StreamKind.OBJECT))
    client = await house.greeted()
    client.send(request_of(stream), 2)
    _, refused = await client.next()
    assert isinstance(refused, StreamError)
    assert (refused.status, refused.code) == (404, "unknown_stream")
    assert not (await house.ledger.info(stream)).ended


async def test_a_steer_is_answered_when_its_text_is_durable(house: House) -> None:
    client = await house.greeted()
    answer = await opened(client)
    house.slot.ordered.clear()
    client.send(Steer(answer.stream, answer.token, " then"), 2)
    await asyncio.wait_for(house.slot.ordered.wait(), 30)
    run, order = house.slot.last
    assert isinstance(order, worker_frame.Steer)
    spans = (IdSpan(0, len(order.ids)),)
    emission = Emission(run, 0, order.ids, spans, encode(Token(" then", 0)))
    await house.runs.worker_step(house.slot, Step.of((emission,)).cut())
    answers = dict([await client.next(), await client.next()])
    assert answers == {1: Token(" then", 0), 2: Status(answer.stream, StreamState.RUNNING, 1)}


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("", "invalid_request", "text"),
        ("fox " * 20, "too_large", "text"),
        ("x" * 50_000, "prompt_too_long", "text"),
    ],
)
async def test_a_text_that_cannot_be_taken_is_refused(
    house: House, text: str, code: str, field: str
) -> None:
    client = await house.greeted()
    answer = await opened(client)
    error = await refused(client, Steer(answer.stream, answer.token, text))
    assert (error.status, error.code, error.field) == (400, code, field)
    assert error.hint


async def test_a_stream_with_an_output_format_is_not_steered(
    house: House,
) -> None:
    client = await house.greeted()
    shape = OutputFormat(FormatKind.REGEX, "[a-z]+")
    answer = await opened(client, request=replace(REQUEST, format=shape))
    error = await refused(client, Steer(answer.stream, None, "text"))
    assert (error.status, error.code) == (409, "unsupported")


async def test_a_stream_that_must_call_a_tool_is_not_steered(house: House, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    service, house.models.readers[""] = house.service, PromptReader(model)
    tools = Tools('[{"name":"now"}]', ToolChoice.REQUIRED)
    chat = replace(REQUEST, prompt=None, messages=(Message("user", "Hi"),), tools=tools)
    answer = await service.open(chat)
    with pytest.raises(Conflict, match="may contain only tool calls"):
        await service.steer(Steer(answer.stream, None, "text"))


async def test_a_stream_that_is_over_or_unknown_is_not_steered(house: House) -> None:
    client = await house.greeted()
    answer = await opened(client, request=replace(REQUEST, credit=0))
    await house.step(house.slot, house.slot.last[0], 0, None)
    ended = await refused(client, Steer(answer.stream, None, "text"))
    assert (ended.status, ended.code) == (409, "conflict")
    unknown = await refused(client, Steer(bytes(16), None, "text"))
    assert (unknown.status, unknown.code) == (404, "unknown_stream")


async def test_a_token_to_read_does_not_steer(house: House) -> None:
    client = await house.greeted()
    answer = await opened(client)
    token = house.service.keys.issue(answer.stream, Right.READ | Right.CANCEL, 100_000)
    error = await refused(client, Steer(answer.stream, token, "text"))
    assert (error.status, error.code) == (403, "missing_right")


async def test_a_request_for_several_streams_opens_them_all(house: House) -> None:
    client = await house.greeted()
    answer = await opened(client, request=replace(REQUEST, n=3, sampling=Sampling(seed=2**64 - 1)))
    assert len(answer.siblings) == 2
    runs = [order for _, order in house.slot.sent]
    assert [run.sampling.seed for run in runs if isinstance(run, StartRun)] == [2**64 - 1, 0, 1]
    assert len({tuple(run.prompt_ids) for run in runs if isinstance(run, StartRun)}) == 1
    for corr, (nth, _) in enumerate(house.slot.sent[1:], 2):
        sibling = answer.siblings[corr - 2]
        await house.step(house.slot, nth, 0, f"of {corr}")
        client.send(Resume(sibling.stream, token=sibling.token, credit=9), corr)
        _, again = await client.next()
        assert isinstance(again, Opened)
        assert again.siblings == ()
        assert await client.next() == (corr, Token(f"of {corr}", 0))


async def test_a_repeated_request_for_several_finds_them_all(house: House) -> None:
    client = await house.greeted()
    request = replace(REQUEST, n=2, idempotency_key="key")
    first = await opened(client, corr=1, request=request)
    again = await opened(client, corr=2, request=request)
    assert again.stream == first.stream
    assert [s.stream for s in again.siblings] == [s.stream for s in first.siblings]
    assert len(house.slot.sent) == 2
    assert len(await house.ledger.unfinished()) <= 2
    assert house.runs.table.count == 2


async def test_several_streams_are_admitted_together_or_not_at_all(house: House) -> None:
    client = await house.greeted()
    await opened(client, corr=1, request=replace(REQUEST, n=3))
    error = await refused(client, replace(REQUEST, n=2))
    assert (error.status, error.code, error.retryable) == (503, "overloaded", True)
    assert house.runs.table.count == 3
    await opened(client, corr=3)


async def test_two_requests_of_one_key_at_once_open_one_set_of_streams(house: House) -> None:
    client = await house.greeted()
    request = replace(REQUEST, n=2, idempotency_key="key")
    client.send(request, 1)
    client.send(request, 2)
    answers = [frame for _, frame in (await client.next(), await client.next())]
    [first, second] = [answer for answer in answers if isinstance(answer, Opened)]
    assert first.stream == second.stream
    assert [s.stream for s in first.siblings] == [s.stream for s in second.siblings]
    assert (len(house.slot.sent), house.runs.table.count) == (2, 2)


async def test_a_kill_leaves_all_streams_of_a_request_or_none(
    tmp_path: Path, checkpoint: Path
) -> None:
    disk = Disk(Random(0))
    vfs = FaultyVfs("faulty", disk)
    killed: list[Path] = []

    def kill() -> None:
        killed.append(tmp_path / f"killed{len(killed)}")
        killed[-1].mkdir()
        disk.kill(killed[-1])
        disk.call_at_write(1, kill)

    async with serving(tmp_path, checkpoint, vfs="faulty", wal_sync=disk.wal_sync) as house:
        client = await house.greeted()
        disk.call_at_write(1, kill)
        client.send(replace(REQUEST, n=3), 1)
        await client.next()
    vfs.unregister()
    left = set()
    for folder in killed:
        ledger = await SqliteLedger.open(folder / "ledger.db", lambda: 1000)
        left.add(len(await ledger.unfinished()))
        await ledger.close()
    assert left == {0, 3}


@pytest.mark.parametrize("n", [0, 17, 2**63])
async def test_an_impossible_number_of_streams_is_refused(house: House, n: int) -> None:
    client = await house.greeted()
    error = await refused(client, replace(REQUEST, n=n))
    assert (error.status, error.field, error.hint) == (400, "n", "from 1 to 16")


async def test_a_bad_format_is_refused_before_a_stream_is_made(house: House) -> None:
    client = await house.greeted()
    error = await refused(client, replace(REQUEST, format=OutputFormat(FormatKind.REGEX, "[")))
    assert (error.status, error.retryable) == (400, False)
    assert house.runs.table.count == 0


@pytest.mark.parametrize(
    "frames",
    [
        [encode(REQUEST, 1)],
        [encode(Hello(bytes(8), "another schema"))],
        [encode(Hello(SCHEMA_HASH, "x")), encode(Hello(SCHEMA_HASH, "again"))],
        [encode(Hello(SCHEMA_HASH, "x")), encode(REQUEST, 0)],
        [encode(Hello(SCHEMA_HASH, "x")), encode(REQUEST, 1) * 2],
        [encode(Hello(SCHEMA_HASH, "x")), b"\x05\x00\x00\x02\x10\x00\x00\x00\x00"],
        [encode(Hello(SCHEMA_HASH, "x")), encode(Token("a server's frame", 0), 1)],
        [b"GET / HTTP/1.1\r\n\r\n"],
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_told_and_dropped(
    house: House, frames: list[bytes]
) -> None:
    client = await house.connected()
    client.send_raw(b"".join(frames))
    [error] = await client.errors_until_closed()
    assert error.status in (400, 426)
    other = await house.greeted()  # the origin goes on
    assert (await opened(other)).model == "demo"


async def test_a_hello_with_other_fields_is_refused_for_its_schema(house: House) -> None:
    payload = b"otherone" + b"\x04test"  # a release whose Hello has one field less
    head = (len(payload) + 5 | 1 << 24).to_bytes(4, "little")
    client = await house.connected()
    client.send_raw(head + bytes((Hello.tag, 0, 0, 0, 0)) + payload)
    [error] = await client.errors_until_closed()
    assert (error.code, error.status) == ("schema_mismatch", 426)


async def test_a_failing_ledger_ends_the_origin_and_shows_nothing(
    house: House, tmp_path: Path
) -> None:
    client = await house.greeted()
    await opened(client)
    with closing(apsw.Connection(str(tmp_path / "ledger.db"))) as vandal:
        vandal.execute("DROP TABLE log")
    with pytest.raises(LedgerFailed):
        await house.step(house.slot, house.slot.last[0], 0, "never shown")
    client.send(REQUEST, 2)
    corr, answer = await client.next()
    assert corr == 2
    assert isinstance(answer, StreamError)
    assert answer.code == "ledger_failed"
    assert len(house.fatal) == 1


async def test_an_origin_whose_ledger_does_not_answer_is_not_ready(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.ready(house.slot)
    assert house.service.heartbeat().ready
    monkeypatch.setattr(house.ledger, "silent_s", lambda: LEDGER_SILENCE_S)
    heartbeat = house.service.heartbeat()
    assert not heartbeat.ready
    assert heartbeat.reasons == ("the ledger does not answer",)


async def test_the_origin_is_not_ready_for_new_streams_while_its_disk_is_full(
    tmp_path: Path, checkpoint: Path
) -> None:
    file = await SqliteFile.open(tmp_path / "ledger.db")
    file.maintenance = disk = SharedDisk(file.maintenance)
    house = House(await SqliteLedger.recover(file, lambda: 1000), checkpoint)
    await house.ready(house.slot)
    assert house.service.heartbeat().ready
    disk.free_bytes = 0
    heartbeat = house.service.heartbeat()
    assert not heartbeat.ready
    [reason] = heartbeat.reasons
    assert "bytes left" in reason
    assert str(tmp_path) in reason
    disk.free_bytes = DISK_BYTES
    assert house.service.heartbeat().ready
    await house.ledger.close()
