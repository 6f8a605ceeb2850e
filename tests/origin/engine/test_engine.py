"""The engine on a tiny model: what every run must get, whatever happens around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.errors import Conflict
from tailrace.ledger.frame import (
    FinishReason,
    FormatKind,
    OutputFormat,
    ScoredToken,
    StreamEnd,
    Token,
)
from tailrace.origin.engine.drafts import Asked, DraftModel, PromptLookup
from tailrace.origin.engine.engine import Engine
from tailrace.origin.engine.generation import ModelContext
from tailrace.origin.filter import Verdict
from tailrace.origin.models.cpu_model import CpuModel, load
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Drawn, Piece
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.workers.worker_frame import ActiveRuns, AtWork, Emission
from tests.origin.engine.runs import (
    continuation,
    end_of,
    engine_of,
    frame_of,
    frames_of,
    make_run,
    run_all,
    text_of,
)
from tests.origin.tiny_checkpoint import END_ID

# Hot enough that a random model leaves its favourite token.
SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 120, "top_p": 0.95, "ignore_eos": True}
LONG_PROMPT = tuple(1 + i % 299 for i in range(3 * PREFILL_CHUNK_TOKENS + 5))


@pytest.fixture
def engine(model: CpuModel, tokenizer: Tokenizer) -> Engine:
    return engine_of(model, tokenizer)


def engine_with(model: CpuModel, tokenizer: Tokenizer, **around: Any) -> Engine:
    """Return an engine with a drafter or a filter."""
    config = model.config
    return Engine(
        model, ModelContext(tokenizer, config.eos_ids, config.context, config.vocab, **around)
    )


class Watched:
    """A model that keeps the rows it draws from."""

    def __init__(self, model: CpuModel) -> None:
        self.config, self.fingerprint = model.config, model.fingerprint
        self.device, self.pages = model.device, model.pages
        self.seen: list[torch.Tensor] = []
        self._model = model

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        return self._model.forward(pieces)

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        self.seen.append(hidden)
        return self._model.draw(hidden, draws)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def steps_to_end(engine: Engine, run_id: int) -> int:
    steps = 0
    while True:
        steps += 1
        for emission in engine.step():
            if emission.run == run_id and isinstance(frame_of(emission), StreamEnd):
                return steps


def test_a_run_gives_its_tokens_and_ends(engine: Engine) -> None:
    emissions = run_all(engine, {5: make_run(**SAMPLED)})[5]
    end = end_of(emissions)
    assert end == StreamEnd(60, FinishReason.LENGTH, len(emissions) - 1, 3)
    assert [emission.index for emission in emissions] == list(range(len(emissions)))
    assert sum(len(emission.ids) for emission in emissions) == 60
    assert all(frame.text for frame in frames_of(emissions) if isinstance(frame, Token))
    assert len(text_of(emissions)) > 20


def test_a_step_decodes_one_token_of_each_running_run(engine: Engine) -> None:
    for run_id in (1, 2, 3):
        engine.add(run_id, make_run(max_tokens=run_id + 2))
    # Three short prompts fit one step, which draws the first token of each.
    assert steps_to_end(engine, 1) == 3
    assert steps_to_end(engine, 2) == 1
    assert steps_to_end(engine, 3) == 1


@pytest.mark.parametrize("prompt", [(1, 2, 3), LONG_PROMPT], ids=["short", "long"])
def test_a_continuation_from_any_frame_gives_the_rest(
    engine: Engine, prompt: tuple[int, ...]
) -> None:
    fields = SAMPLED | {"prompt_ids": prompt, "max_tokens": 60, "seed": 11}
    fields["stop"] = ("never in it",)
    whole = run_all(engine, {1: make_run(**fields)})[1]
    for logged in range(len(whole)):
        rest = run_all(engine, {1: continuation(fields, whole[:logged])})[1]
        assert rest == whole[logged:]


def test_a_rebuilt_cache_gives_the_same_hidden_rows_to_the_last_bit(
    model: CpuModel, tokenizer: Tokenizer
) -> None:
    watched = Watched(model)
    fields = SAMPLED | {"max_tokens": 150, "seed": 8}
    whole = run_all(engine_of(watched, tokenizer), {1: make_run(**fields)})[1]
    uninterrupted, watched.seen = watched.seen, []
    logged = whole[: len(whole) * 2 // 3]
    run_all(engine_of(watched, tokenizer), {1: continuation(fields, logged)})
    done = sum(len(emission.ids) for emission in logged)
    assert torch.equal(torch.cat(watched.seen), torch.cat(uninterrupted[done:]))


def test_a_run_gives_the_same_among_others(engine: Engine) -> None:
    fields = SAMPLED | {"seed": 4}
    alone = run_all(engine, {1: make_run(**fields)})[1]
    others = {
        run_id: make_run(**SAMPLED, seed=run_id, prompt_ids=LONG_PROMPT[: 40 * run_id])
        for run_id in (2, 3)
    }
    among = run_all(engine, {2: others[2], 1: make_run(**fields), 3: others[3]})
    assert among[1] == alone
    assert among[2] == run_all(engine, {2: others[2]})[2]


def test_seeds_make_a_difference(engine: Engine) -> None:
    runs = {seed: make_run(**SAMPLED, seed=seed) for seed in (1, 2)}
    emitted = run_all(engine, runs)
    assert text_of(emitted[1]) != text_of(emitted[2])


def test_greedy_takes_the_best_token_each_time(engine: Engine, model: CpuModel) -> None:
    emissions = run_all(engine, {1: make_run(max_tokens=8, ignore_eos=True)})[1]
    ids = [token for emission in emissions for token in emission.ids]
    rows = model.forward([Piece((1, 2, 3, *ids), 0, (0,), prefill=True)])
    assert ids == model.logits(rows).argmax(-1).tolist()[2:-1]


def test_a_long_prompt_does_not_stop_its_neighbours(engine: Engine) -> None:
    engine.add(1, make_run(max_tokens=4))
    engine.step()
    engine.add(2, make_run(prompt_ids=LONG_PROMPT))
    assert steps_to_end(engine, 1) == 3


def test_a_long_continuation_does_not_stop_its_neighbours(engine: Engine) -> None:
    fields = SAMPLED | {"max_tokens": 200}
    whole = run_all(engine, {2: make_run(**fields)})[2]
    engine.add(1, make_run(max_tokens=4))
    engine.step()
    engine.add(2, continuation(fields, whole[:-2]))
    assert steps_to_end(engine, 1) == 3


def test_runs_over_the_cap_wait_in_order(model: CpuModel, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, Limits(running=1))
    emitted = run_all(engine, {run_id: make_run(max_tokens=2) for run_id in (4, 2, 3)})
    assert list(emitted) == [4, 2, 3]
    assert [end_of(emissions).total_tokens for emissions in emitted.values()] == [2, 2, 2]


def test_halt_ends_a_running_run_as_cancelled(engine: Engine) -> None:
    engine.add(1, make_run(**SAMPLED))
    before = [emission for _ in range(9) for emission in engine.step()]
    engine.cancel(1)
    end = end_of(before + engine.step())
    assert (end.finish_reason, end.total_tokens) == (FinishReason.CANCELLED, 9)
    assert engine.idle


def test_halt_ends_a_waiting_run_as_cancelled(model: CpuModel, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, Limits(running=1))
    engine.add(1, make_run(max_tokens=3))
    engine.add(2, make_run())
    engine.step()
    engine.cancel(2)
    emissions = [emission for emission in engine.step() if emission.run == 2]
    assert frames_of(emissions) == [StreamEnd(0, FinishReason.CANCELLED, 0, 3)]


def test_halt_of_a_run_that_has_ended_changes_nothing(engine: Engine) -> None:
    run_all(engine, {1: make_run(max_tokens=2)})
    engine.cancel(1)
    engine.cancel(99)
    assert engine.idle
    assert engine.step() == []


def test_a_run_id_in_use_is_refused(engine: Engine) -> None:
    engine.add(1, make_run())
    with pytest.raises(Conflict):
        engine.add(1, make_run())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": ()},
        {"prompt_ids": (1,) * 256},
        {"prompt_ids": (300,)},
        {"generated_ids": (300,)},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"repetition_penalty": 0.0},
        {"format": OutputFormat(FormatKind.REGEX, "(")},
    ],
    ids=str,
)
def test_a_run_that_the_model_cannot_serve_fails_with_a_reason(
    engine: Engine, fields: dict[str, Any]
) -> None:
    end = end_of(run_all(engine, {1: make_run(**fields)})[1])
    assert end.finish_reason is FinishReason.FAILED
    assert end.message


class Faulty(Watched):
    """A model that computes no numbers from the id 299 on."""

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        hidden = super().forward(pieces).clone()
        first = 0
        for piece in pieces:
            if 299 in piece.ids:
                hidden[first + piece.ids.index(299) : first + len(piece.ids)] = torch.nan
            first += len(piece.ids)
        return hidden


@pytest.mark.parametrize("prompt", [(1, 299), (299,) * (PAGE_TOKENS + 3)], ids=["short", "long"])
def test_logits_that_are_no_numbers_fail_their_run_alone(
    model: CpuModel, tokenizer: Tokenizer, prompt: tuple[int, ...]
) -> None:
    plain = make_run(max_tokens=5, ignore_eos=True)
    runs = {1: make_run(prompt_ids=prompt), 2: plain}
    emitted = run_all(engine_of(Faulty(model), tokenizer), runs)
    end = end_of(emitted[1])
    assert (end.finish_reason, end.retryable) == (FinishReason.FAILED, True)
    assert "NaN" in str(end.message)
    assert emitted[1][-1].can_retry
    assert not emitted[2][-1].can_retry
    assert end_of(emitted[2]).finish_reason is FinishReason.LENGTH
    assert emitted[2] == run_all(engine_of(model, tokenizer), {2: plain})[2]


class FaultyAt(Watched):
    """A model that computes no numbers in one of its forward passes."""

    def __init__(self, model: CpuModel, at: int) -> None:
        super().__init__(model)
        self.left = at

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        self.left -= 1
        hidden = super().forward(pieces)
        return torch.full_like(hidden, torch.nan) if self.left == 0 else hidden


@pytest.mark.parametrize("at", range(1, 25))
def test_a_run_that_failed_goes_on_elsewhere_with_the_frames_of_a_whole_run(
    model: CpuModel, tokenizer: Tokenizer, at: int
) -> None:
    """The emissions of the step that fails are dropped, as the core does."""
    fields = {**SAMPLED, "max_tokens": 24, "stop": ("a stop sequence that never comes",)}
    whole = run_all(engine_of(model, tokenizer), {1: make_run(**fields)})[1]
    engine = engine_of(FaultyAt(model, at), tokenizer)
    engine.add(1, make_run(**fields))
    logged: list[Emission] = []
    made = engine.step()
    while not any(each.can_retry for each in made):
        logged += made
        made = engine.step()
    rest = run_all(engine_of(model, tokenizer), {1: continuation(fields, logged)})[1]
    assert [each.frame for each in logged + rest] == [each.frame for each in whole]
    assert [each.ids for each in logged + rest] == [each.ids for each in whole]


def test_pages_that_hold_no_numbers_are_given_to_nobody(
    model: CpuModel, tokenizer: Tokenizer
) -> None:
    engine = engine_of(Faulty(model), tokenizer)
    prompt = (299,) * (2 * PAGE_TOKENS)
    for run_id in (1, 2):
        run_all(engine, {run_id: make_run(prompt_ids=prompt)})
    assert engine.load().reused_tokens == 0


def test_a_shared_prompt_is_prefilled_once(engine: Engine) -> None:
    alone = run_all(engine, {1: make_run(prompt_ids=LONG_PROMPT, **SAMPLED)})[1]
    again = run_all(engine, {1: make_run(prompt_ids=LONG_PROMPT, **SAMPLED)})[1]
    assert again == alone
    reused = len(LONG_PROMPT) // PAGE_TOKENS * PAGE_TOKENS
    assert engine.load().reused_tokens == reused
    assert (alone[-1].counted.cached, again[-1].counted.cached) == (0, reused)


def test_a_branch_reuses_the_pages_of_its_parent(engine: Engine) -> None:
    fields = {"prompt_ids": LONG_PROMPT, **SAMPLED}
    parent = run_all(engine, {1: make_run(**fields)})[1]
    before = engine.load().reused_tokens
    shared = parent[:20]
    assert run_all(engine, {1: continuation(fields, shared)})[1] == parent[20:]
    known = len(LONG_PROMPT) + sum(len(emission.ids) for emission in shared)
    assert engine.load().reused_tokens - before == (known - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_a_text_is_inserted_before_the_first_draw_and_only_once(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    ids = tuple(tokenizer.encode(" And then", add_special_tokens=False).ids)
    parent = run_all(engine, {1: make_run(**SAMPLED)})[1]
    begun = continuation(SAMPLED, parent[:5])
    inserted = run_all(engine, {1: replace(begun, inserted_ids=ids)})[1]
    first = inserted[0]
    [span] = first.steered
    assert first.index == 5
    assert first.ids[span.start : span.start + span.count] == ids
    assert text_of(inserted[:1]).endswith(" And then")
    # A worker that takes it over finds the text in the log, and gives the same rest.
    for logged in (1, 4):
        again = continuation(SAMPLED, [*parent[:5], *inserted[:logged]])
        assert run_all(engine, {1: again})[1] == inserted[logged:]


def test_a_preempted_run_goes_on_as_if_nothing_had_been(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    # Room for a whole context of 256 and nothing else: runs of 190 tokens push each other out.
    small = load(checkpoint, kv_bytes=1)
    fields = {n: SAMPLED | {"seed": n, "max_tokens": 180, "prompt_ids": (n, 2)} for n in (1, 2, 3)}
    alone = {
        n: run_all(engine_of(small, tokenizer), {n: make_run(**f)})[n] for n, f in fields.items()
    }
    engine = engine_of(small, tokenizer)
    assert run_all(engine, {n: make_run(**f) for n, f in fields.items()}) == alone
    assert engine.load().preemptions > 0


def test_a_run_that_no_cache_can_hold_fails(checkpoint: Path, tokenizer: Tokenizer) -> None:
    class Narrow(Watched):
        def __init__(self, model: CpuModel) -> None:
            super().__init__(model)
            self.pages = 2

    engine = engine_of(Narrow(load(checkpoint)), tokenizer)
    end = end_of(run_all(engine, {1: make_run(max_tokens=200)})[1])
    assert end.finish_reason is FinishReason.FAILED
    assert "128 tokens" in str(end.message)


@pytest.mark.parametrize("drafter", ["lookup", "model", "liar"])
def test_guesses_never_change_the_tokens(
    model: CpuModel, checkpoint: Path, tokenizer: Tokenizer, drafter: str
) -> None:
    # Cool enough to repeat itself, so that guesses are often right.
    fields = {"temperature": 0.3, "seed": 5, "ignore_eos": True, "max_tokens": 120}
    runs = {n: make_run(**fields | {"seed": n, "prompt_ids": (n, 7, 9)}) for n in (1, 2, 3)}
    pool = PagePool(model.pages)
    draft = load(checkpoint)
    drafters = {"lookup": PromptLookup(), "model": DraftModel(draft, pool), "liar": Liar()}
    engine = engine_with(model, tokenizer, drafter=drafters[drafter])
    assert run_all(engine, runs) == run_all(engine_of(model, tokenizer), runs)
    load_now = engine.load()
    assert load_now.drafted > 0
    assert (load_now.accepted > 0) == (drafter != "liar")
    assert pool.free == pool.pages


class Liar:
    """Guesses what is never drawn next."""

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        return [[END_ID] * min(each.limit, 3) for each in asked]

    def learn(self, run: int, drafted: int, accepted: int) -> None:
        assert accepted == 0

    def release(self, run: int) -> None:
        pass


def test_the_text_matches_its_format(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["age"],
        "additionalProperties": False,
    }
    wanted = OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))
    run = make_run(temperature=1.0, max_tokens=200, format=wanted)
    emitted = run_all(
        engine, {n: replace(run, sampling=replace(run.sampling, seed=n)) for n in range(1, 9)}
    )
    # JSON allows any white space, which a model that has learned nothing is fond of.
    ended = [some for some in emitted.values() if end_of(some).finish_reason is FinishReason.STOP]
    assert len(ended) > 4
    assert all(isinstance(json.loads(text_of(some))["age"], int) for some in ended)


def test_a_continuation_under_a_format_is_exact(engine: Engine) -> None:
    wanted = OutputFormat(
        FormatKind.REGEX, "(fox|bear|[a-z]{3,9})( and (fox|bear|[0-9]{2,4})){2,4}!"
    )
    fields = {"temperature": 1.2, "seed": 2, "format": wanted}
    whole = run_all(engine, {1: make_run(**fields)})[1]
    assert end_of(whole).finish_reason is FinishReason.STOP
    for logged in range(len(whole)):
        assert run_all(engine, {1: continuation(fields, whole[:logged])})[1] == whole[logged:]


def test_a_format_and_guesses_go_together(model: CpuModel, tokenizer: Tokenizer) -> None:
    wanted = OutputFormat(FormatKind.REGEX, "(fox ){40}!")
    run = make_run(temperature=1.0, format=wanted, max_tokens=200)
    engine = engine_with(model, tokenizer, drafter=PromptLookup())
    emissions = run_all(engine, {1: run})[1]
    assert text_of(emissions) == "fox " * 40 + "!"
    assert emissions == run_all(engine_of(model, tokenizer), {1: run})[1]
    assert engine.load().accepted > 0


def test_logprobs_are_those_of_the_model(engine: Engine, model: CpuModel) -> None:
    emissions = run_all(engine, {1: make_run(max_tokens=6, logprobs=3, ignore_eos=True)})[1]
    frames = [frame for frame in frames_of(emissions) if isinstance(frame, ScoredToken)]
    scores = [score for frame in frames for score in frame.scores]
    ids = [token for emission in emissions for token in emission.ids]
    rows = model.forward([Piece((1, 2, 3), 0, (0,), prefill=True)])
    expected = model.logits(rows[-1:]).log_softmax(-1)[0]
    assert [score.chosen.id for score in scores] == ids[: len(scores)]
    assert [len(score.top) for score in scores] == [3] * len(scores)
    assert scores[0].chosen.logprob == pytest.approx(float(expected[ids[0]]), abs=1e-5)
    assert scores[0].top[0].id == ids[0]  # greedy


def test_penalties_count_what_was_generated(engine: Engine) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True}
    plain = run_all(engine, {1: make_run(**fields)})[1]
    penalised = run_all(engine, {1: make_run(**fields, frequency_penalty=2.0)})[1]
    counts = [len({i for emission in some for i in emission.ids}) for some in (plain, penalised)]
    assert counts[1] > counts[0]
    half = penalised[: len(penalised) // 2]
    rest = run_all(engine, {1: continuation(fields | {"frequency_penalty": 2.0}, half)})[1]
    assert half + rest == penalised


def test_a_steered_run_goes_on_from_the_text_it_was_given(
    engine: Engine, model: CpuModel, tokenizer: Tokenizer
) -> None:
    text = " The bear ran."
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    fields = SAMPLED | {"max_tokens": 40, "seed": 9}
    engine.add(1, make_run(**fields))
    emissions = [emission for _ in range(10) for emission in engine.step()]
    before = text_of(emissions)
    engine.steer(1, ids)
    while not engine.idle:
        emissions += engine.step()
    assert text in text_of(emissions)[len(before) :]
    assert end_of(emissions).total_tokens == 40
    [span] = [span for emission in emissions for span in emission.steered]
    assert span.count == len(ids)
    # From any frame on, a continuation is what it would have been.
    for logged in range(len(emissions)):
        rest = run_all(engine_of(model, tokenizer), {1: continuation(fields, emissions[:logged])})
        if any(e.steered for e in emissions[:logged]):
            assert [e.frame for e in rest[1]] == [e.frame for e in emissions[logged:]]


def test_steering_a_run_that_has_ended_changes_nothing(engine: Engine) -> None:
    run_all(engine, {1: make_run(max_tokens=2)})
    engine.steer(1, [5])
    assert engine.idle


def test_a_run_may_be_steered_before_its_first_token(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Café", add_special_tokens=False).ids
    engine.add(1, make_run(prompt_ids=LONG_PROMPT, max_tokens=20, ignore_eos=True))
    engine.steer(1, ids)
    emissions = []
    while not engine.idle:
        emissions += engine.step()
    assert text_of(emissions).startswith("Café")


class NoFoxes:
    """Ends a stream at the word fox."""

    def __init__(self) -> None:
        self._text = ""

    def check(self, text: str, last: bool) -> Verdict:
        end = "no foxes" if "fox" in text else None
        held = 0 if last or end else max(n for n in (2, 1, 0) if "fox"[:n] == text[len(text) - n :])
        return Verdict(len(text) - text.find("fox") if end else held, end)


def test_a_filter_ends_a_stream_before_what_it_forbids(
    model: CpuModel, tokenizer: Tokenizer
) -> None:
    engine = engine_with(model, tokenizer, filter_factory=NoFoxes)
    wanted = OutputFormat(FormatKind.REGEX, "a cat and a fox and a bear")
    emissions = run_all(engine, {1: make_run(format=wanted), 2: make_run(max_tokens=5)})
    end = end_of(emissions[1])
    assert (end.finish_reason, end.message) == (FinishReason.FILTERED, "no foxes")
    assert text_of(emissions[1]) == "a cat and a "
    assert end_of(emissions[2]).finish_reason is not FinishReason.FILTERED


def test_it_says_how_busy_it_is(engine: Engine) -> None:
    for run_id in (1, 2):
        engine.add(run_id, make_run(max_tokens=9, priority=run_id - 1))
    engine.step()
    load_now = engine.load()
    assert load_now.running == (1, 1, 0)
    assert load_now.tokens == 2
    assert load_now.pages_free == load_now.pages - 2
    run_all(engine, {})
    assert engine.load().running == (0, 0, 0)
    assert engine.load().pages_free == engine.load().pages


def test_a_page_of_the_scheduler_is_a_chunk_of_the_model() -> None:
    assert PAGE_TOKENS == PREFILL_CHUNK_TOKENS
    assert Sampling() == Sampling(min_p=0.0, repetition=1.0)


def test_what_a_step_is_done_for_is_said_before_it(
    model: CpuModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(pieces: Sequence[Piece]) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(model, "forward", die)
    config = model.config
    around = ModelContext(tokenizer, config.eos_ids, config.context, config.vocab)
    said: list[ActiveRuns] = []
    at_work = AtWork(said.append)
    engine = Engine(model, around, Limits(running=2), begin=at_work.begin)
    for run in (1, 2, 3):
        at_work.take(run)
        engine.add(run, make_run())
    assert said == [ActiveRuns((run,)) for run in (1, 2, 3)]
    with pytest.raises(MemoryError):
        engine.step()
    assert set(said[-1].runs) == {1, 2}  # the third waits for its turn
