"""The stream side of one run: turns token ids into frames, and detects the end of the run.

Ids stand for bytes, which need not be whole characters.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tailrace.ledger.errors import ModelError
from tailrace.ledger.frame import Score, TokenScores

if TYPE_CHECKING:  # not at run time, because it would import torch
    from tailrace.origin.models.model import Scores
import codecs
import hashlib
from collections.abc import Sequence

from tailrace.ledger.frame import FinishReason, ScoredToken, StreamEnd, Token, ToolCall, encode
from tailrace.ledger.record_extra import IdSpan
from tailrace.ledger.wire.bare import pack_u32s
from tailrace.origin.filter import FilterFactory, FilterGate
from tailrace.origin.tool_calls import MARKUPS, CallPiece, CallReader, Markup, ToolUse
from tailrace.origin.workers.worker_frame import Emission, StartRun, TokenCounts

_BYTE_LEVEL = {"type": "ByteLevel"}
# SentencePiece's vocabularies: U+2581 is a space, <0xE7> a byte.
_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_FALLBACK = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]

MAX_FRAME_SCORE_BYTES = 128 * 1024
"""Maximum bytes of scores per frame: enough for about 300 tokens with 20 alternatives each."""
SCORE_BYTES = 16
"""Maximum bytes of one encoded Score, besides the token's bytes."""
MAX_FRAME_TEXT_CHARS = 16 * 1024
"""Maximum characters per text frame, at most 64 KiB of UTF-8; longer text becomes several frames.
"""


class Vocabulary:
    """The bytes that each id of a tokenizer stands for; all runs of a model share one.

    Building a Vocabulary takes some microseconds per id. It supports byte-level vocabularies
    (GPT-2's, so Llama 3's, Qwen's and BitNet's) and SentencePiece's with byte fallback (Llama 2's).
    Raises ModelError for other tokenizers.
    """

    strips_space: bool
    """True if the tokenizer puts a space before every text, which is removed from the first token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = json.loads(tokenizer.to_str())["decoder"]
        parts = [_known(part) for part in _flat(decoder)]
        if parts not in ([_BYTE_LEVEL], _FALLBACK, [*_FALLBACK, _STRIP]):
            raise ModelError(
                f"the tokenizer's decoder is not supported: {json.dumps(decoder)[:300]}",
                field="decoder",
                hint="use a tokenizer with a byte-level or a byte-fallback vocabulary",
            )
        self.strips_space = _STRIP in parts
        added = tokenizer.get_added_tokens_decoder()
        words = tokenizer.get_vocab(with_added_tokens=True)
        to_bytes = _from_byte_level if parts == [_BYTE_LEVEL] else _from_fallback
        self._bytes = [b""] * (max(words.values(), default=-1) + 1)
        self._special = {token for token, about in added.items() if about.special}
        for word, token in words.items():
            self._bytes[token] = word.encode() if token in self._special else to_bytes(word)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of `token`, or the name of a special token; empty for an unknown id."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def text_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text; none for special tokens."""
        return b"" if token in self._special else self.bytes_of(token)

    def scored(self, token: int, scores: Scores) -> TokenScores:
        """Return the scores of a drawn token in the form that frames use.

        Ids that the tokenizer does not have are sent without bytes.
        """
        drawn = ((token, scores.chosen), *scores.best)
        chosen, *top = (Score(each, self.bytes_of(each), logprob) for each, logprob in drawn)
        return TokenScores(chosen, tuple(top))


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder or {}


