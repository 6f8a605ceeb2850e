"""An upstream server that answers well, dies, stalls or lies, on a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tailrace.ledger.frame import FinishReason, Notice, Reasoning, StreamEnd, Token, decode
from tailrace.origin.config import OriginConfig
from tailrace.origin.producer import Request, Text
from tailrace.origin.producers.production import Production
from tailrace.origin.producers.upstream import (
    BROKEN_TRIES,
    RETRY_MAX_S,
    RETRY_MIN_S,
    SETTLED_PIECES,
    Retry,
    Upstream,
    client_of,
)
from tailrace.origin.producers.upstream_call import UpstreamCall
from tailrace.origin.producers.upstream_reply import MAX_LINE_BYTES
from tests.origin.blocked_phrase import make as blocked_phrases
from tests.origin.producers.asked import frames, request
from tests.origin.producers.raw_server import (
    DONE,
    STREAM_HEAD,
    Asked,
    RawServer,
    Script,
    answer,
    chat,
    completion,
    event,
    finish,
    serving,
    thought,
    usage,
)

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"prompt": None, "messages": (("user", "Hi"),)}
QUICK: dict[str, Any] = {
    "upstream_first_token_s": 0.2, "upstream_between_tokens_s": 0.2, "upstream_retry_s": 0,
}  # fmt: skip
STEADY_S = 1.0
STEADY: dict[str, Any] = {
    "upstream_first_token_s": STEADY_S, "upstream_between_tokens_s": STEADY_S,
    "upstream_retry_s": 0,
}  # fmt: skip
"""For servers that are in time, on a machine that may be busy."""
WHOLE = STREAM_HEAD + completion("a") + completion("b") + finish() + usage(3, 2) + DONE
ENDED = StreamEnd(2, FinishReason.STOP, 2, 3)


class Waits:
    """In the place of sleeping and of the clock: time passes only while somebody waits."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def now(self) -> float:
        return sum(self.seconds)


def upstream(server: RawServer, waits: Waits | None = None, **settings: Any) -> Upstream:
    made = OriginConfig(upstream=server.url, text_streams=4, **settings)
    waits = waits or Waits()
    return Upstream(made, "m", client_of(made), Retry(Random(7), waits, waits.now))


async def asked_of(server: RawServer, asked: Request, **settings: Any) -> Sequence[Any]:
    producer = upstream(server, **settings)
    try:
        return await frames(producer, asked)
    finally:
        await producer.close()


def text(made: Sequence[Any]) -> str:
    return "".join(each.text for each in made if isinstance(each, Token))


def notices(made: Sequence[Any]) -> list[str]:
    return [each.code for each in made if isinstance(each, Notice)]


# ---- a server that answers ----


async def test_a_completion_becomes_tokens_and_an_end_with_the_servers_count() -> None:
    async with serving(WHOLE) as server:
        made = await asked_of(server, request(prompt="Once", seed=2**63 + 5, max_tokens=9))
    assert made == [Token("a", 0), Token("b", 1), ENDED]
    assert server.asked[0].path == "/v1/completions"
    assert "traceparent" not in server.asked[0].headers
    assert server.asked[0].body == {
        "model": "m",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 5,
    }


async def test_a_chat_passes_its_messages_and_all_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVERS_KEY", "secret")
    said = STREAM_HEAD + chat("a") + event({"choices": []}) + chat("b") + finish("length") + DONE
    more: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ("x",),
        "ignore_eos": True,
    }
    async with serving(said) as server:
        made = await asked_of(server, request(**CHAT, **more), upstream_key_env="SERVERS_KEY")
    assert made == [Token("a", 0), Token("b", 1), StreamEnd(2, FinishReason.LENGTH, 2, 0)]
    asked = server.asked[0]
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.body["messages"] == [{"role": "user", "content": "Hi"}]
    assert {name: asked.body[name] for name in more} == more | {"stop": ["x"]}


