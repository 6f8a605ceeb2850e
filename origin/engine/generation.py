"""One run in the engine: what to draw for it, and how drawn tokens are handled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import SAMPLING, FinishReason, TokenScores
from tailrace.origin.engine.drafts import Asked, Drafter, accepted
from tailrace.origin.engine.grammar import GrammarCompiler, OutputGrammar
from tailrace.origin.engine.transcript import Transcript, Vocabulary
from tailrace.origin.filter import FilterFactory
from tailrace.origin.models.model import Draw, Drawn
from tailrace.origin.tool_calls import ToolUse
from tailrace.origin.workers.worker_frame import Emission, StartRun

NOT_A_NUMBER = "the logits hold NaN or infinite values"


@dataclass(slots=True)
class ModelContext:
    """Everything that all runs of one model share."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    context: int
    vocab: int
    """Number of logits; the tokenizer may know fewer ids."""
    filter_factory: FilterFactory | None = None
    drafter: Drafter | None = None
    """Drafter for speculative decoding; None if it is off."""
    vocabulary: Vocabulary = field(init=False)
    _grammars: GrammarCompiler | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(self.tokenizer)

    def prepare_grammars(self) -> GrammarCompiler:
        """Return the compiler of output formats; the first call takes up to seconds.

        Raises ModelError.
        """
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.vocab, self.eos_ids)
        return self._grammars


