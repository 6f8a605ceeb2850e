"""The events of a chat: its turns, the frames of their streams, and the number of readers.

The events of one turn come before those of the next. The id of a turn's event is its number, such
as 3, and that of a frame is the turn's number and the frame's index, such as 3.41. So an id says
which events a reader has, and where to continue after a lost connection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.edge.chats.calls import Fields
from tailrace.edge.generate.encoders import JITTER, NativeEncoder
from tailrace.edge.generate.json_lines import PING as LINE_PING
from tailrace.edge.generate.json_lines import line
from tailrace.edge.generate.params import View, only_position
from tailrace.edge.sse import PING, compact, events, retry
from tailrace.ledger.errors import CallerError, TailraceError, error_body
from tailrace.ledger.wire.bare import U64_MAX

_POSITION = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?")
_ID = re.compile(rb"^id: ", re.MULTILINE)
"""The beginning of an event's `id:` line. An event's data is JSON, which has no line breaks, so no
line of data can begin like this."""


@dataclass(frozen=True, slots=True)
class Position:
    """The last event that a client has: frame `index` of a turn, or without it the turn itself."""

    turn: int
    index: int | None = None


def parse_position(after: Sequence[str], last_event_id: str | None) -> Position | None:
    """Return the position in `?after=` or in `Last-Event-ID`; None if there is none.

    Raises CallerError for an invalid position, and for two that differ.
    """
    return only_position(after, last_event_id, _position, "positions")


def _position(text: str, field: str) -> Position:
    parts = _POSITION.fullmatch(text)
    numbers = [int(part) for part in parts.groups() if part] if parts else []
    if not numbers or max(numbers) > U64_MAX:
        raise CallerError(
            f"{text[:64]!r} is not a position in a chat",
            field=field,
            hint="send the id of the last event that you have: the number of a turn, such as 3,"
            " or a turn and the index of its frame, such as 3.41",
        )
    return Position(*numbers)


class ChatEncoder(Protocol):
    """Encodes the events of a chat for one response."""

    media_type: str
    ping: bytes
    """The keepalive."""

    def begin(self) -> bytes:
        """Return the bytes that begin the body."""

    def turn(self, turn: Fields) -> bytes:
        """Encode the event of a turn, whose data is the turn's record."""

    def readers(self, count: int) -> bytes:
        """Encode the number of clients that follow the chat."""

    def error(self, turn: int, error: TailraceError) -> bytes:
        """Encode the error of a turn whose stream cannot be read."""

    def frames_of(self, turn: int) -> NativeEncoder:
        """Return an encoder for the frames of a turn's stream."""


class SseChatEncoder(ChatEncoder):
    """Encodes a chat as server-sent events."""

    media_type = View.SSE.value
    ping = PING

    def begin(self) -> bytes:
        return retry(JITTER)

    def turn(self, turn: Fields) -> bytes:
        return b"id: %d\nevent: turn\ndata: %b\n\n" % (turn["turn"], compact(turn))

    def readers(self, count: int) -> bytes:
        return b'event: presence\ndata: {"readers":%d}\n\n' % count

    def error(self, turn: int, error: TailraceError) -> bytes:
        return b"event: error\ndata: %b\n\n" % compact({"turn": turn, **error_body(error)})

    def frames_of(self, turn: int) -> NativeEncoder:
        return TurnEvents(turn)


class TurnEvents(NativeEncoder):
    """Encodes a turn's frames as events of `/v1/generate`, with the turn's number in each id."""

    __slots__ = ("_prefix",)

    def __init__(self, turn: int) -> None:
        self._prefix = b"id: %d." % turn

    def frames(self, frames: list[bytes]) -> bytes:
        return _ID.sub(self._prefix, events(frames))


class LinesChatEncoder(ChatEncoder):
    """Encodes a chat as JSON lines."""

    ping = LINE_PING

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    def begin(self) -> bytes:
        return b""

    def turn(self, turn: Fields) -> bytes:
        return compact({"type": "turn", **turn}) + b"\n"

    def readers(self, count: int) -> bytes:
        return b'{"type":"presence","readers":%d}\n' % count

    def error(self, turn: int, error: TailraceError) -> bytes:
        return compact({"type": "error", "turn": turn, **error_body(error)}) + b"\n"

    def frames_of(self, turn: int) -> NativeEncoder:
        return TurnLines(turn)


class TurnLines(NativeEncoder):
    """Encodes a turn's frames as the lines of `/v1/generate`, each with the turn's number."""

    __slots__ = ("_prefix",)

    def __init__(self, turn: int) -> None:
        self._prefix = b'{"turn":%d,' % turn

    def frames(self, frames: list[bytes]) -> bytes:
        lines = filter(None, map(line, frames))
        return b"".join(self._prefix + each.removeprefix(b"{") for each in lines)
