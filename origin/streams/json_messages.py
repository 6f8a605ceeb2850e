"""JSON mode: a stream whose messages are JSON values, read as one array.

Values are stored as the client wrote them, byte for byte, so that no parser loses big numbers or
repeated keys. Small values that arrive together are stored as one message with the commas between
them, so that a value costs only its bytes, and no frame.

A large body is parsed in steps (`Steps`) of some µs each, so that the caller can let other work run
in between; one call of a parser would block the process. A small body is parsed at once, which is
several times as fast and takes at most 1 ms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from tailrace.ledger.errors import CallerError

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator of work that may be suspended wherever it yields."""

JSON_TYPE = "application/json"
MESSAGE_BYTES = 16 * 1024
"""Target bytes of a message; consecutive values are joined until it is reached."""
MAX_DEPTH = 512
"""Maximum nesting of arrays and objects. Many JSON parsers fail from about 1,000 levels on."""
RUN = 256
"""Number of small values that one step parses, in some 20 µs."""

# Only repetitions of single characters are possessive: CPython before 3.11.5 matches possessive
# repetitions of groups wrongly (Debian 12 has 3.11.2). Repetitions of groups cannot backtrack far,
# since each part of a value begins with a character that cannot continue the part before it.
_GAP = rb"[ \t\n\r]*+"
_PLAIN = rb'[^"\\\x00-\x1f]'
_SHORT_STRING = rb'"' + _PLAIN + rb'{0,64}+"'
_WORD = rb"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?+[0-9]++)?|true|false|null"
_SCALAR = rb"(?:" + _SHORT_STRING + rb"|" + _WORD + rb")"
_MEMBER = _SHORT_STRING + _GAP + rb":" + _GAP + _SCALAR


def _flat(begin: bytes, item: bytes, end: bytes) -> bytes:
    more = rb"(?:" + _GAP + rb"," + _GAP + item + rb"){0,15}"
    return begin + _GAP + rb"(?:" + item + more + _GAP + rb")?" + end


_SMALL = rb"|".join((_SCALAR, _flat(rb"\[", _SCALAR, rb"\]"), _flat(rb"\{", _MEMBER, rb"\}")))


def _run(item: bytes) -> re.Pattern[bytes]:
    """Return a pattern that matches up to RUN items, each followed by a comma."""
    return re.compile(rb"(?:(?:%b)%b,%b){0,%d}" % (item, _GAP, _GAP, RUN))


_SMALL_VALUES = _run(_SMALL)
_SMALL_MEMBERS = _run(_MEMBER)
_SPACE = re.compile(_GAP)
_WORDS = re.compile(_WORD)
_CHARACTERS = re.compile(rb'(?:%b++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})){1,%d}' % (_PLAIN, RUN))
_CLOSERS = {b"[": b"]", b"{": b"}"}
_BLANKS = b" \t\n\r"


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")  # RFC 8259 has no NaN and no Infinity


# Numbers are not converted, since only the validity of the JSON matters.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_constant)


def split_json(body: bytes) -> Steps[list[bytes]]:
    """Return the messages in a body: the elements of an array, one level deep, or the one value.

    Raises CallerError for invalid JSON (RFC 8259, in UTF-8 without a byte order mark).
    """
    small = len(body) <= MESSAGE_BYTES and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
    try:
        text = body.decode()
        if small:
            _DECODER.decode(text)
    except ValueError as error:
        raise _not_json(str(error)) from error
    if small:
        value = body.strip(_BLANKS)
        message = value[1:-1].strip(_BLANKS) if value.startswith(b"[") else value
        return [message] if message else []
    return (yield from _split(body))


def _split(body: bytes) -> Steps[list[bytes]]:
    """Split a body in UTF-8 as `split_json` does, in steps."""
    begin = _skip(body, 0)
    if body[begin : begin + 1] == b"[":
        messages, at = yield from _elements(body, begin + 1)
    else:
        at = yield from _value(body, begin)
        messages = [body[begin:at]]
    if (at := _skip(body, at)) != len(body):
        raise _unexpected(at)
    return messages