async def test_the_stop_sequence_that_a_server_names_is_that_of_the_end() -> None:
    for named, expected in (("x", "x"), ("other", None)):
        choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": named}
        said = STREAM_HEAD + completion("a") + event({"choices": [choice]}) + DONE
        async with serving(said) as server:
            made = await asked_of(server, request(stop=("x",)))
        assert made[-1] == StreamEnd(1, FinishReason.STOP, 1, 0, expected)


SAID_BY_US = {"model", "prompt", "stream", "stream_options", "max_tokens"}


async def test_a_server_keeps_its_own_defaults_where_the_request_leaves_sampling_open() -> None:
    async with serving(WHOLE) as server:
        await asked_of(server, request(given=()))
    assert server.asked[0].body.keys() == SAID_BY_US


async def test_a_continuation_too_says_only_what_the_request_gave() -> None:
    first, rest = STREAM_HEAD + completion("a"), STREAM_HEAD + completion("b") + finish() + DONE
    async with serving(first, rest) as server:
        made = await asked_of(server, request(given=("top_p",), top_p=0.5))
    assert text(made) == "ab" and notices(made) == ["inexact"]
    assert [asked.body.keys() for asked in server.asked] == [SAID_BY_US | {"top_p"}] * 2
    assert [asked.body["top_p"] for asked in server.asked] == [0.5, 0.5]


async def test_a_setting_that_the_request_turns_off_is_off_at_the_server() -> None:
    off: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0}
    async with serving(WHOLE) as server:
        await asked_of(server, request(**off, top_k=0, given=(*off, "top_k")))
    body = server.asked[0].body
    assert {name: body[name] for name in off} == off
    assert body["top_k"] == -1  # SGLang refuses 0, and all of them take -1
    assert body.keys() == SAID_BY_US | off.keys() | {"top_k"}


async def test_a_stream_that_an_earlier_version_began_goes_on_as_it_did() -> None:
    async with serving(WHOLE) as server:
        await asked_of(server, request(given=None, temperature=1.0, seed=2**63 + 5, top_p=0.9))
    body = server.asked[0].body
    assert body.keys() == SAID_BY_US | {"temperature", "seed", "top_p"}
    assert (body["temperature"], body["seed"], body["top_p"]) == (1.0, 5, 0.9)


@pytest.mark.parametrize(
    "tail",
    [
        finish() + usage(3, 2) + DONE,
        finish() + usage(3, 2),
        usage(3, 2) + DONE,
        usage(3, 2) + finish(),
    ],
    ids=["all", "no DONE", "no finish_reason", "no DONE, usage first"],
)
async def test_the_ends_that_servers_give_are_ends(tail: bytes) -> None:
    async with serving(STREAM_HEAD + completion("a") + completion("b") + tail) as server:
        assert (await asked_of(server, request()))[-1] == ENDED


@pytest.mark.parametrize("after", [b"data: {\n\n", completion("more"), event({"error": "late"})])
async def test_what_comes_after_the_finish_changes_nothing(after: bytes) -> None:
    async with serving(STREAM_HEAD + completion("a") + finish() + after) as server:
        made = await asked_of(server, request())
    assert made == [Token("a", 0), StreamEnd(1, FinishReason.STOP, 1, 0)]
    assert len(server.asked) == 1


# ---- a server that is lost ----


async def test_the_server_is_told_of_which_trace_its_request_is() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with serving(WHOLE) as server:
        await asked_of(server, request(prompt="Once", trace=trace))
    assert server.asked[0].headers["traceparent"] == trace