def _known(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a tokenizer's decoder, without settings that do not affect decoding.

    These are the settings of a ByteLevel, which concern encoding only.
    """
    return _BYTE_LEVEL if part.get("type") == "ByteLevel" else part


def _from_byte_level(word: str) -> bytes:
    """Return a word's bytes.

    A word with a character outside the table is taken literally, as in decoding.
    """
    table = _byte_of()
    if all(char in table for char in word):
        return bytes(table[char] for char in word)
    return word.encode()


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each of the characters in GPT-2's vocabulary stands for.

    A printable character of Latin-1 stands for its own byte; characters from U+0100 on stand for
    the other bytes.

    This is `bytes_to_unicode` of the code of Radford et al., Language Models are Unsupervised
    Multitask Learners, 2019 (https://github.com/openai/gpt-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _from_fallback(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        try:
            return bytes((int(word[3:5], 16),))
        except ValueError:
            pass  # the token looks like `<0xE7>`, but has no hexadecimal number
    return word.replace("\u2581", " ").encode()


class PendingScores:
    """Scores of tokens that are in no frame yet; the oldest beyond a frame's limit are dropped."""

    def __init__(self) -> None:
        self._scores: deque[TokenScores] = deque()
        self._bytes = 0

    def add(self, scores: TokenScores) -> None:
        self._scores.append(scores)
        self._bytes += _size(scores)
        while self._bytes > MAX_FRAME_SCORE_BYTES and len(self._scores) > 1:
            self._bytes -= _size(self._scores.popleft())

    def take(self) -> tuple[TokenScores, ...]:
        taken = tuple(self._scores)
        self._scores.clear()
        self._bytes = 0
        return taken


def _size(scores: TokenScores) -> int:
    return sum(SCORE_BYTES + len(score.token) for score in (scores.chosen, *scores.top))


class Transcript:
    """Turns a run's tokens into emissions; the result depends on the ids alone, not on timing.

    So a continuation steps through the ids from the ledger, drops the text that was sent, and is
    then in the state of the interrupted run. `run` tells which of these ids were steered (inserted
    from outside), because steered text is not searched for stop sequences.

    The engine makes a Transcript for each run and calls:

    - `resume()` once, first;
    - `accept(token, scores)` for each drawn token, in order;
    - `steer(ids)` for a Steer message, between two steps; its ids are then known tokens of the run;
    - `end(...)` for what the transcript cannot see: a cancel, a failure, a finished grammar.

    Once one of these calls has set `ended`, the run is over, and drafts accepted beyond that token
    are ignored. The position of the next draw is `total_tokens`.

    A frame carries the scores of the tokens whose ids are in its emission, so that no
    interruption loses any. Tokens that complete no text before the run ends have no scores in the
    log.
    """

    def __init__(
        self,
        run_id: int,
        run: StartRun,
        vocabulary: Vocabulary,
        eos_ids: frozenset[int],
        context: int,
        filter_factory: FilterFactory | None = None,
        tools: ToolUse | None = None,
    ) -> None:
        self.total_tokens = 0
        self.cached_tokens = 0
        """Number of the prompt's tokens that were found in the KV cache."""
        self.ended = False
        self._run_id = run_id
        self._run = run
        self._eos_ids = eos_ids
        self._limit = min(run.max_tokens, context - len(run.prompt_ids))
        goes_on = run.completes and any(map(vocabulary.text_of, run.prompt_ids))
        self._markup = None if tools is None or tools.markup is None else MARKUPS[tools.markup]
        marks = () if self._markup is None else (self._markup.begins, self._markup.ends)
        self._detokeniser = Detokeniser(vocabulary, goes_on, marks)
        self._stops = StopMatcher(run.stop)
        self._gate = FilterGate(filter_factory)
        self._calls = None if tools is None or tools.markup is None else CallReader(tools.markup)
        self._most_calls = None if tools is None or tools.parallel else 1
        self._next_index = run.next_index
        self._ids: list[int] = []  # ids that were generated since the last emission
        self._scores = PendingScores()  # scores of the tokens in `_ids`
        self._steered: list[IdSpan] = []  # spans of `_ids` that came from Steer orders
        self._bytes_to_drop = 0

    def resume(self) -> list[Emission]:
        """Step through the run's generated ids and return the emissions that had not been sent.

        Normally there are none. If the stream lacks only its end, that end is returned. If the
        stream's text differs from the text of these ids, an end with FAILED is returned.
        """
        self._bytes_to_drop = self._run.sent_bytes
        emissions: list[Emission] = []
        try:
            for is_order, ids in _orders(self._run):
                if self.ended:
                    break
                emissions += self._take_order(ids) if is_order else self._take(ids[0])
        except UnicodeDecodeError:
            return self._refuse_text()
        if self.ended:
            return emissions
        if self._bytes_to_drop:
            return self._refuse_text()
        if self.total_tokens >= self._limit:
            emissions += self.end(FinishReason.LENGTH)
        return emissions

    def accept(self, token: int, scores: TokenScores | None = None) -> list[Emission]:
        """Take one more drawn token, with its scores if the run has logprobs."""
        self._ids.append(token)
        if scores is not None and self._run.logprobs is not None:
            self._scores.add(scores)
        return self._take(token)

    def steer(self, ids: Sequence[int]) -> list[Emission]:
        """Take the ids of a Steer message: they count as drawn, and their text is the stream's.

        Text that is held back is sent first, since it can no longer become a stop sequence or a
        whole character. Only the limit of tokens can end the run here: ids beyond that limit are
        dropped, and the run ends as `length`. An ended run is ignored.
        """
        if self.ended or not ids:
            return []
        taken = ids[: self._limit - self.total_tokens]
        self._steered.append(IdSpan(len(self._ids), len(taken)))
        self._ids += taken
        return self._take_order(taken)

    def end(
        self, reason: FinishReason, message: str | None = None, retryable: bool = False
    ) -> list[Emission]:
        """End the run: emit the text held back, unless it is a stop sequence, then StreamEnd.

        retryable: the same request may succeed when it is sent again, as after NaN logits. An ended
        run is ignored.
        """
        if self.ended:
            return []
        text = self._stops.feed(self._detokeniser.flush())
        if self._stops.matched and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        emissions = self._emit_text(text + self._stops.flush(), last=True)
        if self._calls is not None and self._calls.calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        if self._gate.reason is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            reason, message = self._gate.reason, self._gate.message
        if reason is FinishReason.STOP:
            message = self._stops.matched
        frame = StreamEnd(
            total_tokens=self.total_tokens,
            finish_reason=reason,
            index=self._next_index,
            prompt_tokens=len(self._run.prompt_ids),
            message=message,
            retryable=retryable,
        )
        self.ended = True
        last = self._emission(frame)
        last.can_retry = retryable
        return [*emissions, last]

    def _take(self, token: int) -> list[Emission]:
        self.total_tokens += 1
        is_eos = token in self._eos_ids
        emissions = self._emit_text(self._stops.feed(self._text_of(token)))
        if self._stops.matched or (is_eos and not self._run.ignore_eos):
            return emissions + self.end(FinishReason.STOP)
        return emissions + self._end_if_due()

    def _take_order(self, ids: Sequence[int]) -> list[Emission]:
        self.total_tokens += len(ids)
        held = self._stops.flush() + self._detokeniser.flush()
        text = "".join(map(self._text_of, ids)) + self._detokeniser.flush()
        return self._emit_text(held + text) + self._end_if_due()

    def _text_of(self, token: int) -> str:
        # An ignored end-of-text token has no text, even if the tokenizer does not call it special.
        return "" if token in self._eos_ids else self._detokeniser.step(token)

    def _end_if_due(self) -> list[Emission]:
        if self._gate.reason is not None:
            return self.end(self._gate.reason, self._gate.message)
        if self._calls is not None and self._calls.whole == self._most_calls:
            return self.end(FinishReason.STOP)
        return self.end(FinishReason.LENGTH) if self.total_tokens >= self._limit else []

    def _refuse_text(self) -> list[Emission]:
        self._bytes_to_drop = 0
        return self.end(FinishReason.FAILED, "the stream's text is not that of its tokens")

    def _emit_text(self, text: str, last: bool = False) -> list[Emission]:
        text = self._gate.feed(text, last)
        pieces = [text] if self._calls is None else self._calls.feed(text, last)
        return [emission for piece in pieces for emission in self._emit_piece(piece)]

    def _emit_piece(self, piece: str | CallPiece) -> list[Emission]:
        """Return the frames of a piece, without the text that was sent before the interruption."""
        step = MAX_FRAME_TEXT_CHARS
        if isinstance(piece, CallPiece):
            if self._bytes_to_drop >= piece.size:
                self._bytes_to_drop -= piece.size
                return []
            said = piece.arguments
            cuts = range(0, len(said), step) if said else [0]
            return [self._emission(self._call_frame(piece, said[at : at + step])) for at in cuts]
        if self._bytes_to_drop:
            encoded = piece.encode()
            piece = encoded[self._bytes_to_drop :].decode()
            self._bytes_to_drop = max(0, self._bytes_to_drop - len(encoded))
        return [
            self._emission(self._text_frame(piece[at : at + step]))
            for at in range(0, len(piece), step)
        ]

    def _call_frame(self, piece: CallPiece, arguments: str) -> ToolCall:
        """Return the frame of a piece of a call, whose id depends only on the run."""
        self._scores.take()  # these scores are dropped, because only frames of text have scores
        id_ = call_id(self._run, piece.call, self._markup) if piece.name else ""
        return ToolCall(piece.call, id_, piece.name, arguments, self._next_index)

    def _text_frame(self, text: str) -> Token | ScoredToken:
        if self._run.logprobs is None:
            return Token(text, self._next_index)
        return ScoredToken(text, self._scores.take(), self._next_index)

    def _emission(self, frame: Token | ScoredToken | ToolCall | StreamEnd) -> Emission:
        ids, steered = tuple(self._ids), tuple(self._steered)
        emission = Emission(self._run_id, self._next_index, ids, steered, encode(frame))
        if isinstance(frame, StreamEnd):
            emission.counted = TokenCounts(cached=self.cached_tokens)
        self._next_index += 1
        self._ids.clear()
        self._steered.clear()
        return emission


def call_id(run: StartRun, call: int, markup: Markup | None) -> str:
    """Return the id of a run's nth call; it differs between requests and seeds."""
    digest = hashlib.sha256(f"{run.sampling.seed} {call} ".encode() + pack_u32s(run.prompt_ids))
    if markup is not None and markup.id_chars is not None:
        return digest.hexdigest()[: markup.id_chars]
    return f"call_{digest.hexdigest()[:24]}"


def _orders(run: StartRun) -> Iterator[tuple[bool, Sequence[int]]]:
    """Yield (False, [id]) for each drawn id, (True, ids) for each Steer message, in their order."""
    ids, at = run.generated_ids, 0
    for span in (*run.steered, IdSpan(len(ids), 0)):
        yield from ((False, [token]) for token in ids[at : span.start])
        at = span.start + span.count
        if span.count:
            yield True, ids[span.start : at]


class Detokeniser:
    """Turns token ids into text as soon as the bytes form whole characters.

    Special tokens have no text, except the `marks` around calls, which `CallReader` needs. Invalid
    UTF-8 becomes U+FFFD as soon as it is certain, in the number that the Unicode standard
    recommends (section 3.9, substitution of maximal subparts). The time of a step depends on the
    bytes of its token alone. A new detokeniser that steps through the same ids gives the same
    pieces.
    """

    def __init__(
        self, vocabulary: Vocabulary, goes_on: bool = False, marks: Sequence[str] = ()
    ) -> None:
        """Start a text. `goes_on`: other text precedes it, so its first space is kept."""
        self._vocabulary = vocabulary
        self._marks = {mark.encode() for mark in marks}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = vocabulary.strips_space and not goes_on

    def step(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is unfinished."""
        raw = self._vocabulary.text_of(token)
        if not raw and self._marks and (name := self._vocabulary.bytes_of(token)) in self._marks:
            raw = name
        if raw and self._strips_space:
            self._strips_space = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """Return an unfinished character as U+FFFD, and drop its bytes; more ids may follow."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Holds back text while it may be the beginning of a stop sequence.

    The text before a stop sequence is released, the sequence never. The result depends on the text
    alone, not on its division into tokens. Once a sequence has `matched`, the text from there on is
    dropped, and nothing is released any more.

    Attributes:
        matched: The stop sequence that was found, or None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that certainly belongs to no stop sequence."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # If the text contains several stop sequences, the one that ends first counts, since it
            # would also be found first if the text came in small pieces. Of those that end at the
            # same place, the longest counts.
            end, start = min(found)
            released, self.matched, self._held = self._held[:start], self._held[start:end], ""
            return released
        certain = len(self._held) - self._suspect_length()
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def flush(self) -> str:
        """Return the text held back.

        To be called when no text follows that could complete a stop sequence.
        """
        held, self._held = self._held, ""
        return held

    def _suspect_length(self) -> int:
        """Return the length of the longest end of the held text that begins a stop sequence."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