class Generation:
    """One run's transcript, grammar and drafts; the scheduler knows which tokens are cached.

    Raises ValueError for invalid settings, CallerError for an output format that cannot be
    followed. `ended` is True once StreamEnd was emitted.
    """

    def __init__(self, run_id: int, run: StartRun, model_context: ModelContext) -> None:
        self._run_id = run_id
        self._run = run
        self.is_begun = False
        """True once a part of the prompt was computed, or all of it was found in the KV cache."""
        self._prefilled = 0  # position up to which the prompt was computed or found in the cache
        self._model_context = model_context
        self._sampling = _sampling(run)
        self.generated = list(run.generated_ids)
        self._known = [*run.prompt_ids, *self.generated]
        self._tools = None if run.tools is None else ToolUse.model_validate_json(run.tools)
        self._transcript = Transcript(
            run_id,
            run,
            model_context.vocabulary,
            model_context.eos_ids,
            model_context.context,
            model_context.filter_factory,
            self._tools,
        )
        self._grammar = self._start_grammar()
        self._counts = self._count()
        self._counted = [*self.generated]
        """The generated ids that `_counts` counts."""
        # Penalties change with every token, so a run with penalties has no drafts.
        self._drafter = model_context.drafter if self._counts is None else None

    @property
    def ended(self) -> bool:
        return self._transcript.ended

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that the run can generate in all."""
        return min(self._run.max_tokens, self._model_context.context - len(self._run.prompt_ids))

    def resume(self) -> list[Emission]:
        """Return the emissions for ids that the stream does not have yet, such as `inserted_ids`.

        Call it once, before any other method.
        """
        emissions = self._transcript.resume()
        if self._run.inserted_ids:
            taken, inserted = self.steer(self._run.inserted_ids)
            self.generated += taken
            emissions += inserted
        return emissions + self._end_if_finished()

    def note_prefill(self, start: int, tokens: int) -> None:
        """Note that `tokens` known tokens from position `start` on are computed.

        Prompt tokens before `start` that no earlier call has counted were found in the KV cache.
        """
        self.is_begun = True
        skipped = min(start, len(self._run.prompt_ids)) - self._prefilled
        self._transcript.cached_tokens += max(0, skipped)
        self._prefilled = max(self._prefilled, start + tokens)

    def asked(self, most: int) -> Asked | None:
        """Return the request to the drafter for at most `most` drafts; None without a drafter."""
        return None if self._drafter is None else Asked(self._run_id, self._known, most)

    @property
    def draws_alone(self) -> bool:
        """True if the next draw can be made without knowing the ids of the tokens before it."""
        return self._grammar is None and self._counts is None

    def draws(self, drafts: Sequence[int], *, ahead: int = 0) -> list[Draw]:
        """Return the draws for the row of the last known token and for the rows of its drafts.

        ahead: number of tokens that earlier steps in flight are still drawing.
        """
        masks: Sequence[Tensor | None] = [None] * (1 + len(drafts))
        if self._grammar is not None:
            masks = [torch.from_numpy(mask) for mask in self._grammar.draft_masks(drafts)]
        position = self._transcript.total_tokens + ahead
        return [
            Draw(
                self._sampling,
                position + at,
                mask,
                self._counts,
                self._run.logprobs,
                generated=None if self._counts is None else self._counted,
            )
            for at, mask in enumerate(masks)
        ]

    def accept(
        self, drafts: Sequence[int], drawn: Sequence[Drawn]
    ) -> tuple[list[int], list[Emission]]:
        """Append the drawn tokens up to the first wrong draft; return them and their emissions."""
        emissions: list[Emission] = []
        taken: list[int] = []
        for each in drawn[: len(accepted(drafts, [each.token for each in drawn]))]:
            emissions += self._take(each)
            if each.token >= 0:
                taken.append(each.token)
            if self.ended:
                break
        if self._drafter is not None:
            self._drafter.learn(self._run_id, len(drafts), max(0, len(taken) - 1))
        return taken, emissions

    def steer(self, ids: Sequence[int]) -> tuple[Sequence[int], list[Emission]]:
        """Append the tokens of a Steer message; return those that fit, and their emissions."""
        before = self._transcript.total_tokens
        emissions = self._transcript.steer(ids)
        taken = ids[: self._transcript.total_tokens - before]
        for token in taken:
            self._learn(token)
        return taken, emissions

    def end(
        self, reason: FinishReason, message: str | None = None, *, retryable: bool = False
    ) -> list[Emission]:
        return self._transcript.end(reason, message, retryable)

    def release(self) -> None:
        """Release the run's state in the drafter, because it has ended or lost its pages."""
        if self._drafter is not None:
            self._drafter.release(self._run_id)

    def _take(self, drawn: Drawn) -> list[Emission]:
        if drawn.token < 0:
            return self.end(FinishReason.FAILED, NOT_A_NUMBER, retryable=True)
        self._learn(drawn.token)
        try:
            if self._grammar is not None:
                self._grammar.accept(drawn.token)
        except CallerError as error:
            return self.end(FinishReason.FAILED, str(error))
        emissions = self._transcript.accept(drawn.token, self._scores(drawn))
        return emissions + self._end_if_finished()

    def _learn(self, token: int) -> None:
        self._known.append(token)
        if self._counts is not None:
            self._counts[token] += 1
            self._counted.append(token)

    def _scores(self, drawn: Drawn) -> TokenScores | None:
        if drawn.scores is None:
            return None
        return self._model_context.vocabulary.scored(drawn.token, drawn.scores)

    def _end_if_finished(self) -> list[Emission]:
        """End the run, without a further draw, if the grammar allows only the end."""
        if self.ended or self._grammar is None or not self._grammar.finished:
            return []
        return self.end(FinishReason.STOP)

    def _start_grammar(self) -> OutputGrammar | None:
        wanted, tools = self._run.format, self._tools
        if tools is not None and (tools.forced or wanted is not None):
            return self._model_context.prepare_grammars().start_calls(tools, self.generated, wanted)
        if wanted is None:
            return None
        return self._model_context.prepare_grammars().start(
            wanted.kind, wanted.source, self.generated
        )

    def _count(self) -> Tensor | None:
        if not self._sampling.penalises:
            return None
        generated = torch.tensor(self.generated, dtype=torch.int64)
        return torch.bincount(generated, minlength=self._model_context.vocab).to(torch.int32)


def _sampling(run: StartRun) -> Sampling:
    """Return the sampler's settings for a run.

    They have the names of a request's settings, but without the suffix `_penalty`.
    """
    said = {name.removesuffix("_penalty"): getattr(run.sampling, name) for name in SAMPLING}
    return Sampling(**{name: value for name, value in said.items() if value is not None})


def refuse(run_id: int, run: StartRun, model_context: ModelContext, message: str) -> list[Emission]:
    """Return the end of a run that this model cannot serve."""
    transcript = Transcript(
        run_id, run, model_context.vocabulary, model_context.eos_ids, model_context.context
    )
    return transcript.end(FinishReason.FAILED, message)
