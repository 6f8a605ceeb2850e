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
"""Maximum number of characters that a filter may hold back while it is undecided."""
FIELD = "origin.filter"
SHAPE = "write MODULE:FACTORY, where FACTORY() gives an object with check(text, last) -> Verdict"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A filter's decision on the text so far.

    The last `hold` characters are held back, and the text before them is sent. If `end` is given,
    the stream ends as filtered with this message, and the held characters are never sent.
    """

    hold: int = 0
    end: str | None = None


PASS = Verdict()
"""Verdict that sends all text so far."""


class Filter(Protocol):
    """A filter of one stream, made by the factory.

    Its verdicts must depend on the text alone, not on how the text is divided into pieces, on time
    or on chance: when a stream is continued, a new filter gets the whole text again and must give
    the same verdicts. All streams of the worker wait while `check` runs. An exception ends the
    stream as failed.
    """

    def check(self, text: str, last: bool) -> Verdict:
        """Judge `text`, which follows the text of the previous call; `last`: no text follows.

        The verdict's `hold` may cover `text` and the characters that are still held. With `last`,
        `hold` must be 0 unless the verdict ends the stream.
        """


FilterFactory = Callable[[], Filter]


def load_filter(spec: str) -> FilterFactory:
    """Return the factory that "module:factory" names; a worker loads it once, when it starts.

    The factory is called once to check that its filters have the right interface. Raises
    ConfigError if anything is missing.
    """
    factory = load_plugin(spec, FIELD, SHAPE)
    if not callable(factory):
        module, _, name = spec.partition(":")
        raise ConfigError(f"{module} has no function or class {name}", field=FIELD, hint=SHAPE)
    try:
        made = factory()
    except Exception as error:  # a factory may raise anything
        raise ConfigError(f"{spec}() failed: {_told(error)}", field=FIELD, hint=SHAPE) from error
    if not callable(getattr(made, "check", None)):
        why = f"{spec}() gives a {type(made).__name__} without check"
        raise ConfigError(why, field=FIELD, hint=SHAPE)
    return cast(FilterFactory, factory)


class FilterGate:
    """Passes one stream's text through its filter; without a factory, all text passes.

    Once `reason` is set, no more text passes.
    """

    def __init__(self, factory: FilterFactory | None) -> None:
        self.reason: FinishReason | None = None
        """FILTERED if the filter ended the stream, FAILED if the filter failed, otherwise None."""
        self.message: str | None = None
        self._factory = factory
        self._filter: Filter | None = None
        self._held = ""

    def feed(self, text: str, last: bool = False) -> str:
        """Check more text, and return the text that may be sent now; `last`: no text follows."""
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
        """Return the filter's verdict; raises ModelError if the operator's code fails."""
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
            raise _failure(
                f"hold is {verdict.hold}, but must be from 0 to {chars} (characters not sent yet)"
            )
        if verdict.end is None and last and verdict.hold:
            raise _failure(f"hold is {verdict.hold} at the end of the text, but must be 0 there")
        if verdict.end is None and verdict.hold > MAX_HELD_CHARS:
            raise _failure(f"hold is {verdict.hold} characters, the limit is {MAX_HELD_CHARS}")


def _failure(message: str) -> ModelError:
    return ModelError(f"the filter failed: {message}", code="filter_failed", field="filter")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
