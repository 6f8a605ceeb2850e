"""One stream as its ledger has it: what it was asked for, its frames, and how it ended."""

from __future__ import annotations

from typing import Any

from ledger.frame import (
    Chunk,
    Classification,
    Embedding,
    Frame,
    Notice,
    Reasoning,
    Revision,
    ScoredToken,
    StreamEnd,
    Token,
    ToolCall,
    decode,
)
from ledger.interface import Ledger, Record, StreamInfo
from ledger.life import StreamLife, tokens_of
from origin.checkpoint.prompt import PromptReader
from origin.generations.recipe import Recipe

MAX_FRAMES = 1000
"""Of one page."""
TOLD = set(
    "model fingerprint prompt_sha256 max_tokens sampling ignore_eos completes logprobs priority"
    " unread unread_after_s siblings trace".split()
)
"""Of a recipe, to whoever may look at a stream: a field that is new may be somebody's words."""
TURN = ("role", "content", "tool_calls", "tool_call_id")
"""What a message of a conversation has, as far as it goes."""

Document = dict[str, Any]


async def stored_document(ledger: Ledger, info: StreamInfo) -> Document:
    """Without what was said to the model, and what it said."""
    recipe = Recipe.model_validate_json(info.recipe)
    record = await _end(ledger, info)
    end = None if record is None else decode(record.frame)[1]
    life = None if record is None else StreamLife.of(record)
    return {
        "id": info.stream.hex(),
        "tenant": recipe.tenant,
        "created_ms": info.created_ms,
        "durability": info.durability.name.lower(),
        "epoch": info.epoch,
        "next_index": info.next_index,
        "ended": info.ended,
        "recipe": _settings(recipe),
        "life": None if life is None else life._asdict(),
        "end": None
        if not isinstance(end, StreamEnd)
        else {
            "finish_reason": end.finish_reason.word,
            "total_tokens": end.total_tokens,
            "prompt_tokens": end.prompt_tokens,
            "message": end.message,
            "retryable": end.retryable,
        },
    }


def prompt_document(info: StreamInfo, reader: PromptReader | None) -> Document:
    """What was said to the model."""
    recipe = Recipe.model_validate_json(info.recipe)
    if recipe.messages:
        listed = [dict(zip(TURN, turn, strict=False)) for turn in recipe.messages]
        return {"messages": listed, "note": recipe.note}
    if recipe.prompt is not None or reader is None:
        return {"prompt": recipe.prompt}
    return {"prompt": reader.text(recipe.prompt_ids)}


def _settings(recipe: Recipe) -> Document:
    """The rest of a recipe. A fingerprint and a hash say what, and not what it was."""
    told = recipe.model_dump(mode="json", include=TOLD)
    told["prompt_tokens"] = len(recipe.prompt_ids)
    told["format"] = None if recipe.format is None else recipe.format[0]
    told["sampling"] = {key: one for key, one in told["sampling"].items() if one is not None}
    told["stop"] = len(recipe.stop)
    told["tools"] = None if recipe.tools is None else recipe.tools.choice
    return told


async def _end(ledger: Ledger, info: StreamInfo) -> Record | None:
    if not info.ended:
        return None
    [*_, record] = await ledger.read(info.stream, info.next_index - 1, 1)
    return record


def frame_row(record: Record, index: int, at_ms: int | None, *, text: bool) -> Document:
    """One frame; `text`: with what it says."""
    _, frame = decode(record.frame)
    row: Document = {
        "index": index,
        "type": type(frame).__name__,
        "bytes": len(record.frame),
        "tokens": len(tokens_of(record)),
        "at_ms": at_ms,
    }
    return row | (_said(frame) if text else {})


def _said(frame: Frame) -> Document:
    match frame:
        case Token() | ScoredToken() | Reasoning():
            return {"text": frame.text}
        case ToolCall():
            return {"call": frame.call, "name": frame.name, "arguments": frame.arguments}
        case Revision():
            return {"text": frame.text, "replaces": frame.replaces, "final": frame.final}
        case Notice():
            return {"code": frame.code, "message": frame.message}
        case Classification():
            return {"label": frame.label, "confidence": frame.confidence}
        case Embedding():
            return {"dimensions": len(frame.values)}
        case Chunk():
            return {"size": len(frame.data)}
        case StreamEnd():
            return {"finish_reason": frame.finish_reason.word, "message": frame.message}
    return {}