async def test_a_server_that_dies_at_any_byte_loses_and_doubles_nothing() -> None:
    async def go_on(asked: Asked, writer: asyncio.StreamWriter) -> None:
        rest = "ab".removeprefix(asked.body["prompt"].removeprefix("Say it."))
        writer.write(STREAM_HEAD + b"".join(map(completion, rest)) + finish() + DONE)
        await writer.drain()

    async with serving() as server:
        producer = upstream(server)
        for at in range(len(WHOLE)):
            server.scripts[:], server.asked[:] = [WHOLE[:at], go_on], []
            made: Any = await frames(producer, request())
            assert text(made) == "ab", at
            assert made[-1].finish_reason is FinishReason.STOP
            was_inexact = len(server.asked) == 2 and server.asked[1].body["prompt"] != "Say it."
            assert notices(made) == ["inexact"] * was_inexact, at
        await producer.close()


@pytest.mark.parametrize(
    "rubbish",
    [b"data: {\n\n", b"data: \xff\n\n", b"data: [1]\n\n", event({"error": "engine died"})],
)
async def test_rubbish_in_the_middle_is_a_loss(rubbish: bytes) -> None:
    rest = STREAM_HEAD + completion("b") + finish()
    async with serving(STREAM_HEAD + completion("a") + rubbish, rest) as server:
        made = await asked_of(server, request())
    assert made[:3] == [Token("a", 0), Notice("inexact", made[1].message, 1), Token("b", 2)]


async def test_a_chat_goes_on_behind_what_was_delivered() -> None:
    said = STREAM_HEAD + chat("a"), STREAM_HEAD + chat("b") + finish() + usage(8, 1)
    async with serving(*said) as server:
        made = await asked_of(server, request(**CHAT, max_tokens=9))
    assert text(made) == "ab"
    assert made[-1] == StreamEnd(2, FinishReason.STOP, 3, 7)
    body = server.asked[1].body
    assert body["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "a"},
    ]
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)
    assert body["max_tokens"] == 8


async def test_a_worker_that_was_killed_goes_on_from_what_the_ledger_has() -> None:
    async with serving(STREAM_HEAD + completion("c") + finish() + usage(5, 1) + DONE) as server:
        made = await asked_of(server, request("ab", 2, max_tokens=10))
    assert made[1:] == [Token("c", 3), StreamEnd(3, FinishReason.STOP, 4, 3)]
    assert notices(made) == ["inexact"]
    assert server.asked[0].body["prompt"] == "Say it.ab"
    assert server.asked[0].body["max_tokens"] == 8


async def test_a_server_lost_before_its_first_token_is_asked_again_without_a_word() -> None:
    async with serving(STREAM_HEAD, answer(503, {"error": "loading"}), WHOLE) as server:
        made = await asked_of(server, request(), upstream_lost="end")
    assert made == [Token("a", 0), Token("b", 1), ENDED]


async def test_lost_end_ends_the_stream_where_it_broke() -> None:
    async with serving(STREAM_HEAD + completion("a"), WHOLE) as server:
        made = await asked_of(server, request(), upstream_lost="end")
    assert made[0] == Token("a", 0)
    assert made[1] == StreamEnd(
        1,
        FinishReason.ORIGIN_LOST,
        1,
        0,
        "the upstream server's answer ended before it was complete",
        retryable=True,
    )
    assert len(server.asked) == 1


async def test_a_lost_server_is_waited_for_so_long_and_no_longer() -> None:
    waits = Waits()
    async with serving(answer(503, {})) as server:
        producer = upstream(server, waits)
        made: Any = await frames(producer, request())
        await producer.close()
    assert made == [
        StreamEnd(
            0, FinishReason.ORIGIN_LOST, 0, 0, "the upstream server answered 503", retryable=True
        )
    ]
    retry_s = OriginConfig().upstream_retry_s
    assert retry_s <= waits.now() <= retry_s + RETRY_MAX_S
    assert len(server.asked) == len(waits.seconds) + 1
    ceilings = [min(RETRY_MAX_S, RETRY_MIN_S * 2**failures) for failures in range(1, 99)]
    assert all(0 <= each <= most for each, most in zip(waits.seconds, ceilings, strict=False))
    assert max(waits.seconds) > RETRY_MAX_S / 2


