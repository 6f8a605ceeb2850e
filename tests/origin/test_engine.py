from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from kernels.sampler import Sampling, sample
from ledger.errors import Conflict
from ledger.frame import FinishReason, StreamEnd, Token
from origin.cpu_model import BitNetModel, load
from origin.engine import REBUILD_TOKENS_PER_STEP, Engine
from origin.model import PREFILL_CHUNK_TOKENS
from tests.origin.runs import continuation, end_of, frame_of, frames_of, make_run, run_all, text_of
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

# Hot enough that a random model leaves its favourite token.
SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 120, "top_p": 0.95, "ignore_eos": True}
LONG_PROMPT = tuple(1 + i % 299 for i in range(3 * PREFILL_CHUNK_TOKENS + 5))


@pytest.fixture
def engine(model: BitNetModel, tokenizer: Tokenizer) -> Engine:
    return Engine(model, tokenizer)


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
    # One run is prefilled per step, so that the third starts two steps late.
    assert steps_to_end(engine, 1) == 3
    assert steps_to_end(engine, 2) == 2
    assert steps_to_end(engine, 3) == 2


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


def test_a_rebuilt_cache_gives_the_same_logits_to_the_last_bit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def recording(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
        seen.append(logits)
        return sample(logits, sampling, position)

    monkeypatch.setattr("origin.cpu_model.sample", recording)
    fields = SAMPLED | {"max_tokens": 3 * REBUILD_TOKENS_PER_STEP, "seed": 8}
    whole = run_all(engine, {1: make_run(**fields)})[1]
    uninterrupted, seen = seen, []
    logged = whole[: len(whole) * 2 // 3]
    run_all(engine, {1: continuation(fields, logged)})
    done = sum(len(emission.ids) for emission in logged)
    assert torch.equal(torch.stack(seen), torch.stack(uninterrupted[done:]))


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


def test_greedy_takes_the_best_token_each_time(engine: Engine, model: BitNetModel) -> None:
    emissions = run_all(engine, {1: make_run(max_tokens=8, ignore_eos=True)})[1]
    ids = [token for emission in emissions for token in emission.ids]
    best = model.forward([1, 2, 3, *ids]).argmax(-1).tolist()
    assert ids == best[2:-1]


def test_a_long_prompt_does_not_stop_its_neighbours(engine: Engine) -> None:
    engine.add(1, make_run(max_tokens=4))
    engine.step()
    engine.add(2, make_run(prompt_ids=LONG_PROMPT))
    assert steps_to_end(engine, 1) == 3


def test_a_long_continuation_does_not_stop_its_neighbours(engine: Engine) -> None:
    fields = SAMPLED | {"max_tokens": 5 * REBUILD_TOKENS_PER_STEP}
    whole = run_all(engine, {2: make_run(**fields)})[2]
    engine.add(1, make_run(max_tokens=4))
    engine.step()
    engine.add(2, continuation(fields, whole[:-2]))
    assert steps_to_end(engine, 1) == 3


def test_runs_over_the_cap_wait_in_order(model: BitNetModel, tokenizer: Tokenizer) -> None:
    engine = Engine(model, tokenizer, max_running=1)
    emitted = run_all(engine, {run_id: make_run(max_tokens=2) for run_id in (4, 2, 3)})
    assert list(emitted) == [4, 2, 3]
    assert [end_of(emissions).total_tokens for emissions in emitted.values()] == [2, 2, 2]


def test_halt_ends_a_running_run_as_cancelled(engine: Engine) -> None:
    engine.add(1, make_run(**SAMPLED))
    before = [emission for _ in range(9) for emission in engine.step()]
    engine.halt(1)
    end = end_of(before + engine.step())
    assert (end.finish_reason, end.total_tokens) == (FinishReason.CANCELLED, 9)
    assert engine.idle


def test_halt_ends_a_waiting_run_as_cancelled(model: BitNetModel, tokenizer: Tokenizer) -> None:
    engine = Engine(model, tokenizer, max_running=1)
    engine.add(1, make_run(max_tokens=3))
    engine.add(2, make_run())
    engine.step()
    engine.halt(2)
    emissions = [emission for emission in engine.step() if emission.run == 2]
    assert frames_of(emissions) == [StreamEnd(0, FinishReason.CANCELLED, 0, 3)]


def test_halt_of_a_run_that_has_ended_changes_nothing(engine: Engine) -> None:
    run_all(engine, {1: make_run(max_tokens=2)})
    engine.halt(1)
    engine.halt(99)
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
    ],
    ids=str,
)
def test_a_run_that_the_model_cannot_serve_fails_with_a_reason(
    engine: Engine, fields: dict[str, Any]
) -> None:
    end = end_of(run_all(engine, {1: make_run(**fields)})[1])
    assert end.finish_reason is FinishReason.FAILED
    assert end.message


def test_logits_that_are_no_numbers_fail_their_run_alone(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_checkpoint(tmp_path, Shape(tied_head=False))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][299] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    engine = Engine(load(tmp_path), tokenizer)
    runs = {1: make_run(prompt_ids=(1, 299)), 2: make_run(max_tokens=5, ignore_eos=True)}
    emitted = run_all(engine, runs)
    assert end_of(emitted[1]).finish_reason is FinishReason.FAILED
    assert "NaN" in str(end_of(emitted[1]).message)
    assert end_of(emitted[2]).finish_reason is FinishReason.LENGTH
