"""JSON mode: a stream whose messages are JSON values, and which reads as one array of them.

Values are kept as the client wrote them, byte for byte: nothing is lost to a parser that
knows no big numbers or drops a repeated key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from ledger.errors import CallerError

JSON_TYPE = "application/json"

_SPACE = re.compile(r"[ \t\n\r]*")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")  # RFC 8259 has no NaN and no Infinity


# Numbers are left as text: only where a value ends is of interest.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_constant)


def split_json(body: bytes) -> list[bytes]:
    """The messages in a body: the elements of an array, one level deep, or the one value.

    Raises CallerError for what is not JSON (RFC 8259, in UTF-8 without a mark).
    """
    try:
        text = body.decode()
        at = _skip(text, 0)
        if text[at : at + 1] == "[":
            messages, at = _elements(text, at + 1)
        else:
            end = _DECODER.raw_decode(text, at)[1]
            messages, at = [text[at:end]], end
    except (ValueError, RecursionError) as error:
        raise CallerError(f"not JSON: {error}", code="bad_json", field="body") from error
    if _skip(text, at) != len(text):
        raise CallerError(f"not JSON: extra data at character {at}", code="bad_json", field="body")
    return [message.encode() for message in messages]


def join_json(messages: Iterable[bytes]) -> bytes:
    """The array of these messages."""
    return b"[" + b",".join(messages) + b"]"


def _elements(text: str, at: int) -> tuple[list[str], int]:
    """The elements of the array that was opened before `at`, and where it ends."""
    elements: list[str] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        return elements, at + 1
    while True:
        end = _DECODER.raw_decode(text, at)[1]
        elements.append(text[at:end])
        at = _skip(text, end)
        mark = text[at : at + 1]
        if mark == "]":
            return elements, at + 1
        if mark != ",":
            raise ValueError(f"expecting ',' or ']' at character {at}")
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()
