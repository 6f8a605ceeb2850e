"""What a response has to tell of its request later: the note that its stream keeps.

A note is JSON: `response` are the fields of the request that every answer repeats, `input` the
items that the model was given, so that a later request can go on from there. No edge keeps either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_INPUT_CHARS = 128 * 1024
"""Of the input, as JSON, that is kept with a stream, beside the ids of its tokens. A longer one is
answered all the same, but cannot be gone on from, and is not listed."""
MAX_ASKED_CHARS = 64 * 1024
"""Of what every answer repeats; where it is longer, the longest parts are not repeated."""


@dataclass(frozen=True, slots=True)
class ResponseNote:
    """`input` is None where it is not kept: too long, or not to be stored."""

    asked: Mapping[str, Any]
    input: Sequence[dict[str, Any]] | None = None

    def write(self) -> str:
        items = self.input
        if items is not None and len(_json(items)) > MAX_INPUT_CHARS:
            items = None
        sizes = {name: len(_json(value)) for name, value in self.asked.items()}
        while sum(sizes.values()) > MAX_ASKED_CHARS:
            del sizes[max(sizes, key=lambda name: sizes[name])]
        return _json({"response": {name: self.asked[name] for name in sizes}, "input": items})


def read_note(text: str | None) -> ResponseNote:
    """What a note says; nothing, where it is that of another route."""
    try:
        said = json.loads(text or "")
        return ResponseNote(dict(said["response"]), said["input"])
    except (ValueError, KeyError, TypeError):
        return ResponseNote({})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
