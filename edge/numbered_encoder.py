"""Encodes answers whose events are numbered, for APIs whose clients resume after an event.

A frame may be several events, or none. So for a client that resumes, the edge reads the whole log
again, and the encoder skips the events that the client has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any, Generic, Protocol, TypeVar

from tailrace.edge.generate.encoders import Encoder
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Frame, Opened, StreamError, Token, decode, to_error

Fields = dict[str, Any]
"""The fields of a JSON object."""

TextPart = TypeVar("TextPart")
"""The part of an answer to which a Token adds its text."""
TextPart_co = TypeVar("TextPart_co", covariant=True)


class NumberedAnswer(Protocol[TextPart_co]):
    """Makes the events of one answer from the frames of its stream, in the order of the log."""

    def begin(self) -> Iterable[Fields]:
        """Return the events before the first frame."""

    def add(self, frame: Frame) -> Iterable[Fields]:
        """Take the stream's next frame, and return the events that show it."""

    def extended(self, token: Token) -> TextPart_co | None:
        """Take a Token that only adds text to an open part, and return this part.

        Return None without taking the Token if the caller must call `add`.
        """


class NumberedEncoder(Encoder, Generic[TextPart]):
    """Encodes the events of an answer, beginning after the event number `after`."""

    def __init__(self, after: int | None = None) -> None:
        self._answer: NumberedAnswer[TextPart] | None = None  # set when the stream is opened
        self._after = -1 if after is None else after
        self._next = 0
        self._before = b""  # the encoded first events, sent before those of the first frame
        # The part that grows, and the format of its delta events (see `_delta_format`).
        self._delta: tuple[TextPart, bytes] | None = None

    @property
    def last(self) -> int:
        """The number of the last event that was sent or skipped; -1 before the first event."""
        return self._next - 1

    def opened(self, opened: Opened) -> None:
        self._answer = self._begun(opened)
        self._before = self._numbered(self._answer.begin())

    def frames(self, frames: list[bytes]) -> bytes:
        before, self._before = self._before, b""
        return b"".join([before, *map(self._encoded, frames)])

    @abstractmethod
    def _begun(self, opened: Opened) -> NumberedAnswer[TextPart]:
        """Return a new `NumberedAnswer`, which makes events from the opened stream's frames."""

    @abstractmethod
    def _event(self, fields: Fields, number: int) -> bytes:
        """Return one encoded event."""

    @abstractmethod
    def _delta_format(self, part: TextPart) -> bytes:
        """Return a format string for the part's delta events, with `%d` and `%b`.

        `%d` is for the event's number, and `%b` for the delta's text as a JSON string.
        """

    @abstractmethod
    def _stream_error(self, error: TailraceError) -> bytes:
        """Return the event for an error that is not part of the stream's log."""

    def _encoded(self, raw: bytes) -> bytes:
        assert self._answer is not None, "frames follow the Opened"
        _, frame = decode(raw)
        if type(frame) is Token and frame.text:
            part = self._answer.extended(frame)
            if part is not None:
                return self._text_delta(part, frame.text)
        elif isinstance(frame, StreamError):
            return self._stream_error(to_error(frame))
        return self._numbered(self._answer.add(frame))

    def _text_delta(self, part: TextPart, text: str) -> bytes:
        number = self._next
        self._next += 1
        if number <= self._after:
            return b""
        if self._delta is None or self._delta[0] is not part:
            self._delta = part, self._delta_format(part)
        return self._delta[1] % (number, encode_basestring(text).encode())

    def _numbered(self, events: Iterable[Fields]) -> bytes:
        parts = []
        for fields in events:
            if self._next > self._after:
                parts.append(self._event(fields, self._next))
            self._next += 1
        return b"".join(parts)
