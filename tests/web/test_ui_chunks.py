"""The messages that a page makes of frames are those that an edge makes for the AI SDK."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tailrace.edge.ai_sdk import UiEvents
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Notice,
    Opened,
    Reasoning,
    Revision,
    ScoredToken,
    Snapshot,
    StreamEnd,
    Token,
    ToolCall,
    encode,
)
from tests.npm import installed
from tests.web.test_client import HERE, run

STREAMS = 400
SEED = 11
TEXTS = ("", "a", "b", "ab", 'é"\n', "😀")
ARGUMENTS = ("", '{"x": ', "1}", "{}")


def some_frames(random: Random) -> list[Frame]:
    """Return a stream that thinks, revises what it said, and calls tools, in any order."""
    frames: list[Frame] = []
    for index in range(random.randrange(12)):
        text = random.choice(TEXTS)
        match random.choice(("token", "token", "token", "scored", "revision", "other", "call")):
            case "token":
                frames.append(Token(text, index))
            case "scored":
                frames.append(ScoredToken(text, (), index))
            case "revision":
                is_final, replaced = random.random() < 0.5, random.randint(0, index)
                stability = random.choice((0.0, 0.5, 1.0))
                frames.append(Revision(replaced, text, is_final, index, stability))
            case "other":
                frames.append(random.choice((Reasoning(text, index), Notice("a", "b", index))))
            case "call":
                call = random.randrange(2)
                arguments = random.choice(ARGUMENTS)
                frames.append(ToolCall(call, f"id{call}", f"tool{call}", arguments, index))
    reason = random.choice(list(FinishReason))
    message = random.choice((None, "no worker is left"))
    return [*frames, StreamEnd(5, reason, len(frames), 3, message)]


def grouped(frame: Frame, random: Random) -> Frame:
    """Return a frame of text as it is, or as the frame that stands for a group of frames."""
    if not isinstance(frame, Token | Reasoning) or random.random() < 0.7:
        return frame
    return Snapshot(frame.index, frame.text, frame.index, isinstance(frame, Reasoning))


def by_the_edge(stream: bytes, frames: list[Frame]) -> list[dict[str, Any]]:
    encoder = UiEvents()
    encoder.opened(Opened(stream, 0, "", "demo", 3))
    body = encoder.frames([encode(frame) for frame in frames]).decode()
    *events, done = [block.removeprefix("data: ") for block in body.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_any_stream_is_the_same_message_at_the_edge_and_in_a_page(tmp_path: Path) -> None:
    installed(HERE)
    random = Random(SEED)
    streams = [(random.randbytes(16), some_frames(random)) for _ in range(STREAMS)]
    file = tmp_path / "streams.json"
    given = [
        {"id": stream.hex(), "frames": [encode(grouped(each, random)).hex() for each in frames]}
        for stream, frames in streams
    ]
    file.write_text(json.dumps(given))
    made = json.loads(run("node", "ui_chunks.mjs", file))
    for (stream, frames), chunks in zip(streams, made, strict=True):
        assert chunks == by_the_edge(stream, frames), frames