def first_values(message: bytes, count: int) -> Steps[tuple[int, int]]:
    """Return the number of values of a message, up to `count`, and where the last of them ends."""
    found = at = end = 0
    while found < count and at < len(message):
        end = yield from _value(message, at)
        found += 1
        at = _skip(message, _skip(message, end) + 1)
    return found, end


def join_json(messages: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(messages) + b"]"


def _elements(body: bytes, at: int) -> Steps[tuple[list[bytes], int]]:
    """Return the elements of the array that was opened before `at`, and where it ends."""
    messages: list[bytes] = []
    begin = at = _skip(body, at)
    if body[at : at + 1] == b"]":
        return messages, at + 1
    while True:
        end = yield from _value(body, _after(_SMALL_VALUES, body, at))
        at = _skip(body, end)
        mark = body[at : at + 1]
        if mark not in (b",", b"]"):
            raise _unexpected(at)
        at += 1
        if mark == b"]" or end - begin >= MESSAGE_BYTES:
            messages.append(body[begin:end])
            begin = _skip(body, at)
        if mark == b"]":
            return messages, at
        at = _skip(body, at)


def _value(body: bytes, at: int) -> Steps[int]:
    """Return the end of the value that begins at `at`."""
    closers: list[bytes] = []  # the expected closing brackets, the innermost last
    while True:
        yield
        mark = body[at : at + 1]
        if (closer := _CLOSERS.get(mark)) is not None:
            if len(closers) == MAX_DEPTH:
                raise _not_json(f"more than {MAX_DEPTH} levels at byte {at}")
            at = _skip(body, at + 1)
            if body[at : at + 1] != closer:
                closers.append(closer)
                at = yield from _item(body, at, closer)
                continue
            at += 1
        elif mark == b'"':
            at = yield from _string(body, at + 1)
        elif (word := _WORDS.match(body, at)) is not None:
            at = word.end()
        else:
            raise _unexpected(at)
        at = _close(body, at, closers)
        if not closers:
            return at
        at = yield from _item(body, _skip(body, at + 1), closers[-1])


def _close(body: bytes, at: int, closers: list[bytes]) -> int:
    """Return the position of the comma after a value that ends at `at`.

    Brackets that close before the comma are removed from the open ones.
    """
    while closers:
        at = _skip(body, at)
        mark = body[at : at + 1]
        if mark == b",":
            return at
        if mark != closers[-1]:
            raise _unexpected(at)
        closers.pop()
        at += 1
    return at


def _item(body: bytes, at: int, closer: bytes) -> Steps[int]:
    """Return the start of the next value, after the small values or the key at `at`."""
    if closer == b"]":
        return _after(_SMALL_VALUES, body, at)
    at = _after(_SMALL_MEMBERS, body, at)
    if body[at : at + 1] != b'"':
        raise _unexpected(at)
    at = yield from _string(body, at + 1)
    at = _skip(body, at)
    if body[at : at + 1] != b":":
        raise _unexpected(at)
    return _skip(body, at + 1)


def _string(body: bytes, at: int) -> Steps[int]:
    """Return the end of the string that was opened before `at`."""
    while (characters := _CHARACTERS.match(body, at)) is not None:
        at = characters.end()
        yield
    if body[at : at + 1] != b'"':
        raise _unexpected(at)
    return at + 1


def _skip(body: bytes, at: int) -> int:
    return _after(_SPACE, body, at)


def _after(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    match = pattern.match(body, at)
    assert match is not None  # the patterns also match an empty string
    return match.end()


def _unexpected(at: int) -> CallerError:
    return _not_json(f"unexpected character or end of the body at byte {at}")


def _not_json(why: str) -> CallerError:
    return CallerError(f"not JSON: {why}", code="bad_json", field="body")
