"""Anthropic's SDK against two edges: `anthropic_client.py EDGE OTHER ASKED`.

ASKED is a request as JSON. The script prints what the SDK makes of its answer, whole, streamed, cut
off after each event, and refused.
"""

import asyncio
import json
import sys
from typing import Any

import anthropic
from anthropic import AsyncAnthropic, AsyncStream
from anthropic.types import Message, RawMessageStreamEvent

edge, other = sys.argv[1:3]
asked: dict[str, Any] = json.loads(sys.argv[3])
AT_A_TIME = 8


async def resumed(client: AsyncAnthropic, message: str, after: int) -> list[dict[str, Any]]:
    """Return the events after a number, read as the documentation says."""
    stream = await client.get(
        f"/v1/messages/{message}?starting_after={after}",
        cast_to=Message,
        stream=True,
        stream_cls=AsyncStream[RawMessageStreamEvent],
    )
    return [event.to_dict() async for event in stream]


async def cut(here: AsyncAnthropic, there: AsyncAnthropic, point: int) -> list[dict[str, Any]]:
    """Return the events of a message that is cut off after one of them, and goes on elsewhere."""
    events = list[RawMessageStreamEvent]()
    async with await here.messages.create(**asked, stream=True) as stream:
        async for event in stream:
            events.append(event)
            if len(events) > point:
                break
    first = events[0]
    assert first.type == "message_start"
    rest = await resumed(there, first.message.id, point)
    return [*(event.to_dict() for event in events), *rest]


async def refusal(client: AsyncAnthropic, **change: Any) -> list[object]:
    try:
        await client.messages.create(**asked | change)
    except anthropic.APIStatusError as error:
        body: Any = error.body
        kind = body["error"]["type"]
        named = error.request_id is not None and body["request_id"] == error.request_id
        return [type(error).__name__, error.status_code, kind, body["error"]["message"], named]
    return []


async def counted(client: AsyncAnthropic) -> int | str:
    """Return the tokens of the request, or the type of the error."""
    prompt = {name: asked[name] for name in ("model", "messages", "tools") if name in asked}
    try:
        count: int = (await client.messages.count_tokens(**prompt)).input_tokens
        return count
    except anthropic.BadRequestError as error:
        return str(error.body["error"]["type"])


async def of(here: AsyncAnthropic, there: AsyncAnthropic) -> dict[str, Any]:
    stream = await here.messages.create(**asked, stream=True)
    events = [event.to_dict() async for event in stream]
    async with here.messages.stream(**asked) as helper:
        texts = [text async for text in helper.text_stream]
        final = await helper.get_final_message()
    whole = await here.messages.create(**asked)
    again: Message = await there.get(f"/v1/messages/{final.id}", cast_to=Message)
    turns = asyncio.Semaphore(AT_A_TIME)

    async def cut_in_turn(point: int) -> bool:
        async with turns:
            got = await cut(here, there, point)
        events_of = [without_id(event) for event in got]
        return events_of == [without_id(event) for event in events]

    points = range(len(events))
    same = await asyncio.gather(*map(cut_in_turn, points))
    return {
        "types": [event["type"] for event in events],
        "events": events,
        "text": "".join(texts),
        "final": final.to_dict(mode="json"),
        "whole": whole.to_dict(mode="json"),
        "again": again.to_dict(mode="json"),
        "broken": [point for point in points if not same[point]],
        "counted": await counted(there),
        "request_id": bool(whole._request_id),  # documented, despite its name
        "refusals": [
            await refusal(here, model="gpt"),
            await refusal(here, max_tokens=0),
            await refusal(here, messages=[{"role": "user", "content": [{"type": "image"}]}]),
            await refusal(here, extra_headers={"anthropic-version": "2023-01-01"}),
        ],
    }


def without_id(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without what differs from stream to stream."""
    if "message" in event:
        return event | {"message": event["message"] | {"id": ""}}
    if event.get("delta", {}).get("type") == "signature_delta":
        return event | {"delta": {}}
    # How much of a prompt is in the cache depends on the streams before it.
    return event | {"usage": {}} if event["type"] == "message_delta" else event


async def main() -> None:
    async with (
        AsyncAnthropic(base_url=edge, api_key="unused", max_retries=0) as here,
        AsyncAnthropic(base_url=other, api_key="unused", max_retries=0) as there,
    ):
        print(json.dumps(await of(here, there)))


asyncio.run(main())
