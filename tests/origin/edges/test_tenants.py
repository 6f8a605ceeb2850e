"""A tenant's streams are its own; a resume token gives access to its stream alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.ledger.errors import CallerError, Forbidden, NotFound, TailraceError, Unauthorized
from tailrace.ledger.frame import Call, Caller, Cancel, Header, Open, Resume, Steer
from tailrace.ledger.links.rights import ALL_RIGHTS, Right
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tests.origin.edges.test_link import House, serving

pytestmark = pytest.mark.anyio

ACME, OTHER = Caller("acme", ALL_RIGHTS), Caller("other", ALL_RIGHTS)
NOBODY = Caller("", 0)
REQUEST = Open("demo", prompt="The fox", caller=ACME)
READER = Caller("acme", Right.GENERATE | Right.READ)


@pytest.fixture
async def house(tmp_path: Path, checkpoint: Path) -> AsyncIterator[House]:
    async with serving(tmp_path, checkpoint) as made:
        yield made


async def test_a_stream_is_as_if_absent_for_another_tenant(house: House) -> None:
    service = house.service
    stream = (await service.open(REQUEST)).stream
    assert (await service.resume(Resume(stream, caller=ACME))).stream == stream
    for caller in (OTHER, None):
        for ask in (
            service.resume(Resume(stream, caller=caller)),
            service.cancel(Cancel(stream, caller=caller)),
            service.steer(Steer(stream, None, "x", caller=caller)),
        ):
            with pytest.raises(NotFound) as refused:
                await ask
            assert refused.value.code == "unknown_stream"
    with pytest.raises(Unauthorized) as nobody:
        await service.resume(Resume(stream, caller=NOBODY))
    assert nobody.value.code == "no_key"
    nobodys = (await service.open(replace(REQUEST, caller=None))).stream
    with pytest.raises(NotFound):
        await service.resume(Resume(nobodys, caller=ACME))


async def test_reading_and_cancelling_are_rights_of_their_own(house: House) -> None:
    service = house.service
    stream = (await service.open(replace(REQUEST, caller=READER))).stream
    await service.resume(Resume(stream, caller=READER))
    with pytest.raises(Forbidden, match="does not allow to cancel"):
        await service.cancel(Cancel(stream, caller=READER))
    with pytest.raises(Forbidden, match="does not allow to steer"):
        await service.steer(Steer(stream, None, "x", caller=READER))
    with pytest.raises(Forbidden, match="does not allow to generate"):
        await service.open(replace(REQUEST, caller=Caller("acme", Right.READ)))
    with pytest.raises(Unauthorized):
        await service.open(replace(REQUEST, caller=NOBODY))


async def test_a_token_has_no_more_rights_than_who_asked_for_it_and_keeps_them(
    house: House,
) -> None:
    service = house.service
    opened = await service.open(replace(REQUEST, n=2, caller=READER))
    tokens = {opened.stream: opened.token}
    tokens |= {sibling.stream: sibling.token for sibling in opened.siblings}
    assert len(tokens) == 2
    for stream, token in tokens.items():
        # Whoever has the token needs no key; each answer's fresh one says no more.
        fresh = (await service.resume(Resume(stream, token=token, caller=NOBODY))).token
        for each in (token, fresh):
            with pytest.raises(Forbidden, match="does not allow to cancel"):
                await service.cancel(Cancel(stream, each, caller=NOBODY))


async def test_a_token_is_bound_to_the_tenant(house: House) -> None:
    service = house.service
    stream = (await service.open(REQUEST)).stream
    forged = service.keys.issue(stream, Right.READ, 10**12, tenant="other")
    with pytest.raises(NotFound):
        await service.resume(Resume(stream, token=forged, caller=OTHER))
    old = service.keys.issue(stream, Right.READ, 10**12)  # a token without a tenant
    with pytest.raises(NotFound):
        await service.resume(Resume(stream, token=old, caller=NOBODY))


async def test_a_token_says_the_same_beside_the_key_of_another_tenant_as_alone(
    house: House,
) -> None:
    service = house.service
    stream = (await service.open(REQUEST)).stream
    token = service.keys.issue(stream, Right.READ, 10**12, tenant="acme")
    for caller in (NOBODY, OTHER):
        assert (await service.resume(Resume(stream, token=token, caller=caller))).stream == stream
        with pytest.raises(Forbidden):  # OTHER's key has the right, for streams of its own
            await service.cancel(Cancel(stream, token, caller=caller))


async def test_idempotency_keys_of_tenants_do_not_meet(house: House) -> None:
    service = house.service
    keyed = replace(REQUEST, idempotency_key="k")
    streams = [
        (await service.open(replace(keyed, caller=caller))).stream
        for caller in (ACME, OTHER, None, replace(ACME, max_unfinished=9))
    ]
    assert len({*streams}) == 3 and streams[0] == streams[3]


async def test_unfinished_streams_are_bounded_by_tenant(house: House) -> None:
    service = house.service
    two = replace(REQUEST, caller=replace(ACME, max_unfinished=2))
    await service.open(replace(two, n=2))
    with pytest.raises(CallerError) as refused:
        await service.open(two)
    error = refused.value
    assert (error.code, error.status, error.retryable) == ("too_many_streams", 429, True)
    assert error.min_retry_ms == 1000
    await service.open(replace(two, caller=replace(OTHER, max_unfinished=1)))


async def test_tokens_are_bounded_by_tenant(house: House) -> None:
    service = house.service
    slow = replace(REQUEST, caller=replace(ACME, tokens_per_s=1))
    await service.open(slow)
    run = house.slot.last[0]
    house.runs.core.quotas.charge("acme", 100, house.runs.clock())
    with pytest.raises(CallerError) as refused:
        await service.open(slow)
    assert (refused.value.code, refused.value.status) == ("too_many_tokens", 429)
    assert refused.value.min_retry_ms is not None and refused.value.min_retry_ms > 10_000
    await service.open(replace(slow, caller=replace(OTHER, tokens_per_s=1)))
    await house.step(house.slot, run, 0, "a")  # running streams continue


async def test_names_of_streams_are_apart_and_none_leads_to_anothers(house: House) -> None:
    async def ok(_request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(204)

    house.objects.answer = ok

    async def name_for(caller: Caller | None, name: str = "notes") -> str:
        call = Call("stream", name, "PUT", "http://e/v1/stream/x", credit=1, caller=caller)
        await house.service.call(call)
        return house.objects.requests[-1][0].name

    assert await name_for(None) == "notes"
    assert await name_for(ACME) == "/acme/notes"
    assert await name_for(OTHER) == "/other/notes"
    assert await name_for(ACME, "0" * 32) == f"/acme/{'0' * 32}"


@pytest.mark.parametrize(
    ("caller", "method", "refusal"),
    [
        (Caller("acme", Right.STREAM_READ), "POST", Forbidden),
        (Caller("acme", Right.STREAM_WRITE), "GET", Forbidden),
        (Caller("acme", Right.READ), "GET", Forbidden),
        (NOBODY, "GET", Unauthorized),
    ],
)
async def test_streams_are_read_and_written_by_right(
    house: House, caller: Caller, method: str, refusal: type[TailraceError]
) -> None:
    call = Call("stream", "notes", method, "http://e/v1/stream/notes", credit=1, caller=caller)
    with pytest.raises(refusal):
        await house.service.call(call)
    assert house.objects.requests == []


async def test_a_generation_is_read_as_a_stream_by_its_tenant_or_with_its_token(
    house: House,
) -> None:
    async def ok(_request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(200)

    house.objects.answer = ok
    opened = await house.service.open(REQUEST)
    name = opened.stream.hex()
    call = Call("stream", name, "GET", f"http://e/v1/stream/{name}", credit=1)
    token = (Header("tailrace-token", opened.token),)
    await house.service.call(replace(call, caller=ACME))
    await house.service.call(replace(call, headers=token, caller=NOBODY))
    assert [key.name for key, _ in house.objects.requests] == [name, name]
    for caller, refusal in ((OTHER, NotFound), (None, NotFound), (NOBODY, Unauthorized)):
        with pytest.raises(refusal):
            await house.service.call(replace(call, caller=caller))


async def test_subscriptions_are_not_for_tenants(house: House) -> None:
    path = "http://e/v1/stream/__ds/jwks.json"
    for caller in (ACME, NOBODY):
        call = Call("subscription", "jwks.json", "GET", path, credit=1, caller=caller)
        with pytest.raises(NotFound) as refused:
            await house.service.call(call)
        assert refused.value.code == "subscriptions_off"


async def test_a_chat_is_its_tenants_to_be_begun_and_gone_back_to_by_right(house: House) -> None:
    async def ok(_request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(204)

    house.objects.answer = ok
    call = Call("chat", "c1", "GET", "", credit=1)
    for caller, name in ((None, "c1"), (ACME, "/acme/c1"), (OTHER, "/other/c1")):
        await house.service.call(replace(call, caller=caller))
        assert house.objects.requests[-1][0] == ("chat", name)
    begins = Caller("acme", Right.GENERATE)
    await house.service.call(replace(call, method="PUT", body=bytes(16), caller=begins))
    for refused in (
        replace(call, caller=begins),
        replace(call, method="PUT", caller=Caller("acme", Right.READ)),
        replace(call, method="PUT", caller=Caller("acme", Right.STREAM_WRITE)),
    ):
        with pytest.raises(Forbidden):
            await house.service.call(refused)
    with pytest.raises(Unauthorized):
        await house.service.call(replace(call, caller=NOBODY))
