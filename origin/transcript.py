"""The stream side of one run: token ids in, frames out, and when the run has ended."""

from __future__ import annotations

from tokenizers import Tokenizer

from ledger.frame import FinishReason, StreamEnd, Token, encode
from origin.detokenise import Detokeniser
from origin.stops import StopMatcher
from origin.worker_frame import Emission, Run


class Transcript:
    """Turns a run's tokens into emissions; it depends on the ids alone, never on timing.

    A continuation therefore steps through the ids that the ledger holds, drops the text that
    was sent, and is then in the state in which the interrupted run was.
    """

    def __init__(
        self, run_id: int, run: Run, tokenizer: Tokenizer, eos_ids: frozenset[int], context: int
    ) -> None:
        self.total_tokens = 0
        self.ended = False
        self._run_id = run_id
        self._run = run
        self._eos_ids = eos_ids
        self._limit = min(run.max_tokens, context - len(run.prompt_ids))
        self._detokeniser = Detokeniser(tokenizer)
        self._stops = StopMatcher(run.stop)
        self._next_index = run.next_index
        self._ids: list[int] = []  # generated since the last emission
        self._bytes_to_drop = 0

    def resume(self) -> list[Emission]:
        """Step through the run's generated ids; what comes out had not been sent.

        Normally nothing; the end, if the stream lacks only that; FAILED, if the stream holds
        other text than these ids give.
        """
        self._bytes_to_drop = self._run.sent_bytes
        emissions: list[Emission] = []
        try:
            for token in self._run.generated_ids:
                emissions += self._take(token)
        except UnicodeDecodeError:
            return self._refuse_text()
        if self.ended:
            return emissions
        if self._bytes_to_drop:
            return self._refuse_text()
        if self.total_tokens >= self._limit:
            emissions += self.end(FinishReason.LENGTH)
        return emissions

    def accept(self, token: int) -> list[Emission]:
        """One more generated token; the run has ended if `ended` is then true."""
        self._ids.append(token)
        return self._take(token)

    def end(self, reason: FinishReason, message: str | None = None) -> list[Emission]:
        """End the run: the text held back, unless it is a stop sequence, then StreamEnd."""
        text = self._stops.feed(self._detokeniser.flush())
        if self._stops.matched and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        emissions = self._emit_text(text + self._stops.flush())
        frame = StreamEnd(
            total_tokens=self.total_tokens,
            finish_reason=reason,
            index=self._next_index,
            prompt_tokens=len(self._run.prompt_ids),
            message=message,
        )
        self.ended = True
        return [*emissions, self._emission(frame)]

    def _take(self, token: int) -> list[Emission]:
        self.total_tokens += 1
        is_eos = token in self._eos_ids
        # An ignored end is no text either, whether or not the tokenizer calls it special.
        text = "" if is_eos else self._detokeniser.step(token)
        emissions = self._emit_text(self._stops.feed(text))
        if self._stops.matched or (is_eos and not self._run.ignore_eos):
            emissions += self.end(FinishReason.STOP)
        elif self.total_tokens >= self._limit:
            emissions += self.end(FinishReason.LENGTH)
        return emissions

    def _refuse_text(self) -> list[Emission]:
        self._bytes_to_drop = 0
        return self.end(FinishReason.FAILED, "the stream's text is not that of its tokens")

    def _emit_text(self, text: str) -> list[Emission]:
        if self._bytes_to_drop:
            encoded = text.encode()
            text = encoded[self._bytes_to_drop :].decode()
            self._bytes_to_drop = max(0, self._bytes_to_drop - len(encoded))
        return [self._emission(Token(text, self._next_index))] if text else []

    def _emission(self, frame: Token | StreamEnd) -> Emission:
        emission = Emission(self._run_id, self._next_index, tuple(self._ids), 0, encode(frame))
        self._next_index += 1
        self._ids.clear()
        return emission
