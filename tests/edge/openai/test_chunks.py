"""Frames as chunks of OpenAI's API: each kind, each end, and what goes between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.openai.chat import ChatShape
from tailrace.edge.openai.chunks import (
    ChunkEncoder,
)
from tailrace.edge.openai.completions import CompletionShape
from tailrace.edge.openai.merged import PROMPTS_AT_A_TIME
from tailrace.ledger.errors import CallerError, Overloaded
from tailrace.ledger.frame import (
    Classification,
    FinishReason,
    Frame,
    Notice,
    Open,
    Opened,
    Reasoning,
    Resume,
    Revision,
    Score,
    ScoredToken,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    TokenScores,
    ToolCall,
    encode,
    error_frame,
)
from tests.edge.scripted_origin import PROMPT_TOKENS, STREAM, ScriptedOrigin

OPENED = Opened(STREAM, 0, "", "demo", 12, created_ms=1_750_000_000_123)
HEAD = {
    "id": f"chatcmpl-{STREAM.hex()}",
    "object": "chat.completion.chunk",
    "created": 1_750_000_000,
    "model": "demo",
}


def events(body: bytes) -> list[Any]:
    """Return the events as the strictest client reads them: `data: `, one line, one blank line."""
    *whole, rest = body.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in whole)
    said = [event.removeprefix("data: ") for event in whole]
    return [each if each == "[DONE]" else json.loads(each) for each in said]


def encoder(**options: Any) -> ChunkEncoder:
    made = ChunkEncoder(ChatShape(), **{"begun": True} | options)
    made.opened(OPENED)
    return made


def told(*frames: Frame, **options: Any) -> list[Any]:
    return events(encoder(**options).frames([encode(frame) for frame in frames]))


def delta_of(frame: Frame) -> Any:
    [chunk] = told(frame)
    [choice] = chunk["choices"]
    assert HEAD.items() <= chunk.items()
    assert choice["index"] == 0 and choice["finish_reason"] is None
    return chunk["sequence_number"], choice["delta"]


@pytest.mark.parametrize(
    ("frame", "delta"),
    [
        (Token("", 3), {"content": ""}),
        (Token(' "the"\n\x00\\ é \u2028', 3), {"content": ' "the"\n\x00\\ é \u2028'}),
        (Token("a" * 200, 3), {"content": "a" * 200}),
        (Token("x", 2**40), {"content": "x"}),
        (Revision(0, "wreck", True, 3), {"content": "wreck"}),
        (Reasoning("Hm.", 3), {"reasoning_content": "Hm."}),
        (
            ToolCall(1, "c1", "add", "", 3),
            {
                "tool_calls": [
                    {
                        "index": 1,
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": ""},
                    }
                ]
            },
        ),
        (
            ToolCall(1, "", "", '{"a"', 3),
            {"tool_calls": [{"index": 1, "function": {"arguments": '{"a"'}}]},
        ),
    ],
)
def test_a_frame_is_a_chunk_with_its_index(frame: Any, delta: dict[str, Any]) -> None:
    assert delta_of(frame) == (frame.index, delta)


def test_a_choice_that_begins_with_a_call_has_no_text_until_there_is_some() -> None:
    call, notice = ToolCall(0, "c1", "add", "", 1), Notice("loading", "it was", 0)
    first, _ = told(call, begun=False)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    first, *_ = told(notice, call, begun=False)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    first, _ = told(Token("x", 0), begun=False)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_choice_begins_with_its_first_frame() -> None:
    made = encoder(begun=False)
    assert made.frames([]) == b""
    first, _ = events(made.frames([encode(ToolCall(0, "c1", "add", "", 0))]))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_offsets_of_scored_tokens_count_from_the_beginning_of_the_text() -> None:
    made = ChunkEncoder(CompletionShape(), begun=True)
    made.opened(OPENED)
    scores = [TokenScores(Score(1, text, -0.5)) for text in (b"The", b" fox", "é".encode())]
    frames = [
        ScoredToken("The fox", tuple(scores[:2]), 0),
        ScoredToken("é", (scores[2],), 1),
        ScoredToken("The", (scores[0],), 2),
    ]
    chunks = events(made.frames([encode(frame) for frame in frames]))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0, 3], [7], [8]]


def test_what_the_api_has_no_place_for_rides_beside_the_choices_or_not_at_all() -> None:
    [notice] = told(Notice("inexact", "another engine", 4), Classification("a", 0.5, 5))
    assert notice["choices"] == [] and notice["sequence_number"] == 4
    assert notice["notice"] == {"code": "inexact", "message": "another engine"}
    assert told(Revision(0, "wre", False, 3)) == []
    [ping] = events(encoder().keepalive())
    assert ping == HEAD | {"choices": []}


def test_scores_are_those_of_the_api_with_bytes_and_no_infinities() -> None:
    chosen, other = Score(1, b"\xc3", -0.5), Score(2, b"a", float("-inf"))
    [chunk] = told(ScoredToken("é", (TokenScores(chosen, (other,)),), 0))
    [score] = chunk["choices"][0]["logprobs"]["content"]
    assert (score["token"], score["logprob"], score["bytes"]) == ("\ufffd", -0.5, [0xC3])
    assert score["top_logprobs"] == [{"token": "a", "logprob": None, "bytes": [97]}]
    old = ChunkEncoder(CompletionShape(), begun=True)
    old.opened(OPENED)
    [chunk] = events(old.frames([encode(ScoredToken("é", (TokenScores(other),), 0))]))
    assert chunk["id"] == f"cmpl-{STREAM.hex()}" and chunk["object"] == "text_completion"
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [{"a": None}],
        "text_offset": [0],
    }


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.FILTERED, "content_filter"),
        (FinishReason.TOOL_CALLS, "tool_calls"),
    ],
)
def test_an_end_is_a_finish_reason_then_the_usage_if_asked_for_then_done(
    reason: FinishReason, said: str
) -> None:
    end = StreamEnd(7, reason, 9, 12)
    finish, done = told(end)
    assert done == "[DONE]"
    assert finish["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": said,
    }  # fmt: skip
    assert finish["sequence_number"] == 9
    finish, used, done = told(end, usage=True)
    assert "sequence_number" not in finish and used["sequence_number"] == 9
    assert used["choices"] == [] and done == "[DONE]"
    assert used["usage"] == {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}


@pytest.mark.parametrize(
    ("frame", "code", "kind"),
    [
        (StreamEnd(1, FinishReason.CANCELLED, 1, 1), "cancelled", "invalid_request_error"),
        (StreamEnd(1, FinishReason.ORIGIN_LOST, 1, 1, "gone", True), "origin_lost", "server_error"),
        (StreamEnd(1, FinishReason.FAILED, 1, 1, "NaN", True), "failed", "server_error"),
        (StreamEnd(1, FinishReason.FAILED, 1, 1), "failed", "invalid_request_error"),
        (StreamError("overloaded", "full", True, 503), "overloaded", "server_error"),
    ],
)
def test_every_other_end_is_an_error_and_never_silence(frame: Frame, code: str, kind: str) -> None:
    error, done = told(frame)
    assert done == "[DONE]"
    assert (error["error"]["code"], error["error"]["type"]) == (code, kind)
    assert error["error"].keys() == {"message", "type", "param", "code"}


def test_an_error_within_a_stream_names_the_field_as_the_api_does() -> None:
    refused = error_frame(CallerError("is not a JSON schema", field="format"))
    error, _ = told(refused)
    assert error["error"]["param"] == "response_format"
    assert error["error"]["message"] == "'response_format' is not a JSON schema"


def test_who_has_all_is_told_that_it_is_done() -> None:
    assert told(Status(STREAM, StreamState.ENDED, 9)) == ["[DONE]"]


def test_each_chunk_counts_the_frames_so_far_where_that_is_asked_for() -> None:
    chunks = told(Token("a", 0), Token("b", 1), usage=True, continuous=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]
    first = told(Token("a", 0), begun=False)[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "sequence_number" not in first


# ---- the routes, over a real link ----


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(3)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.anyio
async def test_a_request_says_to_the_origin_what_its_parameters_mean(
    origin: ScriptedOrigin,
) -> None:
    more = {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            },
            {"role": "user", "content": "Hi"},
        ],
        "max_completion_tokens": 7,
        "temperature": 1,
        "stop": "x",
        "logprobs": True,
        "top_logprobs": 3,
        "priority": "interactive",
        "unread": "cancel",
        "top_k": -1,
        "seed": -1,
    }
    async with origin.serving() as link, served(link) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | more)
        assert answer.json()["choices"][0]["message"]["content"] == " w0 w1 w2"
        await client.post("/v1/chat/completions", json=CHAT | {"seed": -(2**63)})
        first, second = (frame for frame in origin.received if isinstance(frame, Open))
    assert [(turn.role, turn.content) for turn in first.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (first.sampling.top_k, first.sampling.seed) == (0, 2**64 - 1)
    assert (second.sampling.top_k, second.sampling.seed) == (None, 2**63)
    assert (first.max_tokens, first.logprobs, first.stop) == (7, 3, ("x",))
    assert (first.priority.word, first.unread.word) == ("interactive", "cancel")
    assert second.max_tokens == 1 << 20 and second.logprobs is None


@pytest.mark.anyio
@pytest.mark.parametrize("more", [{"top_k": -2}, {"seed": -(2**63) - 1}, {"seed": 2**64}])
async def test_what_no_server_takes_is_refused(
    origin: ScriptedOrigin, more: dict[str, int]
) -> None:
    async with origin.serving() as link, served(link) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT | more)
    assert refused.status_code == 400
    assert [refused.json()["error"]["param"]] == list(more)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_of_many_prompts_only_a_few_are_under_way_at_a_time(
    origin: ScriptedOrigin, stream: bool
) -> None:
    many = {"model": "demo", "prompt": ["hold"] * 20, "stream": stream}
    async with origin.serving() as link, served(link) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=many))
        await origin.has_received(PROMPTS_AT_A_TIME)
        # Frames on one link come in the order in which they were sent.
        await client.get(f"/v1/chat/completions/chatcmpl-{STREAM.hex()}")
        opens = [frame for frame in origin.received if isinstance(frame, Open)]
        assert len(opens) == PROMPTS_AT_A_TIME
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.anyio
async def test_an_error_of_one_prompt_ends_the_answer(origin: ScriptedOrigin) -> None:
    many = {"model": "demo", "prompt": ["x"] * 20}
    async with origin.serving() as link, served(link) as client:
        whole = await client.post("/v1/completions", json=many)
        assert [choice["index"] for choice in whole.json()["choices"]] == [*range(20)]
        assert whole.json()["usage"]["prompt_tokens"] == 20 * PROMPT_TOKENS
        too_many = await client.post("/v1/completions", json=many | {"prompt": ["x"] * 2049})
        assert too_many.status_code == 400 and "2048" in too_many.json()["error"]["message"]
        origin.refusal = Overloaded("the queue is full", retry_after_ms=1500)
        refused = await client.post("/v1/completions", json=many)
        assert (refused.status_code, refused.headers["retry-after-ms"]) == (503, "1500")


@pytest.mark.anyio
async def test_an_error_after_the_first_prompts_ends_a_streamed_answer(
    origin: ScriptedOrigin,
) -> None:
    many = {"model": "demo", "prompt": ["x"] * 20, "stream": True}
    origin.allowed = 9
    async with origin.serving() as link, served(link) as client:
        answer = await client.post("/v1/completions", json=many)
    *chunks, failed, done = events(answer.content)
    assert answer.status_code == 200 and chunks and done == "[DONE]"
    assert failed["error"]["code"] == "overloaded"


@pytest.mark.anyio
async def test_a_resumed_stream_is_asked_for_from_where_the_client_is(
    origin: ScriptedOrigin,
) -> None:
    path = f"/v1/chat/completions/chatcmpl-{STREAM.hex()}"
    async with origin.serving() as link, served(link) as client:
        rest = await client.get(f"{path}?stream=true&starting_after=1&token=t")
        assert [e["sequence_number"] for e in events(rest.content)[:-1]] == [2, 3]
        whole = await client.get(path)
        assert whole.json()["object"] == "chat.completion"
        for query, status, param in (
            ("?stream=true&starting_after=9", 400, "starting_after"),
            ("?stream=true&starting_after=x", 400, "starting_after"),
            ("?stream=maybe", 400, "stream"),
        ):
            refused = await client.get(f"{path}{query}")
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (status, param), query
        missing = await client.get("/v1/chat/completions/chatcmpl-1")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_stream")
        resume = next(frame for frame in origin.received if isinstance(frame, Resume))
    assert (resume.after, resume.token) == (1, "t")


@pytest.mark.anyio
async def test_errors_have_the_shape_and_the_headers_that_clients_act_upon(
    origin: ScriptedOrigin,
) -> None:
    origin.refusal = Overloaded("the queue is full", retry_after_ms=1500)
    async with origin.serving() as link, served(link) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        assert (refused.headers["retry-after-ms"], refused.headers["retry-after"]) == ("1500", "2")
        for path, body, status in (
            ("/v1/chat/completions", b"{", 400),
            ("/v1/chat/completions", b"[]", 400),
            ("/v1/completions", b'{"model": "demo", "prompt": 7}', 400),
            ("/v1/chat/completions", b" " * (1 << 21), 413),
            ("/v1/chat/completions/x/y", b"{}", 404),
        ):
            answer = await client.post(path, content=body)
            assert answer.status_code == status
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
            assert answer.headers["x-should-retry"] == "false"
        native = await client.post("/v1/generate", json={})
        assert native.json()["error"].keys() >= {"code", "message", "retryable"}
    assert error_frame(origin.refusal).code == "overloaded"


def served(link: Any) -> httpx.AsyncClient:
    app = create_app(link, EdgeConfig())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