@pytest.mark.parametrize(
    ("header", "least_s"), [("3", 3.0), ("9" * 30, 30.0), ("soon", 0.0), ("-1", 0.0)]
)
async def test_a_busy_server_is_given_the_time_that_it_asks_for(
    header: str, least_s: float
) -> None:
    waits = Waits()
    async with serving(answer(429, {}, Retry_After=header), WHOLE) as server:
        producer = upstream(server, waits)
        assert (await frames(producer, request()))[-1] == ENDED
        await producer.close()
    assert least_s <= waits.now() <= max(least_s, RETRY_MIN_S * 2)


async def test_a_server_that_makes_one_token_and_dies_again_and_again_comes_to_an_end() -> None:
    async with serving(STREAM_HEAD + completion("x")) as server:
        made = await asked_of(server, request(max_tokens=7))
    assert text(made) == "x" * 7
    assert made[-1].finish_reason is FinishReason.LENGTH
    assert len(server.asked) == 7


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(500, {}), "answered 500"),
        (STREAM_HEAD.replace(b"event-stream", b"html"), "sent text/html, not text/event-stream"),
        (b"220 mail.example ESMTP\r\n\r\n", "sent malformed HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-More: more\r\n" * 9999, "sent malformed HTTP"),
        (
            STREAM_HEAD + b"data: " + b"x" * (MAX_LINE_BYTES + 1),
            f"sent a line of more than {MAX_LINE_BYTES} bytes",
        ),
        (STREAM_HEAD + completion("a") + b"data: {\n\n", "sent an event that is not JSON"),
    ],
    ids=["500", "HTML", "SMTP", "endless head", "long line", "a token each time"],
)
async def test_a_server_that_is_plainly_broken_is_given_up_soon(said: bytes, why: str) -> None:
    waits = Waits()
    async with serving(said) as server:
        producer = upstream(server, waits)
        made = (await frames(producer, request()))[-1]
        await producer.close()
    assert isinstance(made, StreamEnd)
    assert (made.finish_reason, made.message) == (
        FinishReason.ORIGIN_LOST,
        f"the upstream server {why}",
    )
    assert len(server.asked) == BROKEN_TRIES
    ceilings = [min(RETRY_MAX_S, RETRY_MIN_S * 2**failures) for failures in range(1, BROKEN_TRIES)]
    assert all(each <= most for each, most in zip(waits.seconds, ceilings, strict=True))


async def test_a_server_that_starts_after_errors_is_waited_for() -> None:
    starting = [answer(500, {})] * (BROKEN_TRIES - 1) + [answer(503, {})]
    async with serving(*starting, *starting, WHOLE) as server:
        assert (await asked_of(server, request()))[-1] == ENDED


async def test_some_text_between_losses_does_not_make_them_first_ones() -> None:
    waits = Waits()
    some = STREAM_HEAD + completion("a") * (SETTLED_PIECES - 1)
    enough = STREAM_HEAD + completion("a") * SETTLED_PIECES
    async with serving(*[some] * 8, enough, WHOLE) as server:
        producer = upstream(server, waits)
        await frames(producer, request(max_tokens=999))
        await producer.close()
    assert max(waits.seconds[4:8]) > RETRY_MIN_S * 2 >= waits.seconds[8]


async def test_nobody_there_is_a_loss() -> None:
    async with serving(WHOLE) as server:
        pass  # closed again, so that its address refuses connections
    made = await asked_of(server, request())
    assert made[-1].message == "the upstream server cannot be reached"


# ---- a server that stalls ----


