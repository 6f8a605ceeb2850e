"""A hook that can end a stream as `filtered`: it checks text before any reader sees it.

A filter is configured as "module:factory". The factory is called once per stream and returns an
object with `check(text, last) -> Verdict` (`Filter`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from tailrace.ledger.errors import ConfigError, ModelError
from tailrace.ledger.frame import FinishReason
from tailrace.origin.plugin import load_plugin

MAX_HELD_CHARS = 4096
"""Maximum characters that a filter may hold back while it is undecided."""
FIELD = "origin.filter"
SHAPE = "write MODULE:FACTORY, where FACTORY() gives an object with check(text, last) -> Verdict"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A filter's decision on the text so far.

    The last `hold` characters are held back; the text before them is sent. With `end`, a message to
    the reader, they are never sent and the stream ends as filtered.
    """

    hold: int = 0
    end: str | None = None


PASS = Verdict()
"""Verdict that sends all text so far."""


class Filter(Protocol):
    """A filter of one stream, made by the factory.

    It must depend on the text alone, not on its division into pieces, on time or on chance: a
    continued stream is fed its whole text once more, and must get the same verdicts. Every stream
    of its worker waits while it runs. An exception ends its stream as failed.
    """

    def check(self, text: str, last: bool) -> Verdict:
        """Judge `text`, which follows the text checked before; nothing follows the `last`.

        `hold` counts from the end of all text so far, and reaches back at most to what is still
        held; after the last text nothing is held unless the verdict is to end.
        """


FilterFactory = Callable[[], Filter]


def load_filter(spec: str) -> FilterFactory:
    """Return the factory that "module:factory" names; the worker loads it once, when it starts.

    One filter is made to check its interface. Raises ConfigError that says what is missing.
    """
    factory = load_plugin(spec, FIELD, SHAPE)
    if not callable(factory):
        module, _, name = spec.partition(":")
        raise ConfigError(f"{module} has no {name} to call", field=FIELD, hint=SHAPE)
    try:
        made = factory()
    except Exception as error:  # a factory may raise anything
        raise ConfigError(f"{spec}() failed: {_told(error)}", field=FIELD, hint=SHAPE) from error
    if not callable(getattr(made, "check", None)):
        why = f"{spec}() gives a {type(made).__name__} without check"
        raise ConfigError(why, field=FIELD, hint=SHAPE)
    return cast(FilterFactory, factory)


class FilterGate:
    """Passes one stream's text through its filter; without one, everything passes.

    A Transcript or a TextFilter holds it. Once `reason` is set, no more text passes.
    """

    def __init__(self, factory: FilterFactory | None) -> None:
        self.reason: FinishReason | None = None
        """FILTERED, or FAILED if the filter itself failed."""
        self.message: str | None = None
        self._factory = factory
        self._filter: Filter | None = None
        self._held = ""

    def feed(self, text: str, last: bool = False) -> str:
        """Return the text that may be sent now that `text` has come; nothing follows the `last`."""
        if self.reason is not None:
            return ""
        if self._factory is None or not (text or last):
            return text
        try:
            verdict = self._check(text, last)
        except ModelError as error:
            self.reason, self.message = FinishReason.FAILED, error.message
            return ""
        held = self._held + text
        certain = len(held) - verdict.hold
        self._held = held[certain:]
        if verdict.end is not None:
            self.reason, self.message = FinishReason.FILTERED, verdict.end
        return held[:certain]

    def _check(self, text: str, last: bool) -> Verdict:
        """Return the filter's verdict.

        Other exceptions of the operator's code become ModelError.
        """
        assert self._factory is not None
        try:
            if self._filter is None:
                self._filter = self._factory()
            verdict = self._filter.check(text, last)
        except Exception as error:
            raise _failure(_told(error)) from error
        if not isinstance(verdict, Verdict):
            raise _failure(f"check gave a {type(verdict).__name__}, not a Verdict")
        self._check_hold(verdict, len(self._held) + len(text), last)
        return verdict

    def _check_hold(self, verdict: Verdict, chars: int, last: bool) -> None:
        if not 0 <= verdict.hold <= chars:
            raise _failure(f"hold is {verdict.hold}, but {chars} characters are undecided")
        if verdict.end is None and last and verdict.hold:
            raise _failure(f"it still holds {verdict.hold} characters at the end")
        if verdict.end is None and verdict.hold > MAX_HELD_CHARS:
            raise _failure(f"hold is {verdict.hold} characters, the limit is {MAX_HELD_CHARS}")


def _failure(message: str) -> ModelError:
    return ModelError(f"the filter failed: {message}", code="filter_failed", field="filter")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