def stalls_after(said: bytes) -> Script:
    async def stall(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        await asyncio.Event().wait()

    return stall


@pytest.mark.parametrize("said", [b"", STREAM_HEAD, STREAM_HEAD + completion("a")])
async def test_a_server_that_stalls_is_a_lost_one(said: bytes) -> None:
    async with serving(stalls_after(said)) as server:
        made = await asked_of(server, request(), upstream_lost="end", **QUICK)
        assert made[-1].message == "the upstream server stalled"
        await server.gone.wait()


async def test_time_in_which_we_stood_still_is_no_stall_of_the_server() -> None:
    async def while_we_stand_still(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + completion("a"))
        await writer.drain()
        time.sleep(3 * STEADY_S)  # noqa: ASYNC251 - holds our loop as well
        writer.write(completion("b") + finish() + usage(3, 2) + DONE)

    async with serving(while_we_stand_still) as server:
        made = await asked_of(server, request(), upstream_lost="end", **STEADY)
    assert made == [Token("a", 0), Token("b", 1), ENDED]


async def test_signs_of_life_are_no_tokens() -> None:
    async def pings(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + completion("a"))
        while not writer.is_closing():
            writer.write(b": ping\n\n" + event({"choices": []}))
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(pings) as server:
        made = await asked_of(server, request(), upstream_lost="end", **QUICK)
    assert made[-1].message == "the upstream server stalled"


async def test_a_server_that_thinks_is_alive_and_its_thoughts_are_passed_on() -> None:
    async def thinks(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(30):
            writer.write(thought("hm "))
            await writer.drain()
            await asyncio.sleep(STEADY_S / 20)
        writer.write(chat("a") + finish() + usage(3, 31) + DONE)

    async with serving(thinks) as server:
        made = await asked_of(server, request(**CHAT), upstream_lost="end", **STEADY)
    assert made[:30] == [Reasoning("hm ", index) for index in range(30)]
    assert made[30:] == [Token("a", 30), StreamEnd(31, FinishReason.STOP, 31, 3)]


async def test_thoughts_that_led_to_no_text_are_thought_again() -> None:
    said = STREAM_HEAD + thought("x") + thought("y"), STREAM_HEAD + thought("z") + chat("a")
    async with serving(said[0], said[1] + finish() + usage(3, 2)) as server:
        made = await asked_of(server, request(**CHAT, max_tokens=9))
    assert [type(each) for each in made[:5]] == [Reasoning, Reasoning, Notice, Reasoning, Token]
    assert made[5] == StreamEnd(2, FinishReason.STOP, 5, 3)
    assert server.asked[1].body["max_tokens"] == 9


async def test_a_continuation_counts_the_thoughts_before_it() -> None:
    said = STREAM_HEAD + thought("x") + chat("a"), STREAM_HEAD + chat("b") + finish() + usage(4, 1)
    async with serving(*said) as server:
        made = await asked_of(server, request(**CHAT, max_tokens=9))
    assert made[-1] == StreamEnd(3, FinishReason.STOP, 4, 3)
    assert server.asked[1].body["max_tokens"] == 7


async def test_a_filtered_stream_shows_no_thoughts() -> None:
    async with serving(STREAM_HEAD + thought("x") + chat("a") + finish() + DONE) as server:
        producer = upstream(server)
        made = Production(producer, request(**CHAT), 1, blocked_phrases).frames()
        shown = [decode(raw)[1] async for _, raw in made]
        await producer.close()
    assert shown == [Token("a", 0), StreamEnd(2, FinishReason.STOP, 1, 0)]


async def test_a_slow_reader_is_no_stalled_server() -> None:
    said = STREAM_HEAD + completion("a")
    rest = asyncio.Event()

    async def waits_for_its_reader(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await rest.wait()
        writer.write(completion("b") + finish() + DONE)

    async with serving(waits_for_its_reader) as server:
        config = OriginConfig(upstream=server.url, **STEADY)
        client = client_of(config)
        body: dict[str, Any] = {}
        call = UpstreamCall(client, "completions", body, config)
        async with aclosing(call.pieces()) as pieces:
            assert await anext(pieces) == Text("a")
            # The reader is busy beyond the deadline of the server that it read from.
            until = asyncio.get_running_loop().time() + STEADY_S * 1.5
            asyncio.get_running_loop().call_at(until, rest.set)
            await rest.wait()
            assert await anext(pieces) == Text("b")
        await client.aclose()


@pytest.mark.parametrize("piece", [completion("x"), thought("x")], ids=["text", "thoughts"])
async def test_a_server_that_never_ends_is_told_to_stop_at_max_tokens(piece: bytes) -> None:
    stopped = asyncio.Event()

    async def endless(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        try:
            while True:
                writer.write(piece)
                await writer.drain()
        finally:
            stopped.set()

    async with serving(endless) as server:
        async with asyncio.timeout(30):
            made = await asked_of(server, request(max_tokens=50))
            await stopped.wait()
    assert len(made) == 51
    assert made[-1] == StreamEnd(50, FinishReason.LENGTH, 50, 0)


async def test_max_tokens_is_also_counted_by_a_server_that_counts_as_it_goes() -> None:
    counted = [
        event({"choices": [{"index": 0, "text": "x"}], "usage": _usage(3 * n)}) for n in range(1, 9)
    ]
    async with serving(STREAM_HEAD + b"".join(counted)) as server:
        made = await asked_of(server, request(max_tokens=10))
    assert text(made) == "xxx"
    assert made[-1].finish_reason is FinishReason.LENGTH


def _usage(completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": completion_tokens}


async def test_a_stall_after_the_finish_costs_only_the_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.origin.producers.upstream_call.AFTER_FINISH_S", 0.05)
    async with serving(stalls_after(STREAM_HEAD + completion("a") + finish())) as server:
        made = await asked_of(server, request())
    assert made == [Token("a", 0), StreamEnd(1, FinishReason.STOP, 1, 0)]


async def test_a_cancel_closes_the_upstream_request() -> None:
    async with serving(stalls_after(STREAM_HEAD + completion("a"))) as server:
        producer = upstream(server)
        async with aclosing(Production(producer, request(), 1).frames()) as made:
            await anext(made)
            assert not server.gone.is_set()
        async with asyncio.timeout(60):
            await server.gone.wait()
        await producer.close()


# ---- a server that says no ----


async def test_a_refused_request_fails_with_the_servers_words() -> None:
    said = {"error": {"message": "the prompt is too long"}}
    async with serving(answer(400, said)) as server:
        made = await asked_of(server, request())
    message = "the upstream server refused the request: the prompt is too long"
    assert made == [StreamEnd(0, FinishReason.FAILED, 0, 0, message)]
    assert len(server.asked) == 1


async def test_a_refused_continuation_is_a_loss() -> None:
    said = STREAM_HEAD + chat("a"), answer(422, {"detail": "Unexpected fields"})
    async with serving(*said) as server:
        made = await asked_of(server, request(**CHAT))
    assert made[-1].finish_reason is FinishReason.ORIGIN_LOST
    assert text(made) == "a"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "said",
    [
        answer(200, {"choices": []}),
        STREAM_HEAD.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection"),
        STREAM_HEAD.replace(b"event-stream", b"html"),
        b"HTTP/1.1 abc\r\n\r\n",
        b"\x00" * 70_000,
    ],
    ids=["JSON", "gzip", "HTML", "no status", "zeros"],
)
async def test_an_answer_that_is_no_event_stream_is_a_loss(said: bytes) -> None:
    async with serving(said) as server:
        made = await asked_of(server, request())
    assert made[-1].finish_reason is FinishReason.ORIGIN_LOST


async def test_the_fingerprint_names_the_model_and_not_the_address() -> None:
    async with serving(WHOLE) as one, serving(WHOLE) as two:
        first, second = upstream(one), upstream(two)
    assert first.about == second.about
    assert replace(first.about, name="x") != second.about
